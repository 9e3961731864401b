"""Order in which units are evicted: dead weight first, then what the policy ranks least."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf
from typing import Final, NamedTuple

import numpy as np

from tiercache.index.node import Node
from tiercache.index.units import UnitTable
from tiercache.policy import Policy, UnitKind

_SHARE: Final = 64
"""Divisor for the units that a pass takes: the least 64th of them.

The least one in 64 is as good as the least of 64 drawn at random, which a full scan did not beat (see docs/design/0014).
"""
_SAMPLE: Final = 4096
"""Most units that an unsteady policy ranks in one pass; of more units, this many are drawn at random."""
_STEADY_FRONT: Final = 512
"""Fewest units that a pass takes under a steady policy, if there are that many; also the slack of a front that is too long."""


class Victim(NamedTuple):
    """Node, and what of it may go.

    `number` is that of the queue that it came from; `rank` is the policy's, None for dead weight.
    """

    node: Node
    kind: UnitKind
    number: int
    rank: float | None


class UnitQueue:
    """Nodes that have one kind of unit, the one that is worth least first; of equal ones the shallower.

    The front is a heap of the units at or below the horizon; when it is used up, one pass over the columns fetches the next. With a steady
    policy every unit that changes joins the front if it belongs there, so that the order is exact. With another policy the order is as of
    the last pass, which is repeated after as many ticks as the front had units; units that change leave the front and wait for the next
    pass. Cost: O(units) per pass, which fetches the dead weight and the least 64th of the other units.
    Thread safety: the index's thread only.
    """

    def __init__(self, table: UnitTable, number: int, policy: Policy, rng: np.random.Generator) -> None:
        self._table = table
        self._number = number
        self._policy = policy
        self._rng = rng
        self._front: list[tuple[bool, float, int, int, int]] = []  # (alive, rank, depth, version, row); dead weight sorts first
        self._horizon = -inf
        self._until = -1

    @property
    def kind(self) -> Callable[[Node], UnitKind]:
        """Function that tells which unit of this kind a node has."""
        return self._table.kinds[self._number].of

    def pop(self) -> Victim | None:
        """Remove and return the unit that is worth least, or None when nothing is evictable. It comes back when its node is marked."""
        table = self._table
        table.sync()
        self._follow()
        while self._front or self._refill():
            alive, rank, _, version, row = heapq.heappop(self._front)
            node = table.nodes[row]
            if node is not None and table.shared["version"][row] == version and table.has_unit(node, self._number):
                return Victim(node, table.take(node, self._number), self._number, rank if alive else None)
            self._follow()
        return None

    def _follow(self) -> None:
        """Add units that changed since the last call to the front, if they belong there; drop a front that is out of date or too long."""
        table = self._table
        rows = table.changed(self._number)
        crowded = len(self._front) > 2 * len(table.nodes) + _STEADY_FRONT  # mostly entries of units that changed since
        if rows is None or crowded or (not self._policy.steady and table.now > self._until):
            self._front, self._horizon = [], -inf
            table.listen(self._number, on=False)
            return
        if not rows:
            return
        alive = table.shared["alive"]
        dead = [row for row in rows if not alive[row]]
        self._push(dead, table.shared["last_access"][dead])
        living = [row for row in rows if alive[row]] if self._policy.steady else []
        if living:
            ranks = self._policy.rank(table.view(np.array(living), self._number))
            self._push([row for row, rank in zip(living, ranks, strict=True) if rank <= self._horizon], ranks[ranks <= self._horizon])

    def _refill(self) -> bool:
        """Fetch the units that go next; return False if there are none."""
        table, steady = self._table, self._policy.steady
        rows, dead = (table.rows(self._number, alive=alive) for alive in (True, False))
        if not len(rows) and not len(dead):
            return False
        table.listen(self._number, on=True)
        self._front, self._horizon = [], inf
        if len(rows):
            if not steady and len(rows) > _SAMPLE:
                rows = np.sort(self._rng.choice(rows, _SAMPLE, replace=False))
            ranks = self._policy.rank(table.view(rows, self._number))
            wanted = max(_STEADY_FRONT if steady else 1, len(rows) // _SHARE)
            if wanted < len(rows):
                self._horizon = float(np.partition(ranks, wanted - 1)[wanted - 1])
                least = ranks <= self._horizon
                rows, ranks = rows[least], ranks[least]
            self._push(rows.tolist(), ranks)
        self._push(dead.tolist(), table.shared["last_access"][dead])
        self._until = table.now + len(self._front)
        return True

    def _push(self, rows: list[int], ranks: np.ndarray) -> None:
        versions, alive, depth = (self._table.shared[name] for name in ("version", "alive", "depth"))
        for row, rank in zip(rows, ranks.tolist(), strict=True):
            heapq.heappush(self._front, (bool(alive[row]), rank, int(depth[row]), int(versions[row]), row))
