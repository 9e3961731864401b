"""How all verbs print: rows, documents, sizes, ages and progress. Nothing that others wrote reaches a terminal as it came."""

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
"""Hex digits of a page key in a table."""
SHORTER: Final = 8
"""Hex digits of a namespace or a layout."""
_WIDTH: Final = 120
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_AGES: Final = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


class Output(enum.StrEnum):
    """How results are printed."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"


OutputOption = Annotated[
    Output,
    typer.Option("--output", "-o", help="For people; as one JSON document; or as JSON, a line for each row. Sizes in JSON are bytes."),
]


def clean(text: str) -> str:
    """`text` with everything that would steer a terminal or hide itself written as an escape."""
    return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def safe(text: str) -> str:
    """`text` for rich: cleaned, and without its markup."""
    return escape(clean(text))


def size_text(nbytes: int) -> str:
    """A size for people: 4.0 KiB."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{nbytes} B"


def age_text(seconds: float | None) -> str:
    """An age for people; a dash where it is not known."""
    if seconds is None:
        return "-"
    for unit, name in _AGES:
        if seconds >= 2 * unit or unit == 1:
            return f"{max(0.0, seconds) / unit:.0f} {name}"
    return "-"


def count_text(count: int, noun: str) -> str:
    """A number of things: 1 object, 2,000 objects."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def ranges_text(numbers: Sequence[int], most: int = 12) -> str:
    """Ascending numbers with their runs drawn together: 1..4, 7; at most so many parts."""
    parts = [f"{a}..{b}" if b > a else str(a) for a, b in ranges(numbers)]
    return ", ".join(parts) if len(parts) <= most else f"{', '.join(parts[:most])}, ... {numbers[-1]}"


def ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """The runs of ascending numbers, each with its first and last."""
    found: list[tuple[int, int]] = []
    for n in numbers:
        if found and found[-1][1] == n - 1:
            found[-1] = (found[-1][0], n)
        else:
            found.append((n, n))
    return found


def say(text: str) -> None:
    """A sentence on stderr."""
    sys.stderr.write(clean(text) + "\n")


def complain(text: str) -> None:
    """The sentence in which a verb ends, on stderr."""
    Console(stderr=True, highlight=False, emoji=False).print(f"[red]tiercache:[/] {safe(text)}", soft_wrap=True)


def records(found: Iterable[Mapping[str, Any]], output: Output) -> None:
    """Rows as JSON: one document with all of them, or each on a line as it comes."""
    if output is Output.JSON:
        document(list(found))
    else:
        for record in found:
            line(record)


def whole(record: Mapping[str, Any], output: Output) -> None:
    """What has no rows, as JSON."""
    (document if output is Output.JSON else line)(record)


def line(record: Mapping[str, Any]) -> None:
    """One JSON object on a line of its own, in one write: what is interrupted leaves whole lines."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def document(value: Any) -> None:
    """One JSON document."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")
    sys.stdout.flush()


def console() -> Console:
    """Where tables go; as wide as a terminal, or wide enough."""
    found = Console(highlight=False, emoji=False)
    return found if found.is_terminal else Console(width=_WIDTH, highlight=False, emoji=False)


def table(columns: Sequence[str], left: Sequence[str] = ()) -> Table:
    """An empty table whose numbers stand to the right. Its cells take markup: `safe` what comes from a store."""
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        made.add_column(name, justify="left" if name in left else "right", overflow="fold")
    return made


@contextmanager
def progress(doing: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr over `total` bytes, where that is a terminal; the callable says how many more are done."""
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
    # Rows must not end up in the bar where both are on a terminal, and must not go to stderr where they are not.
    with Progress(*columns, console=shown, transient=True, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda done: bar.update(task, advance=done)
