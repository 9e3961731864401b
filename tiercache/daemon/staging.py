"""Memory for payloads on their way out: blocks of one arena, held by leases, each counted in its client's budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tiercache.core import Locations
from tiercache.daemon.budget import Budget
from tiercache.pools import HostArena

BLOCK_BYTES: Final = 64 << 10


class Lease:
    """Blocks of the arena for a list of objects, until `release`. `block_bytes` is the size of a block.

    Thread safety: `views` from any thread; `release` on the event loop's.
    """

    block_bytes: Final = BLOCK_BYTES

    def __init__(self, arena: HostArena, budget: Budget, blocks: Locations, counts: Sequence[int]) -> None:
        self._arena = arena
        self._budget = budget
        self._blocks = blocks
        at = 0
        self.views: Final[list[list[memoryview]]] = []
        """Of each object its blocks in order."""
        for count in counts:
            self.views.append([arena.view(block) for block in blocks[at : at + count].tolist()])
            at += count

    @property
    def nbytes(self) -> int:
        """Of all blocks."""
        return len(self._blocks) * BLOCK_BYTES

    def release(self) -> None:
        """Give the blocks back; once."""
        self.views.clear()
        self._arena.free(self._blocks)
        self._budget.give(self.nbytes)

    @classmethod
    async def take(cls, arena: HostArena, budget: Budget, lengths: Sequence[int]) -> Lease:
        """Room for objects of these lengths, as soon as the budget has it; ValueError where it never will."""
        counts = blocks_for(lengths)
        await budget.take(sum(counts) * BLOCK_BYTES)
        return cls(arena, budget, arena.alloc(sum(counts)), counts)

    @classmethod
    def try_take(cls, arena: HostArena, budget: Budget, lengths: Sequence[int]) -> Lease | None:
        """The same now, or None."""
        counts = blocks_for(lengths)
        if not budget.try_take(sum(counts) * BLOCK_BYTES):
            return None
        return cls(arena, budget, arena.alloc(sum(counts)), counts)


def blocks_for(lengths: Sequence[int]) -> list[int]:
    """How many blocks objects of these lengths take."""
    return [-(-length // BLOCK_BYTES) for length in lengths]
