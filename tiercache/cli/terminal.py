"""Exit codes, output formats, tables and progress bars of all verbs.

Text from stores and users is escaped before it reaches a terminal. The module itself does not import rich:
each function that needs rich imports it, because importing rich takes longer than most verbs.
"""

from __future__ import annotations

import enum
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tiercache.errors import InputError, RefusedError, StorageError, TierCacheError, UnansweredError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


class Exit(enum.IntEnum):
    """Exit codes of all verbs. A code has the same meaning for every verb."""

    DONE = 0
    FAILED = 1
    MISUSED = 2
    UNREACHABLE = 3
    CORRUPT = 4
    REFUSED = 5
    NO = 6
    UNKNOWN = 7
    INTERRUPTED = 130
    UNREAD = 141
    TERMINATED = 143


MEANINGS: Final = {
    Exit.DONE: "done, and all is well",
    Exit.FAILED: "failed: a store, a disk or a process did not do what was asked",
    Exit.MISUSED: "used wrongly: an option, a setting or a file is not valid",
    Exit.UNREACHABLE: "no answer: the daemon or the server cannot be reached",
    Exit.CORRUPT: "wrong bytes: an object is not what was stored",
    Exit.REFUSED: "refused: the server answers, but does not allow this",
    Exit.NO: "no: a check failed, nothing was restored, or you answered no",
    Exit.UNKNOWN: "unknown: the answer does not decide the question",
    Exit.INTERRUPTED: "ended by Ctrl-C",
    Exit.UNREAD: "the reader of the output has closed it",
    Exit.TERMINATED: "ended by SIGTERM",
}


class UnreachableError(StorageError):
    """Error for a daemon or a server that does not answer."""


class CannotTellError(TierCacheError):
    """Error for an answer that does not contain what was asked for."""


def code_of(error: Exception) -> Exit | None:
    """Return the exit code for an error.

    Returns None for a defect of tiercache, which is an error that neither the user nor the environment
    caused.
    """
    if isinstance(error, UnreachableError):
        return Exit.UNREACHABLE
    if isinstance(error, CannotTellError | UnansweredError):
        return Exit.UNKNOWN
    if isinstance(error, RefusedError):
        return Exit.REFUSED
    if isinstance(error, InputError):
        return Exit.MISUSED
    return Exit.FAILED if isinstance(error, TierCacheError | OSError) else None


def exit_table() -> str:
    """Return all exit codes and their meanings, one per line."""
    return "\n".join(f"{code:>3}  {meaning}" for code, meaning in MEANINGS.items())


def exit_sentence() -> str:
    """Return one sentence with the exit codes that a verb itself can choose (all below Exit.INTERRUPTED)."""
    words = [
        f"{code} {meaning.partition(':')[0].partition(',')[0]}"
        for code, meaning in MEANINGS.items()
        if code < Exit.INTERRUPTED
    ]
    return f"Exit codes: {', '.join(words)}; `tiercache --help` explains them."


SHORT: Final = 12
"""Hex digits of a page key that a table shows."""
SHORTER: Final = 8
"""Hex digits of a namespace or a layout that a table shows."""
_WIDTH: Final = 120


class Output(enum.StrEnum):
    """Formats in which a verb can print its results."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"


OutputOption = Annotated[
    Output,
    typer.Option(
        "--output",
        "-o",
        help="table for people, json for one JSON document, jsonl for one JSON line per row (sizes in"
        " bytes).",
    ),
]


def clean(text: str) -> str:
    """Return `text` with its unprintable characters escaped, such as the controls of a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def safe(text: str) -> str:
    """Return `text` for rich, with unprintable characters and markup escaped."""
    from rich.markup import escape

    return escape(clean(text))


def time_text(at: float, form: str) -> str:
    """Format a time in seconds since 1970 as local time, by a format of `time.strftime`."""
    try:
        return time.strftime(form, time.localtime(at))
    except (ValueError, OverflowError, OSError):
        return "an unknown time"


def count_text(count: int, noun: str) -> str:
    """Format a count with its noun, such as "1 object" or "2,000 objects"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def ranges_text(numbers: Sequence[int], max_runs: int = 12) -> str:
    """Return ascending numbers as text, such as "1..4, 7".

    A run of consecutive numbers is one part of the text. After `max_runs` parts, the text ends with "..."
    and the last number.
    """
    parts = [f"{a}..{b}" if b > a else str(a) for a, b in ranges(numbers)]
    return ", ".join(parts) if len(parts) <= max_runs else f"{', '.join(parts[:max_runs])}, ... {numbers[-1]}"


def ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers in an ascending sequence, as (first, last) pairs."""
    found: list[tuple[int, int]] = []
    for n in numbers:
        if found and found[-1][1] == n - 1:
            found[-1] = (found[-1][0], n)
        else:
            found.append((n, n))
    return found


def say(text: str) -> None:
    """Print a sentence on stderr, with unprintable characters escaped."""
    sys.stderr.write(clean(text) + "\n")


def complain(text: str) -> None:
    """Print on stderr the sentence of the error that ends a verb."""
    if not sys.stderr.isatty():
        say(f"tiercache: {text}")
        return
    from rich.console import Console

    shown = Console(stderr=True, highlight=False, emoji=False)
    shown.print(f"[red]tiercache:[/] {safe(text)}", soft_wrap=True)


def records(found: Iterable[Mapping[str, Any]], output: Output, whole: Any = None) -> None:
    """Print rows as JSON: one document, which is `whole` or a list of the rows, or a line for each row.

    A line is printed when its row arrives.
    """
    if output is Output.JSON:
        document(list(found) if whole is None else whole)
    else:
        for record in found:
            line(record)


def whole(record: Mapping[str, Any], output: Output) -> None:
    """Print one object as JSON: as an indented document, or on one line."""
    (document if output is Output.JSON else line)(record)


def line(record: Mapping[str, Any]) -> None:
    """Print one JSON object on a line of its own.

    The line is flushed at once, so that an interruption leaves only complete lines.
    """
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def document(value: Any) -> None:
    """Print one JSON document, indented by one space."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")
    sys.stdout.flush()


def console() -> Console:
    """Return the console for tables on stdout; it has 120 columns if stdout is not a terminal."""
    from rich.console import Console

    found = Console(highlight=False, emoji=False)
    return found if found.is_terminal else Console(width=_WIDTH, highlight=False, emoji=False)


def table(columns: Sequence[str], left: Sequence[str] = ()) -> Table:
    """Return an empty table whose columns are right-aligned, except those named in `left`.

    Cells are parsed as rich markup: pass text that comes from a store through `safe`.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        made.add_column(name, justify="left" if name in left else "right", overflow="fold")
    return made


@contextmanager
def working(doing: str) -> Iterator[None]:
    """Show on stderr, if that is a terminal, that something of unknown length goes on."""
    from rich.console import Console

    with Console(stderr=True, emoji=False).status(safe(doing)):
        yield


@contextmanager
def progress(doing: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar for `total` bytes on stderr, if stderr is a terminal.

    Yields a callable that advances the bar by a number of bytes.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

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
    # If stdout is a terminal, rows on stdout would be printed into the bar, so rich redirects stdout. If
    # stdout is a file or a pipe, rich does not redirect stdout, because the rows would land on stderr.
    with Progress(*columns, console=shown, transient=True, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda done: bar.update(task, advance=done)
