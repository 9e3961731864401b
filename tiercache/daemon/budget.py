"""Budgets for the resources that clients can make the daemon hold, and leases of arena blocks.

A lease takes the bytes of its blocks from a budget. A client's budget is part of its principal's budget, and
the budgets of all principals are parts of the total:

    total ── principal ── client        a unit taken from a client is taken from all three
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from threading import RLock
from typing import Final, NamedTuple

from tiercache.pools import HostArena

BLOCK_BYTES: Final = 64 << 10
"""Size of a block of the arena in bytes."""
MESSAGE_COPIES: Final = 4
"""Number of times that the bytes of a message with payload are held at once.

One copy is on its way, and of the next message there are the payload, the parsed message and its bytes."""


class Budget:
    """A number of units that can be taken and given back.

    Units taken from a budget are taken from its parents as well. Waiters are served in the order in which
    they came, with one exception: a waiter whose client or principal (a budget with a parent) has too few
    units left is passed over. If too few units of the total (the budget without a parent) are left for a
    waiter, all waiters behind this one wait too. Otherwise many small requests would starve a large one:

        queue: A (principal is short) | B (total is short) | C (small)
        A is passed over, B holds up C although there is room for C.

    Thread safety: any thread; coroutines of the event loop `take`, other threads `wait`.
    """

    def __init__(self, limit: int, parent: Budget | None = None) -> None:
        self.limit: Final = limit
        self.held = 0
        """Units that are taken now."""
        self._parent: Final = parent
        self._queue: Final[deque[_Waiter]] = deque() if parent is None else parent._queue
        """Waiters of all budgets that are parts of the same total, in the order in which they came."""
        self._lock: Final[RLock] = RLock() if parent is None else parent._lock
        """Lock of all budgets that are parts of the same total."""

    @property
    def largest(self) -> int:
        """Maximum number of units that can be taken at once."""
        return self.limit if self._parent is None else min(self.limit, self._parent.largest)

    def try_take(self, units: int) -> bool:
        """Take `units` now and return True; return False if too few are left, or if others already wait."""
        with self._lock:
            if self._queue or self._lacking(units) is not None:
                return False
            self._hold(units)
            return True

    async def take(self, units: int) -> None:
        """Wait until `units` are left and take them; raises ValueError for more than `largest`."""
        if (waiter := self._join(units)) is None:
            return
        try:
            await asyncio.wrap_future(waiter.granted)
        except BaseException:
            self._leave(waiter)
            raise

    def wait(self, units: int, seconds: float) -> None:
        """Do the same in a thread, for at most so many seconds; raises TimeoutError."""
        if (waiter := self._join(units)) is None:
            return
        try:
            waiter.granted.result(seconds)
        except BaseException:
            self._leave(waiter)
            raise

    def _join(self, units: int) -> _Waiter | None:
        """Take `units`, or return the waiter that gets them in its turn."""
        if units > self.largest:
            raise ValueError(f"{units} units are wanted, but at most {self.largest} can be taken")
        if self.try_take(units):
            return None
        waiter = _Waiter(self, units, Future())
        with self._lock:
            self._queue.append(waiter)
            self._serve()
        return waiter

    def _leave(self, waiter: _Waiter) -> None:
        """Give up a wait: leave the queue or, if the units were granted meanwhile, give them back."""
        with self._lock:
            if waiter in self._queue:
                self._queue.remove(waiter)
                self._serve()
            else:
                self.give(waiter.units)

    def give(self, units: int) -> None:
        """Give back `units` that were taken."""
        with self._lock:
            self._hold(-units)
            self._serve()

    def _lacking(self, units: int) -> Budget | None:
        """Return the outermost budget with fewer than `units` left; None if all of them have enough."""
        outer = self._parent._lacking(units) if self._parent else None
        return outer or (self if self.held + units > self.limit else None)

    def _hold(self, units: int) -> None:
        self.held += units
        assert self.held >= 0, "more was given back than was taken"
        if self._parent:
            self._parent._hold(units)

    def _serve(self) -> None:
        """Grant what waiters want, as far as it goes; the caller holds the lock."""
        for waiter in list(self._queue):
            if waiter.granted.cancelled():  # its task has not run yet to leave the queue
                continue
            lacking = waiter.budget._lacking(waiter.units)
            if lacking is None and waiter.granted.set_running_or_notify_cancel():
                self._queue.remove(waiter)
                waiter.budget._hold(waiter.units)
                waiter.granted.set_result(None)
            elif lacking is not None and lacking._parent is None:
                # The total has too few units. If waiters behind this one could take from it, many small
                # requests would keep a large one waiting for ever.
                return


class _Waiter(NamedTuple):
    """Task or thread that waits for units."""

    budget: Budget
    units: int
    granted: Future[None]


class BlockPool:
    """Free blocks of an arena, for leases; budgets see to it that there are enough.

    Thread safety: any thread.
    """

    def __init__(self, arena: HostArena) -> None:
        """Take all blocks of `arena`, each of BLOCK_BYTES bytes."""
        self.views: Final = arena.views
        self._free: Final = arena.alloc(arena.available).tolist()[::-1]

    def take(self, count: int) -> list[int]:
        """Return the numbers of so many blocks, in order, so that neighbours stay neighbours."""
        return sorted(self._free.pop() for _ in range(count))

    def give(self, blocks: list[int]) -> None:
        """Take blocks back."""
        self._free.extend(reversed(blocks))


class Lease:
    """Blocks for a list of objects, held until `release`.

    Thread safety: any thread, one at a time.
    """

    def __init__(self, pool: BlockPool, budget: Budget, counts: Sequence[int]) -> None:
        """Lease blocks whose bytes were taken from the budget."""
        self._pool = pool
        self._budget = budget
        self._blocks = pool.take(sum(counts))
        self.views: Final = pool.views(self._blocks, counts)
        """Views of the blocks of each object, in order; adjacent blocks share one."""

    def release(self) -> None:
        """Give the blocks back. Call this only once."""
        self.views.clear()
        self._pool.give(self._blocks)
        self._budget.give(len(self._blocks) * BLOCK_BYTES)

    @classmethod
    async def take(cls, pool: BlockPool, budget: Budget, lengths: Sequence[int]) -> Lease:
        """Wait until the budget has room, and lease blocks for objects of these lengths (bytes).

        Raises ValueError if the limit of the budget is too small for these blocks.
        """
        counts = blocks_for(lengths)
        await budget.take(sum(counts) * BLOCK_BYTES)
        return cls(pool, budget, counts)

    @classmethod
    def wait(cls, pool: BlockPool, budget: Budget, lengths: Sequence[int], seconds: float) -> Lease:
        """Do the same in a thread, for at most so many seconds; raises TimeoutError."""
        counts = blocks_for(lengths)
        budget.wait(sum(counts) * BLOCK_BYTES, seconds)
        return cls(pool, budget, counts)

    @classmethod
    def try_take(cls, pool: BlockPool, budget: Budget, lengths: Sequence[int]) -> Lease | None:
        """Lease blocks for objects of these lengths (bytes), or return None if the budget has no room now."""
        counts = blocks_for(lengths)
        return cls(pool, budget, counts) if budget.try_take(sum(counts) * BLOCK_BYTES) else None


def blocks_for(lengths: Sequence[int]) -> list[int]:
    """Return the number of blocks that each object of these lengths (bytes) takes."""
    return [-(-length // BLOCK_BYTES) for length in lengths]
