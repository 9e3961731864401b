"""The verbs `tiercache status` and `tiercache ping`: what a store holds, and round trips to a daemon."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any, Final, cast

import typer

import tiercache
from tiercache.cli.store.options import MacKeyOption, StoreOption, StoresOption
from tiercache.cli.store.picture import RESTORABLE, Fields, picture, silence_text, value_text
from tiercache.cli.store.target import Target, check_daemon, opened, resolve_all, resolve_daemon
from tiercache.cli.terminal import Output, OutputOption, console, count_text, document, line, safe, say, whole
from tiercache.errors import ConfigError, RefusedError, StorageError
from tiercache.storage.base import StorageBackend

_PING_FIELDS: Final = ("version", "instance", "principal", "tenant", "verbs", "transport", "store")
"""Fields of a daemon's answer to a ping that are shown."""
_SUMS: Final = ("objects", "payload_bytes", "used_bytes", "capacity_bytes")
_PAUSE: Final = 0.1
"""Seconds between two pings if there are at most 100 pings. With more pings there is no pause."""


def status(
    store: StoresOption = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Look at a daemon again and again, until Ctrl-C.")
    ] = False,
    every: Annotated[
        float, typer.Option(min=0.2, max=3600, help="With --watch: seconds between two looks.")
    ] = 2.0,
    mac_key: MacKeyOption = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Show what a store is, holds and does, once or live. Exit code 3 if a daemon does not answer.

    Show a stopped store; show a daemon of this machine, as input for a monitor;
    follow a daemon: tiers, hit rates, throughput, limits, slow calls; record a
    line every minute:

        tiercache status -s /var/lib/tiercache

        tiercache status -s grpc:///run/tiercache -o json

        tiercache status -s grpc:///run/tiercache --watch

        tiercache status --watch --every 60 -o jsonl >> status.jsonl

    Show the tiers of a stopped chain, which are only read here:

        tiercache status -s file:///ssd/kv?tier_name=ssd -s /hdd/kv

    With --watch, a daemon that does not answer later is asked until it does. If
    stdout is no terminal, a table is shown once.

    JSON fields: name, kind, live, directory, owner (process id of the daemon),
    version, daemon (instance, principal, tenant, verbs, transport, store; null
    for a stopped store), objects, payload_bytes, used_bytes, capacity_bytes (0:
    no limit), restorable_bytes (payload that a restore can use), dead_bytes
    (payload that no restore can use), orphans (objects whose parent is
    missing), details (the store's own counters: corrupt, evicted, ...), tiers
    (of a chain, the fastest first: name, kind, health = serving, read-only or
    out, why (it is not serving), objects, payload_bytes, used_bytes,
    capacity_bytes, read_objects, read_bytes, written_objects, written_bytes,
    waiting, dropped, lost_calls, last_read, details), status (the status
    document of a daemon, docs/status.md, as far as this principal may know it;
    null for a stopped store), unlisted (why the store cannot list its objects,
    or ""). The figures of a chain are sums, in which every copy of an object
    counts. restorable_bytes, dead_bytes and orphans are null if the store does
    not report them; so are all figures of a store that cannot list, and those
    that this principal may not know. jsonl has a line for each look.
    `tiercache ls --namespaces` counts objects by namespace and pool.
    """
    target = resolve_all(store, mac_key)
    if watch:
        check_daemon(target, "only a daemon can be watched")
        if output is Output.JSON:
            raise ConfigError("one JSON document never ends with --watch; use -o jsonl")
    with opened(target, tells=False) as found:
        record = _describe(target, found)
        if output is not Output.TABLE:
            whole(record, output)
            if watch:
                _record(target, found, every)
        elif watch and console().is_terminal:
            _watch(target, found, record, every)
        else:
            console().print(picture(record), soft_wrap=True)


def _record(target: Target, found: StorageBackend, every: float) -> None:
    with suppress(KeyboardInterrupt):
        while True:
            time.sleep(every)
            try:
                line(_describe(target, found))
            except StorageError as error:
                say(f"tiercache: {error}")


def _watch(target: Target, found: StorageBackend, latest: Fields, every: float) -> None:
    from rich.live import Live

    heard = time.time()
    with (
        suppress(KeyboardInterrupt),
        Live(picture(latest, live=True), console=console(), screen=True, auto_refresh=False) as shown,
    ):
        while True:
            time.sleep(every)
            note = ""
            try:
                latest, heard = _describe(target, found), time.time()
            except StorageError as error:
                note = silence_text(error, heard)
            shown.update(picture(latest, live=True, note=note), refresh=True)


def ping(
    store: StoreOption = "",
    count: Annotated[int, typer.Option(min=1, max=100_000, help="Number of round trips.")] = 5,
    output: OutputOption = Output.TABLE,
) -> None:
    """Measure round trips to a daemon. Exit code 3 if it does not answer.

    Name the daemon by its directory or by its address:

        tiercache ping -s /var/lib/tiercache --count 20

    JSON fields: count, min_seconds, median_seconds, max_seconds, version,
    instance, principal, tenant, verbs, transport, store. jsonl has one line for
    each round trip: seconds, and the fields from version on.
    """
    target = resolve_daemon(store, "only a daemon answers")
    times: list[float] = []
    with opened(target) as found:
        call = _ping_of(found, target)
        for n in range(count):
            if n:
                time.sleep(_PAUSE if count <= 100 else 0)
            pong = call()
            times.append(float(pong.seconds))
            if output is Output.JSONL:
                line({"seconds": times[-1], **_pong(pong)})
    record = {
        "count": count,
        "min_seconds": min(times),
        "median_seconds": statistics.median(times),
        "max_seconds": max(times),
        **_pong(pong),
    }
    if output is Output.JSON:
        document(record)
    elif output is Output.TABLE:
        low, middle, high = (f"{record[f'{name}_seconds'] * 1e3:.2f} ms" for name in ("min", "median", "max"))
        shown = console()
        shown.print(
            f"{count_text(count, 'round trip')}: min {low}, median {middle}, max {high}", markup=False
        )
        shown.print(
            ", ".join(f"{name} {safe(value_text(record[name]))}" for name in _PING_FIELDS if record[name])
        )


def _ping_of(store: StorageBackend, target: Target) -> Callable[[], Any]:
    call = getattr(store, "ping", None)
    if not callable(call):
        raise ConfigError(f"{target.name} is not a daemon; ping measures daemons, such as grpc://host:port")
    return cast("Callable[[], Any]", call)


def _pong(pong: Any) -> dict[str, Any]:
    found = {name: getattr(pong, name, "") for name in _PING_FIELDS}
    return found | {"verbs": list(found["verbs"])}


def _describe(target: Target, store: StorageBackend) -> dict[str, Any]:
    daemon = _pong(_ping_of(store, target)()) if target.live else None
    status = _document(store) if target.live else None
    try:
        usage = store.usage()
        details, tiers = usage.details, usage.tiers
        figures = {**details, **{name: getattr(usage, name) for name in _SUMS}}
    except RefusedError:
        if status is None:
            raise
        # Of the totals, this principal may know those of the status document; a principal of a tenant, none.
        details, tiers, figures = {}, (), status["store"] or {}
    unlisted = next(
        (str(one["unlisted"]) for one in (details, *(t.details for t in tiers)) if "unlisted" in one), ""
    )
    return {
        "name": target.name,
        "kind": target.kind,
        "live": target.live,
        "directory": target.directory or None,
        "owner": target.owner,
        "version": daemon.pop("version") if daemon else tiercache.__version__,
        "daemon": daemon,
        **{name: None if unlisted else figures.get(name) for name in _SUMS},
        **{name: figures.get(name) for name in RESTORABLE},
        "details": {name: value for name, value in details.items() if name != "unlisted"},
        "tiers": [asdict(tier) for tier in tiers],
        "unlisted": unlisted,
        "status": status,
    }


def _document(store: StorageBackend) -> Fields | None:
    """Return the status document of a daemon; None if it has none for this caller."""
    call = cast("Callable[[], Fields] | None", getattr(store, "status", None))
    try:
        return None if call is None else call()
    except RefusedError:
        return None
