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


class Quarantine:
    """Quarantine on the slots of one allocator.

    The allocator's owner is the one thread that calls `alloc` and `free`.

    A slot that no caller owns is *withheld* while it is under quarantine: the allocator counts it as used.
    When all quarantines on the slot have been lifted, the owner's next `apply_changes` frees the slot.

    `active` is True while a quarantine is in force, a slot is withheld or a change waits for `apply_changes`.
    While `active` is False, the owner may use the allocator directly.

    Thread safety: any thread may call `begin`, the function that it returned, and `covers`, and may read
    `active`. The rest belongs to the allocator's owner. The lock is held only for a few numpy calls.
    """

    def __init__(self, allocator: SlotAllocator, *, noun: str) -> None:
        self.active = False
        self._allocator = allocator
        self._noun = noun
        self._lock = Lock()
        # Two columns by slot, shape [capacity], allocated with the first quarantine.
        self._counts: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._withheld: Mask = np.empty(0, np.bool_)
        self._held = 0
        """Number of slots that are withheld."""
        self._in_force = 0
        """Number of (quarantine, slot) pairs that have not been lifted."""
        self._changes: list[Locations] = []
        """Slots whose count changed since the owner's last `apply_changes`."""

    @property
    def withheld(self) -> int:
        """Number of withheld slots, as of the last `apply_changes`."""
        return self._held

    def begin(self, slots: Locations) -> Callable[[], None]:
        """Put distinct slots under quarantine, and return the function that lifts this quarantine.

        A second call of that function does nothing.
        """
        with self._lock:
            if not len(self._counts):
                self._counts = np.zeros(self._allocator.capacity, np.int32)
                self._withheld = np.zeros(self._allocator.capacity, np.bool_)
            self._change(slots, 1)
        pending = [slots]

        def lift() -> None:
            with self._lock:
                if pending:
                    self._change(pending.pop(), -1)

        return lift

    def covers(self, start: int, stop: int) -> bool:
        """Return whether one of the slots [start, stop) is under quarantine."""
        with self._lock:
            return bool(self._in_force and self._counts[start:stop].any())

    def apply_changes(self) -> None:
        """Withhold free slots that came under quarantine, and free withheld slots whose quarantine ended."""
        # What becomes of a slot whose quarantine changed:
        #             under quarantine                    no longer under quarantine
        #   used      stays with its owner until `free`   stays with its owner
        #   free      leaves the free stack, is withheld  stays free
        #   withheld  stays withheld                      goes back on the free stack
        with self._lock:
            changes, self._changes = self._changes, []
            changed = np.unique(np.concatenate(changes)) if changes else np.empty(0, np.int64)
            isolated = self._counts[changed] > 0
        back = changed[~isolated & self._withheld[changed]]
        self._mark(back, False)
        self._allocator.free(back)
        self._withdraw(changed[isolated & ~self._allocator.allocated(changed)])
        # `active` must not become False while a change waits. Without the lock and the check of `_changes`,
        # slot 7 could be handed out in spite of its quarantine:
        #   1. owner: takes the changes above, and finds that no slot is under quarantine any more
        #   2. other thread: `begin` puts the free slot 7 under quarantine, and sets `active`
        #   3. owner: clears `active`
        #   4. owner: `alloc` sees no quarantine, skips `apply_changes`, and hands out slot 7
        with self._lock:
            self.active = bool(self._in_force or self._held or self._changes)

    def free(self, slots: npt.ArrayLike) -> None:
        """Free slots as the allocator does, but withhold those under quarantine.

        Raises SlotError, with nothing freed, as `SlotAllocator.free` does.
        """
        self.apply_changes()
        if not self.active:
            self._allocator.free(slots)
            return
        array = as_locations(slots, self._allocator.capacity, self._noun)
        spent = array[self._withheld[array]]
        if len(spent):
            raise SlotError(f"{self._noun} {spent[0]} is free already; give each back once")
        self._allocator.free(array)
        with self._lock:
            isolated = self._counts[array] > 0
        self._withdraw(array[isolated])

    def _change(self, slots: Locations, by: int) -> None:
        self._counts[slots] += by
        self._in_force += by
        self._changes.append(slots)
        self.active = True

    def _withdraw(self, slots: Locations) -> None:
        """Take these slots off the free stack, and leave the others on it in their order."""
        if not len(slots):
            return
        self._mark(slots, True)
        free = self._allocator.alloc(self._allocator.available)
        self._allocator.free(free[~self._withheld[free]])

    def _mark(self, slots: Locations, withheld: bool) -> None:
        self._withheld[slots] = withheld
        self._held += len(slots) if withheld else -len(slots)


def check_block_bytes(block_bytes: int) -> None:
    """Raise ConfigError unless a block has a positive multiple of `BLOCK_ALIGN` bytes."""
    if block_bytes < 1 or block_bytes % BLOCK_ALIGN:
        raise ConfigError(f"a block of {block_bytes} bytes is not possible; use a multiple of {BLOCK_ALIGN}")


class BlockArena(ABC):
    """Arena of `blocks` blocks of `block_bytes` bytes each, which objects of all kinds share.

    Subclasses provide the memory. Raises ConfigError unless `block_bytes` is a positive multiple of
    `BLOCK_ALIGN`.

    Thread safety: `alloc`, `free`, `available`, `withheld` and `close` belong to one owner thread. Any thread
    may use `view`, `hold`, `quarantine`, `is_quarantined`, `address`, `nbytes` and `fd`.
    """

    fd: int
    """File descriptor of the region's memfd (a file in memory); -1 if no other process can map the region."""
    address: int
    """Address of the first block in this process; 0 if the arena has no memory."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        check_block_bytes(block_bytes)
        self.block_bytes = block_bytes
        self.allocator = SlotAllocator(blocks, noun=_NOUN)
        self._quarantine = Quarantine(self.allocator, noun=_NOUN)

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
        if self._quarantine.active:
            self._quarantine.apply_changes()
        return self.allocator.available

    @property
    def withheld(self) -> int:
        """Number of blocks that no caller owns and that are not handed out, because of a quarantine."""
        if self._quarantine.active:
            self._quarantine.apply_changes()
        return self._quarantine.withheld

    def alloc(self, n_blocks: int) -> Locations:
        """Take `n_blocks` free blocks and return their numbers: int64, shape [n_blocks], in any order.

        Raises PoolFullError, with nothing taken, if fewer are free.
        """
        if self._quarantine.active:
            self._quarantine.apply_changes()
        return self.allocator.alloc(n_blocks)

    def free(self, blocks: npt.ArrayLike) -> None:
        """Give blocks back.

        Raises SlotError, with nothing freed, as `SlotAllocator.free` does. Works after `close` too, so that
        the arena and its users can be closed in any order.
        """
        if self._quarantine.active:
            self._quarantine.free(blocks)
        else:
            self.allocator.free(blocks)

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
        return self._quarantine.begin(np.unique(np.concatenate(spans)) if spans else np.empty(0, np.int64))

    def is_quarantined(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Return whether a block that these byte ranges touch is under quarantine; any thread may call.

        Raises SlotError for a range that is not inside the arena.
        """
        return any(self._quarantine.covers(*span) for span in self._spans(ranges))

    def _spans(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the blocks [start, stop) that each of these byte ranges touches."""
        for offset, length in ranges:
            if offset < 0 or length < 0 or offset + length > self.nbytes:
                raise SlotError(
                    f"{length} bytes at offset {offset} are not inside the arena of {self.nbytes} bytes"
                )
        size = self.block_bytes
        return [(offset // size, -(-(offset + length) // size)) for offset, length in ranges if length]

    @abstractmethod
    def view(self, block: int) -> memoryview:
        """Return a writable view of a block's bytes."""

    @abstractmethod
    def hold(self) -> memoryview:
        """Return the bytes of all blocks, for callers that use `address`.

        The region stays mapped while this view lives, even after `close`.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the region. A second call does nothing."""
