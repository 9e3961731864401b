"""Memory for payloads on their way in or out: blocks of one arena, held by leases, each counted in its client's budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tiercache.core import Locations
from tiercache.daemon.budget import Budget
from tiercache.pools import HostArena

BLOCK_BYTES: Final = 64 << 10
"""Size of a block of the arena in bytes."""


class Lease:
    """Blocks of the arena for a list of objects, held until `release`; `block_bytes` is the size of a block.

    Thread safety: `views` from any thread; `release` on the event loop's thread.
    """

    block_bytes: Final = BLOCK_BYTES

    def __init__(self, arena: HostArena, budget: Budget, blocks: Locations, counts: Sequence[int]) -> None:
        self._arena = arena
        self._budget = budget
        self._blocks = blocks
        at = 0
        self.views: Final[list[list[memoryview]]] = []
        """Blocks of each object, in order."""
        for count in counts:
            self.views.append([arena.view(block) for block in blocks[at : at + count].tolist()])
            at += count

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return len(self._blocks) * BLOCK_BYTES

    def release(self) -> None:
        """Give the blocks back; to be called only once."""
        self.views.clear()
        self._arena.free(self._blocks)
        self._budget.give(self.nbytes)

    @classmethod
    async def take(cls, arena: HostArena, budget: Budget, lengths: Sequence[int]) -> Lease:
        """Lease room for objects of these lengths, waiting until the budget has it; raises ValueError if it never will."""
        counts = blocks_for(lengths)
        await budget.take(sum(counts) * BLOCK_BYTES)
        return cls(arena, budget, arena.alloc(sum(counts)), counts)

    @classmethod
    def try_take(cls, arena: HostArena, budget: Budget, lengths: Sequence[int]) -> Lease | None:
        """Lease room for objects of these lengths if the budget has it now, else return None."""
        counts = blocks_for(lengths)
        if not budget.try_take(sum(counts) * BLOCK_BYTES):
            return None
        return cls(arena, budget, arena.alloc(sum(counts)), counts)


def blocks_for(lengths: Sequence[int]) -> list[int]:
    """Return the number of blocks that each object of these lengths (bytes) takes."""
    return [-(-length // BLOCK_BYTES) for length in lengths]
