"""The prompts that every server is asked."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.servers.server import Answer

LENGTHS = (300, 1000, 1500, 700)
"""No whole pages of 16 or 64 tokens: of those, a hybrid has to compute the last token."""
_draw = random.Random(5)


def prompt(length: int) -> list[int]:
    """Return a prompt that begins like no other."""
    return [_draw.randrange(3, 250) for _ in range(length)]


PROMPTS = [prompt(length) for length in LENGTHS]


def check(found: Sequence[Answer], expected: Sequence[Answer], *, when: str) -> None:
    """Compare answers with those of a server without a cache: equal tokens, probabilities up to rounding."""
    for n, (answer, right) in enumerate(zip(found, expected, strict=True)):
        where = f"{when}, prompt {n} ({answer.cached} of {LENGTHS[n]} tokens cached)"
        assert answer.tokens == right.tokens, f"{where}: another answer"
        apart = max(abs(a - b) for a, b in zip(answer.logprobs, right.logprobs, strict=True))
        assert apart < 1e-3, f"{where}: log probabilities differ by {apart:g}"


def whole_pages(page: int) -> list[int]:
    """Return how many tokens of each prompt a cache can have: all whole pages before the last token."""
    return [(length - 1) // page * page for length in LENGTHS]
