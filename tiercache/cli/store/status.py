"""The verbs `tiercache status` and `tiercache ping`: what a store holds, and round trips to a daemon."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final, cast

import typer

import tiercache
from tiercache.cli.store.names import Namespaces
from tiercache.cli.store.options import MacKeyOption, StoreOption, StoresOption
from tiercache.cli.store.target import Target, opened, resolve, resolve_all
from tiercache.cli.store.top import Document, status_of, summary
from tiercache.cli.terminal import (
    SHORTER,
    Output,
    OutputOption,
    console,
    count_text,
    document,
    line,
    safe,
    table,
    whole,
)
from tiercache.errors import ConfigError, RefusedError
from tiercache.storage.base import ScanEntry, StorageBackend, Usage
from tiercache.text import readable_age, readable_size

_PING_FIELDS: Final = ("version", "instance", "principal", "tenant", "verbs", "transport", "store")
"""Fields of a daemon's answer to a ping that are shown."""
_PAUSE: Final = 0.1
"""Seconds between two pings if there are at most 100 pings. With more pings there is no pause."""
_RESTORABLE_FIELDS: Final = ("restorable_bytes", "dead_bytes", "orphans")
"""Keys in the details of a store's usage that concern restores. Some stores omit these keys."""


def status(
    store: StoresOption = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Leave out the figures per namespace and pool, which need a scan of all objects."
        ),
    ] = False,
    mac_key: MacKeyOption = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Show what a store is and what it holds. Exit code 3 if a daemon does not answer.

    Show a stopped store; show a daemon of this machine, as input for a monitor:

        tiercache status -s /var/lib/tiercache

        tiercache status -s grpc:///run/tiercache --quick -o json

    Show the tiers of a stopped chain, which are only read here:

        tiercache status -s file:///ssd/kv?tier_name=ssd -s /hdd/kv

    JSON fields: name, kind, live, directory, owner (process id of the daemon),
    version, daemon (instance, principal, tenant, verbs, transport, store; null
    for a stopped store), objects, payload_bytes, used_bytes, capacity_bytes (0:
    no limit), restorable_bytes (payload that a restore can use), dead_bytes
    (payload that no restore can use), orphans (objects whose parent is
    missing), details (the store's own counters: corrupt, evicted, ...),
    namespaces (namespace, label, identity, objects, bytes, pools: pool,
    objects, bytes; null with --quick), tiers (of a chain, the fastest first:
    name, kind, health = serving, read-only or out, why (it is not serving),
    objects, payload_bytes, used_bytes, capacity_bytes, read_objects,
    read_bytes, written_objects, written_bytes, waiting, dropped, lost_calls,
    last_read, details), status (the status document of a daemon, docs/status.md;
    null for a stopped store), unlisted (why the store cannot list its objects, or "").
    The figures of a chain are sums, in which every copy of an object counts.
    restorable_bytes, dead_bytes and orphans are null if the store does not report
    them; so are all figures of a store that cannot list, and namespaces. jsonl
    has the same on one line.
    """
    target = resolve_all(store, mac_key)
    with opened(target, tells=False) as found:
        record = _describe(target, found)
        names = Namespaces.of(found)
        record["namespaces"] = None if quick or record["unlisted"] else _totals(found.scan_all(), names)
    if output is Output.TABLE:
        _print(record)
    else:
        whole(record, output)


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
    target = resolve(store)
    if not target.live:
        raise ConfigError(
            f"{target.name} is not served by a daemon, which could answer; start one there with: tiercache"
            " serve"
        )
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
        shown.print(", ".join(f"{name} {safe(_text(record[name]))}" for name in _PING_FIELDS if record[name]))


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
    usage = store.usage()
    unlisted = next((str(one["unlisted"]) for one in _details(usage) if "unlisted" in one), "")
    sums = ("objects", "payload_bytes", "used_bytes", "capacity_bytes")
    return {
        "name": target.name,
        "kind": target.kind,
        "live": target.live,
        "directory": target.directory or None,
        "owner": target.owner,
        "version": daemon.pop("version") if daemon else tiercache.__version__,
        "daemon": daemon,
        **{name: None if unlisted else getattr(usage, name) for name in sums},
        **{name: usage.details.get(name) for name in _RESTORABLE_FIELDS},
        "details": {name: value for name, value in usage.details.items() if name != "unlisted"},
        "tiers": [asdict(tier) for tier in usage.tiers],
        "unlisted": unlisted,
        "status": _document(target, store) if target.live else None,
    }


def _document(target: Target, store: StorageBackend) -> Document | None:
    """Return the status document of a daemon; None of a daemon that has none, or not for this caller."""
    try:
        return status_of(store, target.name)
    except (ConfigError, RefusedError):
        return None


def _details(usage: Usage) -> list[Mapping[str, Any]]:
    """Return the details of a store and of its tiers."""
    return [usage.details, *(tier.details for tier in usage.tiers)]


def _totals(entries: Iterable[ScanEntry], names: Namespaces) -> list[dict[str, Any]]:
    counts: dict[bytes, dict[str, list[int]]] = {name: {} for name in names.records}
    for entry in entries:
        total = counts.setdefault(entry.meta.namespace, {}).setdefault(str(entry.key.pool), [0, 0])
        total[0] += 1
        total[1] += entry.meta.length
    return [
        {
            **names.record(namespace),
            "objects": sum(n for n, _ in pools.values()),
            "bytes": sum(nbytes for _, nbytes in pools.values()),
            "pools": [
                {"pool": pool, "objects": n, "bytes": nbytes} for pool, (n, nbytes) in sorted(pools.items())
            ],
        }
        for namespace, pools in sorted(counts.items())
    ]


def _print(record: dict[str, Any]) -> None:
    shown = table(("", " "), left=("", " "))
    shown.show_header = False
    rows = [
        ("store", record["name"]),
        ("kind", f"{record['kind']}, {'served by a daemon' if record['live'] else 'not served'}"),
        (
            "owner",
            f"process {record['owner']}" if record["owner"] else "none" if record["kind"] == "file" else "",
        ),
        ("tiercache", record["version"]),
        *((name, _text(value)) for name, value in (record["daemon"] or {}).items()),
        *(summary(record["status"]) if record["status"] else ()),
        *_size_rows(record),
        ("restorable", _restorable_text(record)),
        *(
            (name, _text(value))
            for name, value in record["details"].items()
            if name not in _RESTORABLE_FIELDS
        ),
    ]
    for name, value in rows:
        if value:
            shown.add_row(safe(name), safe(value))
    to = console()
    to.print(shown)
    if record["tiers"]:
        to.print(tier_table(record["tiers"], time.time()))
    for tier in record["tiers"]:
        # A stopped chain is only read here, so that no tier of it takes objects.
        if tier["why"] and (record["live"] or tier["health"] == "out"):
            to.print(f"tier {tier['name']} is {tier['health']}: {tier['why']}", markup=False, soft_wrap=True)
    if record["namespaces"]:
        to.print(_pools(record["namespaces"]))
    if record["unlisted"]:
        to.print(record["unlisted"], markup=False, soft_wrap=True)


def _size_rows(record: dict[str, Any]) -> list[tuple[str, str]]:
    if record["unlisted"]:
        return [("objects", "not known")]
    capacity = record["capacity_bytes"]
    share = f" ({record['used_bytes'] / capacity:.0%})" if capacity else ""
    return [
        ("objects", f"{record['objects']:,}"),
        ("payload", readable_size(record["payload_bytes"])),
        ("used", readable_size(record["used_bytes"]) + share),
        ("capacity", readable_size(capacity) if capacity else "no limit"),
    ]


def _restorable_text(record: dict[str, Any]) -> str:
    """Return the restorable bytes, dead bytes and orphans as text; "" if the store does not report them."""
    restorable, dead, orphans = (record[name] for name in _RESTORABLE_FIELDS)
    if None in (restorable, dead, orphans):
        return ""
    share = f" ({restorable / (restorable + dead):.0%})" if restorable + dead else ""
    return f"{readable_size(restorable)}{share}, dead {readable_size(dead)}, {count_text(orphans, 'orphan')}"


def tier_table(tiers: Sequence[Mapping[str, Any]], now: float) -> Any:
    """Return a table of the tiers of a chain; `now` is in seconds since 1970."""
    columns = (
        "tier",
        "kind",
        "health",
        "objects",
        "used",
        "read",
        "written",
        "waiting",
        "dropped",
        "last read",
    )
    shown = table(columns, left=columns[:3])
    for tier in tiers:
        capacity = f" of {readable_size(tier['capacity_bytes'])}" if tier["capacity_bytes"] else ""
        last = tier["last_read"]
        holds = (f"{tier['objects']:,}", readable_size(tier["used_bytes"]) + capacity)
        if tier["health"] == "out" or "unlisted" in tier["details"]:
            holds = ("-", "-")
        shown.add_row(
            safe(tier["name"]),
            safe(tier["kind"]),
            safe(tier["health"]),
            *holds,
            *(
                f"{tier[f'{way}_objects']:,}, {readable_size(tier[f'{way}_bytes'])}"
                for way in ("read", "written")
            ),
            f"{tier['waiting']:,}",
            f"{tier['dropped']:,}",
            readable_age(None if last is None else now - last),
        )
    return shown


def _pools(namespaces: list[dict[str, Any]]) -> Any:
    shown = table(("namespace", "label", "pool", "objects", "bytes"), left=("namespace", "label", "pool"))
    for space in namespaces:
        start = (space["namespace"][:SHORTER], safe(space["label"]))
        for pool in space["pools"] or [{"pool": "-", "objects": 0, "bytes": 0}]:
            shown.add_row(*start, safe(pool["pool"]), f"{pool['objects']:,}", readable_size(pool["bytes"]))
            start = ("", "")
    return shown


def _text(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
