"""Parts in which the objects of a parked request move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from tiercache.controller.context import ControllerContext
from tiercache.controller.operations import PART_BYTES
from tiercache.core import ABSENT, CacheTransferUnits, Locations, Mask, PoolName

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

    def units(
        self, sources: Places, destinations: Places, wanted: Mapping[PoolName, Mask]
    ) -> list[CacheTransferUnits]:
        """Return the parcel's objects that are marked in `wanted` as transfer units."""
        there = self.pick(destinations, wanted)
        return [
            CacheTransferUnits(pool, at, there[pool])
            for pool, at in self.pick(sources, wanted).items()
            if len(at)
        ]


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
    at_end = np.arange(pages) == pages - 1
    return {
        pool: np.ones(pages, np.bool_) if pool in context.index.page_pools else at_end.copy()
        for pool in context.pools
    }


def spread(
    pages: int, wanted: Mapping[PoolName, Mask], found: Mapping[PoolName, Locations]
) -> dict[PoolName, Locations]:
    """Return places with the locations `found` where `wanted` is set, in order, and absent elsewhere."""
    places = {}
    for pool, mask in wanted.items():
        places[pool] = np.full(pages, ABSENT, np.int64)
        places[pool][mask] = found[pool]
    return places


def counts(wanted: Mapping[PoolName, Mask]) -> dict[PoolName, int]:
    """Return the number of marked objects, by pool."""
    return {pool: int(np.count_nonzero(mask)) for pool, mask in wanted.items()}
