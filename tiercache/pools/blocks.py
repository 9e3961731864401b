"""Bookkeeping of an arena: uniform blocks, which of them are free, and which must not be handed out for the time being."""

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
    """Arena of `blocks` blocks of `block_bytes` bytes each: one byte budget for all kinds of objects. Subclasses provide the memory.

    Thread safety: `alloc`, `free`, `available`, `withheld` and `close` belong to one owner thread; `view`, `hold`, `embargo`, `address`,
    `nbytes` and `fd` may be used from any.
    """

    fd: int
    """File descriptor of the region's memfd; -1 where no other process can map it."""
    address: int
    """Address of the first block in this process; 0 where there is no memory."""

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
        """Number of all blocks, free and used."""
        return self.allocator.capacity

    @property
    def available(self) -> int:
        """Number of free blocks."""
        if self._embargoes.active:
            self._embargoes.settle()
        return self.allocator.available

    @property
    def withheld(self) -> int:
        """Number of blocks that are neither free nor owned: they would be free without their embargo."""
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
        """Hand out no block that one of these (offset, length) byte ranges touches, until the returned callable is called.

        Such a block can be freed, and is withheld then: it comes back with the owner's next `alloc`, `free` or `available` after the last
        lift of the embargoes on it, which may overlap. Lifting twice is harmless, and so are embargoes and lifts after `close`. Raises
        SlotError for a range that is not inside the arena. May be called from any thread; the caller guarantees that no `alloc` is handing
        out a free block of the ranges meanwhile.
        """
        for offset, length in ranges:
            if offset < 0 or length < 0 or offset + length > self.nbytes:
                raise SlotError(f"{length} bytes at {offset} are not inside the arena's {self.nbytes}")
        size = self.block_bytes
        spans = [np.arange(offset // size, -(-(offset + length) // size), dtype=np.int64) for offset, length in ranges if length]
        return self._embargoes.begin(np.unique(np.concatenate(spans)) if spans else np.empty(0, np.int64))

    @abstractmethod
    def view(self, block: int) -> memoryview:
        """Return the bytes of a block, writable; a slice, not a copy."""

    @abstractmethod
    def hold(self) -> memoryview:
        """Return the bytes of all blocks, for callers that use `address`: the region stays mapped while this view lives, even closed."""

    @abstractmethod
    def close(self) -> None:
        """Release the region; twice is harmless."""

    def check_integrity(self) -> None:
        """Check that free, used and withheld blocks partition the arena; raise AssertionError otherwise.

        Call it when nothing is under way.
        """
        self.allocator.check_integrity()
        self._embargoes.check_integrity()
