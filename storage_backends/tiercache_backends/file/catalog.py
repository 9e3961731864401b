"""Catalog of a `file` store: an LMDB environment that records where every object lies.

Format, version 2. All integers are little-endian, except `number`.

    DIR/LOCK, format, state   see local/directory.py; format: {"block": 4096, "slab_blocks": N, "mac": fingerprint or null}
    DIR/slabs/%06d.slab       slab_blocks blocks of 4,096 bytes each; block b is in slab b // slab_blocks; unnamed blocks mean nothing
    DIR/catalog/              this LMDB environment, with three databases:

    objects:    u64 number >> 12, big-endian  ->  records of 192 bytes, many under one key (DUPFIXED), sorted by number
    extents:    number                        ->  the extents after the first: u64 first block, u32 blocks, in payload order
                "opened"                      ->  written at every start, to test whether the catalog can be written
    namespaces: namespace, 1 to 64 bytes      ->  msgpack [id, identity without its salt or nil, whether it has states]

`records.py` describes a record. It is written after the object's bytes, and removed before its blocks are used again.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from errno import EIO, ESTALE
from threading import Lock
from typing import Any, Final, NamedTuple

import lmdb
import numpy as np
import numpy.typing as npt

from tiercache.storage.base import NamespaceRecord, ScanEntry, SetItem
from tiercache.storage.checksum import Sealed
from tiercache.storage.env import Env, let_go
from tiercache_backends.file.names import Names
from tiercache_backends.file.records import RECORD, Records, entry, pack, pack_extents, rows, seal, sound, unpack_extents
from tiercache_backends.file.space import Extent
from tiercache_backends.local.failures import DamagedError, FileLength, os_error
from tiercache_backends.local.names import unpack_name

_log = logging.getLogger(__name__)

_STORED: Final = np.dtype([("chunk", ">u8"), ("record", RECORD)])
_CHUNK_BITS: Final = 12
_NUMBER: Final = struct.Struct(">Q")
_CHUNK: Final = struct.Struct(">Q")
"""Key of `objects`: 8 bytes, so that the alternating keys and records that a bulk read returns can be used without a copy."""
_MARK: Final = b"opened"
"""Key of `extents` that is not a number."""
_RESERVE_BYTES: Final = 1 << 20
_BATCH: Final = 1 << 15
"""Records per transaction when a catalog is rewritten."""
DATA: Final = "data.mdb"
"""Name that LMDB gives to the catalog's file."""


class Loaded(NamedTuple):
    """Sound records of a catalog, oldest first, and the further extents of those that have any.

    `damaged`: some records were unsound or out of order. LMDB's lookups are not reliable then, so the catalog must be rewritten.
    """

    records: Records
    extents: dict[int, tuple[Extent, ...]]
    """Extents after the first, by record number."""
    damaged: bool = False


class Catalog:
    """Records of a store, changed by one writer at a time. Every failure is an OSError.

    Thread safety: any thread may call; `apply` holds the writer lock for one transaction. `load`, `page`, `find` and `entry` take no lock.
    """

    def __init__(self, env: Env, path: str, map_bytes: int, *, name: str = DATA) -> None:
        """Open or create the catalog in the directory `path`. A `name` other than DATA is for a catalog that is being rewritten."""
        self._env = env
        self._path = path
        self._map_bytes = map_bytes
        self._reserved = 0
        self.is_damaged = False
        """Whether LMDB contradicted itself, or its file was cut, since the catalog was opened."""
        self._writer = Lock()
        self._known = Names()
        self._unsaved: set[bytes] = set()
        self._next = 1
        self._pages = 0
        self._file = os.path.join(path, name)
        own = name == DATA
        try:
            self._lmdb = lmdb.open(
                path if own else self._file, map_size=map_bytes, max_dbs=8, mode=0o600, max_spare_txns=4, subdir=own, lock=own
            )
        except lmdb.Error as error:
            raise self._os_error(error) from error
        try:
            self._length = FileLength(env, self._file, self._lmdb)
        except BaseException:
            self._lmdb.close()
            raise
        try:
            self._objects = self._lmdb.open_db(b"objects", dupsort=True, dupfixed=True)
            self._extents = self._lmdb.open_db(b"extents")
            self._names = self._lmdb.open_db(b"namespaces")
            self._page_bytes: int = self._lmdb.stat()["psize"]
            self._load_facts()
            self._reserve()
        except BaseException as error:
            self._let_go()
            if isinstance(error, lmdb.Error):
                raise self._os_error(error) from error
            raise

    def load(self) -> Loaded:
        """Return all sound records, read in a few large copies: a million take about 0.3 s.

        Raises DamagedError where LMDB's own structure is damaged.
        """
        try:
            with self._begin(buffers=True) as txn:
                with txn.cursor(self._objects) as cursor:
                    chunks = [bytes(k) for k in cursor.iternext_nodup(keys=True, values=False)]
                    stored = self._read(cursor, chunks)
                pairs = [(bytes(k), bytes(v)) for k, v in txn.cursor(self._extents)]
        except lmdb.Error as error:
            raise self._os_error(error) from error
        except ValueError as error:
            raise DamagedError(EIO, f"records of other sizes than were written: {error}") from error
        extents = {_NUMBER.unpack(k)[0]: unpack_extents(v) for k, v in pairs if len(k) == _NUMBER.size}
        records = stored["record"]
        numbers = records["number"]
        kept = sound(records)
        if extents:
            held = np.fromiter((len(extents.get(n, ())) for n in numbers.tolist()), np.int64, len(records))
            kept &= held == records["more"]
        else:
            kept &= records["more"] == 0
        self._known.last = max(self._known.last, int(records["namespace"][kept].max(initial=0)))
        in_order = (numbers[1:] > numbers[:-1]).all() and (stored["chunk"] == numbers >> np.uint64(_CHUNK_BITS)).all()
        if kept.all() and in_order:
            return Loaded(records, extents)
        left = records[kept]
        return Loaded(left[np.argsort(left["number"], kind="stable")], extents, damaged=True)

    def try_writing(self) -> None:
        """Make one small change, because a catalog that can be read may still not be writable; raise OSError if that fails."""
        with self._writer:
            try:
                txn = self._begin(write=True)
                try:
                    txn.put(_MARK, self._next.to_bytes(8), db=self._extents)
                    self._env.commit(txn)
                except BaseException:
                    txn.abort()
                    raise
            except lmdb.Error as error:
                raise self._os_error(error) from error

    def restore(self, loaded: Loaded, names: Names) -> None:
        """Write what was saved from a damaged catalog into this one, which is empty; return when all of it is durable.

        The records get new numbers. Raises OSError.
        """
        with self._writer:
            self._known = names
            self._unsaved = set(names.ids)
        for start in range(0, len(loaded.records), _BATCH):
            records = loaded.records[start : start + _BATCH].copy()
            further = {i: loaded.extents[n] for i, n in enumerate(records["number"].tolist()) if n in loaded.extents}
            self.apply(records, further)
        self.apply()
        self.sync()

    def pack(
        self, items: Sequence[SetItem], places: Sequence[tuple[Extent, ...]], seals: Sequence[Sealed], stored_at: int
    ) -> tuple[Records, dict[int, tuple[Extent, ...]]]:
        """Return the records of a batch, not yet numbered, and by position the further extents of those that have more than one.

        `stored_at`: nanoseconds since 1970.
        """
        known_at = min(max(0, stored_at), 2**63 - 1)  # a clock may be set to any time, even before 1970
        records = pack(items, places, seals, [self.id_of(item.meta.namespace) for item in items], known_at)
        return records, {i: place[1:] for i, place in enumerate(places) if len(place) > 1}

    def apply(
        self,
        records: Records | None = None,
        further: Mapping[int, tuple[Extent, ...]] | None = None,
        removals: Sequence[int] = (),
    ) -> None:
        """Change the catalog in one transaction: either all of it is durable on return, or nothing changes and OSError is raised.

        `records` are numbered in place; `further`: their extents after the first, by position. `removals`: numbers of records to remove;
        numbers without a record are ignored.
        """
        with self._writer:
            try:
                self._transact(records, further or {}, removals)
            except lmdb.Error as error:
                raise self._os_error(error) from error

    def page(self, cursor: bytes, count: int) -> Iterator[Records]:
        """Yield `count` records after `cursor`, or as many as there are, in arrays, oldest first; raise OSError.

        `cursor`: the number of a record, 8 bytes, or empty for the beginning.
        """
        try:
            with self._begin(buffers=True) as txn, txn.cursor(self._objects) as walk:
                number = _NUMBER.unpack(cursor)[0] if len(cursor) == _NUMBER.size else 0
                chunk = number >> _CHUNK_BITS
                while count > 0 and walk.set_range(_CHUNK.pack(chunk)):
                    chunk = _CHUNK.unpack(walk.key())[0]
                    stored = self._read(walk, [_CHUNK.pack(chunk)])["record"]
                    found = stored[stored["number"] > number][:count]
                    count -= len(found)
                    yield found
                    chunk += 1
        except lmdb.Error as error:
            raise self._os_error(error) from error

    def find(self, numbers: Sequence[int]) -> Records:
        """Return the records with these numbers that exist and are sound, read in one transaction; raise OSError."""
        try:
            with self._begin(buffers=True) as txn, txn.cursor(self._objects) as walk:
                found = [bytes(walk.value()) for number in numbers if self._is_there(walk, number)]
        except lmdb.Error as error:
            raise self._os_error(error) from error
        records = np.frombuffer(b"".join(raw for raw in found if len(raw) == RECORD.itemsize), RECORD)
        return records[sound(records)]

    def entry(self, record: Any) -> ScanEntry:
        """Return what a record says about its object."""
        return entry(record, self._known.name(int(record["namespace"])))

    def register(self, record: NamespaceRecord) -> None:
        """Record a namespace's identity; raise OSError if it cannot be saved, which the next transaction then tries again."""
        self.id_of(record.namespace)
        with self._writer:
            known = self._known.records.get(record.namespace)
            kept = record.over(known)
            if kept == known:
                return
            self._known.records[record.namespace] = kept
            self._unsaved.add(record.namespace)
        self.apply()

    def has_states(self, namespace: bytes) -> bool:
        """Return whether prefixes of this namespace need states. Takes no lock; True from the moment of registration on."""
        record = self._known.records.get(namespace)
        return record is not None and record.states

    @property
    def newest(self) -> int:
        """Number of the last record."""
        with self._writer:
            return self._next - 1

    def namespaces(self) -> list[NamespaceRecord]:
        """Return every namespace whose identity is known."""
        with self._writer:
            return list(self._known.records.values())

    def removable(self, records: int) -> int:
        """Return how many records a transaction may remove besides adding `records`; 0 or less: it is too full even to add them.

        New records fill LMDB pages at the end; a removal touches a page of records and some above it. A transaction copies the pages that
        it touches, and LMDB reuses the old ones only two transactions later. An eviction and a set are two transactions, and a full map
        refuses even deletions. So there must be room for four copies of all pages that are touched.
        """
        added = records * RECORD.itemsize // self._page_bytes + 8
        touchable = (self._map_bytes // self._page_bytes - self._pages - 5 * added) // 4
        return touchable // 2 if touchable < self._pages else records + (1 << 20)

    def nbytes(self) -> int:
        """Return the bytes of the catalog's file, including those that are reserved."""
        return max(self._reserved, self._written())

    def sync(self) -> None:
        """Return once the catalog is on the medium; raise OSError if that fails."""
        try:
            self._lmdb.sync(True)
        except lmdb.Error as error:
            raise self._os_error(error) from error

    def close(self) -> None:
        """Close the environment."""
        with self._writer:
            self._let_go()

    def _read(self, cursor: Any, chunks: Sequence[bytes]) -> npt.NDArray[Any]:
        """Return all records under these keys, each with its key, by LMDB's bulk read, which copies page by page."""
        raw = cursor.getmulti(chunks, dupdata=True, dupfixed_bytes=RECORD.itemsize, keyfixed=True) if chunks else b""
        return np.frombuffer(raw, _STORED)

    def _transact(
        self,
        records: Records | None,
        further: Mapping[int, tuple[Extent, ...]],
        removals: Sequence[int],
    ) -> None:
        txn = self._begin(write=True)
        try:
            with txn.cursor(self._objects) as cursor:
                for number in removals:
                    self._remove(txn, cursor, number)
                if records is not None:
                    seal(records, self._next)
                    pairs = list(zip(map(_CHUNK.pack, (records["number"] >> _CHUNK_BITS).tolist()), rows(records), strict=True))
                    if cursor.putmulti(pairs, dupdata=True, append=True)[1] != len(pairs):
                        self.is_damaged = True
                        raise DamagedError(EIO, "the catalog is out of order and takes no new records")
                    for index, extents in further.items():
                        txn.put(_NUMBER.pack(int(records["number"][index])), pack_extents(extents), db=self._extents)
            for namespace in self._unsaved:
                txn.put(namespace, self._known.packed(namespace), db=self._names)
            pages = self._used_pages(txn)
        except BaseException:
            txn.abort()
            raise
        try:
            self._env.commit(txn)
        except BaseException as error:
            txn.abort()
            if not isinstance(error, OSError | lmdb.Error) or not self._landed(records, removals):
                raise
            _log.warning("a commit in %s reported a failure, and is there nevertheless", self._path)
        if records is not None:
            self._next += len(records)
        self._unsaved.clear()
        self._pages = pages
        with suppress(OSError):  # this transaction is committed; the next one reports a file that was cut
            self._length.check()
        self._reserve()

    def _landed(self, records: Records | None, removals: Sequence[int]) -> bool:
        """Return whether a transaction took effect although its commit failed. If it were taken for lost, its blocks would be reused."""
        try:
            with self._begin() as txn, txn.cursor(self._objects) as cursor:
                if records is not None:
                    return self._is_there(cursor, int(records["number"][0]))
                return bool(removals) and not self._is_there(cursor, removals[0])
        except lmdb.Error:
            return False

    def _is_there(self, cursor: Any, number: int) -> bool:
        packed = _NUMBER.pack(number)
        return bool(cursor.set_range_dup(_CHUNK.pack(number >> _CHUNK_BITS), packed) and cursor.value()[:8] == packed)

    def _reserve(self) -> None:
        """Keep disk blocks preallocated for the next transactions, because on a full disk even deletions need new LMDB pages."""
        if self._reserved - self._written() >= _RESERVE_BYTES // 2 or self._reserved >= self._map_bytes:
            return
        wanted = min(self._map_bytes, self._written() + _RESERVE_BYTES)
        try:
            fd = self._env.open(self._file, os.O_RDWR)
            try:
                self._env.fallocate(fd, 0, wanted)
                self._env.fdatasync(fd)
            finally:
                let_go(self._env, fd)
        except OSError as error:
            _log.debug("no space can be kept for the catalog in %s: %s", self._path, error)
            return
        self._reserved = wanted

    def _written(self) -> int:
        return self._length.needed()

    def _remove(self, txn: Any, cursor: Any, number: int) -> None:
        if self._is_there(cursor, number):
            cursor.delete()
        txn.delete(_NUMBER.pack(number), db=self._extents)

    def _load_facts(self) -> None:
        with self._begin() as txn:
            self._known.last = int(txn.stat(self._names)["entries"])
            for namespace, value in txn.cursor(self._names):
                try:
                    self._known.add(namespace, *unpack_name(namespace, value))
                except ValueError as error:
                    _log.warning("%s, in %s", error, self._path)
            with txn.cursor(self._objects) as cursor:
                if cursor.last() and cursor.last_dup() and len(cursor.value()) == RECORD.itemsize:
                    self._next = _NUMBER.unpack(cursor.value()[:8])[0] + 1
            self._pages = self._used_pages(txn)

    def _used_pages(self, txn: Any) -> int:
        stats = [txn.stat(db) for db in (self._objects, self._extents, self._names)]
        return sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)

    def _os_error(self, error: lmdb.Error) -> OSError:
        found = os_error(error, self._env, self._path)
        self.is_damaged |= isinstance(found, DamagedError)
        return found

    def id_of(self, namespace: bytes) -> int:
        """Return the id by which records name this namespace; a new id is saved with the next transaction."""
        found = self._known.ids.get(namespace)
        if found is not None:
            return found
        with self._writer:
            if namespace not in self._known.ids:
                self._unsaved.add(namespace)
            return self._known.number(namespace)

    def check_there(self) -> None:
        """Raise OSError unless the catalog's file is still the one at the path where it was opened."""
        if not self._length.same():
            raise OSError(ESTALE, f"{self._file} was replaced while it was open; close the store and open it again")

    def _begin(self, *, write: bool = False, buffers: bool = False) -> Any:
        """Begin a transaction; raise DamagedError if the file was cut, because reading its map beyond the end kills the process."""
        try:
            self._length.check()
        except DamagedError:
            self.is_damaged = True
            raise
        return self._lmdb.begin(None, None, write, buffers)  # type: ignore[call-overload]

    def _let_go(self) -> None:
        """Close the files; harmless when repeated."""
        self._length.close()
        self._lmdb.close()
