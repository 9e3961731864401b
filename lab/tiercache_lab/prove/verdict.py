"""Verdict on a prompt from the answers to three requests."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tiercache.cli.terminal import Exit
from tiercache_lab.prove.completion import Answer
from tiercache_lab.prove.engines import LOOK_AT, REPORT_FLAGS, EngineSubject

MIN_TOKENS: Final = 16
"""Minimum number of restored tokens for a hit.

Fewer tokens may be words that two prompts share by chance, or the token that begins every prompt."""


class Verdict(enum.StrEnum):
    """Verdicts from the worst to the best; the verdict on several rounds is the worst one."""

    WRONG = "wrong"
    UNKNOWN = "unknown"
    MISS = "miss"
    HIT = "hit"


EXITS: Final = {
    Verdict.HIT: Exit.DONE,
    Verdict.MISS: Exit.NO,
    Verdict.UNKNOWN: Exit.UNKNOWN,
    Verdict.WRONG: Exit.CORRUPT,
}


@dataclass(frozen=True, slots=True)
class Round:
    """Answers to the three requests of one round."""

    seed: int
    first: Answer
    """Answer to a new prompt."""
    again: Answer
    """Answer to the same prompt after the engine's own caches were emptied."""
    control: Answer
    """Answer to another new prompt, which no cache can hold."""

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
    def from_memory(self) -> bool:
        """Whether the engine reports the tiers of the cached tokens, and no token was in storage."""
        return self.again.sources is not None and self.again.sources.storage == 0

    @property
    def control_was_cached(self) -> bool:
        """Whether the engine reports the control as cached, although it is a new prompt."""
        return (self.control.cached_tokens or 0) >= MIN_TOKENS

    @property
    def verdict(self) -> Verdict:
        """Verdict on this round."""
        if self.restored is None or self.control_was_cached:
            return Verdict.UNKNOWN
        if self.restored < MIN_TOKENS:
            return Verdict.MISS
        if not self.same_text:
            return Verdict.WRONG
        return Verdict.UNKNOWN if self.from_memory else Verdict.HIT

    @property
    def gain(self) -> float:
        """Time to the first token of `control`, divided by the time to the first token of `again`."""
        return self.control.first_token_s / max(self.again.first_token_s, 1e-9)

    def record(self) -> dict[str, Any]:
        """Return the round as a dictionary for JSON."""
        return {
            "verdict": self.verdict.value, "seed": self.seed, "restored_tokens": self.restored,
            "same_text": self.same_text,
            "gain": self.gain, "first": self.first.record(), "again": self.again.record(),
            "control": self.control.record(),
        }  # fmt: skip


def worst(rounds: Sequence[Round]) -> Verdict:
    """Return the worst verdict of the rounds."""
    found = {item.verdict for item in rounds}
    return next(verdict for verdict in Verdict if verdict in found)


def sentence(rounds: Sequence[Round], flag: str) -> str:
    """Return the verdict on all rounds in words.

    `flag` is the option with which the server reports cached tokens.
    """
    verdict = worst(rounds)
    such = [item for item in rounds if item.verdict is verdict]
    prefix = f"{len(such)} of {len(rounds)} rounds: " if len(rounds) > 1 else ""
    return prefix + _words(verdict, such[0], flag)


def _words(verdict: Verdict, found: Round, flag: str) -> str:
    of = "" if found.again.prompt_tokens is None else f" of {found.again.prompt_tokens:,}"
    times = (
        f"first token after {found.again.first_token_s:.3f} s, {found.control.first_token_s:.3f} s when"
        " computed"
    )
    if verdict is Verdict.HIT:
        return (
            f"{found.restored:,}{of} tokens were restored and the text is the same; {times}:"
            f" {found.gain:.1f} x"
        )
    if verdict is Verdict.MISS:
        return f"nothing was restored, the prompt was computed again; {times}"
    if verdict is Verdict.WRONG:
        return (
            f"{found.restored:,}{of} tokens were restored and the text differs from character"
            f" {found.differs_at} on. Greedy decoding on GPUs may depend on other requests in the"
            " batch: repeat"
            " with --repeat 5 on a server without other load; if the text still differs, trust no hit"
        )
    if found.control_was_cached:
        return (
            f"a new prompt is reported with {found.control.cached_tokens:,} cached tokens, so the server's"
            " figures cannot be trusted"
        )
    if found.restored is not None:
        return (
            f"{found.restored:,}{of} tokens were restored, but the engine reports that they came from"
            f" device or host memory, not from storage; {times}"
        )
    return f"the server does not report cached tokens; start it with {flag}; {times}"


def remarks(rounds: Sequence[Round]) -> list[str]:
    """Return notes on results of the rounds that the verdict does not mention."""
    said = []
    if any(item.verdict is not Verdict.WRONG and not item.same_text for item in rounds):
        said.append(
            "the texts of the two answers differ: if both were computed, greedy decoding on this server"
            " is not reproducible"
        )
    if any(
        (item.first.cached_tokens or 0) - (item.control.cached_tokens or 0) >= MIN_TOKENS for item in rounds
    ):
        said.append(
            "the seed was used before: the first request was already served from a cache, so neither answer"
            " comes from a computed prompt"
        )
    if any(item.verdict is Verdict.HIT and item.gain < 1 for item in rounds):
        said.append(
            "restoring was slower than computing: try longer prompts (--tokens), and `tiercache bench disk`"
            " on the store's disk"
        )
    if any(_counts_differ(item.first.prompt_tokens, item.again.prompt_tokens) for item in rounds):
        said.append(
            "the same prompt has a different number of tokens the second time: the tokenizer has changed"
        )
    return said


def _counts_differ(first: int | None, again: int | None) -> bool:
    return first is not None and again is not None and first != again


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a run: the server and model, its rounds, and notes."""

    url: str
    subject: EngineSubject
    rounds: Sequence[Round]
    notes: Sequence[str]

    @property
    def verdict(self) -> Verdict:
        """Verdict on all rounds."""
        return worst(self.rounds)

    @property
    def sentence(self) -> str:
        """Verdict in words."""
        return sentence(self.rounds, REPORT_FLAGS[self.subject.engine])

    @property
    def look_at(self) -> Sequence[str]:
        """Possible reasons for a miss; empty for any other verdict."""
        return LOOK_AT[self.subject.engine] if self.verdict is Verdict.MISS else ()

    def record(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON."""
        return {
            "verdict": self.verdict.value, "exit_code": EXITS[self.verdict], "sentence": self.sentence,
            **heading(self.url, self.subject),
            "rounds": [item.record() for item in self.rounds], "notes": [*self.notes, *remarks(self.rounds)],
            "look_at": [*self.look_at],
        }  # fmt: skip


def heading(url: str, subject: EngineSubject) -> dict[str, Any]:
    """Return the URL, the engine and the model for JSON."""
    return {"url": url, "engine": subject.engine.value, "model": subject.model.name}
