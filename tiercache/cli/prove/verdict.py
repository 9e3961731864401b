"""What three answers mean. No requests here."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tiercache.cli.exits import Exit
from tiercache.cli.prove.completion import Answer

LEAST: Final = 16
"""Restored tokens that make a hit: fewer are words that two prompts have in common by chance, or the mark that begins every prompt."""


class Verdict(enum.StrEnum):
    """Worst first: of several rounds the first of these is the verdict."""

    WRONG = "wrong"
    UNKNOWN = "unknown"
    MISS = "miss"
    HIT = "hit"


EXITS: Final = {Verdict.HIT: Exit.DONE, Verdict.MISS: Exit.NO, Verdict.UNKNOWN: Exit.UNKNOWN, Verdict.WRONG: Exit.CORRUPT}


@dataclass(frozen=True, slots=True)
class Round:
    """A prompt, the same prompt again after the caches were emptied, and another that was never sent."""

    seed: int
    first: Answer
    again: Answer
    control: Answer

    @property
    def restored(self) -> int | None:
        """Cached tokens of the second request beyond those that a prompt never sent has as well; None if not reported."""
        if self.again.cached_tokens is None:
            return None
        return max(0, self.again.cached_tokens - (self.control.cached_tokens or 0))

    @property
    def same_text(self) -> bool:
        """Whether both answers to the one prompt are equal."""
        return self.first.text == self.again.text

    @property
    def differs_at(self) -> int:
        """Characters that the two have in common at their beginning."""
        a, b = self.first.text, self.again.text
        return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    @property
    def from_memory(self) -> bool:
        """The engine says where the tokens lay, and it was not storage."""
        return self.again.sources is not None and self.again.sources.storage == 0

    @property
    def strange(self) -> bool:
        """A prompt that was never sent is said to be cached."""
        return (self.control.cached_tokens or 0) >= LEAST

    @property
    def verdict(self) -> Verdict:
        """A wrong text is worse than not to know where it came from."""
        if self.restored is None or self.strange:
            return Verdict.UNKNOWN
        if self.restored < LEAST:
            return Verdict.MISS
        if not self.same_text:
            return Verdict.WRONG
        return Verdict.UNKNOWN if self.from_memory else Verdict.HIT

    @property
    def gain(self) -> float:
        """How many times sooner the first token came than for a prompt that had to be computed."""
        return self.control.first_token_s / max(self.again.first_token_s, 1e-9)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "verdict": self.verdict.value, "seed": self.seed, "restored_tokens": self.restored, "same_text": self.same_text,
            "gain": self.gain, "first": self.first.record(), "again": self.again.record(), "control": self.control.record(),
        }  # fmt: skip


def worst(rounds: Sequence[Round]) -> Verdict:
    """The verdict on all of them."""
    found = {item.verdict for item in rounds}
    return next(verdict for verdict in Verdict if verdict in found)


def sentence(rounds: Sequence[Round], flag: str) -> str:
    """The verdict in words. `flag` makes a server report cached tokens."""
    verdict = worst(rounds)
    such = [item for item in rounds if item.verdict is verdict]
    prefix = f"{len(such)} of {len(rounds)} rounds: " if len(rounds) > 1 else ""
    return prefix + _words(verdict, such[0], flag)


def _words(verdict: Verdict, found: Round, flag: str) -> str:
    of = "" if found.again.prompt_tokens is None else f" of {found.again.prompt_tokens:,}"
    times = f"first token after {found.again.first_token_s:.3f} s, {found.control.first_token_s:.3f} s when computed"
    if verdict is Verdict.HIT:
        return f"{found.restored:,}{of} tokens came back and the text is the same; {times}: {found.gain:.1f} x"
    if verdict is Verdict.MISS:
        return f"nothing came back, the prompt was computed again; {times}"
    if verdict is Verdict.WRONG:
        return (
            f"{found.restored:,}{of} tokens came back and the text differs from character {found.differs_at} on. Greedy decoding on GPUs "
            "may differ by what else is in the batch: repeat with --repeat 5 on a server without other load; if it stays, trust no hit"
        )
    if found.strange:
        return f"a prompt that was never sent is reported with {found.control.cached_tokens:,} cached tokens: its figures say nothing"
    if found.restored is not None:
        return f"{found.restored:,}{of} tokens came back, but by the engine's account from device or host memory, not from storage; {times}"
    return f"the server does not report cached tokens; start it with {flag}; {times}"


def remarks(rounds: Sequence[Round]) -> list[str]:
    """What else stands out."""
    said = []
    if any(item.verdict is not Verdict.WRONG and not item.same_text for item in rounds):
        said.append("the text of the two answers differs: if both were computed, this server does not decode greedily the same twice")
    if any((item.first.cached_tokens or 0) - (item.control.cached_tokens or 0) >= LEAST for item in rounds):
        said.append("the first request was served from a cache already: the seed is not new, so its text was not computed either")
    if any(item.verdict is Verdict.HIT and item.gain < 1 for item in rounds):
        said.append("restoring was slower than computing: try longer prompts (--tokens), and `tiercache bench disk` on the store's disk")
    if any(
        None not in (item.first.prompt_tokens, item.again.prompt_tokens) and item.first.prompt_tokens != item.again.prompt_tokens
        for item in rounds
    ):
        said.append("the same prompt has another number of tokens the second time: the tokenizer has changed")
    return said
