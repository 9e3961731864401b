"""Host objects of parked requests, and the parcels in which they move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from tiercache.controller.context import ControllerContext
from tiercache.controller.operations import PART_BYTES
from tiercache.core import Locations, Mask, PoolName
from tiercache.index import Pin


class HostHold:
    """Host objects, and pins of the index, that a parked request holds until it has ended.

    Copies and calls of the store that use the objects are counted. The objects are freed once the hold is
    closed and nothing uses them any more: a call that hangs may still read or write them.
    """

    def __init__(self, holds: HostHolds, own: Mapping[PoolName, Locations], blocks: int) -> None:
        self.own = own
        """Handles, by pool, that nobody else has."""
        self.places: Places = {}
        """Handle of each object of a parked request, those of the index's pages included."""
        self.pins: Sequence[Pin] = ()
        """Pins of the index's pages among them."""
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
    """All holds of one controller."""

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._held: set[HostHold] = set()
        self.blocks = 0
        """Number of host blocks that count against the share."""

    def take(self, need: Mapping[PoolName, int], blocks: int = 0) -> HostHold:
        """Take host objects, with evictions if necessary.

        Raises PoolFullError, with nothing taken, if there is no room.
        """
        hold = HostHold(self, self._context.allocator.take_host(need), blocks)
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


Places: TypeAlias = Mapping[PoolName, Locations]
"""Location of each object by pool, one entry a page. A state has the entry of the last page."""


class Parcel(NamedTuple):
    """Objects of pages [start, end) that move together: of all page pools, or the state of one state pool."""

    pools: tuple[PoolName, ...]
    start: int
    end: int

    def flags(self, wanted: Mapping[PoolName, Mask]) -> dict[PoolName, Mask]:
        """Return the flags of this parcel's objects, by pool."""
        return {pool: wanted[pool][self.start : self.end] for pool in self.pools}

    def pick(self, places: Places, wanted: Mapping[PoolName, Mask]) -> dict[PoolName, Locations]:
        """Return the locations of the parcel's objects that are marked in `wanted`, by pool."""
        return {pool: places[pool][self.start : self.end][mask] for pool, mask in self.flags(wanted).items()}


def cut_parcels(context: ControllerContext, pages: int) -> list[Parcel]:
    """Return the parcels of a request with `pages` pages: pages from the start, then the states."""
    page_pools = context.index.page_pools
    parcels = list[Parcel]()
    if page_pools:
        nbytes = sum(context.host[pool].geometry.nbytes for pool in page_pools)
        step = max(1, min(PART_BYTES, context.options.piece_bytes) // nbytes)
        parcels += [Parcel(page_pools, at, min(at + step, pages)) for at in range(0, pages, step)]
    return [*parcels, *(Parcel((pool,), pages - 1, pages) for pool in context.index.state_pools)]


def all_objects(context: ControllerContext, pages: int) -> dict[PoolName, Mask]:
    """Return flags that mark every page, and the state at the end."""
    depths, paged = np.arange(pages), context.index.page_pools
    return {pool: depths >= (0 if pool in paged else pages - 1) for pool in context.pools}


def counts(wanted: Mapping[PoolName, Mask]) -> dict[PoolName, int]:
    """Return the number of marked objects, by pool."""
    return {pool: int(np.count_nonzero(mask)) for pool, mask in wanted.items()}
