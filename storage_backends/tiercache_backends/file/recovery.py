"""Check of an opened catalog: decide which records can be trusted and which blocks are free.

    slab      |...........................................|
    records     [A......)   [B....)     [C.......)
                                     [D....)                   C and D overlap: read both, keep the sound one
    gaps      |.|       |...|     |.....|        |........|    the free space if C is kept

NumPy columns make this fast: a million records take a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tiercache.core import BLOCK_ALIGN
from tiercache.storage.pages import Ints, Mask
from tiercache_backends.file.records import CatalogContents, Extent, Records, words_of


def sound_records(
    loaded: CatalogContents, slabs: Sequence[Extent], slab_blocks: int, holds: Callable[[int], bool]
) -> tuple[CatalogContents, list[int], list[Extent]]:
    """Return the records to keep, the numbers of the records to drop, and the free extents.

    A record is dropped if its extents leave their slab or do not fit its length. A damaged catalog may bring
    removed records back. Then several records may name the same blocks or the same object. `holds(index)`
    tests whether the blocks of record `index` contain the object's bytes, and a record that fails this test
    is dropped. If two overlapping records both pass the test, both are dropped, because it is not known which
    was written last. If two records of the same object both pass, the later one is kept.
    """
    records = loaded.records
    starts, counts, owners = _all_extents(loaded)
    bad = _misplaced(loaded, starts, counts, owners, slabs, slab_blocks)
    alike = _alike(records)
    doubtful = _overlapping(starts, counts, owners, ~bad) | _repeated(records, alike)
    for i in np.flatnonzero(doubtful & ~bad).tolist():
        bad[i] = not holds(i)
    # Drop sound records that still overlap. Of several sound records of one object, keep the last.
    if doubtful.any():
        outdated = _outdated(records, [i for i in alike if not bad[i]])
        bad |= _overlapping(starts, counts, owners, ~bad) | outdated
    kept = ~bad[owners]
    gaps = _gaps(slabs, starts[kept], counts[kept])
    if not bad.any():
        return loaded, [], gaps
    return loaded._replace(records=records[~bad]), records["number"][bad].tolist(), gaps


def blocks_named(records: Records, extents: Iterable[Extent], slab_blocks: int) -> dict[int, int]:
    """Return how many blocks each slab must have for these records and further extents, by slab number.

    Extents that begin before block 0 or leave their slab are ignored.
    """
    more = list(extents)
    starts = np.concatenate(
        [records["start"].astype(np.int64), np.array([extent.start for extent in more], np.int64)]
    )
    counts = np.concatenate(
        [records["blocks"].astype(np.int64), np.array([extent.blocks for extent in more], np.int64)]
    )
    right = (starts >= 0) & (starts % slab_blocks + counts <= slab_blocks)
    slabs, owners = np.unique(starts[right] // slab_blocks, return_inverse=True)
    ends = np.zeros(len(slabs), np.int64)
    np.maximum.at(ends, owners, (starts % slab_blocks + counts)[right])
    return dict(zip(slabs.tolist(), ends.tolist(), strict=True))


def _misplaced(
    loaded: CatalogContents,
    starts: Ints,
    counts: Ints,
    owners: Ints,
    slabs: Sequence[Extent],
    slab_blocks: int,
) -> Mask:
    """Return which records have extents that leave their slab or do not fit their length."""
    records = loaded.records
    bad = np.zeros(len(records), np.bool_)
    bad[owners[_outside(starts, counts, slabs, slab_blocks)]] = True
    room = np.bincount(owners, weights=counts, minlength=len(records)).astype(np.int64)
    bad |= (records["length"] == 0) | (room != -(-records["length"].astype(np.int64) // BLOCK_ALIGN))
    return bad


def _all_extents(loaded: CatalogContents) -> tuple[Ints, Ints, Ints]:
    """Return three columns with one entry per extent: first block, number of blocks, index of its record."""
    records = loaded.records
    starts, counts = records["start"].astype(np.int64), records["blocks"].astype(np.int64)
    owners = np.arange(len(records))
    with_more = np.flatnonzero(records["more"])
    if not len(with_more):
        return starts, counts, owners
    further = [loaded.extents[number] for number in records["number"][with_more].tolist()]
    flat = np.array([extent for extents in further for extent in extents], np.int64)
    return (
        np.concatenate([starts, flat[:, 0]]),
        np.concatenate([counts, flat[:, 1]]),
        np.concatenate([owners, np.repeat(with_more, [len(extents) for extents in further])]),
    )


def _outside(starts: Ints, counts: Ints, slabs: Sequence[Extent], slab_blocks: int) -> Mask:
    """Return which extents do not lie inside one of the slabs."""
    # limits[k]: number of the block after slab k; 0 if there is no slab k, so that no extent fits.
    limits = np.zeros(max((s.start // slab_blocks + 1 for s in slabs), default=0) + 1, np.int64)
    for slab in slabs:
        limits[slab.start // slab_blocks] = slab.start + slab.blocks
    slab_of = np.clip(starts // slab_blocks, 0, len(limits) - 1)
    outside: Mask = (
        (starts < 0) | (counts < 1) | (starts + counts > limits[slab_of]) | (starts // slab_blocks != slab_of)
    )
    return outside


def _overlapping(starts: Ints, counts: Ints, owners: Ints, among: Mask) -> Mask:
    """Return which of the records `among` name a block that another record `among` names too."""
    there = among[owners]
    overlapping = np.zeros(len(among), np.bool_)
    overlapping[owners[there][_clashing(starts[there], counts[there])]] = True
    return overlapping


def _clashing(starts: Ints, counts: Ints) -> Ints:
    """Return the indices of extents that overlap another extent."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], (starts + counts)[order]
    clash = np.zeros(len(order), np.bool_)
    # The extents are in order of their starts. An extent overlaps another one if it begins before an earlier
    # extent ends, or ends after the next extent begins.
    clash[1:] |= starts[1:] < np.maximum.accumulate(ends)[:-1]
    clash[:-1] |= ends[:-1] > starts[1:]
    return order[clash]


def _alike(records: Records) -> list[int]:
    """Return the indices of records that may describe the same object as another record, oldest first.

    Every record that shares its object with another record is included. A few other records may be included.
    """
    # Compare one word of 8 bytes, mixed from two words of the digest, instead of all 8 words. Word 0 is from
    # the layout digest, word 4 from the page key.
    words = words_of(records, "digest")
    mixed = words[:, 0] * np.uint64(0x9E3779B97F4A7C15) + words[:, 4]
    order = np.argsort(mixed, kind="stable")
    alike = np.flatnonzero(mixed[order][1:] == mixed[order][:-1])
    return sorted(set(order[alike].tolist()) | set(order[alike + 1].tolist()))


def _repeated(records: Records, alike: Sequence[int]) -> Mask:
    """Return which of the records `alike` describe an object that another record `alike` describes too."""
    seen: dict[bytes, list[int]] = {}
    for i in alike:
        seen.setdefault(records["digest"][i].tobytes(), []).append(i)
    repeated = np.zeros(len(records), np.bool_)
    repeated[[i for group in seen.values() if len(group) > 1 for i in group]] = True
    return repeated


def _outdated(records: Records, alike: Sequence[int]) -> Mask:
    """Return which of the records `alike` are older than another record of the same object.

    A removal that failed leaves such records behind.
    """
    outdated = np.zeros(len(records), np.bool_)
    last: dict[bytes, int] = {}
    for i in alike:
        digest = records["digest"][i].tobytes()
        if digest in last:
            outdated[last[digest]] = True
        last[digest] = i
    return outdated


def _gaps(slabs: Sequence[Extent], starts: Ints, counts: Ints) -> list[Extent]:
    """Return the parts of the slabs outside the given extents, which are disjoint and each inside a slab."""
    order = np.argsort(starts)
    starts, ends = starts[order], (starts + counts)[order]
    gaps: list[Extent] = []
    #   slab     |....[A...).....[B...)...|
    #   lows     ^         ^          ^        start of the slab, ends of the extents
    #   highs         ^          ^        ^    starts of the extents, end of the slab
    for slab in slabs:
        low, high = np.searchsorted(starts, [slab.start, slab.start + slab.blocks])
        lows = np.concatenate([[slab.start], ends[low:high]])
        highs = np.concatenate([starts[low:high], [slab.start + slab.blocks]])
        found = highs > lows
        gaps += [Extent(a, b - a) for a, b in zip(lows[found].tolist(), highs[found].tolist(), strict=True)]
    return gaps
