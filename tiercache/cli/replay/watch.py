"""Progress of a running study, shown on stderr."""

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
    """Receiver of a study's stages and results; this base class prints nothing.

    Thread safety: one thread.
    """

    def stage(self, stage: Stage) -> Callable[[], object]:
        """Begin a stage and return a function to call after each of its requests."""
        return lambda: None

    def found(self, result: Result) -> None:
        """Take in a finished result."""


class _Log(Watch):
    """Watch that prints a line per finished result, for stderr that is not a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def found(self, result: Result) -> None:
        at = "" if result.capacity is None or result.policy == "infinite" else f" at {result.capacity * 100:g} %"
        said = f"{result.policy}{at}: {percent(result.token_hit_rate)} of tokens hit, {percent(result.flops_saved)} of FLOPs saved"
        self._console.print(f"{said}, in {result.seconds:.1f} s", markup=False, soft_wrap=True)


class _Bars(Watch):
    """Watch that shows a progress bar for the current stage, and one for all stages."""

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
    """Yield the Watch that suits the output: bars if stderr is a terminal, else a line per result.

    Yields a silent Watch where there are no bars and the results themselves are printed as JSON.
    """
    console = Console(stderr=True, highlight=False, emoji=False)
    # No bars where JSON rows go to the same terminal: the rows would appear between them.
    if not console.is_terminal or (as_json and sys.stdout.isatty()):
        yield Watch() if as_json else _Log(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(elapsed_when_finished=True))
    # By default rich redirects stdout through this console, which would send the rows to stderr.
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, refresh_per_second=4) as progress:
        yield _Bars(progress, stages, requests)
