"""Opening of a store's catalog: which log is the right one, and which of its records are.

A record with a right guard may still be of no use: damage, or a power cut, may have taken the GONE record of
an object whose blocks were given to another. `sound_records` finds such records. Where two of them claim the
same blocks, the newer object was stored after the older one was gone:

    slab      |...........................................|
    records     [A......)   [B....)     [C.......)
                                     [D....)                   C and D overlap: the newer one is kept
    gaps      |.|       |...|     |.....|        |........|    the free space if C is kept

NumPy columns make this fast: a million records take a fraction of a second.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from tiercache.core import BLOCK_ALIGN
from tiercache.storage.env import Env, close_quietly, read_all
from tiercache.storage.pages import Ints, Mask
from tiercache_backends.file.records import (
    NO_RECORDS,
    NOTE,
    RECORD,
    RECORD_BYTES,
    CatalogContents,
    Extent,
    LogHead,
    RecordKind,
    Records,
    keys_of,
    known_pools,
    notes_for,
    sound,
    unpack_extents,
    unpack_gone,
    unpack_value,
    words_of,
)
from tiercache_backends.local.directory import StoreDirectory
from tiercache_backends.local.names import Names

_log = logging.getLogger(__name__)

NEW: Final = "new.log"
"""Name of a log that is being written."""
_LOG: Final = ".log"
_GENERATION: Final = re.compile(r"([0-9]{6,18})\.log")
_EXTENT_BYTES: Final = 12


@dataclass(slots=True)
class FoundLog:
    """Log of a store, as it was found."""

    store: bytes
    """Id of the store."""
    generation: int = 0
    fd: int = -1
    """Open file of the log; -1 if there is none."""
    contents: CatalogContents = field(default_factory=lambda: CatalogContents(NO_RECORDS, {}))
    """Records of the objects that are stored."""
    numbers: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Number of the record at each position. Numbers never fall; a damaged record has that before it."""
    alive: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """Mask of the positions that have records of `contents`, or of their further extents."""
    names: Names = field(default_factory=Names)
    last: int = 0
    """Number of the newest object that the store has had."""
    damaged: bool = False
    """Whether there are damaged records before the end, or logs without a single right record."""
    older: list[str] = field(default_factory=list)
    """Paths of logs that a rewritten one has replaced."""

    def close(self, env: Env) -> None:
        """Close the log's file, if it is open and no catalog has taken it over."""
        if self.fd >= 0:
            close_quietly(env, self.fd)
            self.fd = -1


def log_path(database: str, generation: int) -> str:
    """Return the path of the log of a generation."""
    return os.path.join(database, f"{generation:06d}{_LOG}")


def _generations(env: Env, database: str) -> list[int]:
    """Return the generations of the logs in a directory, newest first."""
    try:
        names = env.listdir(database)
    except FileNotFoundError:
        return []
    found = (_GENERATION.fullmatch(name) for name in names)
    return sorted((int(match[1]) for match in found if match), reverse=True)


def store_id(env: Env, database: str) -> bytes | None:
    """Return the id that the newest log's head gives its store; None if there is no right head.

    It is looked for when the file `format`, which has the id too, was lost.
    """
    for generation in _generations(env, database):
        head = np.zeros(1, RECORD)
        fd = env.open(log_path(database, generation), os.O_RDONLY)
        try:
            read_all(env, fd, [head.view(np.uint8).data], 0)
        finally:
            close_quietly(env, fd)
        found = LogHead.unpack(head).store
        if sound(head, 0, keys_of(found, generation))[0]:
            return found
    return None


def find_log(env: Env, directory: StoreDirectory, store: bytes, *, read_only: bool) -> FoundLog:
    """Return the newest log that has a right record; a newer one without any is put aside.

    Unless `read_only`, what an earlier opening was writing is removed, and the whole catalog is put aside if
    nothing in it is right. Raises OSError.
    """
    database = directory.database
    if not read_only:
        directory.remove(os.path.join(database, NEW))
    useless: list[int] = []
    generations = _generations(env, database)
    for generation in generations:
        path = log_path(database, generation)
        fd = env.open(path, os.O_RDONLY if read_only else os.O_RDWR)
        try:
            found = _read_log(env, fd, store, generation)
        except BaseException:  # whatever it is, no file stays open, and it is raised again
            close_quietly(env, fd)
            raise
        if found is not None:
            older = [log_path(database, other) for other in generations if other < generation]
            found.older, found.damaged = older, found.damaged or bool(useless)
            break
        close_quietly(env, fd)
        _log.error("nothing in %s is a record of this store", path)
        useless.append(generation)
    else:
        found = FoundLog(store, max(generations, default=0), damaged=bool(useless))
        if useless and not read_only:
            directory.set_aside()
            return found
    try:
        for generation in () if read_only else useless:
            env.rename(log_path(database, generation), log_path(database, generation) + ".damaged")
    except BaseException:  # whatever it is, no file stays open, and it is raised again
        found.close(env)
        raise
    return found


def _read_log(env: Env, fd: int, store: bytes, generation: int) -> FoundLog | None:
    """Read a whole log; return None if it has no right record."""
    keys = keys_of(store, generation)
    records = np.empty(env.fstat(fd).st_size // RECORD_BYTES, RECORD)
    records = records[: read_all(env, fd, [records.view(np.uint8).data], 0) // RECORD_BYTES]
    right = sound(records, 0, keys)
    if not right.any():
        return None
    # The log ends behind its last right record: what follows was reserved, or is what a torn write left.
    end = int(right.nonzero()[0][-1]) + 1
    records, right = records[:end], right[:end]
    notes = records.view(NOTE)
    kinds = np.where(right, records["kind"], 0)
    # numbers   0 | 1  2  2  ?  4        a damaged record (?) gets the number before it, so that numbers rise
    numbers = np.maximum.accumulate(np.where(right, records["number"], 0).astype(np.int64))
    alive = (kinds == RecordKind.STORED) & known_pools(records)
    gone = unpack_gone(notes[kinds == RecordKind.GONE]).astype(np.int64)
    at = np.searchsorted(numbers, gone)
    at = at[(at < end) & (numbers[np.minimum(at, end - 1)] == gone)]
    alive[at] = False
    extents: dict[int, tuple[Extent, ...]] = {}
    stored = alive.copy()
    for i in np.flatnonzero(alive & (records["more"] > 0)).tolist():
        value = unpack_value(notes, kinds, i + 1)
        if value is None or len(value) != int(records["more"][i]) * _EXTENT_BYTES:
            alive[i] = stored[i] = False
        else:
            extents[int(numbers[i])] = unpack_extents(value)
            alive[i + 1 : i + 1 + notes_for(len(value))] = True
    [at] = stored.nonzero()
    adjacent = len(at) > 0 and at[-1] - at[0] + 1 == len(at)
    contents = CatalogContents(records[at[0] : at[-1] + 1] if adjacent else records[at], extents)
    last, names = int(numbers[-1]), Names()
    if kinds[0] == RecordKind.HEAD:
        head = LogHead.unpack(notes[:1])
        last, names.last = max(last, head.last_number), head.last_namespace
    for i in np.flatnonzero((kinds == RecordKind.NAME) & (notes["more"] == 0)).tolist():
        value = unpack_value(notes, kinds, i)
        if value:
            namespace = value[1 : 1 + value[0]]
            with suppress(ValueError):  # it was not written by this version
                names.add_packed(namespace, value[1 + len(namespace) :])
    used = np.unique(contents.records["namespace"]).tolist()
    names.last = max([names.last, *used])
    # Forget the namespaces that have neither objects nor an identity. The last id is never given again.
    kept = set(used)
    names.forget([name for name, i in names.ids.items() if i not in kept and name not in names.records])
    return FoundLog(store, generation, fd, contents, numbers, alive, names, last, not right.all())


def sound_records(
    loaded: CatalogContents, slabs: Sequence[Extent], slab_blocks: int
) -> tuple[CatalogContents, list[int], list[Extent]]:
    """Return the records to keep, the numbers of the records to drop, and the free extents.

    A record is dropped if its extents leave their slab or do not fit its length, or if a newer record has one
    of its blocks, or its object. A removal that failed leaves such records behind, and so does damage.
    """
    records = loaded.records
    starts, counts, owners = _all_extents(loaded)
    bad = _misplaced(loaded, starts, counts, owners, slabs, slab_blocks)
    there = ~bad[owners]
    bad |= _overwritten(starts[there], counts[there], owners[there], len(records)) | _repeated(records, bad)
    kept = ~bad[owners]
    gaps = _gaps(slabs, starts[kept], counts[kept])
    if not bad.any():
        return loaded, [], gaps
    return loaded._replace(records=records[~bad]), records["number"][bad].tolist(), gaps


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


def _overwritten(starts: Ints, counts: Ints, owners: Ints, size: int) -> Mask:
    """Return which of `size` records have a block that a newer one has too; `owners` has the newest last.

    A (oldest)     |-----------|            bounds     0     1      2     3        4
    B                    |------------|     newest     |  A  |  B   |  C  |   C    |
    C (newest)                  |--------------|
    """
    overwritten = np.zeros(size, np.bool_)
    clash = _clashing(starts, counts)
    starts, ends, owners = starts[clash], (starts + counts)[clash], owners[clash]
    bounds = np.unique(np.concatenate([starts, ends]))
    first, last = np.searchsorted(bounds, starts), np.searchsorted(bounds, ends)
    # The parts between two bounds that each extent has, one after the other.
    widths = last - first
    parts = np.arange(widths.sum()) + np.repeat(first - (np.cumsum(widths) - widths), widths)
    mine = np.repeat(owners, widths)
    np.maximum.at(newest := np.full(len(bounds), -1), parts, mine)
    overwritten[mine[newest[parts] > mine]] = True
    return overwritten


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


def _repeated(records: Records, bad: Mask) -> Mask:
    """Return which records, without the `bad` ones, have the same object as a newer one."""
    # Compare one word of 8 bytes, mixed from two words of the digest, instead of all 8 words. Word 0 is from
    # the layout digest, word 4 from the page key. Only where two are equal, compare the digests.
    words = words_of(records, "digest")
    mixed = words[:, 0] * np.uint64(0x9E3779B97F4A7C15) + words[:, 4]
    order = np.argsort(mixed, kind="stable")
    alike = np.flatnonzero(mixed[order][1:] == mixed[order][:-1])
    repeated = np.zeros(len(records), np.bool_)
    last: dict[bytes, int] = {}
    for i in np.unique(np.concatenate([order[alike], order[alike + 1]])).tolist():
        if not bad[i]:
            digest = records["digest"][i].tobytes()
            if digest in last:
                repeated[last[digest]] = True
            last[digest] = i
    return repeated


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
