"""Budgets that bound what clients can make the daemon hold: for each client, for each principal, and in total."""

from __future__ import annotations

from asyncio import Future, get_running_loop
from collections import deque
from contextlib import suppress
from typing import Final, NamedTuple


class Budget:
    """A number of units that can be taken and given back; units taken from a budget are taken from its parents as well.

    Waiters are served in the order in which they came, with one exception: a waiter that lacks units of a budget with a parent (a client's
    or a principal's) is passed over. A waiter that lacks units of the outermost budget holds up all waiters behind it, because otherwise
    many small requests would starve a large one.

    Thread safety: the event loop's thread only.
    """

    def __init__(self, limit: int, parent: Budget | None = None) -> None:
        self.limit: Final = limit
        self.held = 0
        self._parent: Final = parent
        self._queue: Final[deque[_Waiter]] = deque() if parent is None else parent._queue

    @property
    def largest(self) -> int:
        """Most units that can be taken at once."""
        return self.limit if self._parent is None else min(self.limit, self._parent.largest)

    def try_take(self, units: int) -> bool:
        """Take `units` now and return True; return False, with nothing taken, if they are not there or others wait."""
        if self._queue or self._lacking(units) is not None:
            return False
        self._hold(units)
        return True

    async def take(self, units: int) -> None:
        """Take `units`, waiting until they are there; raises ValueError for more than `largest`."""
        if units > self.largest:
            raise ValueError(f"{units} are wanted and there are never more than {self.largest}")
        if self.try_take(units):
            return
        waiter = _Waiter(self, units, get_running_loop().create_future())
        self._queue.append(waiter)
        self._serve()
        try:
            await waiter.granted
        except BaseException:
            if waiter.granted.done() and not waiter.granted.cancelled():
                self.give(units)
            else:
                with suppress(ValueError):  # `_serve` has found the cancelled waiter and removed it meanwhile
                    self._queue.remove(waiter)
                self._serve()
            raise

    def give(self, units: int) -> None:
        """Give back `units` that were taken."""
        self._hold(-units)
        self._serve()

    def _lacking(self, units: int) -> Budget | None:
        """Return the outermost budget that has fewer than `units` left; None if all have enough."""
        outer = self._parent._lacking(units) if self._parent else None
        return outer or (self if self.held + units > self.limit else None)

    def _hold(self, units: int) -> None:
        self.held += units
        assert self.held >= 0, "more was given back than was taken"
        if self._parent:
            self._parent._hold(units)

    def _serve(self) -> None:
        for waiter in list(self._queue):
            if waiter.granted.done():  # cancelled, and not yet awake to leave the queue
                self._queue.remove(waiter)
                continue
            lacking = waiter.budget._lacking(waiter.units)
            if lacking is None:
                self._queue.remove(waiter)
                waiter.budget._hold(waiter.units)
                waiter.granted.set_result(None)
            elif lacking._parent is None:
                return  # nothing behind this waiter may take units of the total before it


class _Waiter(NamedTuple):
    budget: Budget
    units: int
    granted: Future[None]
