"""The verb `tiercache report`: what each tenant stored, read and saved, by day or hour."""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from typing import Annotated, Any, Final

import typer

from tiercache.cli.store.selection import StoreOption
from tiercache.cli.store.target import opened, resolve_daemon
from tiercache.cli.terminal import Output, OutputOption, clean, console, records, safe, table, time_text
from tiercache.config import parse_duration
from tiercache.errors import ConfigError
from tiercache.storage.hits import Hits
from tiercache.text import readable_seconds, readable_size

_COMMON: Final = "(no tenant)"
"""Name in tables of the callers without a tenant."""
_HOUR_S: Final = 3600
_NOT_COUNTED: Final = {"hour", "tenant"}
_UNITS: Final = ("", "k", "M", "G", "T", "P", "E", "Z")


class By(enum.StrEnum):
    """Length of the time that a row covers."""

    DAY = "day"
    HOUR = "hour"


def report(
    store: StoreOption = "",
    since: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Begin: an age such as 24h or 7d, or a local date such as 2026-11-20."
        ),
    ] = "24h",
    by: Annotated[By, typer.Option(help="Rows of a day or of an hour.")] = By.DAY,
    tenant: Annotated[
        str | None, typer.Option(help="Only this tenant; '' for the callers without one.", show_default=False)
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show what each tenant of a daemon stored, read and saved, by day or hour.

    The daemon counts by hour, so the hour in which the time begins counts
    as a whole. A principal of a tenant sees its own tenant; all tenants need
    the verb observe or admin.

        tiercache report --since 7d -s grpc://n7:7070

        tiercache report --since 2026-11-20 --by hour --tenant red -o jsonl

    JSON: since, account_begins and rows (jsonl: one line each): begins
    (seconds since 1970), tenant ("" for none), written_objects, written_bytes, read_objects,
    read_bytes, missed_objects (asked for by a read, and not there),
    found_objects and absent_objects (of lookups), restored_tokens,
    unpriced_tokens (restored, but the FLOPs are not known), saved_flops (of
    the other tokens; null if all are unpriced), asked_tokens (of pages that
    were looked up), token_hit_rate (restored / asked; null if not known),
    saved_seconds (time of the prefill of the restored tokens, less that of
    their reads; null if not known), unsized_objects (looked up, and their
    tokens are not known), timed_tokens, prefill_seconds and read_seconds
    (restored tokens whose prefill has a known time, and both times).
    """
    begin = _begin(since, time.time())
    target = resolve_daemon(store, "only a running daemon keeps an account")
    with opened(target) as found:
        answer = getattr(found, "report")(begin)  # noqa: B009  only a daemon's store has it
    names = {row["tenant"] for row in answer.rows}
    if tenant is not None and tenant not in names:
        known = ", ".join(sorted(clean(name) for name in names if name)) or "none"
        raise ConfigError(
            f"--tenant {clean(tenant)!r} has nothing in this account, as far as you may know it; there are:"
            f" {known}"
        )
    rows = _summed([row for row in answer.rows if tenant in (None, row["tenant"])], by)
    if output is Output.TABLE:
        _print(rows, begin, answer.begun, by)
    else:
        records(rows, output, {"since": begin, "account_begins": answer.begun or None, "rows": rows})


def _begin(text: str, now: float) -> float:
    """Return the begin that --since names, in seconds since 1970; raises ConfigError."""
    try:
        found = datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        try:
            found = now - parse_duration(text)
        except ConfigError as error:
            raise ConfigError(
                f"--since {clean(text)!r} is neither an age such as 24h or 7d nor a date such as 2026-11-20"
            ) from error
    if found > now:
        raise ConfigError(f"--since {clean(text)} is in the future; give an age, or a date that has begun")
    return max(0.0, found)


def _summed(rows: Sequence[Mapping[str, Any]], by: By) -> list[dict[str, Any]]:
    """Return one row for each tenant and day (or hour), in this order."""
    found: dict[tuple[float, str], dict[str, Any]] = {}
    for row in rows:
        begins = float(row["hour"]) if by is By.HOUR else _day(row["hour"])
        summed = found.setdefault((begins, row["tenant"]), {"begins": begins, "tenant": row["tenant"]})
        for name, value in row.items():
            if name not in _NOT_COUNTED:
                summed[name] = summed.get(name, 0) + value
    for summed in found.values():
        tokens, unpriced = summed["restored_tokens"], summed["unpriced_tokens"]
        if tokens and unpriced == tokens:
            summed["saved_flops"] = None
        hits = _hits(summed)
        summed |= {"token_hit_rate": hits.token_hit_rate, "saved_seconds": hits.saved_seconds}
    return [found[key] for key in sorted(found)]


def _hits(row: Mapping[str, Any]) -> Hits:
    return Hits(**{field.name: row[field.name] for field in fields(Hits)})


def _day(hour: int) -> float:
    """Return the local midnight before an hour; the hour itself if the calendar does not reach so far."""
    try:
        return datetime.fromtimestamp(hour).replace(hour=0, minute=0, second=0).timestamp()
    except (ValueError, OverflowError, OSError):
        return float(hour)


def _print(rows: Sequence[Mapping[str, Any]], begin: float, begun: float, by: By) -> None:
    to = console()
    columns = (
        "begins", "tenant", "written", "read", "objects", "missed", "tokens", "hit rate", "saved",
        "time saved",
    )  # fmt: skip
    made = table(columns, left=("begins", "tenant"))
    for row in rows:
        made.add_row(
            _when(row["begins"], by),
            safe(row["tenant"] or _COMMON),
            readable_size(row["written_bytes"]),
            readable_size(row["read_bytes"]),
            f"{row['read_objects']:,}",
            f"{row['missed_objects']:,}",
            f"{row['restored_tokens']:,}",
            "unknown" if row["token_hit_rate"] is None else f"{row['token_hit_rate']:.1%}",
            _saved(row),
            "unknown" if row["saved_seconds"] is None else readable_seconds(row["saved_seconds"]),
        )
    if rows:
        to.print(made)
        total = Hits.total(map(_hits, rows))
        for name, why in (("hit rate", total.why_no_rate), ("time saved", total.why_not_saved)):
            if why:
                to.print(f"[dim]{name}: {why}[/]", soft_wrap=True)
    else:
        to.print(f"nothing was stored or asked for since {_when(begin, By.HOUR)}")
    if any(row["unpriced_tokens"] for row in rows):
        to.print(
            "unknown: the model's FLOPs were not registered; give SGLang or vLLM the model as a directory"
            " with config.json, or the setting profile (docs/explain.md)",
            soft_wrap=True,
        )
    if begun > begin + _HOUR_S:
        to.print(f"[dim]the account begins at {_when(begun, By.HOUR)}[/]")


def _saved(row: Mapping[str, Any]) -> str:
    """Return saved FLOPs as text; tokens without a price are said aloud, and not guessed."""
    if row["saved_flops"] is None:
        return "unknown"
    text = flops_text(row["saved_flops"])
    return text + (f" + unknown ({row['unpriced_tokens']:,} tokens)" if row["unpriced_tokens"] else "")


def flops_text(flops: float) -> str:
    """Format a number of FLOPs, such as "3.2 PFLOP"."""
    step = 0
    while flops >= 1000 and step < len(_UNITS) - 1:
        flops /= 1000
        step += 1
    return f"{flops:.3g} {_UNITS[step]}FLOP"


def _when(at: float, by: By) -> str:
    return time_text(at, "%Y-%m-%d" if by is By.DAY else "%Y-%m-%d %H:%M")
