"""Printing for all verbs: rows, documents, sizes, ages and progress. Text from outside is escaped before it reaches a terminal."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

SHORT: Final = 12
"""Hex digits of a page key that a table shows."""
SHORTER: Final = 8
"""Hex digits of a namespace or a layout that a table shows."""
_WIDTH: Final = 120
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_AGES: Final = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


class Output(enum.StrEnum):
    """Formats in which a verb can print its results."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"


OutputOption = Annotated[
    Output,
    typer.Option("--output", "-o", help="For people; as one JSON document; or as JSON, a line for each row. Sizes in JSON are bytes."),
]


def clean(text: str) -> str:
    """Return `text` with every unprintable character, such as a terminal control or an invisible one, written as an escape."""
    return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def safe(text: str) -> str:
    """Return `text` for rich: unprintable characters escaped, and markup made literal."""
    return escape(clean(text))


def size_text(nbytes: int) -> str:
    """Format a size for reading, such as "4.0 KiB"."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{nbytes} B"


def age_text(seconds: float | None) -> str:
    """Format an age in seconds for reading, such as "3 min"; "-" if it is not known."""
    if seconds is None:
        return "-"
    for unit, name in _AGES:
        if seconds >= 2 * unit or unit == 1:
            return f"{max(0.0, seconds) / unit:.0f} {name}"
    return "-"


def count_text(count: int, noun: str) -> str:
    """Format a count with its noun, such as "1 object" or "2,000 objects"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def ranges_text(numbers: Sequence[int], most: int = 12) -> str:
    """Format ascending numbers with runs merged, such as "1..4, 7"; at most `most` runs, then "..." and the last number."""
    parts = [f"{a}..{b}" if b > a else str(a) for a, b in ranges(numbers)]
    return ", ".join(parts) if len(parts) <= most else f"{', '.join(parts[:most])}, ... {numbers[-1]}"


def ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers in an ascending sequence, each as its first and last number."""
    found: list[tuple[int, int]] = []
    for n in numbers:
        if found and found[-1][1] == n - 1:
            found[-1] = (found[-1][0], n)
        else:
            found.append((n, n))
    return found


def say(text: str) -> None:
    """Print a sentence on stderr, escaped."""
    sys.stderr.write(clean(text) + "\n")


def complain(text: str) -> None:
    """Print on stderr the sentence of the error that ends a verb."""
    Console(stderr=True, highlight=False, emoji=False).print(f"[red]tiercache:[/] {safe(text)}", soft_wrap=True)


def records(found: Iterable[Mapping[str, Any]], output: Output) -> None:
    """Print rows as JSON: one document with all of them, or one line each as they arrive."""
    if output is Output.JSON:
        document(list(found))
    else:
        for record in found:
            line(record)


def whole(record: Mapping[str, Any], output: Output) -> None:
    """Print one object without rows as JSON: as a document, or on one line."""
    (document if output is Output.JSON else line)(record)


def line(record: Mapping[str, Any]) -> None:
    """Print one JSON object on a line of its own, in one write, so that an interruption leaves whole lines only."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def document(value: Any) -> None:
    """Print one JSON document, indented by one space."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")
    sys.stdout.flush()


def console() -> Console:
    """Return the console for tables on stdout; 120 columns wide where it is not a terminal."""
    found = Console(highlight=False, emoji=False)
    return found if found.is_terminal else Console(width=_WIDTH, highlight=False, emoji=False)


def table(columns: Sequence[str], left: Sequence[str] = ()) -> Table:
    """Return an empty table whose columns are right-aligned, except those named in `left`.

    Cells are parsed as rich markup: pass text that comes from a store through `safe`.
    """
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        made.add_column(name, justify="left" if name in left else "right", overflow="fold")
    return made


@contextmanager
def progress(doing: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar over `total` bytes on stderr if it is a terminal; no bar otherwise.

    Yields a callable that takes the number of bytes done since its last call.
    """
    shown = Console(stderr=True, emoji=False)
    if not shown.is_terminal:
        yield lambda _: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    # Redirect stdout only where it is a terminal: rows would be drawn into the bar there, and would go to stderr otherwise.
    with Progress(*columns, console=shown, transient=True, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda done: bar.update(task, advance=done)
