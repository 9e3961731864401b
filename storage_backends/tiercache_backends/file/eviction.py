"""Which objects a `file` store gives up first: suffixes before what they depend on, and among those the policy's least.

The front is a heap of every leaf whose rank lies at or below the horizon. When it runs out, one pass over the columns fetches the next
few thousand leaves and moves the horizon up. So a million objects cost nothing until something must go, and then some 15 us each.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf
from typing import Final

import numpy as np
import numpy.typing as npt

from tiercache.policy import Policy, Unit, UnitKind
from tiercache_backends.file.objects import RESIDENT, Objects
from tiercache_backends.file.pages import Ints

_FRONT: Final = 1024
_SHARE: Final = 64
"""A pass fetches at least 1,024 leaves, and at least one in 64."""


class EvictionOrder:
    """The leaves of a store in eviction order, lazily: an entry is put right when it comes to the front.

    The entry of an object that left or is not a leaf any more is dropped: it is offered again when it becomes one. One whose rank has risen
    goes back. Ranks never fall while a unit is untouched (see `Policy.rank`), so nothing outside the front may come before it.

    Thread rule: none of its own; the store calls it under its mutex.
    """

    def __init__(self, objects: Objects, policy: Policy) -> None:
        self._objects = objects
        self._policy = policy
        self._front: list[tuple[float, int, int]] = []
        self._horizon = -inf

    def offer(self, row: int) -> None:
        """This object is new, or a leaf again, or may be worth less: it joins the front if it belongs there."""
        objects = self._objects
        if self._horizon == -inf or objects.queued[row] or objects.state[row] != RESIDENT or not objects.is_leaf(row):
            return
        rank = self._policy.rank(UnitView(objects, row))
        if rank <= self._horizon:
            self._push(rank, row)

    def victims(self, enough: Callable[[int], bool]) -> list[int]:
        """Take rows out of the order until `enough` says so of one, or none is left; each must `leave` before the next is asked for.

        `enough` does that. Pinned objects stay.
        """
        objects = self._objects
        taken: list[int] = []
        spared: list[tuple[float, int, int]] = []
        while self._front or self._refill():
            rank, row, number = heapq.heappop(self._front)
            if objects.number[row] != number or objects.state[row] != RESIDENT:
                continue
            objects.queued[row] = 0
            if not objects.is_leaf(row):
                continue
            now = self._policy.rank(UnitView(objects, row))
            if now > rank:
                if now <= self._horizon:
                    self._push(now, row)
            elif objects.pins[row]:
                spared.append((rank, row, number))
                objects.queued[row] = 1
            else:
                taken.append(row)
                if enough(row):
                    break
        for entry in spared:
            heapq.heappush(self._front, entry)
        return taken

    def _refill(self) -> bool:
        """Fetch the leaves that come next; False if there are none."""
        objects = self._objects
        rows = objects.leaves()
        rows = rows[objects.columns["queued"][rows] == 0]
        if not len(rows):
            return False
        ranks = self._policy.rank_all(UnitViews(objects, rows))
        wanted = max(_FRONT, len(rows) // _SHARE)
        self._horizon = inf
        if wanted < len(rows):
            self._horizon = float(np.partition(ranks, wanted)[wanted])
            least = ranks <= self._horizon
            rows, ranks = rows[least], ranks[least]
        objects.columns["queued"][rows] = 1
        self._front = list(zip(ranks.tolist(), rows.tolist(), objects.columns["number"][rows].tolist(), strict=True))
        heapq.heapify(self._front)
        return True

    def _push(self, rank: float, row: int) -> None:
        # Objects that are deleted leave their entry behind: without this a store that only ever sets and deletes would grow for ever.
        if len(self._front) > 2 * len(self._objects) + _FRONT:
            self._objects.columns["queued"][:] = 0
            self._front, self._horizon = [], -inf
            return
        self._objects.queued[row] = 1
        heapq.heappush(self._front, (rank, row, self._objects.number[row]))


class UnitView(Unit):
    """One object as a policy sees it.

    Thread rule: during one call of the policy.
    """

    __slots__ = ("_objects", "_row")

    def __init__(self, objects: Objects, row: int) -> None:
        self._objects = objects
        self._row = row

    @property
    def kind(self) -> UnitKind:
        """A state goes alone; a page is a leaf when it goes."""
        return UnitKind.STATE if self._objects.hangs(self._row) else UnitKind.LEAF

    @property
    def last_access(self) -> int:
        """The store's tick when the object was last used or made."""
        return int(self._objects.tick[self._row])

    @property
    def hits(self) -> int:
        """How often the object was read since the store was opened."""
        return int(self._objects.hits[self._row])

    @property
    def depth(self) -> int:
        """Pages from the start of the sequence to the object's end; 0 where the caller did not say."""
        return int(self._objects.depth[self._row])

    @property
    def children(self) -> int:
        """How many stored objects depend on the object's page, the states on it included."""
        return int(self._objects.pages.dependents[self._objects.page[self._row]])

    @property
    def replay_pages(self) -> int:
        """Pages that must be computed to have the object again: back to the nearest page above with a state on it, or to the start."""
        objects = self._objects
        node = objects.page[self._row]
        for distance in range(objects.used + 1):
            row, parent, with_state = objects.pages.first[node], -1, False
            while row >= 0:
                if objects.hangs(row):
                    with_state |= distance > 0
                else:
                    parent = objects.parent[row]
                row = objects.next[row]
            if with_state:
                return distance
            if parent < 0:
                return distance + 1
            node = parent
        return objects.used


class UnitViews:
    """Many objects as a policy sees them, with their last accesses in one array.

    Thread rule: during one call of the policy.
    """

    def __init__(self, objects: Objects, rows: Ints) -> None:
        self._objects = objects
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Unit:
        return UnitView(self._objects, int(self._rows[index]))

    @property
    def last_access(self) -> npt.NDArray[np.uint64]:
        """As `Unit.last_access`, of all."""
        found: npt.NDArray[np.uint64] = self._objects.columns["tick"][self._rows]
        return found
