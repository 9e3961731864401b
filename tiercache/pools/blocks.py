"""Blocks of an arena, which are free, used or in quarantine.

A block is in quarantine while another process may still write to it. Such a block can be freed, but it is not
handed out before the quarantine ends. Without a quarantine, a late write could damage another object:

    1. a client asks a daemon to read an object into the client's blocks 7 and 8
    2. no answer comes in time; the client frees blocks 7 and 8
    3. another object of the client takes block 7
    4. the daemon wakes up, and writes the first object's bytes into block 7
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final

import numpy as np
import numpy.typing as npt

from tiercache.core import BLOCK_ALIGN, Locations, Mask
from tiercache.errors import ConfigError, SlotError
from tiercache.pools.slots import SlotAllocator, as_locations

_NOUN: Final = "arena block"


def check_block_bytes(block_bytes: int) -> None:
    """Raise ConfigError unless a block has a positive multiple of `BLOCK_ALIGN` bytes."""
    if block_bytes < 1 or block_bytes % BLOCK_ALIGN:
        raise ConfigError(f"a block of {block_bytes} bytes is not possible; use a multiple of {BLOCK_ALIGN}")


class BlockArena(ABC):
    """Arena of `blocks` blocks of `block_bytes` bytes each, which objects of all kinds share.

    A block that no caller owns is *withheld* while it is under quarantine: the allocator counts it as used.
    When all quarantines on the block have been lifted, the owner's next call frees it.

    Subclasses provide the memory. Raises ConfigError unless `block_bytes` is a positive multiple of
    `BLOCK_ALIGN`.

    Thread safety: `alloc`, `free`, `available`, `withheld` and `close` belong to one owner thread. Any thread
    may use `views`, `hold`, `quarantine`, what that returned, `is_quarantined`, `address`, `nbytes`
    and `fd`. The lock is held only for a few numpy calls.
    """

    fd: int
    """File descriptor of the region's memfd (a file in memory); -1 if no other process can map the region."""
    address: int
    """Address of the first block in this process; 0 if the arena has no memory."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        check_block_bytes(block_bytes)
        self.block_bytes = block_bytes
        self.allocator = SlotAllocator(blocks, noun=_NOUN)
        self._is_watched = False
        """Whether a quarantine is in force, a block is withheld or a change waits for `_apply_changes`.

        While it is False, the owner uses the allocator directly.
        """
        self._quarantine_lock = Lock()
        # Two columns by block, shape [blocks], allocated with the first quarantine.
        self._counts: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._withheld: Mask = np.empty(0, np.bool_)
        self._held = 0
        """Number of blocks that are withheld."""
        self._in_force = 0
        """Number of (quarantine, block) pairs that have not been lifted."""
        self._changes: list[Locations] = []
        """Blocks whose count changed since the owner's last `_apply_changes`."""

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
        if self._is_watched:
            self._apply_changes()
        return self.allocator.available

    @property
    def withheld(self) -> int:
        """Number of blocks that no caller owns and that are not handed out, because of a quarantine."""
        if self._is_watched:
            self._apply_changes()
        return self._held

    def alloc(self, n_blocks: int) -> Locations:
        """Take `n_blocks` free blocks and return their numbers: int64, shape [n_blocks], in any order.

        Raises PoolFullError, with nothing taken, if fewer are free.
        """
        if self._is_watched:
            self._apply_changes()
        return self.allocator.alloc(n_blocks)

    def free(self, blocks: npt.ArrayLike) -> None:
        """Give blocks back. Those under quarantine are withheld.

        Raises SlotError, with nothing freed, as `SlotAllocator.free` does. Works after `close` too, so that
        the arena and its users can be closed in any order.
        """
        if self._is_watched:
            self._apply_changes()
        if not self._is_watched:
            self.allocator.free(blocks)
            return
        array = as_locations(blocks, self.blocks, _NOUN)
        spent = array[self._withheld[array]]
        if len(spent):
            raise SlotError(f"{_NOUN} {spent[0]} is free already; give each back once")
        self.allocator.free(array)
        with self._quarantine_lock:
            isolated = self._counts[array] > 0
        self._withdraw(array[isolated])

    def quarantine(self, ranges: Sequence[tuple[int, int]]) -> Callable[[], None]:
        """Put every block that these byte ranges touch under quarantine, and return a function that lifts it.

        Each range is (offset, length) in bytes. A block under quarantine can be freed, and is then withheld.
        Quarantines may overlap. After all quarantines on a withheld block were lifted, the owner's next use
        of `alloc`, `free` or `available` frees the block.

        A second call of that function does nothing. Quarantines may also begin and end after `close`. Raises
        SlotError for a range that is not inside the arena.

        Any thread may call this method. The caller guarantees that no `alloc` hands out a free block of these
        ranges at the same time.
        """
        spans = [np.arange(start, stop) for start, stop in self._spans(ranges)]
        blocks = np.unique(np.concatenate(spans)) if spans else np.empty(0, np.int64)
        with self._quarantine_lock:
            if not len(self._counts):
                self._counts = np.zeros(self.blocks, np.int32)
                self._withheld = np.zeros(self.blocks, np.bool_)
            self._change(blocks, 1)
        pending = [blocks]

        def lift() -> None:
            with self._quarantine_lock:
                if pending:
                    self._change(pending.pop(), -1)

        return lift

    def is_quarantined(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Return whether a block that these byte ranges touch is under quarantine; any thread may call.

        Raises SlotError for a range that is not inside the arena.
        """
        spans = self._spans(ranges)
        with self._quarantine_lock:
            return bool(self._in_force) and any(self._counts[start:stop].any() for start, stop in spans)

    @abstractmethod
    def views(self, blocks: npt.ArrayLike, counts: npt.ArrayLike) -> list[list[memoryview]]:
        """Return writable views of the blocks of objects, one for each run of adjacent blocks.

        `blocks` has the blocks of all objects, one object after the other; `counts` how many each has.
        """

    @abstractmethod
    def hold(self) -> memoryview:
        """Return the bytes of all blocks, for callers that use `address`.

        The region stays mapped while this view lives, even after `close`.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the region. A second call does nothing."""

    def _spans(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the blocks [start, stop) that each of these byte ranges touches."""
        for offset, length in ranges:
            if offset < 0 or length < 0 or offset + length > self.nbytes:
                raise SlotError(
                    f"{length} bytes at offset {offset} are not inside the arena of {self.nbytes} bytes"
                )
        size = self.block_bytes
        return [(offset // size, -(-(offset + length) // size)) for offset, length in ranges if length]

    def _apply_changes(self) -> None:
        """Withhold free blocks that came under quarantine; free withheld ones whose quarantine ended."""
        # What becomes of a block whose quarantine changed:
        #             under quarantine                    no longer under quarantine
        #   used      stays with its owner until `free`   stays with its owner
        #   free      leaves the free stack, is withheld  stays free
        #   withheld  stays withheld                      goes back on the free stack
        with self._quarantine_lock:
            changes, self._changes = self._changes, []
            changed = np.unique(np.concatenate(changes)) if changes else np.empty(0, np.int64)
            isolated = self._counts[changed] > 0
        back = changed[~isolated & self._withheld[changed]]
        self._mark(back, False)
        self.allocator.free(back)
        self._withdraw(changed[isolated & ~self.allocator.allocated(changed)])
        # `_is_watched` must not become False while a change waits. Without the lock and the check of
        # `_changes`, block 7 could be handed out in spite of its quarantine:
        #   1. owner: takes the changes above, and finds that no block is under quarantine any more
        #   2. other thread: `quarantine` puts the free block 7 under quarantine, and sets `_is_watched`
        #   3. owner: clears `_is_watched`
        #   4. owner: `alloc` sees no quarantine, skips `_apply_changes`, and hands out block 7
        with self._quarantine_lock:
            self._is_watched = bool(self._in_force or self._held or self._changes)

    def _change(self, blocks: Locations, by: int) -> None:
        self._counts[blocks] += by
        self._in_force += by
        self._changes.append(blocks)
        self._is_watched = True

    def _withdraw(self, blocks: Locations) -> None:
        """Take these blocks off the free stack, and leave the others on it in their order."""
        if not len(blocks):
            return
        self._mark(blocks, True)
        free = self.allocator.alloc(self.allocator.available)
        self.allocator.free(free[~self._withheld[free]])

    def _mark(self, blocks: Locations, withheld: bool) -> None:
        self._withheld[blocks] = withheld
        self._held += len(blocks) if withheld else -len(blocks)
