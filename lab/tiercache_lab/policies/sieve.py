"""SIEVE: one queue in order of arrival, a bit for each unit, and a hand that evicts what was not used."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import ClassVar, Final

import numpy as np

from tiercache.policy.base import Column, Policy, Ranks, Units, last_use
from tiercache_lab.policies.history import GROUP, entered, queue_number

_MAX_STEPS: Final = 1024
"""Maximum number of steps in the memory of where the hand passed when (see `_Hand`)."""
_END: Final = 1 << 62
"""Place behind every unit."""


class Sieve(Policy):
    """Policy in which a hand goes through the units, from the oldest on, and evicts the unused ones.

    A unit that was used since the hand last passed it is left in its place. From the newest unit the hand
    goes back to the oldest.

    How the ranks follow the paper: a unit's place in the queue is the tick of its creation. A unit is marked
    as visited if its last use is later than its creation and than the tick at which the hand last passed its
    place. The next units in the way of the hand are those without a mark from the hand on, then those without
    a mark before it, then the marked ones from the hand on, whose marks the hand clears on its way, and then
    those before it. The order is exact for units that all may be evicted. A unit that may not be evicted,
    such as a pinned one, is passed.

    What is remembered is the place of the hand, and a function from places to ticks with at most 1,024 steps.
    Each queue of the owner has a hand of its own. An owner that does not tell when units were created gets
    LRU. The size of units plays no part, as in the paper.

    Source: Zhang, Yang, Yue, Vigfusson and Rashmi, "SIEVE is Simpler than LRU", NSDI 2024.

    Thread safety: as `Policy`.
    """

    name: ClassVar[str] = "sieve"

    def __init__(self) -> None:
        self._hands: dict[int, _Hand] = {}
        self._now = 0
        self._rank = 0.0

    def rank(self, units: Units) -> Ranks:
        """Return each unit's place in the way of the hand."""
        self._now = units.now
        hand = self._hands.setdefault(queue_number(units.queue), _Hand())
        place = entered(units)
        hand.newest = int(place.max())
        marked = last_use(units) > np.maximum(place, hand.passed(place))
        return np.asarray(GROUP * (2.0 * marked + (place < hand.place)) + place, np.float64)

    def evicted(self, rank: float) -> None:
        """Note the rank, which says how far the hand has moved (see `left`)."""
        self._rank = rank

    def left(self, queue: int, digest: int, nbytes: int) -> None:
        """Move the hand of this queue to the place of the evicted unit."""
        if (hand := self._hands.get(queue_number(queue))) is not None:
            rounds, place = divmod(max(0.0, self._rank), GROUP)
            hand.move(int(rounds), int(place), self._now)


class _Hand:
    """Hand of one queue, and the ticks at which it last passed each place."""

    def __init__(self) -> None:
        self.place = 0
        """Place of the unit that the hand looks at next."""
        self.newest = 0
        """Place of the newest unit."""
        # The hand passed the places from `_starts[i]` up to the next start at the tick `_ticks[i]`.
        self._starts = [0]
        self._ticks = [0]

    def passed(self, places: Column) -> Column:
        """Return the tick at which the hand last passed each place; 0 for never."""
        at = np.searchsorted(np.array(self._starts), places, "right") - 1
        ticks: Column = np.array(self._ticks)[np.maximum(at, 0)]
        return ticks

    def move(self, group: int, place: int, now: int) -> None:
        """Move the hand to a unit in this group of ranks, which is evicted there."""
        #             group 0          group 1              groups 2 and 3
        # passed      [hand, place)    [hand, end) and      all places
        #                              [start, place)
        if group >= 2:
            self._starts, self._ticks = [0], [now]
        elif group:
            self._pass(self.place, _END, now)
            self._pass(0, place, now)
        else:
            self._pass(self.place, place, now)
        # The paper's hand starts again at the oldest unit after it has evicted the newest one.
        self.place = place if place < self.newest else 0

    def _pass(self, start: int, stop: int, now: int) -> None:
        if start >= stop:
            return
        first, last = bisect_left(self._starts, start), bisect_right(self._starts, stop)
        after = self._ticks[last - 1] if last else 0
        joins = first > 0 and self._ticks[first - 1] == now
        self._starts[first:last] = [stop] if joins else [start, stop]
        self._ticks[first:last] = [after] if joins else [now, after]
        if len(self._starts) > _MAX_STEPS:
            # The later of two ticks is kept, so that units are forgotten to be marked, not found to be.
            half = _MAX_STEPS // 2
            self._ticks[:half] = [max(pair) for pair in zip(*[iter(self._ticks[:half])] * 2, strict=True)]
            self._starts[:half] = self._starts[:half:2]
