"""What clients can make the daemon hold: bounded for each client, for each principal, and in total."""

from __future__ import annotations

from asyncio import Future, get_running_loop
from collections import deque
from contextlib import suppress
from typing import Final, NamedTuple


class Budget:
    """A number of units of which parts are held for a while. What is held of a budget is held of its parents as well.

    Who waits is served in order, but for this: one who waits for a client's budget does not hold up those who wait for another's. One who
    waits for the total holds up all behind him, else many small wishes would starve a large one.

    Thread safety: the event loop's thread only.
    """

    def __init__(self, limit: int, parent: Budget | None = None) -> None:
        self.limit: Final = limit
        self.held = 0
        self._parent: Final = parent
        self._queue: Final[deque[_Waiter]] = deque() if parent is None else parent._queue

    @property
    def largest(self) -> int:
        """The most that can be taken at once."""
        return self.limit if self._parent is None else min(self.limit, self._parent.largest)

    def try_take(self, units: int) -> bool:
        """Take `units` now, or nothing."""
        if self._queue or self._lacking(units) is not None:
            return False
        self._hold(units)
        return True

    async def take(self, units: int) -> None:
        """Take `units` as soon as they are there; raises ValueError for more than there can ever be."""
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
                with suppress(ValueError):  # somebody who gave back met it meanwhile
                    self._queue.remove(waiter)
                self._serve()
            raise

    def give(self, units: int) -> None:
        """Give back what was taken."""
        self._hold(-units)
        self._serve()

    def _lacking(self, units: int) -> Budget | None:
        """The budget, outermost first, that has not enough left."""
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
                return


class _Waiter(NamedTuple):
    budget: Budget
    units: int
    granted: Future[None]
