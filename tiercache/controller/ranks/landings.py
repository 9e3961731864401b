"""Ends of copies and of store calls that every rank applies at the same place of its work.

An engine whose ranks decide alike, each by itself, asks a cache on each rank. The caches answer alike if they
begin alike, are called alike, and nothing else changes them. What else does is the end of a copy or of a call
of the store, which comes at another moment on each rank, and of a call also the result; and the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tiercache.core import Outcome, PoolName, Reason
from tiercache.errors import TransferError

Ends: TypeAlias = npt.NDArray[Any]
"""Numbers of one rank, of which the least over all ranks counts: int64 for ends, int8 for results."""
Landing = Callable[[TransferError | None], None]
LATE, PENDING, UNDONE, ENDED = -1, 0, 1, 2
"""States of a copy or a call. The least over all ranks is the common one.

LATE: a call hangs on a rank. PENDING: a rank has not ended it. UNDONE: it has failed, or has not been made,
on a rank, and has ended on all. ENDED: it has been done on all.
"""
_NONE: Final[Ends] = np.empty(0, np.int8)
_MICROSECONDS: Final = 1_000_000
_ORDER: Final = "error corrupt miss unavailable refused throttled stored hit"
# What one rank lacks is missing. A call whose outcomes are all errors counts as failed.
_OUTCOMES: Final = tuple(map(Outcome, _ORDER.split()))
_REASONS: Final = tuple(reversed(Reason))  # NONE is the last


@dataclass(frozen=True, slots=True)
class Codes:
    """How the result of a store call is written as numbers: the least over all ranks is the common result.

    0 stands for what there is if a rank has made no call, or has had an answer of another length.
    """

    size: int = 1
    """Number of codes. It follows from the call, whatever its result is."""
    pack: Callable[[Any], Sequence[int]] = lambda value: [value]
    unpack: Callable[[Sequence[int]], Any] = lambda codes: bool(codes[0])


def outcome_codes(count: int) -> Codes:
    """Return the codes of a list of `count` outcomes."""
    return Codes(
        count, lambda row: [_OUTCOMES.index(o) for o in row], lambda codes: [_OUTCOMES[c] for c in codes]
    )


def answer_codes(counts: Mapping[PoolName, int]) -> Codes:
    """Return the codes of an answer about so many objects: (what is there by pool, a reason), or None."""

    def pack(answer: tuple[Mapping[PoolName, Sequence[bool]], Reason] | None) -> Sequence[int]:
        if answer is None:
            return ()
        there, reason = answer
        return [1, _REASONS.index(reason), *(flag for pool in counts for flag in there[pool])]

    def unpack(codes: Sequence[int]) -> tuple[dict[PoolName, list[bool]], Reason] | None:
        flags = map(bool, codes[2:])
        there = {pool: [*islice(flags, count)] for pool, count in counts.items()}
        return (there, _REASONS[codes[1]]) if codes[0] else None

    return Codes(2 + sum(counts.values()), pack, unpack)


class AgreedEnd(Protocol):
    """Copy or call under way, whose end waits for all ranks."""

    codes: Ends
    """Codes of its result: int8."""

    def state(self, now: float) -> int:
        """Return the state on this rank, at `now` of this rank's clock."""

    def settle(self, common: int, codes: Sequence[int]) -> bool:
        """Apply the common state, and the common result if it is ENDED; return whether this is over."""


class AgreedLandings:
    """Copies and calls under way, whose ends wait until all ranks have them, and the common time.

    Thread safety: the owner's thread. Any thread may end a copy.
    """

    def __init__(
        self, least: Callable[[Ends], Ends], clock: Callable[[], float], wake: Callable[[], object]
    ) -> None:
        """`least` returns the least that any rank gives, element by element; all ranks call it at once.

        `clock` is this rank's own, and `wake` may be called on any thread when something ends.
        """
        self.clock, self.wake = clock, wake
        self.is_alone = False
        """Whether the other ranks do not count any more."""
        self._least = least
        self._now = 0.0
        self._since = clock()
        self._ends: dict[AgreedEnd, None] = {}

    def now(self) -> float:
        """Return the common time in seconds, which changes in `apply` only, and rests while nothing is on."""
        return self._now

    def expect(self, end: AgreedEnd) -> None:
        """Register what has just begun; all ranks do so in one order."""
        if not self._ends:
            self._since = self.clock()
        self._ends[end] = None

    def expect_copy(self, land: Landing) -> Landing:
        """Return the function that ends a copy, on any thread; `land` is called once all ranks have its end.

        What has failed on one rank has failed.
        """
        copy = _Copy(land, self.wake)
        self.expect(copy)
        return copy.end

    def apply(self, *, busy: bool) -> None:
        """Apply what has ended on all ranks; each calls this at the same place of its work.

        `busy`: whether the time counts although nothing is expected, which is alike on all ranks as well.
        """
        now, ends = self.clock(), list(self._ends)
        passed, self._since = now - self._since, now
        if not ends and not busy:
            return
        mine = [int(passed * _MICROSECONDS), *(end.state(now) for end in ends)]
        least, *states = self._least(np.array(mine, np.int64)).tolist()
        self._now += least / _MICROSECONDS
        common = list(zip(ends, states, strict=True))
        codes = np.concatenate([_NONE, *(end.codes for end, state in common if state == ENDED)])
        results = iter(self._least(codes).tolist() if len(codes) else ())
        for end, state in common:
            result = [*islice(results, len(end.codes))] if state == ENDED else []
            if state != PENDING and end.settle(state, result):
                del self._ends[end]

    def dissolve(self) -> None:
        """Agree with nobody from now on, because this rank closes its cache."""
        self._least, self.is_alone = lambda mine: mine, True


class _Copy:
    """Copy under way."""

    codes = _NONE

    def __init__(self, land: Landing, wake: Callable[[], object]) -> None:
        self._land, self._wake = land, wake
        self._state = PENDING
        self._error: TransferError | None = None

    def end(self, error: TransferError | None) -> None:
        self._error = error
        self._state = ENDED if error is None else UNDONE
        self._wake()

    def state(self, now: float) -> int:
        return self._state

    def settle(self, common: int, codes: Sequence[int]) -> bool:
        if common == UNDONE and self._error is None:
            self._error = TransferError("this copy has failed on another rank")
        self._land(self._error)
        return True
