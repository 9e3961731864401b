"""Free extents of the slabs. Pure bookkeeping: nothing here does I/O.

Blocks are numbered through all slabs. An object may take several extents, so fragmentation does not make free
blocks unusable.

Example: [8, 12) is given back while [4, 8), [12, 16) and [16, 20) are free, and a slab ends at 16. `by_end`
maps the end of a free extent to its start, and `by_start` maps its start to its number of blocks:

    before   4....8    12...16|16...20      by_end[8] = 4, by_start[12] = 4, by_start[16] = 4
    after    4..............16|16...20      joined with both neighbours, but not across a slab's end
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice
from typing import Final

from tiercache.core import BLOCK_ALIGN
from tiercache_backends.file.records import Extent

APART_BLOCKS: Final = (8 << 20) // BLOCK_ALIGN
"""Minimum size, in blocks (8 MiB), of a batch that is divided between two slabs."""
_MAX_EXAMINED: Final = 8
"""Maximum number of free extents examined in each bin (size class) when one slab is to be avoided."""


class ExtentAllocator:
    """Free extents, indexed by size, by start and by end.

    These indexes allow the allocator to take and give back blocks without a search.

    Among extents of similar size, the one that was freed last is taken first. Its blocks are probably still
    in the page cache, where a write is several times cheaper.

    Thread safety: none of its own; the store calls it under its mutex.
    """

    def __init__(self, slab_blocks: int) -> None:
        self.slab_blocks = slab_blocks
        self._by_start: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        self._bins: list[dict[int, None]] = [{} for _ in range(slab_blocks.bit_length())]
        """Starts of free extents by size: bin k has the extents of 2**k to 2**(k+1) - 1 blocks.

        The extent that was freed last is the last in its bin.
        """
        self._in_slab: dict[int, int] = {}
        """Number of free blocks by slab number."""
        self.free = 0
        """Number of free blocks."""
        self.size = 0
        """Number of blocks that the slabs have in all."""

    def grow(self, extent: Extent) -> None:
        """Add a slab's new blocks, which are free."""
        self.size += extent.blocks
        self.give([extent])

    def allocate(self, blocks: int) -> tuple[Extent, ...] | None:
        """Take `blocks` blocks, in few extents.

        The number of extents is small, but not always the smallest possible. Returns None, with nothing
        taken, if fewer blocks are free.
        """
        if blocks > self.free:
            return None
        taken: list[Extent] = []
        while blocks:
            start, count = self._pick(blocks)
            self._unlink(start, count)
            # The rest of a longer extent stays free: [start, start + blocks) is taken.
            if count > blocks:
                self._link(start + blocks, count - blocks)
                count = blocks
            taken.append(Extent(start, count))
            blocks -= count
            self.free -= count
        return tuple(taken)

    def allocate_all(self, sizes: Sequence[int]) -> list[tuple[Extent, ...]]:
        """Place the objects of a batch side by side if there are free extents that are long enough.

        Returns the extents of each object, in the order of `sizes`. An object that does not fit gets ().

        Objects that were written as one batch are mostly read as one batch too, and one system call can move
        many adjacent objects. If there is room, a batch of `APART_BLOCKS` or more is placed half in one slab
        and half in another. Two files are written faster than one file, because a file system lets only one
        thread at a time write to the cached pages of a file.
        """
        left = sum(sizes)
        if left < APART_BLOCKS:
            return self._place(sizes, left)
        ends = list(accumulate(sizes))
        #   batch    |-- sizes[:half], in one slab --|-- sizes[half:], in another slab --|
        # ends[half - 1] is the first running total at or beyond half of the batch.
        half = bisect_left(ends, left // 2) + 1
        first = self._place(sizes[:half], ends[half - 1])
        elsewhere = first[-1][-1].start // self.slab_blocks if first[-1] else None
        return first + self._place(sizes[half:], left - ends[half - 1], elsewhere)

    def needs_second_slab(self, blocks: int) -> bool:
        """Return whether a batch of `blocks` blocks should take two slabs, but only one slab has room."""
        if blocks < APART_BLOCKS or self.free < blocks:
            return False
        return self.free - max(self._in_slab.values()) < blocks // 2

    def _place(self, sizes: Sequence[int], left: int, avoid: int | None = None) -> list[tuple[Extent, ...]]:
        """Place objects of these sizes side by side, outside slab `avoid` if there is room elsewhere.

        `left`: the sum of the sizes.
        """
        places: list[tuple[Extent, ...]] = []
        # `run` is the part of the newest extent that no object has yet. It is given back if it stays unused.
        #   extent   |-- object 1 --|-- object 2 --|---- run ----|
        run = Extent(0, 0)
        for blocks in sizes:
            if blocks > run.blocks:
                self._end(run)
                run = self._begin(blocks, left, avoid) if blocks <= self.free else Extent(0, 0)
            if run.blocks:
                places.append((Extent(run.start, blocks),))
                run = Extent(run.start + blocks, run.blocks - blocks)
            else:
                places.append(self.allocate(blocks) or ())
            left -= blocks
        self._end(run)
        return places

    def give(self, extents: Iterable[Extent]) -> None:
        """Make extents free, and join each with free neighbours in the same slab."""
        for start, count in extents:
            self.free += count
            end = start + count
            # Join with the free neighbours on both sides, unless a slab ends in between.
            if end % self.slab_blocks and (behind := self._by_start.get(end)):
                self._unlink(end, behind)
                end += behind
            if start % self.slab_blocks and (before := self._by_end.get(start)) is not None:
                self._unlink(before, start - before)
                start = before
            self._link(start, end - start)

    def _begin(self, min_blocks: int, max_blocks: int, avoid: int | None) -> Extent:
        """Take a free extent of `min_blocks` to `max_blocks` blocks; return an empty one if none is found.

        The caller guarantees that at least `min_blocks` blocks are free.
        """
        # Try in turn: a long extent in another slab, a long extent anywhere, any extent of `min_blocks`.
        max_blocks = min(max_blocks, self.slab_blocks)
        found = self._pick_elsewhere(max_blocks, avoid) if avoid is not None else None
        if found is None:
            found = self._pick(max_blocks)
        if found.blocks < min_blocks:
            found = self._pick(min_blocks)
        if found.blocks < min_blocks:
            return Extent(0, 0)
        self._unlink(*found)
        taken = min(found.blocks, max_blocks)
        if found.blocks > taken:
            self._link(found.start + taken, found.blocks - taken)
        self.free -= taken
        return Extent(found.start, taken)

    def _end(self, run: Extent) -> None:
        if run.blocks:
            self.give([run])

    def _pick(self, blocks: int) -> Extent:
        """Return a free extent of at least `blocks` blocks, from the smallest bin that has only such extents.

        If all these bins are empty, return an extent from the largest bin in use, which may be shorter.
        """
        for k in range((blocks - 1).bit_length(), len(self._bins)):
            if self._bins[k]:
                return self._last(k)
        return self._last(max(k for k, starts in enumerate(self._bins) if starts))

    def _pick_elsewhere(self, blocks: int, avoid: int) -> Extent | None:
        """Return an extent of at least `blocks` blocks outside slab `avoid`; None if none is found.

        Only the `_MAX_EXAMINED` extents of each bin that were freed last are examined.
        """
        for k in range(blocks.bit_length() - 1, len(self._bins)):
            for start in islice(reversed(self._bins[k]), _MAX_EXAMINED):
                if start // self.slab_blocks != avoid and self._by_start[start] >= blocks:
                    return Extent(start, self._by_start[start])
        return None

    def _last(self, k: int) -> Extent:
        start = next(reversed(self._bins[k]))
        return Extent(start, self._by_start[start])

    def _link(self, start: int, count: int) -> None:
        """Enter a free extent into all indexes."""
        self._by_start[start] = count
        self._by_end[start + count] = start
        self._bins[count.bit_length() - 1][start] = None
        slab = start // self.slab_blocks
        self._in_slab[slab] = self._in_slab.get(slab, 0) + count

    def _unlink(self, start: int, count: int) -> None:
        del self._by_start[start]
        del self._by_end[start + count]
        del self._bins[count.bit_length() - 1][start]
        self._in_slab[start // self.slab_blocks] -= count
