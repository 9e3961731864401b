"""Front of an eviction order: the units that are evicted next. The index and the stores use this module.

An owner (the index or a store) keeps its units in columns: what ranks them, which of them are
dead (no hit can use them), and which may not be evicted now. It ranks them only when it must evict:

    columns     . . . . . . . . . . . . . . . . . . . .     all units
    front       dead . . | live . . . horizon               what is evicted next, in this order

One pass over the columns ranks all live units, and the front takes the lowest 64th of them. When the front is
empty, the next pass follows. Before the first eviction the order costs nothing, and one pass over N units
serves N / 64 evictions.

An entry may describe a unit that has changed since, because nothing is searched in a heap. The owner checks
an entry when it comes out, and puts the unit back in its new place or drops the entry. A front with several
times more entries than there are units is filled anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from tiercache.policy.base import Ranks

_SHARE: Final = 64
"""A pass takes the lowest 64th of the units into the front.

Such a unit is as good a choice as the lowest of 64 units drawn at random. In measurements, its eviction was
no worse than that of the lowest of all units (see docs/design/policies.md).
"""
_FEW: Final = 512
"""Number of entries up to which outdated ones do not matter."""
Entry = TypeVar("Entry", bound=tuple[Any, ...])


class Front(Generic[Entry]):
    """Heaps of the units that are evicted next: dead ones, then live ones up to the rank `horizon`.

    Entries are tuples that the owner makes; they are popped in ascending order.

    With steady ranks (see `Policy.steady`) the order is exact: the owner pushes every unit that changes to
    a rank within the horizon, so all units outside the front have higher ranks. With any others the
    order is that of the last pass. If the pass gave N entries, the order is out of date N ticks later.

    Thread safety: none of its own; only the owner uses the front.
    """

    def __init__(self, *, steady: bool, fewest: int) -> None:
        self.steady = steady
        """Whether ranks of different passes can be compared (see `Policy.steady`)."""
        self._fewest = fewest
        self._until = -1
        self.live: list[Entry] = []
        """Heap of live units; an entry begins with the unit's rank."""
        self.dead: list[Entry] = []
        """Heap of dead units; an entry begins with the time of the unit's last use. All of them are here."""
        self.horizon = -inf
        """Rank up to which all live units are in the front; minus infinity before the first pass."""

    def __len__(self) -> int:
        return len(self.live) + len(self.dead)

    def choose(self, ranks: Ranks) -> npt.NDArray[np.bool_]:
        """Set the horizon for a pass, and return which live units have ranks at or below it.

        These are the lowest 64th of the units, but at least `fewest`. They can be more, because all units
        whose rank equals the horizon are among them.
        """
        wanted = max(self._fewest, len(ranks) // _SHARE)
        # `partition` finds the rank that sorting would put at place `wanted`, in O(n).
        self.horizon = float(np.partition(ranks, wanted - 1)[wanted - 1]) if wanted < len(ranks) else inf
        chosen: npt.NDArray[np.bool_] = ranks <= self.horizon
        return chosen

    def admits(self, rank: float) -> bool:
        """Return whether a unit that changed to this rank must join the front now."""
        return self.steady and rank <= self.horizon

    def fill(self, live: list[Entry], now: int, dead: Iterable[Entry] = ()) -> None:
        """Take the entries that a pass at the tick `now` gave, instead of all earlier ones of live units."""
        self.live = live
        self.dead += dead
        heapify(self.live)
        heapify(self.dead)
        self._until = now + len(live)

    def is_outdated(self, now: int) -> bool:
        """Return whether the order is out of date at the tick `now`."""
        return not self.steady and now > self._until

    def is_crowded(self, units: int) -> bool:
        """Return whether so many entries are out of date that the front of `units` units is filled anew."""
        return len(self) > 2 * units + _FEW

    def push(self, entry: Entry, *, dead: bool = False) -> None:
        """Add an entry."""
        heappush(self.dead if dead else self.live, entry)

    def pop(self) -> tuple[Entry, bool]:
        """Remove and return the entry of the unit that is evicted next, and whether the unit is dead."""
        dead = bool(self.dead)
        return heappop(self.dead if dead else self.live), dead

    def clear(self) -> None:
        """Remove all entries, as before the first pass."""
        self.live, self.dead, self.horizon = [], [], -inf
