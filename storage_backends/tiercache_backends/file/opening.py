"""Opening of a catalog; a damaged catalog is rewritten from the records that can still be read.

A damaged catalog is read without LMDB. This salvage searches each LMDB page in use for records with a valid
guard. In a sound catalog the salvage finds every record and nothing else. In a damaged catalog it misses
records on damaged pages. If LMDB's list of free pages is damaged, the salvage also finds records that were
removed before. `sound_records` then checks which records still match the bytes in their blocks:

    slab      |...........................................|
    records     [A......)   [B....)     [C.......)
                                     [D....)                   C and D overlap: read both, keep the sound one
    gaps      |.|       |...|     |.....|        |........|    the free space if C is kept

NumPy columns make this fast: a million records take a fraction of a second.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from errno import EDQUOT, ENOSPC, EROFS
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from tiercache.core import BLOCK_ALIGN, PoolName
from tiercache.storage.base import NamespaceRecord
from tiercache.storage.env import Env
from tiercache.storage.pages import Ints, Mask
from tiercache_backends.file.catalog import DATA, Catalog
from tiercache_backends.file.records import (
    RECORD,
    CatalogContents,
    Extent,
    Records,
    sound,
    unpack_extents,
    words_of,
)
from tiercache_backends.local.directory import StoreDirectory
from tiercache_backends.local.failures import DamagedError
from tiercache_backends.local.lmdb_file import LmdbFile, LmdbNode, LmdbPages
from tiercache_backends.local.names import Names, unpack_name

_log = logging.getLogger(__name__)

_NEW: Final = "data.new"
"""File name of a catalog that is being rewritten, beside the old one."""
_POOL_AT: Final = RECORD.fields["pool"][1]  # type: ignore[index]
_POOLS: Final = np.array([np.frombuffer(pool.encode()[:2], np.uint16)[0] for pool in PoolName])
"""First two bytes of each pool's name, as one integer."""
_NUMBER_BYTES: Final = 8
_EXTENT_BYTES: Final = 12
_LONGEST_NAME: Final = 64
"""Maximum length of a namespace, in bytes."""


class Salvaged(NamedTuple):
    """Result of a salvage."""

    loaded: CatalogContents
    """Records that were found; `damaged` says whether one of them had lost its further extents."""
    names: Names


def salvage(env: Env, directory: str) -> Salvaged:
    """Read the catalog in `directory` without LMDB; return empty contents if there is no catalog.

    Raises OSError if the file cannot be read.
    """
    records: list[Records] = [np.empty(0, RECORD)]
    names = Names()
    further: dict[int, list[tuple[Extent, ...]]] = {}
    try:
        file = LmdbFile(env, os.path.join(directory, DATA))
    except FileNotFoundError:
        return Salvaged(CatalogContents(records[0], {}), names)
    with closing(file):
        for first, pages in file.pages():
            for number, page in enumerate(pages, first):
                # On a damaged page, records may lie at any offset.
                if not file.is_whole(page, number):
                    records.append(_scattered(page))
                    continue
                records.append(_sound_values(file.keys(page, RECORD.itemsize)))
                for node in file.nodes(page, number):
                    if len(node.value) == RECORD.itemsize and len(
                        one := _sound_values(np.frombuffer(node.value, np.uint8)[None])
                    ):
                        records.append(one)
                    else:
                        _take(node, names, further)
    # Join the arrays as bytes: np.concatenate on records would convert all integers to native byte order.
    found = np.concatenate([some.view(np.uint8) for some in records]).view(RECORD)
    return Salvaged(_loaded(found, further), names)


class OpenedCatalog(NamedTuple):
    """Open catalog, with its contents at the time of opening."""

    catalog: Catalog
    contents: CatalogContents


class Snapshot(Catalog):
    """Read-only catalog with all records in memory. Its file is not mapped, locked or written.

    Thread safety: immutable.
    """

    def __init__(self, salvaged: Salvaged, nbytes: int) -> None:
        # No environment is opened, so the constructor of Catalog does not run.
        self._loaded = salvaged.loaded
        self._known = salvaged.names
        self._nbytes = nbytes
        self.is_damaged = False

    def load(self) -> CatalogContents:
        """Return the records that were read when the catalog was opened."""
        return self._loaded

    def apply(
        self,
        records: Records | None = None,
        further: Mapping[int, tuple[Extent, ...]] | None = None,
        removals: Sequence[int] = (),
        forgotten: Sequence[bytes] = (),
    ) -> None:
        """Raise OSError (EROFS), because the catalog is read-only."""
        raise OSError(EROFS, os.strerror(EROFS))

    def page(self, cursor: bytes, count: int) -> Iterator[Records]:
        """Yield the records after `cursor`, at most `count`, as one array."""
        numbers = self._loaded.records["number"]
        start = int(np.searchsorted(numbers, int.from_bytes(cursor), side="right")) if cursor else 0
        yield self._loaded.records[start : start + count]

    def find(self, numbers: Sequence[int]) -> Records:
        """Return the records with these numbers that exist."""
        return self._loaded.records[np.isin(self._loaded.records["number"], np.array(numbers, np.uint64))]

    def namespaces(self) -> list[NamespaceRecord]:
        """Return every namespace whose identity is known."""
        return list(self._known.records.values())

    def nbytes(self) -> int:
        """Return the bytes of the catalog's file."""
        return self._nbytes

    def close(self) -> None:
        """Do nothing, because no file is open."""


def read_catalog(env: Env, directory: StoreDirectory) -> OpenedCatalog:
    """Read a catalog, damaged or not, for a store that is opened for reading only."""
    found = salvage(env, directory.database)
    return OpenedCatalog(Snapshot(found, directory.database_bytes()), found.loaded)


def open_catalog(env: Env, directory: StoreDirectory, map_bytes: int, *, sound: bool) -> OpenedCatalog:
    """Open and read the catalog; rewrite a damaged one from all records that can still be read.

    `sound`: whether the caller found the file intact enough for LMDB to open it. Raises OSError.
    """
    beside = os.path.join(directory.database, _NEW)
    directory.remove(beside)
    if sound and not directory.suspect:
        opened = _open_sound(env, directory, map_bytes)
        if opened is not None:
            return opened
    found = salvage(env, directory.database)
    _log.error(
        "the catalog in %s is damaged; it is written anew from %d records",
        directory.database,
        len(found.loaded.records),
    )
    new = Catalog(env, directory.database, map_bytes, name=_NEW)
    try:
        new.restore(found.loaded, found.names)
    finally:
        new.close()
    # The rename is atomic: the name always refers to a complete catalog on the medium, old or new.
    directory.replace(beside)
    directory.mark_repaired()
    catalog = Catalog(env, directory.database, map_bytes)
    with _closed_on_error(catalog):
        return OpenedCatalog(catalog, catalog.load())


def _open_sound(env: Env, directory: StoreDirectory, map_bytes: int) -> OpenedCatalog | None:
    """Return the catalog, or None if it cannot be read completely or cannot be written."""
    try:
        catalog = Catalog(env, directory.database, map_bytes)
        with _closed_on_error(catalog):
            contents = catalog.load()
            if not contents.damaged and _is_writable(catalog):
                return OpenedCatalog(catalog, contents)
    except DamagedError as error:
        _log.error("the catalog in %s is damaged: %s", directory.database, error)
        return None
    catalog.close()
    return None


def _is_writable(catalog: Catalog) -> bool:
    """Return whether a transaction works, or fails only because the disk or quota is full."""
    try:
        catalog.try_writing()
    except DamagedError:
        return False
    except OSError as error:
        if error.errno not in (ENOSPC, EDQUOT):
            raise
    return True


@contextmanager
def _closed_on_error(catalog: Catalog) -> Iterator[None]:
    """Close the catalog if the block raises."""
    try:
        yield
    except BaseException:
        catalog.close()
        raise


def _sound_values(raw: LmdbPages) -> Records:
    """Return the sound records among the values in `raw`, an array of shape (n, 192)."""
    found = np.ascontiguousarray(raw).reshape(-1).view(RECORD)
    return found[sound(found)]


def _scattered(page: LmdbPages) -> Records:
    """Return all sound records in a damaged page, at any even offset: LMDB aligns values to 2 bytes."""
    places = (len(page) - RECORD.itemsize) // 2 + 1
    # First choose the offsets with the beginning of a pool's name. To compute all guards takes much longer.
    at = np.flatnonzero(np.isin(page.view(np.uint16)[_POOL_AT // 2 : _POOL_AT // 2 + places], _POOLS))
    return _sound_values(as_strided(page, (places, RECORD.itemsize), (2, 1))[at])


def _take(node: LmdbNode, names: Names, further: dict[int, list[tuple[Extent, ...]]]) -> None:
    """Add a node's namespace to `names`, or an object's further extents to `further`.

    A key of 8 bytes may belong to either database, so both are tried.
    """
    if len(node.key) == _NUMBER_BYTES and node.value and len(node.value) % _EXTENT_BYTES == 0:
        further.setdefault(int.from_bytes(node.key), []).append(unpack_extents(node.value))
    if 0 < len(node.key) <= _LONGEST_NAME:
        with suppress(ValueError):
            names.add(node.key, *unpack_name(node.key, node.value))


def _loaded(found: Records, further: Mapping[int, list[tuple[Extent, ...]]]) -> CatalogContents:
    """Return the found records without duplicates, oldest first, with their further extents.

    Records whose further extents were lost are left out.
    """
    order = np.lexsort((found["stored_at"], found["guard"], found["number"]))
    found = found[order]
    # Neighbours with equal number and guard are copies of one record. Keep the first.
    twice = (found["number"][1:] == found["number"][:-1]) & (found["guard"][1:] == found["guard"][:-1])
    found = found[np.concatenate([[True], ~twice])] if len(found) else found
    numbers, more = found["number"].tolist(), found["more"].tolist()
    extents: dict[int, tuple[Extent, ...]] = {}
    whole: npt.NDArray[np.bool_] = found["more"] == 0
    for i in np.flatnonzero(~whole).tolist():
        # Of several records with one number, only the first gets the extents found under that number.
        fitting = [some for some in further.get(numbers[i], ()) if len(some) == more[i]]
        if fitting and numbers[i] not in extents:
            extents[numbers[i]] = fitting[-1]
            whole[i] = True
    return CatalogContents(found[whole], extents, damaged=not whole.all())


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
