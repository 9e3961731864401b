"""Budgets for the resources that clients can make the daemon hold, and leases of arena blocks.

A lease takes the bytes of its blocks from a budget. A client's budget is part of its principal's budget, and
the budgets of all principals are parts of the total:

    total ── principal ── client        a unit taken from a client is taken from all three
"""

from __future__ import annotations

from asyncio import Future, get_running_loop
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from tiercache.core import Locations
from tiercache.pools import HostArena

BLOCK_BYTES: Final = 64 << 10
"""Size of a block of the arena in bytes."""


class Budget:
    """A number of units that can be taken and given back.

    Units taken from a budget are taken from its parents as well. Waiters are served in the order in which
    they came, with one exception: a waiter whose client or principal (a budget with a parent) has too few
    units left is passed over. If too few units of the total (the budget without a parent) are left for a
    waiter, all waiters behind this one wait too. Otherwise many small requests would starve a large one:

        queue: A (principal is short) | B (total is short) | C (small)
        A is passed over, B holds up C although there is room for C.

    Thread safety: the event loop's thread only.
    """

    def __init__(self, limit: int, parent: Budget | None = None) -> None:
        self.limit: Final = limit
        self.held = 0
        """Units that are taken now."""
        self._parent: Final = parent
        self._queue: Final[deque[_Waiter]] = deque() if parent is None else parent._queue
        """Waiters of all budgets that are parts of the same total, in the order in which they came."""

    @property
    def largest(self) -> int:
        """Maximum number of units that can be taken at once."""
        return self.limit if self._parent is None else min(self.limit, self._parent.largest)

    def try_take(self, units: int) -> bool:
        """Take `units` now and return True; return False if too few are left, or if others already wait."""
        if self._queue or self._lacking(units) is not None:
            return False
        self._hold(units)
        return True

    async def take(self, units: int) -> None:
        """Wait until `units` are left and take them; raises ValueError for more than `largest`."""
        if units > self.largest:
            raise ValueError(f"{units} units are wanted, but at most {self.largest} can be taken")
        if self.try_take(units):
            return
        waiter = _Waiter(self, units, get_running_loop().create_future())
        self._queue.append(waiter)
        self._serve()
        try:
            await waiter.granted
        except BaseException:
            # 1. `_serve` grants the units.
            # 2. This task is cancelled before it wakes up: give the units back.
            if waiter.granted.done() and not waiter.granted.cancelled():
                self.give(units)
            else:
                with suppress(ValueError):  # `_serve` may have removed the cancelled waiter already
                    self._queue.remove(waiter)
                self._serve()
            raise

    def give(self, units: int) -> None:
        """Give back `units` that were taken."""
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
        for waiter in list(self._queue):
            if waiter.granted.done():  # cancelled, but its task has not run yet to leave the queue
                self._queue.remove(waiter)
                continue
            lacking = waiter.budget._lacking(waiter.units)
            if lacking is None:
                self._queue.remove(waiter)
                waiter.budget._hold(waiter.units)
                waiter.granted.set_result(None)
            elif lacking._parent is None:
                # The total has too few units. If waiters behind this one could take from it, many small
                # requests would keep a large one waiting for ever.
                return


class _Waiter(NamedTuple):
    budget: Budget
    units: int
    granted: Future[None]


class Lease:
    """Blocks of the arena for a list of objects, held until `release`.

    Thread safety: `views` from any thread; `release` on the event loop's thread.
    """

    block_bytes: Final = BLOCK_BYTES
    """Size of a block in bytes."""

    def __init__(self, arena: HostArena, budget: Budget, blocks: Locations, counts: Sequence[int]) -> None:
        self._arena = arena
        self._budget = budget
        self._blocks = blocks
        at = 0
        self.views: Final[list[list[memoryview]]] = []
        """Views of the blocks of each object, in order."""
        for count in counts:
            self.views.append([arena.view(block) for block in blocks[at : at + count].tolist()])
            at += count

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return len(self._blocks) * BLOCK_BYTES

    def release(self) -> None:
        """Give the blocks back. Call this only once."""
        self.views.clear()
        self._arena.free(self._blocks)
        self._budget.give(self.nbytes)

    @classmethod
    async def take(cls, arena: HostArena, budget: Budget, lengths: Sequence[int]) -> Lease:
        """Wait until the budget has room, and lease blocks for objects of these lengths (bytes).

        Raises ValueError if the limit of the budget is too small for these blocks.
        """
        counts = blocks_for(lengths)
        await budget.take(sum(counts) * BLOCK_BYTES)
        return cls(arena, budget, arena.alloc(sum(counts)), counts)

    @classmethod
    def try_take(cls, arena: HostArena, budget: Budget, lengths: Sequence[int]) -> Lease | None:
        """Lease blocks for objects of these lengths (bytes), or return None if the budget has no room now."""
        counts = blocks_for(lengths)
        if not budget.try_take(sum(counts) * BLOCK_BYTES):
            return None
        return cls(arena, budget, arena.alloc(sum(counts)), counts)


def blocks_for(lengths: Sequence[int]) -> list[int]:
    """Return the number of blocks that each object of these lengths (bytes) takes."""
    return [-(-length // BLOCK_BYTES) for length in lengths]
