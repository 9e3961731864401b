"""Front of an eviction order: the units that are evicted next. The index and the stores use this module.

An owner (the index or a store) keeps its units in columns and ranks them only when it must evict. One pass
over the columns ranks all units, and the front takes the lowest 64th of them. When the front is empty, the
next pass follows. Before the first eviction the order costs nothing, and one pass over N units serves N / 64
evictions.
"""

from __future__ import annotations

import heapq
from math import inf
from typing import Any, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from tiercache.policy.base import Policy, Ranks

_SHARE: Final = 64
"""A pass takes the lowest 64th of the units into the front.

Such a unit is as good a choice as the lowest of 64 units drawn at random. In measurements, its eviction was
no worse than that of the lowest of all units (see docs/design/policies.md).
"""

Entry = TypeVar("Entry", bound=tuple[Any, ...])


class Front(Generic[Entry]):
    """Heap of the units that are evicted next: those with ranks at or below the `horizon`.

    Entries are tuples that the owner makes; they are popped in ascending order. A popped entry may describe a
    unit that has changed since. The owner checks each entry before it evicts the unit.

    With a steady policy (see `Policy.steady`) the order is exact: the owner pushes every unit that changes to
    a rank within the horizon, so all units outside the front have higher ranks. With any other policy the
    order is that of the last pass. If the pass gave N entries, the order is out of date N ticks later.

    Thread safety: none of its own; only the owner uses the front.
    """

    def __init__(self, policy: Policy, fewest: int) -> None:
        self.steady = policy.steady
        """Whether ranks of different passes can be compared (see `Policy.steady`)."""
        self._fewest = fewest
        self._until = -1
        self._entries: list[Entry] = []
        self.horizon = -inf
        """Rank up to which all units are in the front; minus infinity before the first pass."""

    def __len__(self) -> int:
        return len(self._entries)

    def choose(self, ranks: Ranks) -> npt.NDArray[np.bool_]:
        """Set the horizon for a pass, and return which units have ranks at or below it.

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

    def fill(self, entries: list[Entry], now: int) -> None:
        """Replace all entries by these, which a pass at the tick `now` gave."""
        heapq.heapify(entries)
        self._entries = entries
        self._until = now + len(entries)

    def is_outdated(self, now: int) -> bool:
        """Return whether the order is out of date at the tick `now`."""
        return not self.steady and now > self._until

    @property
    def lowest(self) -> Entry:
        """The entry that `pop` would return."""
        return self._entries[0]

    def push(self, entry: Entry) -> None:
        """Add an entry."""
        heapq.heappush(self._entries, entry)

    def pop(self) -> Entry:
        """Remove and return the lowest entry."""
        return heapq.heappop(self._entries)

    def clear(self) -> None:
        """Remove all entries, as before the first pass."""
        self._entries, self.horizon = [], -inf
