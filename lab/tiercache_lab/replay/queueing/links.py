"""Link from a tier to the device, whose bandwidth all its loads share."""

from __future__ import annotations

import heapq
import math
from typing import Generic, TypeVar

T = TypeVar("T")


class Link(Generic[T]):
    """Link that serves all its loads at once, each at an equal share of the bandwidth (processor sharing).

    Times are seconds of a clock that never goes back. `bandwidth` is in bytes per second.

    Thread safety: one thread.
    """

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth
        self._at = 0.0
        self._served = 0.0  # bytes that a load has received that has been there from the beginning
        # A load ends when `_served` reaches the first number. No two loads have the same second number.
        self._loads: list[tuple[float, int, T]] = []
        self._count = 0
        self.busy = 0.0
        """Seconds in which at least one load was under way."""
        self.nbytes = 0.0
        """Bytes of all loads that have been added."""

    def add(self, now: float, nbytes: float, load: T) -> None:
        """Begin a load of `nbytes` bytes."""
        self._advance(now)
        heapq.heappush(self._loads, (self._served + nbytes, self._count, load))
        self._count += 1
        self.nbytes += nbytes

    @property
    def next(self) -> float:
        """Time at which the next load ends, if no other begins before; infinite for an idle link."""
        if not self._loads:
            return math.inf
        rest = max(0.0, self._loads[0][0] - self._served)
        return self._at + rest * len(self._loads) / self._bandwidth

    def pop(self) -> T:
        """End the load that ends next, at the time `next`, and return it."""
        now, (served, _, load) = self.next, self._loads[0]
        self._advance(now)
        self._served = served  # without the rounding of `_advance`, which could make a load end twice
        heapq.heappop(self._loads)
        return load

    def _advance(self, now: float) -> None:
        passed = now - self._at
        if self._loads:
            self._served += passed * self._bandwidth / len(self._loads)
            self.busy += passed
        self._at = now
