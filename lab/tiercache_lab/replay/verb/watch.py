"""Progress of a running study, shown on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tiercache_lab.replay.figures import percent
from tiercache_lab.replay.results import Result
from tiercache_lab.replay.study import Stage


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
