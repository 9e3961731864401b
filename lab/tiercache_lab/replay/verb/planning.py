"""`tiercache replay --plan` on the terminal: the search, and its answer as text, table and JSON."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import typer

from tiercache.cli.terminal import Exit, Output, console, line, records
from tiercache.errors import ConfigError
from tiercache_lab.replay.figures import counted
from tiercache_lab.replay.plan.answer import explanations, facts, grid, picture, plan_page, rows_of, sentences
from tiercache_lab.replay.plan.search import Search, SizePlan
from tiercache_lab.replay.report import write_whole
from tiercache_lab.replay.study import Question
from tiercache_lab.replay.verb import asking, show
from tiercache_lab.replay.verb.show import watching

SVG: Final = ".svg"
"""Suffix of a report that is only the drawing."""
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
    as_json, code = output is not Output.TABLE, Exit.DONE
    search: Search | None = None
    runs = 0
    try:
        # 20: a stage for reading, one for the infinite cache, and the most runs of a search
        with watching(20, len(question.source), as_json=as_json) as watch:
            search = Search(
                question, watch.stage, lambda seconds, runs: _tell(seconds, runs, as_json=as_json)
            )
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
        records([*map(show.record, rows_of(plan)), answer], output)
    else:
        show_plan(plan, question, asking.about(question.source))
    if report is not None:
        notes = [f"The policy is {question.policies[0]}.", *asking.notes(question)]
        notes += ["The search was interrupted, so runs are missing."] if code else []
        write_whole(report, picture(plan) if report.suffix == SVG else plan_page(plan, notes))
        typer.echo(f"report: {report}", err=True)
    return code


def show_plan(plan: SizePlan, question: Question, about: str = "") -> None:
    """Print the answer, and the runs as a table with bars. `about` may be empty."""
    to, one = console(), plan.unlimited
    to.print(
        f"[bold]{one.source}[/]: {one.requests:,} requests, {one.profile}, seed {one.seed}, policy"
        f" {question.policies[0]}\n",
        soft_wrap=True,
    )
    for number, sentence in enumerate(sentences(plan)):
        to.print(sentence, style="bold" if not number else "", markup=False, soft_wrap=True)
    if plan.curve.top > 0:
        to.print()
        show.print_grid(to, grid(plan))
        to.print()
    show.dim(to, [*explanations(), *([about] if about else [])])


def _tell(seconds: float, runs: int, *, as_json: bool) -> None:
    if as_json and not sys.stderr.isatty():
        return
    length = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
    typer.echo(f"at most {runs} runs, about {length}; --limit N replays fewer requests", err=True)
