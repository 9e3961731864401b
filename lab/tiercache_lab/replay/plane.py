"""Null versions of the device pools, the arena, the transfer engine and the I/O threads.

They allocate and count, but move no bytes. The null store is in `tiercache_lab.replay.store`.
"""

# ruff: noqa: D102 (the contracts document these methods)

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tiercache.controller import IoThreads
from tiercache.core import BLOCK_ALIGN, CacheTransferUnits, PoolName
from tiercache.errors import ConfigError
from tiercache.geometry import Geometry, Segment, state_geometry
from tiercache.policy import ModelProfile
from tiercache.pools import BlockArena, DevicePool
from tiercache.pools.device import SegmentTable
from tiercache.transfer import LayerTicket, Ticket, TransferEngine
from tiercache.transfer.base import Fence


def geometries(profile: ModelProfile, page_size: int) -> dict[PoolName, Geometry]:
    """Return one geometry per pool, whose objects are plain bytes and as large as those of the model.

    A model without states has no state pool, and one without KV no page pool. Raises ConfigError for a model
    with neither.
    """
    found: dict[PoolName, Geometry] = {}
    if profile.kv_bytes_per_token:
        found[PoolName.KV] = Geometry(
            PoolName.KV, page_size, (Segment(0, "kv", (page_size, profile.kv_bytes_per_token), "uint8"),)
        )
    elif not profile.state_bytes:
        raise ConfigError(f"model {profile.name} has neither KV nor states, so a cache has nothing to keep")
    if profile.state_bytes:
        found[PoolName.MAMBA] = state_geometry([(0, "state", (profile.state_bytes,), "uint8")], page_size)
    return found


def device_pool(geometry: Geometry, slots: int) -> DevicePool:
    """Return a pool of `slots` slots without tensors."""
    one = np.zeros(1, np.int64)
    return DevicePool(
        geometry, SegmentTable(one.astype(np.uint64), one, geometry.lengths, one, one, one), slots, "null", {}
    )


class NullArena(BlockArena):
    """Arena whose blocks all share the memory of one block, so that nothing written can be read back.

    Thread safety: as `BlockArena`.
    """

    fd = -1
    address = 0

    def __init__(self, nbytes: int, block_bytes: int) -> None:
        super().__init__(nbytes // block_bytes, block_bytes)
        self._one = memoryview(bytearray(block_bytes))
        self.peak = 0

    def alloc(self, n_blocks: int) -> Any:
        taken = super().alloc(n_blocks)
        self.peak = max(self.peak, self.blocks - self.available)
        return taken

    def views(self, blocks: npt.ArrayLike, counts: npt.ArrayLike) -> list[list[memoryview]]:
        return [[self._one] * count for count in np.asarray(counts).tolist()]

    def hold(self) -> memoryview:
        return self._one

    def close(self) -> None:
        pass


def block_bytes(pools: Mapping[PoolName, Geometry]) -> int:
    """Return the bytes of a block: those of a page, or of a state if there are no pages, rounded up."""
    return max(BLOCK_ALIGN, (pools.get(PoolName.KV) or pools[PoolName.MAMBA]).padded_nbytes)


class NullEngine(TransferEngine):
    """Transfer engine that copies nothing and counts the bytes of each direction.

    Each transfer ends before the call that starts it returns. Thread safety: one thread.
    """

    def __init__(self, object_bytes: Mapping[PoolName, int]) -> None:
        self._bytes = object_bytes
        self.stored_bytes = 0
        self.loaded_bytes = 0

    def store(self, units: Sequence[CacheTransferUnits], *, after: Sequence[Fence] = ()) -> Ticket:
        self.stored_bytes += self._of(units)
        ticket = Ticket()
        ticket.finish()
        return ticket

    def load(self, units: Sequence[CacheTransferUnits], *, after: Sequence[Fence] = ()) -> LayerTicket:
        self.loaded_bytes += self._of(units)
        ticket = LayerTicket(())
        ticket.finish()
        return ticket

    def close(self, timeout: float = 30.0) -> None:
        pass

    def _of(self, units: Sequence[CacheTransferUnits]) -> int:
        return sum(len(part) * self._bytes[part.pool] for part in units)


class Inline(IoThreads):
    """Replacement for I/O threads that runs each job at once, in the calling thread.

    Events are therefore posted in the order of the calls. Thread safety: one thread.
    """

    def __init__(self, name: str, threads: int) -> None:
        pass

    def submit(self, job: Callable[[], None]) -> None:
        job()

    def close(self, timeout: float) -> bool:
        return True
