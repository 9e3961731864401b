"""Finds the length up to which a model's cache equals a recomputation, with growing prompts, past every length that is named.

Some models compute differently from some length on: rotary embeddings switch, windows begin to forget, attention becomes sparse. A cache
from below such a length is wrong above it. Therefore a prefill is cut a few tokens before each length that the configuration names and
continued past it, a little and to twice its length; prompts are also doubled up to the greatest named length. The first failure bounds the
cache: sequences up to the longest proven one are restored and kept, longer ones are computed without the cache.

`seconds` bounds the time that this takes at load. A length that is not reached in that time bounds the cache as well; but if it is a number
of positions, short prompts that begin a little before it are run instead, which shows everything that depends on positions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch

from tiercache.errors import UnsupportedModelError
from tiercache.integrations.transformers.runner import TailMode

SECONDS: Final = 20.0
"""Seconds that longer prompts may take by default."""
BEFORE: Final = 5
"""Tokens before a named length at which a prefill is cut."""
BEYOND: Final = 7
"""Tokens after a named length up to which that prefill continues."""
LEAST: Final = 24
"""Tokens of the shortest prompt that shows anything."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reach:
    """The result of prompts longer than the usual ones.

    `limit` is the number of tokens of the longest sequence that is restored and kept; None for no limit. `why` says what bounds it.
    `lengths` maps the lengths that the configuration names, such as `sliding_window 4096`, to what was found about each. `tokens` is the
    length of the longest prompt that was run, `seconds` the time that all took.
    """

    limit: int | None = None
    why: str = ""
    tokens: int = 0
    lengths: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0


UNBOUNDED: Final = Reach()
"""The reach of a model whose cache is good for any length."""


class Prompt(Protocol):
    """A prompt of one length, on which a cut can be tried."""

    def crossing(self, mode: TailMode, cuts: tuple[int, ...]) -> str:
        """Return why a prefill cut at `cuts` differs from an uncut one; empty if it does not."""


class Explorer:
    """One search for the reach of a model.

    `make(tokens, first_position)` gives a prompt. `checked` is the prompt length that all checks were made with, `usual` the length that
    they are meant for, and `lengths` are the named lengths, all in tokens. The search takes about `seconds` at most.

    Thread safety: one owner thread.
    """

    def __init__(
        self,
        make: Callable[[int, int], Prompt],
        mode: TailMode,
        checked: int,
        usual: int,
        lengths: Mapping[str, int],
        seconds: float = SECONDS,
    ) -> None:
        self._make, self._mode, self._checked, self._usual, self._lengths = make, mode, checked, usual, lengths
        self._seconds = seconds
        self._done: dict[str, str] = {}
        self._began = time.monotonic()
        self._last = (usual, 0.0)
        self._proven = 0

    def explore(self, positions: int | None) -> Reach:
        """Try the named lengths and the doublings between them, ascending, up to the first that fails or cannot be reached.

        `positions` is the number of positions of the model; None for a model without a limit.
        """
        end = positions or 1 << 62
        named = set(self._lengths.values())
        steps = sorted({*named, self._checked, self._usual, *self._doublings(min(max(named, default=0), end))})
        why = ""
        for length in steps:
            if why := self._cross(length, end) if length in named else self._double(length):
                _log.warning("sequences of more than %d tokens are computed without the cache: %s", self._proven, why)
                break
        for name, length in self._lengths.items():
            self._done.setdefault(f"{name} {length}", "not tried, after what came before it")
        return Reach(self._proven if why else None, why, self._last[0], self._done, time.monotonic() - self._began)

    def _doublings(self, top: int) -> Iterator[int]:
        """Yield the usual length doubled, and doubled again, while it is below `top`."""
        length = 2 * self._usual
        while length < top:
            yield length
            length *= 2

    def _cross(self, length: int, end: int) -> str:
        """Return why sequences that grow past a named length, a little and to twice it, cannot be continued; empty if they can."""
        names = [f"{name} {at}" for name, at in self._lengths.items() if at == length]
        fault: str | None = ""
        below, above = max(1, length - BEFORE), length + max(1, length // 2)
        # Sparse attention shows at a cut after the length: a prefix fed by itself keeps more than the same tokens in a whole prompt.
        for tokens, cuts in ((length + BEYOND, (below,)), (2 * length + BEYOND, (below, above)), (2 * length + BEYOND, (above,))):
            if fault == "":
                fed = min(max(tokens, LEAST), end)
                fault = self._try(fed, tuple(cut for cut in cuts if cut < fed) or (below,))
        if fault is None:
            fault = self._run(self._checked, (self._checked // 2,), max(0, length - self._checked // 2))
            if fault == "" and all("position" in name for name in names):
                self._done |= dict.fromkeys(names, "crossed by positions alone")
                return ""
            fault = fault or f"not reached within {self._seconds:g} seconds, or the memory"
        if not fault:
            self._done |= dict.fromkeys(names, "crossed")
            return ""
        if length >= LEAST and self._try(length, (min(self._proven or length // 2, length - BEFORE - 1), length - BEFORE)) == "":
            self._proven = length
        self._done |= dict.fromkeys(names, fault)
        return f"{', '.join(names)}: {fault}"

    def _double(self, tokens: int) -> str:
        """Return why a prompt of a length without a name cannot be continued; empty if it can, or if the length cannot be reached."""
        fault = "" if tokens == self._checked else self._try(tokens, (tokens // 2, tokens - BEYOND))
        if fault == "":
            self._proven = max(self._proven, tokens)
        return fault or ""  # a length that cannot be reached is reported by the named length above it

    def _try(self, tokens: int, cuts: tuple[int, ...]) -> str | None:
        """Return why a cut makes a difference, empty if it makes none; None if there is not enough time or memory to find out."""
        begun, (last, seconds) = time.monotonic(), self._last
        # At worst, time grows with the square of the length.
        if begun - self._began + seconds * max(1.0, tokens / last) ** 2 > self._seconds:
            return None
        try:
            fault = self._run(tokens, cuts)
        except torch.OutOfMemoryError:
            return None
        if tokens >= last:
            self._last = (tokens, time.monotonic() - begun)
        return fault

    def _run(self, tokens: int, cuts: tuple[int, ...], first_position: int = 0) -> str:
        try:
            return self._make(tokens, first_position).crossing(self._mode, cuts)
        except UnsupportedModelError as error:
            return str(error)
