"""Free extents of the slabs. Pure bookkeeping: nothing here does I/O.

Blocks are numbered through all slabs. An object may take several extents, so fragmentation does not make free
blocks unusable.

Example: [8, 12) is given back while [4, 8), [12, 16) and [16, 20) are free, and a slab ends at 16. `by_end`
maps the end of a free extent to its start, and `by_start` maps its start to its number of blocks:

    before   4....8    12...16|16...20      by_end[8] = 4, by_start[12] = 4, by_start[16] = 4
    after    4..............16|16...20      joined with both neighbours, but not across a slab's end
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tiercache_backends.file.records import Extent


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
            taken.append(self._take(self._pick(blocks), blocks))
            blocks -= taken[-1].blocks
        return tuple(taken)

    def allocate_all(self, sizes: Sequence[int]) -> list[tuple[Extent, ...]]:
        """Place the objects of a batch side by side if there are free extents that are long enough.

        Returns the extents of each object, in the order of `sizes`. An object that does not fit gets ().

        Objects that were written as one batch are mostly read as one batch too, and one system call can move
        many adjacent objects.
        """
        left = sum(sizes)
        places: list[tuple[Extent, ...]] = []
        # [start, stop) is the part of the newest extent that no object has yet. The rest is given back.
        #   extent   |-- object 1 --|-- object 2 --|start ... stop|
        start = stop = 0
        for blocks in sizes:
            if blocks > stop - start:
                self._end(start, stop)
                start, count = self._begin(blocks, left) if blocks <= self.free else (0, 0)
                stop = start + count
            if stop > start:
                places.append((Extent(start, blocks),))
                start += blocks
            else:
                places.append(self.allocate(blocks) or ())
            left -= blocks
        self._end(start, stop)
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

    def _begin(self, min_blocks: int, max_blocks: int) -> Extent:
        """Take a free extent of `min_blocks` to `max_blocks` blocks; return an empty one if none is found.

        The caller guarantees that at least `min_blocks` blocks are free.
        """
        max_blocks = min(max_blocks, self.slab_blocks)
        found = self._pick(max_blocks)
        if found.blocks < min_blocks:
            found = self._pick(min_blocks)
        if found.blocks < min_blocks:
            return Extent(0, 0)
        return self._take(found, max_blocks)

    def _take(self, found: Extent, max_blocks: int) -> Extent:
        """Take at most `max_blocks` blocks from the start of a free extent; its rest stays free."""
        self._unlink(*found)
        taken = min(found.blocks, max_blocks)
        if found.blocks > taken:
            self._link(found.start + taken, found.blocks - taken)
        self.free -= taken
        return Extent(found.start, taken)

    def _end(self, start: int, stop: int) -> None:
        if stop > start:
            self.give([Extent(start, stop - start)])

    def _pick(self, blocks: int) -> Extent:
        """Return a free extent of at least `blocks` blocks, from the smallest bin that has only such extents.

        If all these bins are empty, return an extent from the largest bin in use, which may be shorter.
        """
        for k in range((blocks - 1).bit_length(), len(self._bins)):
            if self._bins[k]:
                return self._last(k)
        return self._last(max(k for k, starts in enumerate(self._bins) if starts))

    def _last(self, k: int) -> Extent:
        start = next(reversed(self._bins[k]))
        return Extent(start, self._by_start[start])

    def _link(self, start: int, count: int) -> None:
        """Enter a free extent into all indexes."""
        self._by_start[start] = count
        self._by_end[start + count] = start
        self._bins[count.bit_length() - 1][start] = None

    def _unlink(self, start: int, count: int) -> None:
        del self._by_start[start]
        del self._by_end[start + count]
        del self._bins[count.bit_length() - 1][start]
