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
from tiercache_lab.replay.figures import percent
from tiercache_lab.replay.results import Result
from tiercache_lab.replay.study import Stage
from tiercache_lab.replay.tables import Grid, Style, grids, legend

_GAP: Final = "  "
"""Space between two columns."""
_LEFT: Final = ("policy", "tier", "share")
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


class Watch:
    """Receiver of a study's stages and results; without `bar` and `log` it prints nothing.

    Thread safety: one thread.
    """

    def __init__(self, log: Console | None = None, bar: Progress | None = None, total: int = 0) -> None:
        self._log, self._bar = log, bar
        self._task = bar.add_task("", total=total) if bar else None

    def stage(self, stage: Stage) -> Callable[[], object]:
        """Begin a stage and return a function that the caller calls after each request."""
        bar, task = self._bar, self._task
        if bar is None or task is None:
            return lambda: None
        bar.update(task, description=stage.label)
        return lambda: bar.advance(task)

    def found(self, result: Result) -> None:
        """Show a finished result on a line of its own, if there is no bar."""
        if self._log is None:
            return
        is_fraction = result.capacity is not None and result.policy != "infinite"
        at = f" at {result.capacity * 100:g} %" if is_fraction and result.capacity is not None else ""
        self._log.print(
            f"{result.policy}{at}: hit rate {percent(result.token_hit_rate)},"
            f" {percent(result.flops_saved)} of FLOPs saved, in {result.seconds:.1f} s",
            markup=False, soft_wrap=True,
        )  # fmt: skip


@contextmanager
def watching(stages: int, requests: int, *, as_json: bool) -> Iterator[Watch]:
    """Yield the Watch that suits the output.

    - If stderr is a terminal, the Watch shows a bar over all stages. But if stdout is a terminal, too, and
      gets JSON, the Watch prints nothing, because the rows of JSON would appear in the bar.
    - If stderr is not a terminal, the Watch prints one line per result, or nothing if stdout gets JSON.
    """
    console = Console(stderr=True, highlight=False, emoji=False)
    if not console.is_terminal or (as_json and sys.stdout.isatty()):
        yield Watch() if as_json else Watch(console)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )  # fmt: skip
    # By default rich redirects stdout to this console. The rows of results would then go to stderr.
    with Progress(
        *columns, console=console, transient=True, redirect_stdout=False, refresh_per_second=4
    ) as progress:
        yield Watch(bar=progress, total=stages * requests)
