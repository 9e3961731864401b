"""Up to which length a model's cache is what a recompute gives: prompts that grow, within a time, past every length that is named.

Some models compute otherwise from some length on: rotary embeddings that switch, windows that begin to forget, attention that becomes
sparse. A cache from below such a length is wrong above it. So a prefill is cut a few tokens before each named length and continued past
it, a little and to twice its length, and prompts are doubled up to the greatest. What fails there bounds the cache: sequences up to the
longest one that is proven are restored and kept, longer ones are computed anew.

`seconds` bound the time that this takes at load. A length that is not reached in it bounds the cache as well; but where it is one of
positions, short prompts begin a little before it instead, which shows all that depends on positions.
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
"""How long longer prompts may take, unless said otherwise."""
BEFORE: Final = 5
"""Tokens before a named length at which a prefill is cut."""
BEYOND: Final = 7
"""Tokens after it to which it goes on."""
LEAST: Final = 24
"""Tokens of the shortest prompt that shows anything."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reach:
    """What prompts longer than the usual ones showed.

    `limit`: tokens of the longest sequence that is restored and kept; None for any. `why` says what bounds it. `lengths` maps the lengths
    that the configuration names, such as `sliding_window 4096`, to what was done about each; `tokens` is the longest prompt that was run.
    """

    limit: int | None = None
    why: str = ""
    tokens: int = 0
    lengths: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0


UNBOUNDED: Final = Reach()


class Prompt(Protocol):
    """A prompt of one length, on which a cut can be tried."""

    def crossing(self, mode: TailMode, cuts: tuple[int, ...]) -> str:
        """Why a prefill cut there differs from an uncut one, or nothing."""


class Explorer:
    """One exploration. `make(tokens, first_position)` gives a prompt; `checked` is the length that all checks were made with, `usual` the
    one that they are meant for, `lengths` those that are named; it takes about `seconds` at most. Thread safety: one owner thread.
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
        """Go up, through the named lengths and the doublings between them, to the first that fails or cannot be reached."""
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
        length = 2 * self._usual
        while length < top:
            yield length
            length *= 2

    def _cross(self, length: int, end: int) -> str:
        """Why sequences that grow past a named length, a little and to twice that, cannot be continued from the cache, or nothing."""
        names = [f"{name} {at}" for name, at in self._lengths.items() if at == length]
        fault: str | None = ""
        below, above = max(1, length - BEFORE), length + max(1, length // 2)
        # What a sparse attention leaves out shows at a cut behind the length: a prefix that is fed by itself keeps more.
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
        """Why a prompt of a length without a name cannot be continued, or nothing."""
        fault = "" if tokens == self._checked else self._try(tokens, (tokens // 2, tokens - BEYOND))
        if fault == "":
            self._proven = max(self._proven, tokens)
        return fault or ""  # what cannot be reached is told by the length with a name above it

    def _try(self, tokens: int, cuts: tuple[int, ...]) -> str | None:
        """Why a cut makes a difference, or nothing; None if there is no time or no memory left to find out."""
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
