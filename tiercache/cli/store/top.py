"""The verb `tiercache top`: the status document of a daemon in a terminal, again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tiercache.cli.store.options import StoreOption
from tiercache.cli.store.target import opened, resolve
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
)
from tiercache.errors import ConfigError, StorageError
from tiercache.storage.base import StorageBackend
from tiercache.text import readable_age, readable_seconds, readable_size

if TYPE_CHECKING:
    from rich.console import RenderableType

_BARS: Final = "▁▂▃▄▅▆▇█"
_WIDTH: Final = 30
"""Columns of a sparkline."""
_NAME: Final = 24
"""Maximum columns of a tier's name."""
_JOURNAL: Final = 6
"""Number of events that are shown."""

Document = Mapping[str, Any]


def top(
    store: StoreOption = "",
    once: Annotated[bool, typer.Option("--once", help="Show the figures once and end.")] = False,
    every: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two looks.")] = 2.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show live what a daemon does: tiers, hit rates, throughput, limits, slow calls. Ctrl-C ends it.

    Watch the daemon of this machine; take one look; record a line every minute:

        tiercache top -s /var/lib/tiercache

        tiercache top -s grpc:///run/tiercache --once

        tiercache top -s /var/lib/tiercache -o jsonl --every 60 >> status.jsonl

    JSON fields: those of the status document of the daemon's HTTP port (docs/status.md), as far as this
    principal may know it. json has one document; jsonl has a line for each look. If stdout is no terminal,
    a table is shown once. Exit code 3 if the daemon does not answer at the first look; later ones are
    repeated until it does.
    """
    target = resolve(store)
    if not target.live:
        raise ConfigError(
            f"{target.name} is not served by a daemon, which could answer; start one there with: tiercache"
            " serve"
        )
    with opened(target, tells=False) as found:
        first = status_of(found, target.name)
        shown = console()
        if output is Output.JSON:
            document(first)
        elif output is Output.TABLE and (once or not shown.is_terminal):
            shown.print(picture(first))
        else:
            with suppress(KeyboardInterrupt):
                if output is Output.JSONL:
                    _record(found, first, target.name, None if once else every)
                else:
                    _watch(found, first, target.name, every)


def status_of(found: StorageBackend, name: str) -> Document:
    """Return the status document of a daemon; raises ConfigError for a store that is none."""
    ask: Callable[[], Document] | None = getattr(found, "status", None)
    if ask is None:
        raise ConfigError(f"{name} is not a daemon; name one, such as grpc://host:port")
    return ask()


def summary(it: Document) -> list[tuple[str, str]]:
    """Return the figures of the whole daemon, each with its name."""
    ready = it["readiness"]
    rows = [("state", ": ".join(filter(None, [_state(ready), "; ".join(ready["reasons"])])))]
    for hits in [it["hits"]] if it.get("hits") else it.get("tenant_hits", ()):
        rows += [("hit rate", rate_text(hits)), ("saved", saved_text(hits))]
    if it["whole"]:
        history = it["history"]
        rows += [
            ("read", f"{_rate(history['read'])} to clients"),
            ("written", f"{_rate(history['written'])} from clients"),
            ("calls", f"{history['calls'][-1] if history['calls'] else 0:.1f}/s"),
        ]
    return rows


def rate_text(hits: Document) -> str:
    """Return a hit rate with what it is made of, or the reason why there is none."""
    asked = f"{hits['restored_tokens']:,} of {count_text(hits['asked_tokens'], 'prompt token')} restored"
    rate = hits["token_hit_rate"]
    return f"unknown: {hits['why_no_rate']}" if rate is None else f"{rate:.1%}, {asked}"


def saved_text(hits: Document) -> str:
    """Return the saved time, or the reason why it is not known."""
    if hits["saved_seconds"] is None:
        return f"unknown: {hits['why_not_saved']}"
    more = f" + unknown: {hits['why_not_saved']}" if hits["why_not_saved"] else ""
    return readable_seconds(hits["saved_seconds"]) + more


def picture(it: Document, note: str = "") -> RenderableType:
    """Return the document for a terminal; `note` is shown above it."""
    from rich.console import Group
    from rich.text import Text

    up = readable_age(max(0.0, it["time"] - it["started"]))
    head = Text.assemble(
        ("tiercache ", "bold"), (clean(it.get("host", "")), ""), (f" {clean(it['version'])}, up {up}", "dim"),
        (f", as {clean(it['reader'])}" if it["reader"] else "", "dim"),
    )  # fmt: skip
    parts: list[RenderableType] = [head]
    if note:
        parts.append(Text(note, style="bold red"))
    parts.append(_figures(it))
    if it["whole"]:
        parts += [_tiers(it), _misses_and_limits(it)]
    parts.append(_principals(it))
    if it.get("tenants"):  # an older daemon has none
        parts.append(_tenants(it))
    parts.append(_slowest(it))
    if it["journal"]:
        parts.append(_journal(it))
    return Group(*parts)


def spark(values: Sequence[float | None], top: float = 0.0, width: int = _WIDTH) -> str:
    """Return the last values as a line of bars, the highest of which is `top`; a gap for None."""
    step = max(1, -(-len(values) // width))
    chosen = values[::-1][::step][::-1]
    high = top or max((value for value in chosen if value is not None), default=0.0) or 1.0
    bars = (" " if v is None else _BARS[min(7, int(7.99 * max(0.0, v) / high))] for v in chosen)
    return "".join(bars)


def _record(found: StorageBackend, first: Document, name: str, every: float | None) -> None:
    line(first)
    while every is not None:
        time.sleep(every)
        try:
            line(status_of(found, name))
        except StorageError as error:
            say(f"tiercache: {error}")


def _watch(found: StorageBackend, first: Document, name: str, every: float) -> None:
    from rich.live import Live

    latest, heard = first, time.time()
    with Live(picture(first), console=console(), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(every)
            note = ""
            try:
                latest, heard = status_of(found, name), time.time()
            except StorageError:
                since = time.strftime("%H:%M:%S", time.localtime(heard))
                note = f"the daemon does not answer since {since}; the figures are of that time"
            live.update(picture(latest, note), refresh=True)


def _figures(it: Document) -> RenderableType:
    shown = table(("", " ", "last hour"), left=("", " ", "last hour"))
    shown.show_header = False
    history = it["history"] or {}
    columns = {"hit rate": "token_hit_rate", "read": "read", "written": "written", "calls": "calls"}
    for name, said in summary(it):
        values = history.get(columns.get(name, ""), ())
        shown.add_row(f"[bold]{name}[/]", safe(said), spark(values, 1.0 if name == "hit rate" else 0.0))
    store = it["store"]
    if store is not None:
        capacity = store["capacity_bytes"]
        of = f" of {readable_size(capacity)} ({store['used_bytes'] / capacity:.0%})" if capacity else ""
        used = f"{readable_size(store['used_bytes'])}{of}, {count_text(store['objects'], 'object')}"
        shown.add_row("[bold]stored[/]", used, spark(history["used_bytes"], float(capacity)))
        kept, dead = store["restorable_bytes"], store["dead_bytes"]
        if kept is not None and kept + dead:
            shown.add_row("[bold]restorable[/]", f"{kept / (kept + dead):.1%}, {readable_size(kept)}", "")
    return shown


def _tiers(it: Document) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    columns = ("tier", "kind", "health", "used", "objects", "read share", "waiting", "dropped", "last read")
    shown = table(columns, left=columns[:3])
    whys = []
    for tier in it["tiers"]:
        capacity = f" of {readable_size(tier['capacity_bytes'])}" if tier["capacity_bytes"] else ""
        out = tier["health"] == "out"
        style = "red" if out else "yellow" if tier["health"] != "serving" else "green"
        last = tier["last_read"]
        shown.add_row(
            safe(_cut(tier["name"])), safe(tier["kind"]), f"[{style}]{safe(tier['health'])}[/]",
            "-" if out else readable_size(tier["used_bytes"]) + capacity,
            "-" if out else f"{tier['objects']:,}", _share(tier.get("read_share")), f"{tier['waiting']:,}",
            f"{tier['dropped']:,}", readable_age(None if last is None else it["time"] - last),
        )  # fmt: skip
        if tier["why"]:
            whys.append(
                Text(f" {clean(_cut(tier['name']))} is {tier['health']}: {clean(tier['why'])}", style)
            )
    return Group(shown, *whys)


def _misses_and_limits(it: Document) -> RenderableType:
    from rich.columns import Columns

    misses = table(("miss", "of", "objects"), left=("miss", "of"))
    for miss in it["lookups"]["misses"][:6]:
        misses.add_row(safe(miss["reason"]), safe(miss["operation"]), f"{miss['objects']:,}")
    limits = table(("held", "now", "limit"), left=("held",))
    for row in it["limits"]:
        show = str if row["name"] in ("calls", "threads") else readable_size
        style = "[yellow]" if row["held"] > 0.9 * row["limit"] else "[default]"
        limits.add_row(safe(row["name"]), f"{style}{show(row['held'])}[/]", show(row["limit"]))
    return Columns([misses, limits], padding=(0, 6))


def _principals(it: Document) -> RenderableType:
    shown = table(("principal", "tenant", "calls", "read", "written"), left=("principal", "tenant"))
    for row in sorted(it["principals"], key=lambda row: -row["calls"]):
        shown.add_row(
            safe(row["name"] + (" (removed)" if row.get("removed") else "")), safe(row["tenant"] or "-"),
            f"{row['calls']:,}",
            readable_size(row["read_bytes"]), readable_size(row["written_bytes"]),
        )  # fmt: skip
    return shown


def _tenants(it: Document) -> RenderableType:
    shown = table(("tenant", "used", "quota", "guarantee", "evicted", "throttled"), left=("tenant",))
    for row in it["tenants"]:
        quota = row["quota_bytes"]
        style = "[yellow]" if quota and row["used_bytes"] > 0.95 * quota else "[default]"
        shown.add_row(
            safe(row["name"]), f"{style}{readable_size(row['used_bytes'])}[/]",
            "-" if quota is None else readable_size(quota), readable_size(row["guarantee_bytes"]),
            f"{row['evicted_objects']:,}", f"{row['throttled_objects']:,}",
        )  # fmt: skip
    return shown


def _slowest(it: Document) -> RenderableType:
    shown = table(("slowest call", "principal", "took", "ago"), left=("slowest call", "principal"))
    for row in it["slowest"][:5]:
        name = safe(row["method"]) + (" [red](failed)[/]" if row["failed"] else "")
        ago = readable_age(max(0.0, it["time"] - row["time"]))
        shown.add_row(name, safe(row["principal"]), f"{row['seconds'] * 1e3:,.1f} ms", ago)
    return shown


def _journal(it: Document) -> RenderableType:
    shown = table(("at", "event"), left=("at", "event"))
    for row in it["journal"][:_JOURNAL]:
        style = "yellow" if row["level"] == "warning" else "default"
        at = time.strftime("%H:%M:%S", time.localtime(row["time"]))
        shown.add_row(at, f"[{style}]{safe(row['text'])}[/]")
    return shown


def _cut(name: str) -> str:
    """Return a name that leaves room for the other columns."""
    return name if len(name) <= _NAME else f"{name[: _NAME - 3]}..."


def _state(readiness: Document) -> str:
    """Return `ready`, `degraded` or `not ready`; older daemons do not tell the second."""
    return str(readiness.get("state", "ready" if readiness["ready"] else "not ready"))


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _rate(values: Sequence[float]) -> str:
    return f"{readable_size(round(values[-1]) if values else 0)}/s"
