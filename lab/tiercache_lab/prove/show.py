"""Output of `tiercache prove`: a table and a sentence, or all figures as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from tiercache.cli.terminal import Output, console, document, line, records, safe, table
from tiercache_lab.prove.completion import Answer
from tiercache_lab.prove.verdict import Report, Round, Verdict, remarks

_COLOURS: Final = {
    Verdict.HIT: "green",
    Verdict.MISS: "yellow",
    Verdict.UNKNOWN: "yellow",
    Verdict.WRONG: "red",
}
_SHOWN: Final = 60
"""Maximum characters of a text that the table shows."""
_BEFORE: Final = 20
"""Number of characters that the table shows before the first difference between two texts."""


def write(report: Report, output: Output) -> None:
    """Print the figures as JSON: one document, or one line for each round and a last line with the rest."""
    record = report.record()
    if output is Output.JSON:
        document(record)
    else:
        records(record.pop("rounds"), output)
        line({"summary": record})


def show(report: Report) -> None:
    """Print the report as a table with its verdict, notes and hints."""
    to = console()
    to.print(
        f"{safe(report.url)}: {report.subject.engine.value}, model {safe(report.subject.model.name)}",
        soft_wrap=True,
    )
    to.print(_table(report.rounds))
    to.print(
        f"[bold {_COLOURS[report.verdict]}]{report.verdict.name}:[/] {safe(report.sentence)}", soft_wrap=True
    )
    for note in (*report.notes, *remarks(report.rounds)):
        to.print(f"note: {safe(note)}", soft_wrap=True)
    if report.look_at:
        to.print("possible causes:")
        _list(to, report.look_at)


def _list(to: Console, points: Sequence[str]) -> None:
    for point in points:
        to.print(f"  - {safe(point)}", soft_wrap=True)


def _table(rounds: Sequence[Round]) -> Table:
    made = table(
        ("seed", "request", "prompt", "cached", "1st token", "text"), left=("seed", "request", "text")
    )
    for item in rounds:
        start = 0 if item.same_text else max(0, item.differs_at - _BEFORE)
        same = (
            "[green]the same[/]" if item.same_text else f"[red]differs:[/] {_short(item.again.text, start)}"
        )
        made.add_row(str(item.seed), "first", *_figures(item.first), _short(item.first.text, start))
        made.add_row("", "again", *_figures(item.again), same)
        made.add_row("", "never sent", *_figures(item.control), "")
    return made


def _figures(answer: Answer) -> tuple[str, str, str]:
    prompt = "-" if answer.prompt_tokens is None else f"{answer.prompt_tokens:,}"
    cached = "not reported" if answer.cached_tokens is None else f"{answer.cached_tokens:,}"
    if answer.sources is not None:
        parts = {
            "device": answer.sources.device,
            "host": answer.sources.host,
            "storage": answer.sources.storage,
        }
        cached += f" ({', '.join(f'{n:,} {name}' for name, n in parts.items() if n) or 'none'})"
    return prompt, cached, f"{answer.first_token_s:.3f} s"


def _short(text: str, start: int) -> str:
    part = " ".join(text[start : start + _SHOWN].split())
    return safe(f"{'...' if start else ''}{part}{'...' if len(text) > start + _SHOWN else ''}")
