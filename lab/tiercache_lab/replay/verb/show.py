"""Output of a replay: its progress, results, reports and answers of plans, and the list of sources."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from tiercache.cli.terminal import console, table
from tiercache.policy import PROFILES
from tiercache_lab.policies import MAIN, RIVALS, VARIANTS
from tiercache_lab.replay import plan
from tiercache_lab.replay.machines import MACHINES
from tiercache_lab.replay.plan import SizePlan
from tiercache_lab.replay.results import Result
from tiercache_lab.replay.sources import SESSIONS, SOURCES
from tiercache_lab.replay.study import READING, Question, Stage
from tiercache_lab.replay.tables import Grid, Style, grids, legend
from tiercache_lab.replay.verb import asking

_GAP: Final = "  "
_LEFT: Final = ("policy", "tier")
_OPTIONAL_COLUMNS: Final = ("written", "p95", "evicted", "per read")
"""Columns that are left out one after the other, in this order, until the table fits the terminal."""
_STYLES: Final = {Style.PLAIN: "", Style.BEST: "bold green", Style.BOUND: "dim"}


def show_results(found: Sequence[Result], question: Question, answer: SizePlan | None) -> None:
    """Print results, or the answer of a plan with all its runs."""
    if not found:
        return
    to, first, about = console(), found[0], question.source.about
    policy = f", policy {question.policies[0]}" if answer else ""
    to.print(
        f"[bold]{first.source}[/]: {first.requests:,} requests, {first.profile}, seed {first.seed}{policy}\n",
        soft_wrap=True,
    )
    for number, sentence in enumerate(plan.sentences(answer) if answer else ()):
        to.print(sentence, style="" if number else "bold", markup=False, soft_wrap=True)
    for table_ in [plan.grid(answer)] if answer else grids(found):
        if answer:
            to.print()
        _print_grid(to, table_)
        to.print()
    explained = [*plan.EXPLANATIONS, about] if answer else [about, *legend(found)]
    for sentence in filter(None, explained):
        to.print(sentence, style="dim", markup=False)


def page_of(found: Sequence[Result], question: Question, answer: SizePlan | None, *, is_whole: bool) -> str:
    """Return the report on results, or on the answer of a plan; unless `is_whole`, some are missing."""
    from tiercache_lab.replay import report  # the engine of its charts takes long to import

    missing = [] if is_whole else ["The replay was interrupted, so results are missing."]
    notes = [*asking.notes(question), *missing]
    if answer is None:
        return report.render(found, notes=notes)
    return report.page(
        "How much memory saves how much", about=report.facts(answer.unlimited),
        sentences=list(plan.sentences(answer)), drawings=[], tables=[plan.grid(answer)],
        notes=[f"The policy is {question.policies[0]}.", *notes, *plan.EXPLANATIONS],
    )  # fmt: skip


def source_records() -> Iterator[dict[str, Any]]:
    """Yield the generators and recorded sessions with their parameters, as JSON has them."""
    for name, kind in (*SOURCES.items(), ("DIR", SESSIONS)):
        parameters = [
            asdict(option) | ({"default": str(option.default)} if isinstance(option.default, tuple) else {})
            for option in kind.options
        ]
        yield {"name": name, "summary": kind.summary, "parameters": parameters}


def show_sources() -> None:
    """Print the generators and recorded sessions with their parameters, and all other names."""
    shown = table(
        ("generator", "parameter", "default", "from", "to", "what it is"),
        left=("generator", "parameter", "what it is"),
    )
    for name, kind in (*SOURCES.items(), ("DIR", SESSIONS)):
        shown.add_section()
        shown.add_row(f"[bold]{name}", *[""] * 4, Text(kind.summary, style="italic"))
        for option in kind.options:
            low, high = _bound(option.low), _bound(option.high)
            shown.add_row("", option.name, str(option.default), low, high, Text(option.about))
    to = console()
    to.print(shown)
    for line in (
        "Write parameters after the name or the path: 'shared-prefix?groups=32&question=64-128'. A length is"
        " a number or a range.",
        f"Policies: all: {', '.join(MAIN)}. By name only: {', '.join((*RIVALS, *VARIANTS))}.",
        f"Profiles: {', '.join(PROFILES)}.",
        f"Machines: {', '.join(MACHINES)}.",
    ):
        to.print(line, style="dim")


def _bound(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def _print_grid(to: Console, grid: Grid) -> None:
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
