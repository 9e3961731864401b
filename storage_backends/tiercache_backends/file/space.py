"""Free blocks of the slabs. Pure bookkeeping: nothing here does I/O.

Blocks are numbered through all slabs. An object may take several extents, so fragmentation does not make free blocks unusable.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice, pairwise
from typing import Final, NamedTuple

from tiercache.core import BLOCK_ALIGN

APART_BLOCKS: Final = (8 << 20) // BLOCK_ALIGN
"""Blocks (8 MiB) from which on a batch is placed in two slabs."""
_LOOKED_AT: Final = 8
"""Free extents per bin that are examined when one in another slab is sought."""


class Extent(NamedTuple):
    """Adjacent blocks from block `start` on, all in one slab."""

    start: int
    blocks: int


class Space:
    """Free extents, indexed by size, by start and by end, so that taking and giving back need no search.

    `_bins[k]` holds the starts of the free extents of 2**k .. 2**(k+1) - 1 blocks. The extent freed last is taken first: its blocks are the
    likeliest to be in the page cache, where overwriting is several times cheaper.

    Thread safety: none of its own; the store calls it under its mutex.
    """

    def __init__(self, slab_blocks: int) -> None:
        self.slab_blocks = slab_blocks
        self._by_start: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        self._bins: list[dict[int, None]] = [{} for _ in range(slab_blocks.bit_length())]
        self._in_slab: dict[int, int] = {}
        self.free = 0
        """Number of free blocks."""
        self.size = 0
        """Number of blocks that the slabs have in all."""

    def grow(self, extent: Extent) -> None:
        """Add a slab's new blocks, which are free."""
        self.size += extent.blocks
        self.give([extent])

    def allocate(self, blocks: int) -> tuple[Extent, ...] | None:
        """Take `blocks` blocks, in as few extents as the bins yield without a search; None, with nothing taken, if fewer are free."""
        if blocks > self.free:
            return None
        taken: list[Extent] = []
        while blocks:
            start, count = self._pick(blocks)
            self._unlink(start, count)
            if count > blocks:
                self._link(start + blocks, count - blocks)
                count = blocks
            taken.append(Extent(start, count))
            blocks -= count
            self.free -= count
        return tuple(taken)

    def allocate_all(self, sizes: Sequence[int]) -> list[tuple[Extent, ...]]:
        """Place a batch, side by side where free extents are long enough; return the extents of each size, () for those that do not fit.

        A batch is mostly read as it was written, and neighbours move in one call. A batch of `APART_BLOCKS` or more is placed in two slabs,
        half of it in each, if there is room, because file systems let one writer at a time into a file's cached pages.
        """
        left = sum(sizes)
        if left < APART_BLOCKS:
            return self._place(sizes, left)
        ends = list(accumulate(sizes))
        half = bisect_left(ends, left // 2) + 1
        first = self._place(sizes[:half], ends[half - 1])
        elsewhere = first[-1][-1].start // self.slab_blocks if first[-1] else None
        return first + self._place(sizes[half:], left - ends[half - 1], elsewhere)

    def needs_second_slab(self, blocks: int) -> bool:
        """Return whether a batch of `blocks` blocks would be placed in one slab because there is no room in another."""
        if blocks < APART_BLOCKS or self.free < blocks:
            return False
        return self.free - max(self._in_slab.values()) < blocks // 2

    def _place(self, sizes: Sequence[int], left: int, avoid: int | None = None) -> list[tuple[Extent, ...]]:
        """Place sizes side by side, and not in slab `avoid` if there is room elsewhere. `left`: the sum of the sizes."""
        places: list[tuple[Extent, ...]] = []
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
        """Take blocks back, and join them with free neighbours in the same slab."""
        for start, count in extents:
            self.free += count
            end = start + count
            if end % self.slab_blocks and (behind := self._by_start.get(end)):
                self._unlink(end, behind)
                end += behind
            if start % self.slab_blocks and (before := self._by_end.get(start)) is not None:
                self._unlink(before, start - before)
                start = before
            self._link(start, end - start)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the free extents are disjoint, inside their slabs, joined and counted right."""
        assert self.free == sum(self._by_start.values()) <= self.size, "free blocks are counted right"
        assert self._by_end == {s + c: s for s, c in self._by_start.items()}, "both views name the same extents"
        assert {s for b in self._bins for s in b} == set(self._by_start), "every free extent is in one bin"
        ordered = sorted(self._by_start.items())
        counts = Counter(dict.fromkeys(self._in_slab, 0))
        for s, c in ordered:
            counts[s // self.slab_blocks] += c
        assert counts == self._in_slab, "free blocks are counted right in each slab"
        for (start, count), (following, _) in pairwise(ordered):
            assert start + count <= following, "free extents are disjoint"
            assert start + count < following or following % self.slab_blocks == 0, "free neighbours are joined"
        assert all(s // self.slab_blocks == (s + c - 1) // self.slab_blocks for s, c in ordered), "an extent lies in one slab"

    def _begin(self, least: int, most: int, avoid: int | None) -> Extent:
        """Take a free extent of at most `most` blocks for the next sizes; an empty one where none with `least` blocks is found."""
        most = min(most, self.slab_blocks)
        found = self._pick_elsewhere(most, avoid) if avoid is not None else None
        if found is None:
            found = self._pick(most)
        if found.blocks < least:
            found = self._pick(least)
        if found.blocks < least:
            return Extent(0, 0)
        self._unlink(*found)
        taken = min(found.blocks, most)
        if found.blocks > taken:
            self._link(found.start + taken, found.blocks - taken)
        self.free -= taken
        return Extent(found.start, taken)

    def _end(self, run: Extent) -> None:
        if run.blocks:
            self.give([run])

    def _pick(self, blocks: int) -> Extent:
        """Return a free extent that fits, from the smallest bin in which every extent does; else one from the largest bin in use."""
        for k in range((blocks - 1).bit_length(), len(self._bins)):
            if self._bins[k]:
                return self._last(k)
        return self._last(max(k for k, starts in enumerate(self._bins) if starts))

    def _pick_elsewhere(self, blocks: int, avoid: int) -> Extent | None:
        """Return a free extent that fits and is not in slab `avoid`, among those freed last; None if there is none among them."""
        for k in range(blocks.bit_length() - 1, len(self._bins)):
            for start in islice(reversed(self._bins[k]), _LOOKED_AT):
                if start // self.slab_blocks != avoid and self._by_start[start] >= blocks:
                    return Extent(start, self._by_start[start])
        return None

    def _last(self, k: int) -> Extent:
        start = next(reversed(self._bins[k]))
        return Extent(start, self._by_start[start])

    def _link(self, start: int, count: int) -> None:
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
