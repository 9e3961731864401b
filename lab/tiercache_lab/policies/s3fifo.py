"""S3-FIFO: a small queue for new units, a main queue for units that were used again, and a list of ghosts."""

from __future__ import annotations

from typing import ClassVar, Final, NamedTuple

import numpy as np

from tiercache.policy.base import Column, Policy, Ranks, Reuse, Units
from tiercache_lab.policies.history import GROUP, Digests, GhostList, before, entered, queue_number

_SMALL: Final = 0.1
"""Share of the bytes that the small queue may have."""
_MOST_USES: Final = 3
"""Maximum of a unit's counter of uses."""
# Groups of units, by the order of eviction if the small queue has more than its share:
_SMALL_TAIL, _MOVING, _SMALL_REST = 0, 2, 6
_MAIN: Final = np.array([1, 3, 4, 5])
"""Group of the units of the main queue, by their counter."""


class S3Fifo(Policy):
    """Policy with two queues in order of arrival: a small one tests new units, a main one has the others.

    - A new unit enters the small queue. If it was evicted from there not long ago, it enters the main queue.
    - If the small queue has 10 % of the bytes or more, its oldest unit is looked at: with two hits or more it
      moves to the main queue, otherwise it is evicted, and a ghost of it is kept. Else the oldest unit of the
      main queue is looked at: with a hit it enters the queue again, with one hit less, otherwise it is
      evicted.
    - A counter of hits goes up to 3, and starts at 0 in the main queue. The ghosts are those of the last
      evicted 90 % of the bytes.

    How the ranks follow the paper: the small queue's order is that of the units' creation. The main queue's
    is in the policy's memory, by digest: a number for each time that a unit entered, and the hits until then.
    Units move, and enter again, when a unit behind them is evicted. The counters of a unit that the owner has
    made anew on a node with older hits include these hits.

    What is approximated: the share of the small queue is that of the units that can be evicted. Between two
    passes of the owner (a 64th of the units, see `order`), units do not change places. If there are more than
    4,096 units, the policy sees a sample of them. The main queue and the ghosts have at most 65,536 digests;
    the owner reports only misses of its last 4,096 lost units. Each queue of the owner has queues of its own.
    An owner that does not tell digests gets the small queue alone.

    Source: Yang, Zhang, Qiu, Yue and Rashmi, "FIFO Queues are All You Need for Cache Eviction", SOSP 2023.
    The paper counts ghosts, its artifact their bytes, as here.

    Thread safety: as `Policy`.
    """

    name: ClassVar[str] = "s3fifo"

    def __init__(self) -> None:
        self._queues: dict[int, _Queues] = {}
        self._rank = 0.0

    def rank(self, units: Units) -> Ranks:
        """Return each unit's place in the order of eviction."""
        return self._queues.setdefault(queue_number(units.queue), _Queues()).rank(units)

    def evicted(self, rank: float) -> None:
        """Note the rank, which says from which queue the unit comes (see `left`)."""
        self._rank = rank

    def left(self, queue: int, digest: int, nbytes: int) -> None:
        """Move the units that were looked at before this one was evicted."""
        if digest and (queues := self._queues.get(queue_number(queue))) is not None:
            queues.left(self._rank, digest, nbytes)

    def reused(self, reuse: Reuse) -> None:
        """Remember a miss of a ghost, so that the unit enters the main queue when it is made again."""
        if reuse.evicted:
            for queues in self._queues.values():
                queues.missed(reuse.digest)


class _Main(NamedTuple):
    """Unit of the main queue."""

    number: int
    """Place in the order in which units entered."""
    spent: int
    """Hits of the unit that do not count any more."""


class _Seen(NamedTuple):
    """Unit of one of the queues as the last pass saw it."""

    key: float
    """Place in its queue."""
    digest: int
    hits: int
    uses: int
    """Its counter."""
    excess: bool
    """Whether it would be looked at before the main queue is."""


class _Queues:
    """Small and main queue and ghosts, for one queue of the owner."""

    def __init__(self) -> None:
        self._main: Digests[_Main] = Digests()
        self._ghosts = GhostList()
        self._wanted: Digests[None] = Digests()
        """Digests of ghosts that were missed, whose units will enter the main queue."""
        self._ghost_bytes = 0.0
        self._entries = 0
        # Units of the last pass that have not been looked at since, the oldest last.
        self._small_seen: list[_Seen] = []
        self._main_seen: list[_Seen] = []
        self._again: list[_Seen] = []
        """Units of `_main_seen` that entered again in this round."""
        self._round = 0

    def rank(self, units: Units) -> Ranks:
        hits = units.hits + (units.expected > units.last_access)
        keys, nbytes = entered(units), units.nbytes
        digests = units.digest
        self._enter_wanted(digests, keys)
        found = [self._main.kept.get(digest, _OUTSIDE) for digest in digests.tolist()]
        numbers, spent = np.array(found, np.int64).reshape(-1, 2).T
        is_main = numbers >= 0
        uses = np.clip(np.where(is_main, hits - spent, hits), 0, _MOST_USES)
        # the small queue, from its oldest unit on:   evicted while it has its share or more
        moves = uses >= 2
        size = np.where(is_main, 0, nbytes)
        order = np.lexsort((digests, keys))
        past = before(size, order)
        start = np.zeros(len(order))
        ends = np.where(is_main | moves, 0.0, past + size)[order]
        start[order] = np.maximum.accumulate(np.concatenate([[0.0], ends[:-1]]))
        excess = size.sum(dtype=np.float64) - start >= _SMALL * nbytes.sum(dtype=np.float64)
        small = np.where(excess, np.where(moves, _MOVING, _SMALL_TAIL), _SMALL_REST)
        ranks = GROUP * np.where(is_main, _MAIN[uses], small) + np.where(is_main, numbers, keys)
        self._ghost_bytes = (1 - _SMALL) * nbytes.sum(dtype=np.float64) * (units.population / len(units))
        self._see(order, is_main, np.where(is_main, numbers, keys), digests, hits, uses, excess)
        return np.asarray(ranks, np.float64)

    def left(self, rank: float, digest: int, nbytes: int) -> None:
        group, key = divmod(max(0.0, rank), GROUP)
        if digest in self._main:
            del self._main.kept[digest]
            # The small queue has been looked at before, and had only units to move.
            while self._small_seen and self._small_seen[-1].excess:
                self._move(self._small_seen.pop())
            self._look_at_main(int(np.searchsorted(_MAIN, group)), key)
            return
        while self._small_seen and self._small_seen[-1].key < key:
            self._move(self._small_seen.pop())
        if group == _MOVING:
            while self._small_seen and self._small_seen[-1].excess:
                unit = self._small_seen.pop()
                if unit.digest != digest:
                    self._move(unit)
            self._look_at_main(1, 0)  # it was evicted after it would have moved behind all other units
        else:
            self._ghosts.add(digest, nbytes)
            self._ghosts.trim(self._ghost_bytes)

    def missed(self, digest: int) -> None:
        if self._ghosts.take(digest):
            self._wanted.add(digest, None)

    def _see(self, order: Column, is_main: Column, *columns: Column) -> None:
        """Keep the units that may have to move or to enter again. `columns` are the fields of `_Seen`."""
        keys, _, _, uses, _ = columns
        small = order[::-1]
        small = small[(~is_main & (uses >= 2))[small]]
        main = np.flatnonzero(is_main & (uses > 0))
        main = main[np.argsort(-keys[main])]
        self._small_seen, self._main_seen = (
            list(map(_Seen, *(column[rows].tolist() for column in columns))) for rows in (small, main)
        )
        self._again, self._round = [], 0

    def _move(self, unit: _Seen) -> None:
        """Move a unit from the small queue to the main queue."""
        if unit.digest not in self._main:
            self._add(unit.digest, unit.hits)

    def _look_at_main(self, uses: int, key: float) -> None:
        """Let the units enter again that were looked at before one with these `uses` and this place."""
        #   uses of the evicted unit   0: units before it were looked at once
        #                              1: all units were looked at once, and units before it once more
        while self._round < uses:
            while self._main_seen:
                self._enter_again(self._main_seen.pop())
            self._main_seen, self._again, self._round = self._again[::-1], [], self._round + 1
        while self._main_seen and self._main_seen[-1].key < key:
            self._enter_again(self._main_seen.pop())

    def _enter_again(self, unit: _Seen) -> None:
        if unit.digest in self._main and unit.uses > 0:
            self._add(unit.digest, unit.hits - unit.uses + 1)
            self._again.append(unit._replace(uses=unit.uses - 1))

    def _enter_wanted(self, digests: Column, keys: Column) -> None:
        """Let missed ghosts that were made again enter the main queue, in the order of their creation."""
        wanted = self._wanted.kept
        if not wanted:
            return
        rows = [row for row, digest in enumerate(digests.tolist()) if digest in wanted]
        for row in sorted(rows, key=lambda row: (keys[row], digests[row])):
            wanted.pop(int(digests[row]), None)
            if int(digests[row]) not in self._main:
                self._add(int(digests[row]), 0)

    def _add(self, digest: int, spent: int) -> None:
        self._entries += 1
        self._main.add(digest, _Main(self._entries, spent))


_OUTSIDE: Final = _Main(-1, 0)
