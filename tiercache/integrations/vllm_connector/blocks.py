"""Device pools over vLLM's tensors, whose blocks vLLM's own manager hands out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tiercache.core import HitPolicy, Locations, PoolName
from tiercache.errors import ConfigError
from tiercache.geometry import Geometry, Segment
from tiercache.pools import DevicePool
from tiercache.pools.device import SegmentTable


class BlockPool(DevicePool):
    """Objects that vLLM has in several blocks: one of each group of one kind.

    A slot is a number of this pool, which stands for one block of each group while the slot is in use. `lend`
    takes slots for blocks; `free` gives them back, and leaves the blocks to vLLM.

    Thread safety: as `DevicePool`; `lend` belongs to the owner's thread.
    """

    _groups: Sequence[DevicePool] = ()
    _blocks = np.empty((0, 0), np.int64)

    @classmethod
    def over(
        cls, name: PoolName, page_size: int, groups: Sequence[Sequence[tuple[int, str, torch.Tensor]]]
    ) -> BlockPool:
        """Make the pool of groups of layers: (number, name, tensor of bytes `[blocks, bytes of a block]`).

        All tensors have the same number of blocks. Raises GeometryError for tensors that do not fit.
        """
        policy = HitPolicy.TRAILING_PAGES if name is PoolName.MAMBA else HitPolicy.ALL_PAGES

        def geometry(layers: Sequence[tuple[int, str, torch.Tensor]]) -> Geometry:
            segments = (Segment(n, label, tuple(t.shape[1:]), "uint8") for n, label, t in sorted(layers))
            return Geometry(name, page_size, tuple(segments), policy, layout="vllm block")

        layers = [layer for group in groups for layer in group]
        pool = cls.from_tensors(geometry(layers), {(n, label): tensor for n, label, tensor in layers})
        pool._blocks = np.zeros((len(groups), pool.capacity), np.int64)
        names = [segment.name for segment in pool.geometry.segments]
        pool._groups = [
            DevicePool(
                geometry(group),
                _rows(pool.segments, np.isin(names, [label for _, label, _ in group])),
                pool.capacity,
                pool.device,
                {(n, label): tensor for n, label, tensor in group},
                pool.source,
            )
            for group in groups
        ]
        return pool

    def lend(self, blocks: Locations) -> Locations:
        """Return slots that stand for `blocks`: int64, shape [groups, n], one row for each group.

        Raises PoolFullError, with nothing taken, for too few slots.
        """
        slots = self.alloc(blocks.shape[1])
        self._blocks[:, slots] = blocks
        return slots

    def views(self, slots: Any) -> Sequence[tuple[DevicePool, Locations]]:
        """Return each group's pool, and its blocks of these objects."""
        at = self.checked(slots)
        return [(group, row[at]) for group, row in zip(self._groups, self._blocks, strict=True)]


def _rows(table: SegmentTable, mask: Any) -> SegmentTable:
    """Return the segments in `mask`, which keep their places in the object."""
    columns = (table.base, table.stride, table.length, table.offset, table.layer, table.allocation)
    return SegmentTable(*(column[mask] for column in columns))


def bytes_of(cache: torch.Tensor, blocks: int, nbytes: int, name: str) -> torch.Tensor:
    """Return the bytes of one layer's blocks: uint8, shape [blocks, nbytes], the same memory.

    `cache` is what vLLM gives to the layer; its first dimension counts blocks, or equal parts of blocks.
    Raises ConfigError if the bytes of a block are not contiguous, and at its begin.
    """
    block = cache.unflatten(0, (blocks, -1))  # type: ignore[no-untyped-call]
    dense, size = 1, cache.element_size()
    for length, stride in sorted(zip(block.shape[1:], block.stride()[1:], strict=True), key=lambda d: d[1]):
        if length > 1 and stride != dense:
            break
        dense *= length
    if dense * size < nbytes:
        raise ConfigError(
            f"TierCacheConnector cannot serve the cache of layer {name}, of which a block is not contiguous:"
            f" shape {tuple(cache.shape)}, strides {cache.stride()}; choose another --attention-backend"
        )
    whole = torch.empty(0, dtype=torch.uint8, device=cache.device)
    return whole.set_(
        cache.untyped_storage(), cache.storage_offset() * size, (blocks, nbytes), (block.stride(0) * size, 1)
    )
