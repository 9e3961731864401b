"""Progress of a running study, shown on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tiercache_lab.replay.results import Result
from tiercache_lab.replay.study import Stage
from tiercache_lab.replay.verb.show import percent


class Watch:
    """Receiver of a study's stages and results. This base class prints nothing.

    Thread safety: one thread.
    """

    def stage(self, stage: Stage) -> Callable[[], object]:
        """Begin a stage and return a function that the caller calls after each request."""
        return lambda: None

    def found(self, result: Result) -> None:
        """Show a finished result."""


class _Log(Watch):
    """Watch that prints one line per finished result. It is used if stderr is not a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def found(self, result: Result) -> None:
        at = (
            ""
            if result.capacity is None or result.policy == "infinite"
            else f" at {result.capacity * 100:g} %"
        )
        said = (
            f"{result.policy}{at}: hit rate {percent(result.token_hit_rate)},"
            f" {percent(result.flops_saved)} of FLOPs saved"
        )
        self._console.print(f"{said}, in {result.seconds:.1f} s", markup=False, soft_wrap=True)


class _Bars(Watch):
    """Watch that shows a progress bar for the current stage and another for all stages together."""

    def __init__(self, progress: Progress, stages: int, requests: int) -> None:
        self._progress = progress
        self._stages = stages
        self._number = 0
        self._whole = progress.add_task("", total=stages * requests)
        self._current: TaskID = progress.add_task("", total=requests)

    def stage(self, stage: Stage) -> Callable[[], object]:
        progress, whole, current = self._progress, self._whole, self._current
        progress.update(
            whole,
            description=f"stage {self._number + 1} of {self._stages}",
            completed=self._number * stage.requests,
        )
        progress.reset(current, total=stage.requests, description=stage.label)
        self._number += 1

        def step() -> None:
            progress.advance(current)
            progress.advance(whole)

        return step


@contextmanager
def watching(stages: int, requests: int, *, as_json: bool) -> Iterator[Watch]:
    """Yield the Watch that suits the output.

    - If stderr is a terminal, the Watch shows bars. But if stdout is a terminal, too, and gets JSON, the
      Watch prints nothing, because the rows of JSON would appear between the bars.
    - If stderr is not a terminal, the Watch prints one line per result, or nothing if stdout gets JSON.
    """
    console = Console(stderr=True, highlight=False, emoji=False)
    if not console.is_terminal or (as_json and sys.stdout.isatty()):
        yield Watch() if as_json else _Log(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    # By default rich redirects stdout to this console. The rows of results would then go to stderr.
    with Progress(
        *columns, console=console, transient=True, redirect_stdout=False, refresh_per_second=4
    ) as progress:
        yield _Bars(progress, stages, requests)
