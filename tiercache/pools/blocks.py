"""The books of an arena: uniform blocks, which of them are free, and which must not be handed out for the time being."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tiercache.core import BLOCK_ALIGN, Locations
from tiercache.errors import ConfigError, SlotError
from tiercache.pools.embargo import Embargoes
from tiercache.pools.slots import SlotAllocator

_NOUN: Final = "arena block"


class BlockArena(ABC):
    """`blocks` blocks of `block_bytes` bytes each: one byte budget for all kinds of objects. Where the bytes are is the subclass's affair.

    Thread safety: `alloc`, `free`, `available`, `withheld` and `close` belong to one owner thread; `view`, `hold`, `embargo`, `address`,
    `nbytes` and `fd` may be used from any.
    """

    fd: int
    """The memfd of the region; -1 where no other process could map it."""
    address: int
    """Where this process has the first block mapped; 0 where there is no memory."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        if block_bytes < 1 or block_bytes % BLOCK_ALIGN:
            raise ConfigError(f"a block of {block_bytes} bytes is not possible; use a multiple of {BLOCK_ALIGN}")
        self.block_bytes = block_bytes
        self.allocator = SlotAllocator(blocks, noun=_NOUN)
        self._embargoes = Embargoes(self.allocator, noun=_NOUN)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.blocks * self.block_bytes

    @property
    def blocks(self) -> int:
        """All blocks, free and used."""
        return self.allocator.capacity

    @property
    def available(self) -> int:
        """Free blocks."""
        if self._embargoes.active:
            self._embargoes.settle()
        return self.allocator.available

    @property
    def withheld(self) -> int:
        """Blocks that are neither free nor anybody's: they would be free without their embargo."""
        if self._embargoes.active:
            self._embargoes.settle()
        return self._embargoes.withheld

    def alloc(self, n_blocks: int) -> Locations:
        """Take blocks: int64, shape [n_blocks], not necessarily adjacent. Raises PoolFullError, with nothing taken, if fewer are free."""
        if self._embargoes.active:
            self._embargoes.settle()
        return self.allocator.alloc(n_blocks)

    def free(self, blocks: npt.ArrayLike) -> None:
        """Give blocks back, all or none (SlotError). Allowed after `close`, so that owners can wind up in any order."""
        if self._embargoes.active:
            self._embargoes.free(blocks)
        else:
            self.allocator.free(blocks)

    def embargo(self, ranges: Sequence[tuple[int, int]]) -> Callable[[], None]:
        """Hand out no block that one of these (offset, length) byte ranges touches, until the callable that comes back is called.

        Such a block can be freed, and is withheld then: it comes back with the owner's next `alloc`, `free` or `available` behind the last
        lift of the embargoes on it, which may overlap. Lifting twice is harmless, as is all of it after `close`. Raises SlotError for a
        range that is not inside the arena. Any thread; a block that is free must not be on its way out in an `alloc` meanwhile.
        """
        for offset, length in ranges:
            if offset < 0 or length < 0 or offset + length > self.nbytes:
                raise SlotError(f"{length} bytes at {offset} are not inside the arena's {self.nbytes}")
        size = self.block_bytes
        spans = [np.arange(offset // size, -(-(offset + length) // size), dtype=np.int64) for offset, length in ranges if length]
        return self._embargoes.begin(np.unique(np.concatenate(spans)) if spans else np.empty(0, np.int64))

    @abstractmethod
    def view(self, block: int) -> memoryview:
        """The bytes of a block, writable; a slice, not a copy."""

    @abstractmethod
    def hold(self) -> memoryview:
        """The bytes of all blocks. For who works with `address`: as long as this view lives, the region stays mapped, `close` or not."""

    @abstractmethod
    def close(self) -> None:
        """Release the region; twice is harmless."""

    def check_integrity(self) -> None:
        """Free, used and withheld blocks partition the arena; raises AssertionError otherwise. Call it when nothing is under way."""
        self.allocator.check_integrity()
        self._embargoes.check_integrity()
