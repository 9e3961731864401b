"""Results of a replay on a terminal and as JSON, and the progress of a running study on stderr."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from tiercache.cli.terminal import console
from tiercache_lab.replay.results import Result
from tiercache_lab.replay.study import READING, Stage
from tiercache_lab.replay.tables import Grid, Style, grids, legend

_GAP: Final = "  "
"""Space between two columns."""
_LEFT: Final = ("policy", "tier")
"""Columns that are aligned left."""
_OPTIONAL_COLUMNS: Final = ("written", "p95", "evicted", "per read")
"""Columns that are left out one after the other, in this order, until the table fits the terminal."""
_STYLES: Final = {Style.PLAIN: "", Style.BEST: "bold green", Style.BOUND: "dim"}


def show_results(found: Sequence[Result], about: str = "") -> None:
    """Print the results; `about` is a sentence on how the source was replayed, which may be empty."""
    to, first = console(), found[0]
    to.print(f"[bold]{first.source}[/]: {first.requests:,} requests, {first.profile}, seed {first.seed}\n")
    for grid in grids(found):
        print_grid(to, grid)
        to.print()
    dim(to, [*([about] if about else []), *legend(found)])


def print_grid(to: Console, grid: Grid) -> None:
    """Print groups under one header. Each column is as wide as its widest cell in all groups."""
    lines = grid.lines
    widths = {
        name: max(cell_len(text) for text in (name, *(line.cells[name] for line in lines)))
        for name in lines[0].cells
    }
    for spared in _OPTIONAL_COLUMNS:
        if sum(widths.values()) + len(_GAP) * (len(widths) - 1) <= to.width:
            break
        widths.pop(spared, None)
    to.print(_aligned({name: name for name in widths}, widths), style="bold", soft_wrap=True)
    for title, group in grid.groups:
        if title:
            to.print(Text(title, style="cyan"), soft_wrap=True)
        for line in group:
            to.print(_aligned(line.cells, widths), style=_STYLES[line.style], soft_wrap=True)


def dim(to: Console, sentences: Iterable[str]) -> None:
    """Print sentences that explain what stands above them."""
    for sentence in sentences:
        to.print(sentence, style="dim", markup=False)


def _aligned(cells: dict[str, str], widths: dict[str, int]) -> Text:
    texts = []
    for name, width in widths.items():
        blank = " " * (width - cell_len(cells[name]))
        texts.append(cells[name] + blank if name in _LEFT else blank + cells[name])
    return Text(_GAP.join(texts).rstrip())


def record(result: Result) -> dict[str, Any]:
    """Return a result as a dictionary for JSON; numbers that are not finite become None."""
    return {name: _finite(value) for name, value in result.row().items()}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def watching(
    stages: int, requests: int, *, as_json: bool
) -> Iterator[Callable[[Stage], Callable[[], object]]]:
    """Yield a function that begins a stage, and returns one that is to be called after each request.

    - If stderr is a terminal, they show a bar over all stages. But if stdout is a terminal, too, and gets
      JSON, they print nothing, because the rows of JSON would appear in the bar.
    - If stderr is not a terminal, each run is a line there, or nothing if stdout gets JSON.
    """
    console = Console(stderr=True, highlight=False, emoji=False)
    if not console.is_terminal or (as_json and sys.stdout.isatty()):

        def told(stage: Stage) -> Callable[[], object]:
            if not as_json and stage.label != READING:
                console.print(stage.label, markup=False, soft_wrap=True)
            return lambda: None

        yield told
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )  # fmt: skip
    # By default rich redirects stdout to this console. The rows of results would then go to stderr.
    with Progress(
        *columns, console=console, transient=True, redirect_stdout=False, refresh_per_second=4
    ) as progress:
        task = progress.add_task("", total=stages * requests)

        def begun(stage: Stage) -> Callable[[], object]:
            progress.update(task, description=stage.label)
            return lambda: progress.advance(task)

        yield begun
