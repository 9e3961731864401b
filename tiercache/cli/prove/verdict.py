"""Verdict on a prompt from the answers to three requests. Sends no requests itself."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tiercache.cli.exits import Exit
from tiercache.cli.prove.completion import Answer

LEAST: Final = 16
"""Restored tokens from which a round counts as a hit.

Fewer may be words that two prompts share by chance, or the mark that begins every prompt.
"""


class Verdict(enum.StrEnum):
    """Verdicts from the worst to the best; the worst one of several rounds is the verdict on all of them."""

    WRONG = "wrong"
    UNKNOWN = "unknown"
    MISS = "miss"
    HIT = "hit"


EXITS: Final = {Verdict.HIT: Exit.DONE, Verdict.MISS: Exit.NO, Verdict.UNKNOWN: Exit.UNKNOWN, Verdict.WRONG: Exit.CORRUPT}


@dataclass(frozen=True, slots=True)
class Round:
    """Answers to a prompt, to the same prompt after the caches were emptied, and to another one that was never sent (the control)."""

    seed: int
    first: Answer
    again: Answer
    control: Answer

    @property
    def restored(self) -> int | None:
        """Cached tokens of the second request beyond those that the control has as well; None if not reported."""
        if self.again.cached_tokens is None:
            return None
        return max(0, self.again.cached_tokens - (self.control.cached_tokens or 0))

    @property
    def same_text(self) -> bool:
        """Whether both answers to the same prompt are equal."""
        return self.first.text == self.again.text

    @property
    def differs_at(self) -> int:
        """Number of characters that both answers have in common at their beginning."""
        a, b = self.first.text, self.again.text
        return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    @property
    def from_memory(self) -> bool:
        """Whether the engine reports where the cached tokens lay, and none of them lay in storage."""
        return self.again.sources is not None and self.again.sources.storage == 0

    @property
    def strange(self) -> bool:
        """Whether the engine reports the control, a prompt that was never sent, as cached."""
        return (self.control.cached_tokens or 0) >= LEAST

    @property
    def verdict(self) -> Verdict:
        """Verdict on this round: a wrong text counts as worse than not knowing where the tokens came from."""
        if self.restored is None or self.strange:
            return Verdict.UNKNOWN
        if self.restored < LEAST:
            return Verdict.MISS
        if not self.same_text:
            return Verdict.WRONG
        return Verdict.UNKNOWN if self.from_memory else Verdict.HIT

    @property
    def gain(self) -> float:
        """Ratio of the time to the first token of the control, which had to be computed, to that of the second request."""
        return self.control.first_token_s / max(self.again.first_token_s, 1e-9)

    def record(self) -> dict[str, Any]:
        """Return the round as a dictionary for JSON."""
        return {
            "verdict": self.verdict.value, "seed": self.seed, "restored_tokens": self.restored, "same_text": self.same_text,
            "gain": self.gain, "first": self.first.record(), "again": self.again.record(), "control": self.control.record(),
        }  # fmt: skip


def worst(rounds: Sequence[Round]) -> Verdict:
    """Return the worst verdict of the rounds."""
    found = {item.verdict for item in rounds}
    return next(verdict for verdict in Verdict if verdict in found)


def sentence(rounds: Sequence[Round], flag: str) -> str:
    """Return the verdict on all rounds in words. `flag` is the server option that makes it report cached tokens."""
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
    """Return notes on anything else remarkable in the rounds."""
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
