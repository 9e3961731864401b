"""The null data plane: pools, arena, engine, threads and store that keep real books and move no bytes."""

# ruff: noqa: D102 (the contracts document these methods)

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tiercache.controller import IoThreads
from tiercache.core import BLOCK_ALIGN, CacheTransferUnits, PoolName
from tiercache.errors import SlotError
from tiercache.geometry import Geometry, Segment, state_geometry
from tiercache.policy import ModelProfile
from tiercache.pools import BlockArena, DevicePool
from tiercache.pools.device import SegmentTable
from tiercache.transfer import LayerTicket, Ticket, TransferEngine
from tiercache.transfer.fences import Fence


def geometries(profile: ModelProfile, page_size: int) -> dict[PoolName, Geometry]:
    """Pages and states as large as the model's, as plain bytes; no state pool for a model without states."""
    found = {PoolName.KV: Geometry(PoolName.KV, page_size, (Segment(0, "kv", (page_size, profile.kv_bytes_per_token), "uint8"),))}
    if profile.state_bytes:
        found[PoolName.MAMBA] = state_geometry([(0, "state", (profile.state_bytes,), "uint8")], page_size)
    return found


def device_pool(geometry: Geometry, slots: int) -> DevicePool:
    """A pool of `slots` slots without tensors."""
    one = np.zeros(1, np.int64)
    return DevicePool(geometry, SegmentTable(one.astype(np.uint64), one, geometry.lengths, one, one, one), slots, "null", {})


class NullArena(BlockArena):
    """An arena whose blocks all lie in one and the same piece of memory: what is written is lost. Thread safety: as `BlockArena`."""

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

    def view(self, block: int) -> memoryview:
        if not 0 <= block < self.blocks:
            raise SlotError(f"arena block {block} is out of range; there are {self.blocks}")
        return self._one

    def hold(self) -> memoryview:
        return self._one

    def close(self) -> None:
        pass


def block_bytes(geometry: Geometry) -> int:
    """The block that fits a page: its bytes, rounded up."""
    return max(BLOCK_ALIGN, geometry.padded_nbytes)


class NullEngine(TransferEngine):
    """Every copy is done when it is asked for. Bytes are counted by direction. Thread safety: one thread."""

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

    def fork(self, units: Sequence[CacheTransferUnits], *, stream: int = 0) -> None:
        pass

    def close(self, timeout: float = 30.0) -> None:
        pass

    def _of(self, units: Sequence[CacheTransferUnits]) -> int:
        return sum(len(part) * self._bytes[part.pool] for part in units)


class Inline(IoThreads):
    """Jobs run at once, on the thread that submits them: the order of events is that of the calls. Thread safety: one thread."""

    def __init__(self, name: str, threads: int) -> None:
        pass

    def submit(self, job: Callable[[], None]) -> None:
        job()

    def close(self, timeout: float) -> bool:
        return True
