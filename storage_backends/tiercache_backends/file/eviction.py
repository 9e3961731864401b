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

from tiercache.policy import Policy, UnitKind
from tiercache.policy.base import Column
from tiercache.policy.stored import StoredColumns
from tiercache_backends.file.objects import RESIDENT, Objects
from tiercache_backends.file.pages import Ints

_FRONT: Final = 1024
_SHARE: Final = 64
"""A pass fetches at least 1,024 leaves, and at least one in 64."""


class EvictionOrder:
    """The leaves of a store in eviction order, lazily: an entry is put right when it comes to the front.

    The entry of an object that left or is not a leaf any more is dropped: it is offered again when it becomes one. With a steady policy
    one whose rank has risen goes back, and as ranks never fall while a unit is untouched, nothing outside the front may come before it.
    Another policy's order is as of the last pass, which is repeated after as many ticks as the front had objects.

    Thread rule: none of its own; the store calls it under its mutex.
    """

    def __init__(self, objects: Objects, policy: Policy) -> None:
        self._objects = objects
        self._policy = policy
        self._front: list[tuple[float, int, int]] = []
        self._horizon = -inf
        self._until = 0

    def offer(self, row: int) -> None:
        """This object is new, or a leaf again, or may be worth less: it joins the front if it belongs there."""
        objects = self._objects
        if self._horizon == -inf or objects.queued[row] or objects.state[row] != RESIDENT or not objects.is_leaf(row):
            return
        if self._policy.steady and (rank := self._rank(row)) <= self._horizon:
            self._push(rank, row)

    def victims(self, enough: Callable[[int], bool]) -> list[int]:
        """Take rows out of the order until `enough` says so of one, or none is left; each must `leave` before the next is asked for.

        `enough` does that. Pinned objects stay.
        """
        objects = self._objects
        taken: list[int] = []
        spared: list[tuple[float, int, int]] = []
        if not self._policy.steady and objects.clock > self._until:
            self._drop()
        while self._front or self._refill():
            rank, row, number = heapq.heappop(self._front)
            if objects.number[row] != number or objects.state[row] != RESIDENT:
                continue
            objects.queued[row] = 0
            if not objects.is_leaf(row):
                continue
            if self._policy.steady and (now := self._rank(row)) > rank:
                if now <= self._horizon:
                    self._push(now, row)
            elif objects.pins[row]:
                spared.append((rank, row, number))
                objects.queued[row] = 1
            else:
                taken.append(row)
                self._policy.evicted(rank)
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
        ranks = self._policy.rank(StoredUnits(objects, rows))
        wanted = max(_FRONT, len(rows) // _SHARE)
        self._horizon = inf
        if wanted < len(rows):
            self._horizon = float(np.partition(ranks, wanted)[wanted])
            least = ranks <= self._horizon
            rows, ranks = rows[least], ranks[least]
        objects.columns["queued"][rows] = 1
        self._front = list(zip(ranks.tolist(), rows.tolist(), objects.columns["number"][rows].tolist(), strict=True))
        heapq.heapify(self._front)
        self._until = objects.clock + len(rows)
        return True

    def _rank(self, row: int) -> float:
        return float(self._policy.rank(StoredUnits(self._objects, np.array([row])))[0])

    def _drop(self) -> None:
        self._objects.columns["queued"][:] = 0
        self._front, self._horizon = [], -inf

    def _push(self, rank: float, row: int) -> None:
        # Objects that are deleted leave their entry behind: without this a store that only ever sets and deletes would grow for ever.
        if len(self._front) > 2 * len(self._objects) + _FRONT:
            self._drop()
            return
        self._objects.queued[row] = 1
        heapq.heappush(self._front, (rank, row, self._objects.number[row]))


class StoredUnits(StoredColumns):
    """Objects as a policy sees them. See `Units`; what a store does not know of them is 0. The tokens of a page are not known either, so
    that a page counts for one.

    Thread rule: during one call of the policy.
    """

    page_tokens = 1

    def __init__(self, objects: Objects, rows: Ints) -> None:
        self._objects = objects
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def now(self) -> int:
        """The store's clock."""
        return self._objects.clock

    @property
    def kind(self) -> Column:
        """A state goes alone; a page is a leaf when it goes."""
        return np.where(self._column("page") == self._column("parent"), UnitKind.STATE, UnitKind.LEAF)

    @property
    def last_access(self) -> Column:
        """The store's tick when each object was last used or made."""
        return self._column("tick")

    @property
    def hits(self) -> Column:
        """How often each was read since the store was opened."""
        return self._column("hits")

    @property
    def depth(self) -> Column:
        """Pages from the start of the sequence to the object's end; 0 where the caller did not say."""
        return self._column("depth")

    @property
    def children(self) -> Column:
        """How many stored objects depend on the object's page, the states on it included."""
        found: Column = self._objects.pages.dependents_column[self._column("page")]
        return found

    @property
    def replay(self) -> Column:
        """Pages from the nearest page above that has a state on it, or from the start."""
        return self._objects.replay(self._rows)

    @property
    def nbytes(self) -> Column:
        """Payload bytes, at least 1."""
        return np.maximum(self._column("length").astype(np.int64), 1)

    def _column(self, name: str) -> Column:
        found: Column = self._objects.columns[name][self._rows]
        return found
