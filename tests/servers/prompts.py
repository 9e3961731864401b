"""The prompts that every server is asked."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.servers.server import Answer, Server

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


def ask_all(server: Server) -> list[Answer]:
    return [server.ask(asked) for asked in PROMPTS]


def cached(answers: Sequence[Answer]) -> list[int]:
    return [answer.cached for answer in answers]


def come_back(start: Callable[[], Server], right: Sequence[Answer], page: int) -> None:
    """Check answers and hits: first, from memory, from the store, after a restart, and after a kill."""

    def asked(when: str, hits: list[int]) -> None:
        found = ask_all(server)
        check(found, right, when=when)
        assert cached(found) == hits, when

    whole = whole_pages(page)
    with start() as server:
        asked("first", [0] * len(PROMPTS))
        asked("again", whole)
        server.flush()
        asked("flushed", whole)
    with start() as server:
        asked("restarted", whole)
        server.kill()
    with start() as server:
        asked("killed", whole)
    assert "memory leak" not in server.said().lower()


def damage(store: Path, every: int) -> None:
    """Change a byte of the slabs of a `file` store at every so many bytes."""
    for slab in (store / "slabs").iterdir():
        with slab.open("r+b") as file:
            for place in range(100, slab.stat().st_size, every):
                os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, place)[0] ^ 1]), place)
