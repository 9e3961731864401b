"""Device pools over vLLM's tensors, whose blocks vLLM's own manager hands out.

A page has as many tokens as the largest block. Of a group with smaller blocks it has several, and each place
within a page counts as a group of its own here:

    page                |       0       |       1       |
    blocks of one group |       4       |       9       |     one group
    of another          |   7   |   2   |   3   |   8   |     two groups: 7, 3 and 2, 8
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import torch

from tiercache.core import ABSENT, HitPolicy, Locations, PoolName
from tiercache.errors import ConfigError
from tiercache.geometry import Geometry, Segment
from tiercache.pools import DevicePool

Layer: TypeAlias = tuple[int, str, torch.Tensor]
"""Number and name of a layer, and the bytes of its blocks: uint8, shape [blocks, bytes of a block]."""


class BlockPool(DevicePool):
    """Objects that vLLM has in several blocks: one of each group of one kind.

    A slot is a number of this pool, which stands for one block of each group while the slot is in use. `lend`
    takes slots for blocks; `free` gives them back, and leaves the blocks to vLLM.

    Thread safety: as `DevicePool`; `lend` belongs to the owner's thread.
    """

    _blocks = np.empty((0, 0), np.int64)
    """Blocks by slot and group; 0 for none."""
    _group = np.empty(0, np.int64)
    """Group of each segment."""

    @classmethod
    def over(cls, name: PoolName, page_size: int, groups: Sequence[Sequence[Layer]]) -> Self:
        """Make the pool of groups of layers, whose tensors all have the same number of blocks.

        Raises GeometryError for tensors that do not fit.
        """
        policy = HitPolicy.ALL_PAGES if name is PoolName.KV else HitPolicy.TRAILING_PAGES
        layers = sorted((*layer[:2], at, layer[2]) for at, group in enumerate(groups) for layer in group)
        segments = (Segment(n, label, tuple(t.shape[1:]), "uint8") for n, label, _, t in layers)
        geometry = Geometry(name, page_size, tuple(segments), policy, layout="vllm block")
        pool = cls.from_tensors(geometry, {(n, label): tensor for n, label, _, tensor in layers})
        pool._blocks = np.zeros((pool.capacity, len(groups)), np.int64)
        pool._group = np.array([at for _, _, at, _ in layers], np.int64)
        return pool

    def lend(self, blocks: Locations) -> Locations:
        """Return slots that stand for `blocks`: int64, shape [groups, n], one row for each group.

        Raises PoolFullError, with nothing taken, for too few slots.
        """
        slots = self.alloc(blocks.shape[1])
        self._blocks[slots] = blocks.T
        return slots

    def places(self, slots: Any) -> Locations:
        """Return the block of each segment; ABSENT where the group has none."""
        found = self._blocks[self.checked(slots)][:, self._group]
        return np.where(found == 0, ABSENT, found)


class Reach(NamedTuple):
    """Part of the tokens before it that a token sees."""

    tokens: int
    """Length of the window, with the token itself; or of the chunks of which it sees its own."""
    is_chunk: bool = False
    cut: int = 0
    """Number of tokens of a page behind the block."""

    def first(self, depth: int) -> int:
        """Return the first token that the token at `depth` sees, which may be itself."""
        return depth // self.tokens * self.tokens if self.is_chunk else max(0, depth - self.tokens + 1)

    def pages(self, page_size: int) -> int:
        """Return of how many pages, at most, a token at the begin of a page sees the block."""
        return max(int(not self.cut), -(-(self.tokens - 1 - self.cut) // page_size))


class WindowPool(BlockPool):
    """States of attention with windows: what a token at one depth sees of the tokens before it.

    An object has the last pages of each group of layers, as many as may be seen. Where fewer are, it has the
    first of them several times, or the last page where none is.

    Thread safety: as `BlockPool`.
    """

    _reaches: Sequence[Reach] = ()

    @classmethod
    def over_windows(
        cls, page_size: int, groups: Sequence[Sequence[Layer]], reaches: Sequence[Reach]
    ) -> Self:
        """Make the pool of groups of layers, as `over`, with the reach of each group."""
        parts = [
            [(number, f"{label} {back}", tensor) for number, label, tensor in group]
            for group, reach in zip(groups, reaches, strict=True)
            for back in range(reach.pages(page_size), 0, -1)
        ]
        pool = cls.over(PoolName.SWA, page_size, parts)
        pool._reaches = reaches
        return pool

    @property
    def reach(self) -> int:
        """Number of pages that are seen at most."""
        return max(reach.pages(self.geometry.page_size) for reach in self._reaches)

    def seen(self, table: Locations, depth: int, begin: int | None = None) -> Locations | None:
        """Return the blocks of the object at `depth`, to be lent: shape [blocks, 1]; None if one is missing.

        `table` has the blocks of a request: shape [groups, pages], 0 where is none. With `begin`, the object
        is to be loaded, and only into pages behind that one: the others have the block 0.
        """
        size, found = self.geometry.page_size, []
        for row, reach in zip(table, self._reaches, strict=True):
            count = reach.pages(size)
            pages, first = np.arange(depth - count, depth), (reach.first(depth * size) + reach.cut) // size
            at = row[np.maximum(pages, min(first, depth - 1))]
            if begin is not None:
                at = at[pages >= max(begin, first)]
            if not at.all():
                return None
            found += [np.zeros(count - len(at), np.int64), at]
        return np.concatenate(found)[:, None]


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
