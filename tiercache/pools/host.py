"""Host pools: the objects of one cache kind in the host arena."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tiercache.core import Locations, PoolName
from tiercache.errors import PoolFullError, SlotError
from tiercache.geometry import Geometry
from tiercache.pools.blocks import BlockArena
from tiercache.pools.slots import as_locations


class HostPool:
    """View of the arena as objects of one geometry. All pools of an arena share its free blocks.

    An object takes `blocks_per_object` blocks, which need not be adjacent. Its handle is the number of its
    first block, so two pools of one arena never have the same handle. If the payload ends inside the last
    block, the rest of that block is unused.

    Thread safety: `alloc` and `free` belong to the arena's owner thread. Any thread may call the rest, for
    handles that stay allocated during the call.
    """

    def __init__(self, geometry: Geometry, arena: BlockArena) -> None:
        self.geometry = geometry
        self.arena = arena
        self.blocks_per_object = -(-geometry.nbytes // arena.block_bytes)
        # Row h lists the blocks of the object with handle h; no other row is ever read:
        #   row 7   7 2 9       the object with handle 7 lies in blocks 7, 2 and 9; rows 2 and 9 are unused
        # The table may be large, but the kernel gives memory only to pages of it that were written.
        self._table = np.empty((arena.blocks, self.blocks_per_object), np.int64)
        self._live = np.zeros(arena.blocks, np.bool_)

    @property
    def name(self) -> PoolName:
        """Cache kind of the pool."""
        return self.geometry.pool

    @property
    def available(self) -> int:
        """Number of objects that fit now, if no other pool takes blocks."""
        return self.arena.available // self.blocks_per_object

    def alloc(self, n: int) -> Locations:
        """Allocate `n` objects and return their handles: int64, shape [n].

        Raises PoolFullError, with nothing taken, if they do not fit.
        """
        if n > self.available:
            raise PoolFullError(
                f"{n} {self.name} objects are wanted on the host and {self.available} fit; evict first"
            )
        blocks = self.arena.alloc(n * self.blocks_per_object).reshape(n, self.blocks_per_object)
        handles = blocks[:, 0].copy()
        self._table[handles] = blocks
        self._live[handles] = True
        return handles

    def free(self, handles: npt.ArrayLike) -> None:
        """Give objects back.

        Raises SlotError, with nothing freed, for a handle that is named twice or is not this pool's.
        """
        array = self._checked(handles)
        self.arena.free(self._table[array].reshape(-1))  # SlotError for a handle that is named twice
        self._live[array] = False

    def blocks(self, handles: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the blocks of each object in order: int64, shape [n, blocks_per_object].

        Raises SlotError for a handle that is not this pool's.
        """
        return self._table[self._checked(handles)]

    def buffers_of(self, handles: npt.ArrayLike) -> list[list[memoryview]]:
        """Return writable views of the blocks of each object, in order.

        The payload is the first `geometry.nbytes` bytes of the blocks. Raises SlotError as `blocks` does.
        """
        view = self.arena.view
        return [[view(block) for block in blocks] for blocks in self.blocks(handles).tolist()]

    def _checked(self, handles: npt.ArrayLike) -> Locations:
        array = as_locations(handles, self.arena.blocks, f"{self.name} handle")
        unknown = ~self._live[array]
        if unknown.any():
            raise SlotError(
                f"handle {array[unknown][0]} is not an object of pool {self.name}; it was freed, or belongs"
                " to another pool"
            )
        return array
