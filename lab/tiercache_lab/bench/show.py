"""Output of a run: rows and notes. With JSON, rows go to stdout and notes to stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol, TypeVar

from rich.console import Console

from tiercache.cli.terminal import Output, console, document, line, safe, table
from tiercache_lab.bench.machine import Machine
from tiercache_lab.bench.plan import Plan
from tiercache_lab.bench.rows import Note, Row, Target, size_text

_COLUMNS: Final = ("case", "size", "GB/s", "limit", "ratio", "us each", "limit is", "target", "met")
_LEFT: Final = ("case", "limit is")
"""Columns that are aligned left."""
_MIN_REPEATS: Final = 5
"""Number of repeats below which the footer warns that medians are not reliable."""


class Recorded(Protocol):
    """Row of any benchmark."""

    def record(self) -> dict[str, Any]:
        """Return the row as a JSON object."""


R = TypeVar("R", bound=Recorded)


def collect(found: Iterable[R | Note], output: Output) -> tuple[list[R], list[Note]]:
    """Return the rows and the notes of a run.

    JSON lines are printed one by one, as soon as a row is known. A JSON document is printed at the end.
    """
    rows: list[R] = []
    notes: list[Note] = []
    for item in found:
        if isinstance(item, Note):
            notes.append(item)
            continue
        rows.append(item)
        if output is Output.JSONL:
            line(item.record())
    if output is Output.JSON:
        document([row.record() for row in rows])
    return rows, notes


def aside(said: Sequence[str]) -> None:
    """Print sentences about the rows on stderr; stdout has the rows as JSON."""
    Console(stderr=True, highlight=False, emoji=False).print(
        "\n".join(said), style="dim", markup=False, soft_wrap=True
    )


def print_rows(
    to: Console,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Any],
    cells: Callable[[Any], Sequence[str]],
    *,
    left: Sequence[str],
    section: Callable[[Any], object],
) -> None:
    """Print a table of rows, in which rows with the same `section` stand together."""
    shown = table(columns, left)
    shown.title, shown.title_style = title, "bold"
    for row, before in zip(rows, [*rows[:1], *rows], strict=False):
        if section(row) != section(before):
            shown.add_section()
        shown.add_row(*cells(row))
    to.print(shown)


def show_rows(rows: Sequence[Row], title: str, said: Sequence[str]) -> None:
    """Print all rows with one section per object size, and then the sentences `said`."""
    to = console()
    print_rows(to, title, _COLUMNS, rows, _cells, left=_LEFT, section=lambda row: row.size)
    for sentence in said:
        to.print(sentence, style="dim", markup=False)


def wanted(target: Target | None, met: bool | None) -> list[str]:
    """Return the cells of a target and of whether it is met."""
    return [safe(str(target or "")), {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[met]]


def footer(plan: Plan, machine: Machine, notes: Sequence[Note]) -> list[str]:
    """Return the sentences that explain the figures."""
    said = [
        (
            f"{machine}. Durability {'power' if plan.durable else 'process'}; calling threads:"
            f" {plan.threads}; medians of {plan.repeats} interleaved runs over the same buffers. A set"
            " includes computing the checksums, a get verifying them."
        ),
        (
            "limit: GB/s of the fastest plain system calls that move the same objects, or of the rival that"
            " the row names."
        ),
    ]
    if machine.in_memory:
        said.append(
            f"The files were on {machine.file_system}, so these are figures of memory, not of a disk."
        )
    if plan.repeats < _MIN_REPEATS:
        said.append(f"Medians of fewer than {_MIN_REPEATS} runs are not reliable; raise --repeat.")
    # Several sizes may give the same note, which is shown once.
    return said + [f"{text[0].upper()}{text[1:]}." for text in dict.fromkeys(note.text for note in notes)]


def _cells(row: Row) -> list[str]:
    # The title already names the store, so the first word of the name is left out.
    start = [row.name.partition(" ")[2], size_text(row.size)]
    if not row.payload:
        return [
            *start,
            "",
            "",
            f"{row.ratio:.2f}" if row.ratio else "",
            f"{row.us_per_object:.2f}",
            row.limit or f"{row.objects:,} in {_time(row.seconds)}",
            *wanted(row.target, row.met),
        ]
    speeds = [f"{row.gbps:.2f}", f"{row.limit_gbps:.2f}", f"{row.ratio:.2f}"]
    return [*start, *speeds, f"{row.us_per_object:.1f}", row.limit, *wanted(row.target, row.met)]


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
