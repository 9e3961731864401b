"""What is seen of a study while it runs, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tiercache.cli.replay.words import percent
from tiercache.replay.results import Result
from tiercache.replay.study import Stage


class Watch:
    """Is told of stages and of results, and says nothing. Thread safety: one thread."""

    def stage(self, stage: Stage) -> Callable[[], object]:
        """A stage begins; what comes back is called after each request."""
        return lambda: None

    def found(self, result: Result) -> None:
        """A row is finished."""


class _Log(Watch):
    """A line per finished row, for who collects stderr in a file."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def found(self, result: Result) -> None:
        at = "" if result.capacity is None or result.policy == "infinite" else f" at {result.capacity * 100:g} %"
        said = f"{result.policy}{at}: {percent(result.token_hit_rate)} of tokens hit, {percent(result.flops_saved)} of FLOPs saved"
        self._console.print(f"{said}, in {result.seconds:.1f} s", markup=False, soft_wrap=True)


class _Bars(Watch):
    """A bar for the stage, and one for all of them."""

    def __init__(self, progress: Progress, stages: int, requests: int) -> None:
        self._progress = progress
        self._stages = stages
        self._number = 0
        self._whole = progress.add_task("", total=stages * requests)
        self._current: TaskID = progress.add_task("", total=requests)

    def stage(self, stage: Stage) -> Callable[[], object]:
        progress, whole, current = self._progress, self._whole, self._current
        progress.update(whole, description=f"stage {self._number + 1} of {self._stages}", completed=self._number * stage.requests)
        progress.reset(current, total=stage.requests, description=stage.label)
        self._number += 1

        def step() -> None:
            progress.advance(current)
            progress.advance(whole)

        return step


@contextmanager
def watching(stages: int, requests: int, *, as_json: bool) -> Iterator[Watch]:
    """Bars on a terminal. Elsewhere a line per row, or nothing where the rows themselves are printed as JSON."""
    console = Console(stderr=True, highlight=False, emoji=False)
    # Rows on the same terminal would end up between bars.
    if not console.is_terminal or (as_json and sys.stdout.isatty()):
        yield Watch() if as_json else _Log(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(elapsed_when_finished=True))
    # rich would otherwise send stdout through this console as well, and with it the rows.
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, refresh_per_second=4) as progress:
        yield _Bars(progress, stages, requests)
