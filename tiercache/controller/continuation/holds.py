"""Host objects of parked requests, which belong to no path of the index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tiercache.controller.context import ControllerContext
from tiercache.core import Locations, PoolName
from tiercache.index import Pin


class HostHold:
    """Host objects, and pins of the index, that a parked request holds until it has ended.

    Copies and calls of the store that use the objects are counted. The objects are freed once the hold is
    closed and nothing uses them any more: a call that hangs may still read or write them.

    Thread safety: the owner's thread.
    """

    def __init__(
        self, holds: HostHolds, own: Mapping[PoolName, Locations], pins: Sequence[Pin], blocks: int
    ) -> None:
        self.own = own
        """Handles, by pool, that nobody else has."""
        self.pins = pins
        self.blocks = blocks
        """Number of host blocks that count against the share of parked requests."""
        self._holds = holds
        self._users = 0
        self._closed = False

    def use(self) -> None:
        """Count one more copy or call that uses the objects."""
        self._users += 1

    def leave(self) -> None:
        """Count one copy or call less."""
        self._users -= 1
        assert self._users >= 0, "more uses of host objects end than began"
        self._free_if_over()

    def close(self) -> None:
        """Free the objects, and release the pins, once nothing uses them. A second call is harmless."""
        if not self._closed:
            self._closed = True
            self._free_if_over()

    def _free_if_over(self) -> None:
        if self._closed and not self._users:
            self._holds.free(self)


class HostHolds:
    """All holds of one controller.

    Thread safety: the owner's thread.
    """

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._held: set[HostHold] = set()
        self.blocks = 0
        """Number of host blocks that count against the share."""

    @property
    def pins(self) -> list[Pin]:
        """Pins that the holds have in the index."""
        return [pin for hold in self._held for pin in hold.pins]

    @property
    def objects(self) -> list[Mapping[PoolName, Locations]]:
        """Handles that the holds have for themselves, by pool."""
        return [hold.own for hold in self._held]

    def take(self, need: Mapping[PoolName, int], pins: Sequence[Pin] = (), blocks: int = 0) -> HostHold:
        """Take host objects, with evictions if necessary; the hold then owns `pins` too.

        Raises PoolFullError, with nothing taken, if there is no room.
        """
        hold = HostHold(self, self._context.allocator.take_host(need), pins, blocks)
        self._held.add(hold)
        self._count(blocks)
        return hold

    def free(self, hold: HostHold) -> None:
        """Free the objects of a hold, and release its pins."""
        self._held.remove(hold)
        for pool, handles in hold.own.items():
            self._context.allocator.free_host(pool, handles)
        for pin in hold.pins:
            pin.release()
        self._count(-hold.blocks)
        # Commits and prefetches that wait for room are offered again.
        self._context.in_flight.landed = True

    def _count(self, blocks: int) -> None:
        self.blocks += blocks
        self._context.metrics.set("parked_bytes", to=self.blocks * self._context.arena.block_bytes)
