"""Verdict on a prompt from the answers to three requests, and how it is printed."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tiercache.cli.terminal import Exit, Output, console, safe, table, whole
from tiercache_lab.prove.completion import Answer
from tiercache_lab.prove.engines import LOOK_AT, REPORT_FLAGS, EngineSubject

MIN_TOKENS: Final = 16
"""Minimum number of restored tokens for a hit. Fewer tokens may be words that two prompts share by chance, or
the token that begins every prompt."""
_SHOWN: Final = 60
"""Maximum characters of a text that the table shows."""
_BEFORE: Final = 20
"""Number of characters that the table shows before the first difference between two texts."""


class Verdict(enum.StrEnum):
    """Verdicts on a prompt."""

    WRONG = "wrong"
    UNKNOWN = "unknown"
    MISS = "miss"
    HIT = "hit"


EXITS: Final = {
    Verdict.HIT: Exit.DONE, Verdict.MISS: Exit.NO, Verdict.UNKNOWN: Exit.UNKNOWN,
    Verdict.WRONG: Exit.CORRUPT,
}  # fmt: skip
_COLOURS: Final = {Verdict.HIT: "green", Verdict.WRONG: "red"}


@dataclass(frozen=True, slots=True)
class Report:
    """Answers to the three requests of a run, and what is uncertain about them."""

    url: str
    subject: EngineSubject
    seed: int
    first: Answer
    """Answer to a new prompt."""
    again: Answer
    """Answer to the same prompt after the engine's own caches were emptied."""
    control: Answer
    """Answer to another new prompt, which no cache can hold."""
    notes: Sequence[str] = ()

    @property
    def restored(self) -> int | None:
        """Cached tokens of `again` minus those of `control`; None if the server does not report them."""
        if self.again.cached_tokens is None:
            return None
        return max(0, self.again.cached_tokens - (self.control.cached_tokens or 0))

    @property
    def same_text(self) -> bool:
        """Whether both answers to the same prompt are equal."""
        return self.first.text == self.again.text

    @property
    def differs_at(self) -> int:
        """Number of equal characters at the beginning of both answers."""
        a, b = self.first.text, self.again.text
        return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    @property
    def control_was_cached(self) -> bool:
        """Whether the engine reports the control as cached, although it is a new prompt."""
        return (self.control.cached_tokens or 0) >= MIN_TOKENS

    @property
    def verdict(self) -> Verdict:
        """Verdict on the prompt."""
        if self.restored is None or self.control_was_cached:
            return Verdict.UNKNOWN
        if self.restored < MIN_TOKENS:
            return Verdict.MISS
        if not self.same_text:
            return Verdict.WRONG
        sources = self.again.sources
        return Verdict.UNKNOWN if sources is not None and sources.storage == 0 else Verdict.HIT

    @property
    def gain(self) -> float:
        """Time to the first token of `control`, divided by the time to the first token of `again`."""
        return self.control.first_token_s / max(self.again.first_token_s, 1e-9)

    @property
    def sentence(self) -> str:
        """Verdict in words."""
        again, control = self.again, self.control
        of = "" if again.prompt_tokens is None else f" of {again.prompt_tokens:,}"
        restored = f"{self.restored or 0:,}{of} tokens were restored"
        times = f"first token after {again.first_token_s:.3f} s, {control.first_token_s:.3f} s when computed"
        if self.verdict is Verdict.HIT:
            return f"{restored} and the text is the same; {times}: {self.gain:.1f} x"
        if self.verdict is Verdict.MISS:
            return f"nothing was restored, the prompt was computed again; {times}"
        if self.verdict is Verdict.WRONG:
            return (
                f"{restored} and the text differs from character {self.differs_at} on. Greedy decoding on"
                " GPUs may depend on other requests in the batch: repeat on a server without other load; if"
                " the text still differs, trust no hit"
            )
        if self.control_was_cached:
            return (
                f"a new prompt is reported with {control.cached_tokens:,} cached tokens, so the server's"
                " figures cannot be trusted"
            )
        if self.restored is not None:
            return (
                f"{restored}, but the engine reports that they came from device or host memory, not from"
                f" storage; {times}"
            )
        flag = REPORT_FLAGS[self.subject.engine]
        return f"the server does not report cached tokens; start it with {flag}; {times}"

    def remarks(self) -> Iterator[str]:
        """Yield notes on what the verdict does not mention."""
        yield from self.notes
        if self.verdict is not Verdict.WRONG and not self.same_text:
            yield (
                "the texts of the two answers differ: if both were computed, greedy decoding on this server"
                " is not reproducible"
            )
        if (self.first.cached_tokens or 0) - (self.control.cached_tokens or 0) >= MIN_TOKENS:
            yield (
                "the seed was used before: the first request was already served from a cache, so neither"
                " answer comes from a computed prompt"
            )
        if self.verdict is Verdict.HIT and self.gain < 1:
            yield (
                "restoring was slower than computing: try longer prompts (--tokens), and `tiercache bench"
                " disk` on the store's disk"
            )

    @property
    def look_at(self) -> Sequence[str]:
        """Possible reasons for a miss; empty for any other verdict."""
        return LOOK_AT[self.subject.engine] if self.verdict is Verdict.MISS else ()

    def record(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON."""
        return {
            "verdict": self.verdict.value, "exit_code": EXITS[self.verdict], "sentence": self.sentence,
            **heading(self.url, self.subject), "seed": self.seed, "restored_tokens": self.restored,
            "same_text": self.same_text, "gain": self.gain, "first": self.first.record(),
            "again": self.again.record(), "control": self.control.record(), "notes": [*self.remarks()],
            "look_at": [*self.look_at],
        }  # fmt: skip


def heading(url: str, subject: EngineSubject) -> dict[str, Any]:
    """Return the URL, the engine and the model for JSON."""
    return {"url": url, "engine": subject.engine.value, "model": subject.model}


def show(report: Report, output: Output) -> None:
    """Print the report as a table with its verdict, notes and hints, or as JSON."""
    if output is not Output.TABLE:
        whole(report.record(), output)
        return
    to, verdict, subject = console(), report.verdict, report.subject
    to.print(f"{safe(report.url)}: {subject.engine.value}, model {safe(subject.model)}", soft_wrap=True)
    shown = table(("request", "prompt", "cached", "1st token", "text"), left=("request", "text"))
    start = 0 if report.same_text else max(0, report.differs_at - _BEFORE)
    again = "[green]the same[/]"
    if not report.same_text:
        again = f"[red]differs:[/] {_short(report.again.text, start)}"
    shown.add_row(f"first, seed {report.seed}", *_figures(report.first), _short(report.first.text, start))
    shown.add_row("again", *_figures(report.again), again)
    shown.add_row("never sent", *_figures(report.control), "")
    to.print(shown)
    to.print(
        f"[bold {_COLOURS.get(verdict, 'yellow')}]{verdict.name}:[/] {safe(report.sentence)}", soft_wrap=True
    )
    for note in report.remarks():
        to.print(f"note: {safe(note)}", soft_wrap=True)
    if report.look_at:
        to.print("possible causes:")
        for point in report.look_at:
            to.print(f"  - {safe(point)}", soft_wrap=True)


def _figures(answer: Answer) -> tuple[str, str, str]:
    prompt = "-" if answer.prompt_tokens is None else f"{answer.prompt_tokens:,}"
    cached = "not reported" if answer.cached_tokens is None else f"{answer.cached_tokens:,}"
    if (sources := answer.sources) is not None:
        parts = {"device": sources.device, "host": sources.host, "storage": sources.storage}
        cached += f" ({', '.join(f'{n:,} {name}' for name, n in parts.items() if n) or 'none'})"
    return prompt, cached, f"{answer.first_token_s:.3f} s"


def _short(text: str, start: int) -> str:
    part = " ".join(text[start : start + _SHOWN].split())
    return safe(f"{'...' if start else ''}{part}{'...' if len(text) > start + _SHOWN else ''}")
