"""The verbs `tiercache status` and `tiercache ping`: the state of a store, and round trips."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

import tiercache
from tiercache.cli.store.selection import MacKeyOption, StoreOption, StoresOption
from tiercache.cli.store.target import Target, check_daemon, opened, resolve_all, resolve_daemon
from tiercache.cli.terminal import (
    Output,
    OutputOption,
    clean,
    console,
    count_text,
    document,
    line,
    safe,
    say,
    table,
    whole,
)
from tiercache.errors import ConfigError, RefusedError, StorageError
from tiercache.storage.base import StorageBackend
from tiercache.text import readable_age, readable_seconds, readable_size

if TYPE_CHECKING:
    from rich.console import RenderableType

_BARS: Final = "▁▂▃▄▅▆▇█"
_WIDTH: Final = 30
"""Columns of a sparkline."""
_JOURNAL: Final = 6
"""Number of events that are shown."""
RESTORABLE: Final = ("restorable_bytes", "dead_bytes", "orphans")
"""Fields of a store's details that concern restores. Some stores have none of them."""
_STYLES: Final = {"serving": "green", "out": "red"}
"""Colours of a tier's health; another one is yellow."""

Fields = Mapping[str, Any]
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
        for n in range(count):
            if n:
                time.sleep(_PAUSE if count <= 100 else 0)
            seconds, daemon = _ping(found)
            times.append(seconds)
            if output is Output.JSONL:
                line({"seconds": seconds, **daemon})
    record = {
        "count": count,
        "min_seconds": min(times),
        "median_seconds": statistics.median(times),
        "max_seconds": max(times),
        **daemon,
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


def _ping(store: StorageBackend) -> tuple[float, dict[str, Any]]:
    """Return the seconds of a round trip to a daemon, and what the daemon says of itself."""
    pong = getattr(store, "ping")()  # noqa: B009  only a daemon's store has it
    found = {name: getattr(pong, name) for name in _PING_FIELDS}
    return float(pong.seconds), found | {"verbs": list(pong.verbs)}


def _describe(target: Target, store: StorageBackend) -> dict[str, Any]:
    daemon = _ping(store)[1] if target.live else None
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
    with suppress(RefusedError):
        return cast("Fields", getattr(store, "status")())  # noqa: B009  only a daemon's store has it
    return None


def picture(record: Fields, *, live: bool = False, note: str = "") -> RenderableType:
    """Return the fields of `tiercache status` for a terminal.

    A `live` picture leaves out what does not change. `note` is shown above it.
    """
    from rich.console import Group
    from rich.text import Text

    status, now = record["status"], time.time()
    parts: list[RenderableType] = []
    if status is not None:
        now = status["time"]
        up = readable_age(max(0.0, now - status["started"]))
        reader = f", as {clean(status['reader'])}" if status["reader"] else ""
        about = f" {clean(status['version'])}, up {up}{reader}"
        parts.append(Text.assemble(("tiercache ", "bold"), clean(status["host"]), (about, "dim")))
    if note:
        parts.append(Text(note, style="bold red"))
    parts.append(_figures(record, live=live))
    if tiers := (status["tiers"] if status is not None else ()) or record["tiers"]:
        # A stopped chain is only read here, so that no tier of it takes objects.
        quiet = [one if record["live"] or one["health"] == "out" else {**one, "why": ""} for one in tiers]
        parts.append(tier_table(quiet, now))
    if status is not None:
        parts += _traffic(status)
    if record["unlisted"]:
        parts.append(Text(record["unlisted"]))
    return Group(*parts)


def spark(values: Sequence[float | None], top: float = 0.0, width: int = _WIDTH) -> str:
    """Return the last values as a line of bars, the highest of which is `top`; a gap for None."""
    step = max(1, -(-len(values) // width))
    chosen = values[::-1][::step][::-1]
    high = top or max((value for value in chosen if value is not None), default=0.0) or 1.0
    bars = (" " if v is None else _BARS[min(7, int(7.99 * max(0.0, v) / high))] for v in chosen)
    return "".join(bars)


def silence_text(error: StorageError, heard: float) -> str:
    """Return why the figures are those of the time `heard`."""
    since = time.strftime("%H:%M:%S", time.localtime(heard))
    if isinstance(error, RefusedError):
        return f"the daemon refuses this since {since}: {clean(str(error))}"
    return f"the daemon does not answer since {since}; the figures are of that time"


def value_text(value: Any) -> str:
    """Return a number with separators, the elements of a list, or the text of another value."""
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _figures(record: Fields, *, live: bool) -> RenderableType:
    status = record["status"]
    shown = table(("", " ", "last hour"), left=("", " ", "last hour"))
    shown.show_header = False
    rows: list[tuple[str, str, str]] = []
    if not live:
        owner = f"process {record['owner']}" if record["owner"] else "none" * (record["kind"] == "file")
        served = "served by a daemon" if record["live"] else "not served"
        fixed = [("store", record["name"]), ("kind", f"{record['kind']}, {served}"), ("owner", owner)]
        fixed += [("tiercache", record["version"]), *(record["daemon"] or {}).items()]
        rows += [(name, value_text(value), "") for name, value in fixed]
    if status is not None:
        rows += _hits_and_rates(status)
    rows += [*_contents(record)]
    if not live:
        counters = record["details"].items()
        rows += [(name, value_text(value), "") for name, value in counters if name not in RESTORABLE]
    for name, value, bars in rows:
        if value:
            shown.add_row(f"[bold]{safe(name)}[/]", safe(value), bars)
    return shown


def _hits_and_rates(status: Fields) -> Iterator[tuple[str, str, str]]:
    ready, history = status["readiness"], status["history"]
    yield "state", ": ".join(filter(None, [ready["state"], "; ".join(ready["reasons"])])), ""
    for hits in [status["hits"]] if status["hits"] else status["tenant_hits"]:
        yield "hit rate", _rate_text(hits), spark(history["token_hit_rate"], 1.0) if history else ""
        yield "saved", _saved_text(hits), ""
    if history:
        for name, way in (("read", "to clients"), ("written", "from clients")):
            rate = history[name][-1] if history[name] else 0
            yield name, f"{readable_size(round(rate))}/s {way}", spark(history[name])
        calls = history["calls"]
        yield "calls", f"{calls[-1] if calls else 0:.1f}/s", spark(calls)


def _rate_text(hits: Fields) -> str:
    """Return a hit rate with what it is made of, or the reason why there is none."""
    asked = f"{hits['restored_tokens']:,} of {count_text(hits['asked_tokens'], 'prompt token')} restored"
    rate = hits["token_hit_rate"]
    return f"unknown: {hits['why_no_rate']}" if rate is None else f"{rate:.1%}, {asked}"


def _saved_text(hits: Fields) -> str:
    """Return the saved time, or the reason why it is not known."""
    if hits["saved_seconds"] is None:
        return f"unknown: {hits['why_not_saved']}"
    more = f" + unknown: {hits['why_not_saved']}" if hits["why_not_saved"] else ""
    return readable_seconds(hits["saved_seconds"]) + more


def _contents(record: Fields) -> Iterator[tuple[str, str, str]]:
    if record["objects"] is None:
        yield "objects", "not known", ""
        return
    used, capacity = record["used_bytes"], record["capacity_bytes"]
    room = f" of {readable_size(capacity)} ({used / capacity:.0%})" if capacity else ", no limit"
    history = record["status"]["history"] if record["status"] is not None else None
    yield "objects", f"{record['objects']:,}, {readable_size(record['payload_bytes'])} of payload", ""
    yield "used", readable_size(used) + room, spark(history["used_bytes"], float(capacity)) if history else ""
    restorable, dead, orphans = (record[name] for name in RESTORABLE)
    if None not in (restorable, dead, orphans):
        share = f" ({restorable / (restorable + dead):.0%})" if restorable + dead else ""
        lost = f"dead {readable_size(dead)}, {count_text(orphans, 'orphan')}"
        yield "restorable", f"{readable_size(restorable)}{share}, {lost}", ""


def tier_table(tiers: Sequence[Fields], now: float) -> RenderableType:
    """Return a table of tiers, and below it why some do not serve; `now` is in seconds since 1970.

    The tiers are those of a status document, which have a share of the reads, or reports of a chain, which
    have what was read and written.
    """
    from rich.console import Group
    from rich.text import Text

    traffic = ("read share",) if "read_share" in tiers[0] else ("read", "written")
    columns = ("tier", "kind", "health", "objects", "used", *traffic, "waiting", "dropped", "last read")
    shown = table(columns, left=columns[:3])
    whys = []
    for tier in tiers:
        capacity = f" of {readable_size(tier['capacity_bytes'])}" if tier["capacity_bytes"] else ""
        last, style = tier["last_read"], _STYLES.get(tier["health"], "yellow")
        holds = (f"{tier['objects']:,}", readable_size(tier["used_bytes"]) + capacity)
        if tier["health"] == "out" or "unlisted" in tier.get("details", ()):
            holds = ("-", "-")
        share = tier.get("read_share")
        moved = [
            ("-" if share is None else f"{share:.1%}")
            if name == "read share"
            else f"{tier[f'{name}_objects']:,}, {readable_size(tier[f'{name}_bytes'])}"
            for name in traffic
        ]
        shown.add_row(
            safe(tier["name"]), safe(tier["kind"]), f"[{style}]{safe(tier['health'])}[/]", *holds, *moved,
            f"{tier['waiting']:,}", f"{tier['dropped']:,}",
            readable_age(None if last is None else now - last),
        )  # fmt: skip
        if tier["why"]:
            whys.append(Text(f"tier {clean(tier['name'])} is {tier['health']}: {clean(tier['why'])}", style))
    return Group(shown, *whys)


def _tenant_table(rows: Sequence[Fields]) -> RenderableType:
    shown = table(("tenant", "used", "quota", "guarantee", "evicted", "throttled"), left=("tenant",))
    for row in rows:
        used, quota = row["used_bytes"], row["quota_bytes"]
        share = f" ({used / quota:.0%})" if quota else ""
        style = "yellow" if quota and used > 0.95 * quota else "default"
        shown.add_row(
            safe(row["name"]), f"[{style}]{readable_size(used)}{share}[/]",
            "none" if quota is None else readable_size(quota),
            readable_size(row["guarantee_bytes"]) if row["guarantee_bytes"] else "none",
            f"{row['evicted_objects']:,}", f"{row['throttled_objects']:,}",
        )  # fmt: skip
    return shown


def _traffic(status: Fields) -> Iterator[RenderableType]:
    """Yield what clients did: misses and limits, principals and tenants, and events."""
    from rich.columns import Columns

    if status["whole"]:
        misses = table(("miss", "of", "objects"), left=("miss", "of"))
        for miss in status["lookups"]["misses"][:6]:
            misses.add_row(safe(miss["reason"]), safe(miss["operation"]), f"{miss['objects']:,}")
        limits = table(("held", "now", "limit"), left=("held",))
        for row in status["limits"]:
            show = str if row["name"] in ("calls", "threads") else readable_size
            style = "yellow" if row["held"] > 0.9 * row["limit"] else "default"
            limits.add_row(safe(row["name"]), f"[{style}]{show(row['held'])}[/]", show(row["limit"]))
        yield Columns([misses, limits], padding=(0, 6))
    principals = table(("principal", "tenant", "calls", "read", "written"), left=("principal", "tenant"))
    for row in sorted(status["principals"], key=lambda row: -row["calls"]):
        principals.add_row(
            safe(row["name"]), safe(row["tenant"] or "-"),
            f"{row['calls']:,}", readable_size(row["read_bytes"]), readable_size(row["written_bytes"]),
        )  # fmt: skip
    yield principals
    if status["tenants"]:
        yield _tenant_table(status["tenants"])
    if status["journal"]:
        journal = table(("at", "event"), left=("at", "event"))
        for row in status["journal"][:_JOURNAL]:
            style = "yellow" if row["level"] == "warning" else "default"
            at = time.strftime("%H:%M:%S", time.localtime(row["time"]))
            journal.add_row(at, f"[{style}]{safe(row['text'])}[/]")
        yield journal
