"""Rows of all benchmarks, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from rich.console import Console

from tiercache.cli.terminal import Output, console, document, line, safe, table

KIB: Final = 1 << 10
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one case. Rows whose figures have the same names stand in one table."""

    name: str
    figures: Mapping[str, Any]
    """Texts and numbers by the names of the columns; None for what does not apply."""
    section: object = None
    """Rows with the same value stand together in the table."""

    def record(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
        figures = {
            name: digits(value) if isinstance(value, float) else value for name, value in self.figures.items()
        }
        return {"name": self.name, **figures}


def speed(
    name: str,
    size: int,
    objects: int,
    seconds: float,
    payload: int = 0,
    limit: str = "",
    limit_seconds: float = 0.0,
) -> Row:
    """Return the row of a batch of `objects` of `size` bytes that took `seconds`, beside its limit.

    `payload` has the bytes that the batch moves; 0 where only the time per object counts. The limit is a way
    to move the same bytes without tiercache, which takes `limit_seconds`; empty if there is none.
    """
    figures = {
        "size": size, "objects": objects, "seconds": seconds,
        "gbps": payload / seconds / 1e9 if payload else None,
        "limit_gbps": payload / limit_seconds / 1e9 if limit and payload else None,
        "ratio": limit_seconds / seconds if limit else None, "us_per_object": seconds / objects * 1e6,
        "limit": limit or None,
    }  # fmt: skip
    return Row(name, figures, section=size)


def collect(found: Iterable[Row], output: Output) -> list[Row]:
    """Return the rows of a run.

    JSON lines are printed one by one, as soon as a row is known. A JSON document is printed at the end.
    """
    rows: list[Row] = []
    for row in found:
        rows.append(row)
        if output is Output.JSONL:
            line(row.record())
    if output is Output.JSON:
        document([row.record() for row in rows])
    return rows


def show(rows: Sequence[Row], sentences: Sequence[str], output: Output) -> None:
    """Print the rows as tables, and sentences about them; with JSON only these, on stderr."""
    if output is not Output.TABLE:
        aside = Console(stderr=True, highlight=False, emoji=False)
        aside.print("\n".join(sentences), style="dim", markup=False, soft_wrap=True)
        return
    to = console()
    for columns, alike in groupby(rows, key=lambda row: (*row.figures,)):
        shown, before = table(("case", *columns), left=("case", "limit", "method")), None
        shown.columns[0].no_wrap = True
        for row in alike:
            if before is not None and row.section != before.section:
                shown.add_section()
            shown.add_row(safe(row.name), *map(_cell, row.figures.values()))
            before = row
        to.print(shown)
    for sentence in sentences:
        to.print(sentence, style="dim", markup=False)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else safe(str(value or ""))


def size_text(nbytes: int) -> str:
    """Return a number of bytes as a whole number of GiB, MiB, KiB or B, in the largest possible unit."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", MIB), ("KiB", KIB)):
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def digits(value: float | None) -> float | None:
    """Round to four significant digits, because further digits differ from run to run; None stays None."""
    return None if value is None else float(f"{value:.4g}")
