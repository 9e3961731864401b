"""`tiercache replay --plan` on the terminal: the runs, and their answer as text, table and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import typer

from tiercache.cli.terminal import Exit, Output, console, line, records
from tiercache.errors import ConfigError
from tiercache_lab.replay.figures import counted
from tiercache_lab.replay.plan import (
    DISK_RUNS,
    EXPLANATIONS,
    HOST_RUNS,
    Search,
    SizePlan,
    facts,
    grid,
    sentences,
)
from tiercache_lab.replay.report import facts as about_run
from tiercache_lab.replay.report import page, write_whole
from tiercache_lab.replay.study import Question
from tiercache_lab.replay.verb import asking, show

_POLICY: Final = "hvd"
"""Policy that plans use unless another is named, as controllers do."""


def policy_of(policies: str) -> str:
    """Return the policy to plan with: the one that is named, or the default policy for "all"."""
    named = [part for part in policies.split(",") if part.strip()]
    if len(named) > 1:
        raise ConfigError(f"--plan runs one policy, and --policy names {len(named)}; name one of them")
    return _POLICY if policies == asking.ALL else policies


def check_sizes(**given: object) -> None:
    """Raise ConfigError if an option gives a size, or how a tier behaves, which a plan decides itself."""
    wrong = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if wrong:
        raise ConfigError(f"--plan finds the sizes of host and disk itself; leave out {', '.join(wrong)}")


def run(question: Question, output: Output, report: Path | None) -> Exit:
    """Search, show what is found, and write the report; return the exit code."""
    code, runs = Exit.DONE, 0
    search: Search | None = None
    # 2: a stage for reading, and one for the infinite cache
    stages = 2 + HOST_RUNS + DISK_RUNS
    try:
        with show.watching(stages, len(question.source), as_json=output is not Output.TABLE) as watch:
            search = Search(question, watch)
            for result in search.results():
                runs += 1
                if output is Output.JSONL:
                    line(show.record(result))
    except KeyboardInterrupt:
        code = Exit.INTERRUPTED
        typer.echo(f"interrupted after {counted(runs, 'run')}", err=True)
    plan = search.plan if search else None
    if plan is None:
        return code
    answer = {"plan": facts(plan)}
    if output is Output.JSONL:
        line(answer)
    elif output is Output.JSON:
        records([*map(show.record, plan.runs), answer], output)
    else:
        _show(plan, question)
    if report is not None:
        notes = [f"The policy is {question.policies[0]}.", *asking.notes(question), *EXPLANATIONS]
        notes += ["The search was interrupted, so runs are missing."] if code else []
        write_whole(
            report,
            page(
                "How much memory saves how much", about=about_run(plan.unlimited),
                sentences=list(sentences(plan)), drawings=[], tables=[grid(plan)], notes=notes,
            ),
        )  # fmt: skip
        typer.echo(f"report: {report}", err=True)
    return code


def _show(plan: SizePlan, question: Question) -> None:
    """Print the answer, and the runs as a table."""
    to, one, about = console(), plan.unlimited, asking.about(question.source)
    to.print(
        f"[bold]{one.source}[/]: {one.requests:,} requests, {one.profile}, seed {one.seed}, policy"
        f" {question.policies[0]}\n",
        soft_wrap=True,
    )
    for number, sentence in enumerate(sentences(plan)):
        to.print(sentence, style="bold" if not number else "", markup=False, soft_wrap=True)
    to.print()
    show.print_grid(to, grid(plan))
    to.print()
    show.dim(to, [*EXPLANATIONS, *([about] if about else [])])
