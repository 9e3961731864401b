"""Catalog of a `file` store: an LMDB environment that records where every object lies.

Format, version 2. All integers are little-endian, except `number`.

    DIR/LOCK, state       see local/directory.py
    DIR/format            {"block": 4096, "slab_blocks": N, "mac": fingerprint or null}
    DIR/slabs/%06d.slab   slab_blocks blocks of 4,096 bytes each; block b is in slab b // slab_blocks. Blocks
                          that no record names are not in use
    DIR/catalog/          this LMDB environment, with three databases:

    database    key                           value
    objects     u64 number >> 12, big-endian  records of 192 bytes, sorted by number; many under one key
                                              (DUPFIXED)
    extents     number of a record            extents after the first, in payload order: u64 start, u32 blocks
                "opened"                      written at every start, to test that the catalog is writable
    namespaces  namespace, 1 to 64 bytes      msgpack [id, identity (without its salt) or nil, has states]

`records.py` describes a record. A record is written after the object's bytes, and removed before the object's
blocks are used again.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from errno import EIO, ENOSPC, ESTALE
from threading import Lock
from typing import Any, Final

import lmdb
import numpy as np
import numpy.typing as npt

from tiercache.storage.base import NamespaceRecord, ScanEntry, SetItem
from tiercache.storage.env import Env, close_quietly
from tiercache_backends.file.records import (
    RECORD,
    CatalogContents,
    Extent,
    Places,
    Records,
    entry,
    number_and_guard,
    pack,
    pack_extents,
    rows,
    sound,
    unpack_extents,
)
from tiercache_backends.local.failures import DamagedError, FileLength, os_error
from tiercache_backends.local.names import Name, Names, pack_name, unpack_name

_log = logging.getLogger(__name__)

_STORED: Final = np.dtype([("chunk", ">u8"), ("record", RECORD)])
"""One element of LMDB's bulk read of `objects`: the key, then a record."""
_CHUNK_BITS: Final = 12
"""Number of low bits of a record's number that its key in `objects` leaves out.

So up to 4,096 records, a chunk, lie under one key.
"""
_NUMBER: Final = struct.Struct(">Q")
_CHUNK: Final = struct.Struct(">Q")
"""Key in `objects`. All keys have 8 bytes, so a bulk read returns one array, which is used without a copy."""
_MARK: Final = b"opened"
"""Key of the test write that each start makes in `extents`."""
_RESERVE_BYTES: Final = 1 << 20
"""Bytes that are preallocated behind the last page of the catalog's file."""
_BATCH: Final = 1 << 15
"""Records per transaction when a catalog is rewritten."""
_NAME_SHARE: Final = 512
"""Bytes of the map for each namespace that the catalog may have; a namespace takes at most 160."""
_RECORD_SHARE: Final = 8
"""Divisor of the map: so much of it may be records of namespaces, which take twice their length at most."""
DATA: Final = "data.mdb"
"""Name that LMDB gives to the catalog's file."""


class Catalog:
    """Records of a store, changed by one writer at a time. Every failure is an OSError.

    Thread safety: any thread may call; `apply` holds the writer lock for one transaction. `load`, `page`,
    `find` and `entry` take no lock.
    """

    def __init__(self, env: Env, path: str, map_bytes: int, *, name: str = DATA) -> None:
        """Open or create the catalog in the directory `path`.

        A `name` other than DATA is for a catalog that is being rewritten. Its file lies beside the old one,
        and LMDB makes no lock file for it.
        """
        self._env = env
        self._path = path
        self._map_bytes = map_bytes
        self._reserved = 0
        """Length to which the catalog's file is preallocated, in bytes."""
        self.is_damaged = False
        """Whether LMDB has reported damage, or the file was cut, since the catalog was opened."""
        self._writer = Lock()
        self._known = Names()
        self._unsaved: set[bytes] = set()
        """Namespaces that the next transaction must save."""
        self._next = 1
        """Number of the next record."""
        self._pages = 0
        """Number of LMDB pages in use."""
        self._file = os.path.join(path, name)
        own = name == DATA
        try:
            self._lmdb = lmdb.open(
                path if own else self._file,
                map_size=map_bytes,
                max_dbs=8,
                mode=0o600,
                max_spare_txns=4,
                subdir=own,
                lock=own,
            )
        except lmdb.Error as error:
            raise self._os_error(error) from error
        try:
            self._length = FileLength(env, self._file, self._lmdb)
        except BaseException:  # whatever it is, the environment does not stay open, and it is raised again
            self._lmdb.close()
            raise
        try:
            self._objects = self._lmdb.open_db(b"objects", dupsort=True, dupfixed=True)
            self._extents = self._lmdb.open_db(b"extents")
            self._names = self._lmdb.open_db(b"namespaces")
            self._page_bytes: int = self._lmdb.stat()["psize"]
            self._load_facts()
            self._reserve()
        except BaseException as error:  # whatever it is, no file stays open, and it is raised again
            self._close_files()
            if isinstance(error, lmdb.Error):
                raise self._os_error(error) from error
            raise

    def load(self) -> CatalogContents:
        """Return all sound records. A million records take about 0.3 s, because a few large copies read them.

        Raises DamagedError if LMDB's own structure is damaged.
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
        # Keep a record if its guard is right and it has as many further extents as its field `more` says.
        kept = sound(records)
        if extents:
            held = np.fromiter((len(extents.get(n, ())) for n in numbers.tolist()), np.int64, len(records))
            kept &= held == records["more"]
        else:
            kept &= records["more"] == 0
        self._known.last = max(self._known.last, int(records["namespace"][kept].max(initial=0)))
        # In a sound catalog, numbers rise from record to record, and a record's key follows from its number.
        in_order = (numbers[1:] > numbers[:-1]).all() and (
            stored["chunk"] == numbers >> np.uint64(_CHUNK_BITS)
        ).all()
        if kept.all() and in_order:
            return CatalogContents(records, extents)
        left = records[kept]
        return CatalogContents(left[np.argsort(left["number"], kind="stable")], extents, damaged=True)

    def try_writing(self) -> None:
        """Test with one small change whether the catalog can be written.

        Raises OSError if it cannot.
        """
        with self._writer:
            try:
                txn = self._begin(write=True)
                try:
                    txn.put(_MARK, self._next.to_bytes(8), db=self._extents)
                    self._env.commit(txn)
                except BaseException:  # whatever it is, LMDB's writer is free again, and it is raised again
                    txn.abort()
                    raise
            except lmdb.Error as error:
                raise self._os_error(error) from error

    def restore(self, loaded: CatalogContents, names: Names) -> None:
        """Write records from a damaged catalog into this empty one, with new numbers.

        Returns when all of them are durable. Raises OSError.
        """
        with self._writer:
            self._known = names
            self._unsaved = set(names.ids)
        for start in range(0, len(loaded.records), _BATCH):
            records = loaded.records[start : start + _BATCH].copy()
            further = {
                i: loaded.extents[n] for i, n in enumerate(records["number"].tolist()) if n in loaded.extents
            }
            self.apply(records, further)
        self.apply()  # saves the namespaces even if there are no records
        self.sync()

    def pack(
        self,
        items: Sequence[SetItem],
        places: Places,
        checksums: Sequence[bytes],
        macs: Sequence[bytes],
        stored_at: int,
    ) -> Records:
        """Return the records of a batch, not yet numbered; `stored_at`: nanoseconds since 1970."""
        known_at = min(max(0, stored_at), 2**63 - 1)  # a wrong clock may show a time before 1970
        namespaces = [self.id_of(item.meta.namespace) for item in items]
        return pack(items, places, checksums, macs, namespaces, known_at)

    def apply(
        self,
        records: Records | None = None,
        further: Mapping[int, tuple[Extent, ...]] | None = None,
        removals: Sequence[int] = (),
        forgotten: Sequence[bytes] = (),
    ) -> None:
        """Change the catalog in one transaction.

        On return all changes are durable. If the call raises OSError, nothing was changed.

        `records`: records to add; this call sets their numbers. `further`: their extents after the first, by
        position. `removals`: numbers of records to remove; numbers without a record are ignored.
        `forgotten`: namespaces to forget, which no record names.
        """
        with self._writer:
            try:
                self._transact(records, further or {}, removals, forgotten)
            except lmdb.Error as error:
                raise self._os_error(error) from error

    def page(self, cursor: bytes, count: int) -> Iterator[Records]:
        """Yield at most `count` records after `cursor`, in arrays, oldest first.

        Raises OSError. `cursor`: the number of a record as 8 bytes; empty to begin with the first record.
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
        """Return the records with these numbers that exist and are sound, read in one transaction.

        Raises OSError.
        """
        try:
            with self._begin(buffers=True) as txn, txn.cursor(self._objects) as walk:
                found = [bytes(walk.value()) for number in numbers if self._is_there(walk, number)]
        except lmdb.Error as error:
            raise self._os_error(error) from error
        records = np.frombuffer(b"".join(raw for raw in found if len(raw) == RECORD.itemsize), RECORD)
        return records[sound(records)]

    def entry(self, record: Any) -> ScanEntry:
        """Return the scan entry of the object that a record describes."""
        return entry(record, self._known.name(int(record["namespace"])))

    def register(self, record: NamespaceRecord) -> None:
        """Record a namespace's identity.

        Raises OSError if the identity cannot be saved. The next transaction tries again, unless the reason is
        that there are too many already.
        """
        there = self.id_of(record.namespace)
        with self._writer:
            known = self._known.records.get(record.namespace)
            kept = record.over(known)
            if kept == known:
                return
            others = [self._known.packed(name) for name in self._known.records if name != record.namespace]
            packed = pack_name(Name(there, kept))
            if not there or sum(map(len, [*others, packed])) > self._map_bytes // _RECORD_SHARE:
                raise OSError(ENOSPC, "there are too many namespaces, or their records are too long")
            self._known.records[record.namespace] = kept
            self._unsaved.add(record.namespace)
        self.apply()

    def forget_unused(self, loaded: CatalogContents) -> None:
        """Forget the namespaces that have neither a record nor one of these objects.

        Raises OSError. The last id stays, so that no later namespace gets an id that was in use.
        """
        kept = {*np.unique(loaded.records["namespace"]).tolist(), self._known.last}
        with self._writer:
            ids, records = self._known.ids, self._known.records
            unused = [name for name, number in ids.items() if number not in kept and name not in records]
        try:
            self.apply(forgotten=unused)
        except OSError:
            # The transaction may have taken effect. The next one saves the namespaces again.
            self._unsaved.update(unused)
            raise

    def has_states(self, namespace: bytes) -> bool:
        """Return whether prefixes of this namespace need states.

        Takes no lock. The answer is True as soon as the need is registered, even if it is not saved yet.
        """
        record = self._known.records.get(namespace)
        return record is not None and record.states

    @property
    def newest(self) -> int:
        """Number of the last record."""
        with self._writer:
            return self._next - 1

    def namespaces(self) -> list[NamespaceRecord]:
        """Return the record of every namespace whose identity is known."""
        with self._writer:
            return list(self._known.records.values())

    def removable(self, records: int) -> int:
        """Return how many records a transaction may remove while it also adds `records`.

        A result of 0 or less means that there is not even room to add the records.

        A full map refuses every change, even a deletion. New records fill LMDB pages at the end of the tree.
        A removal changes one page of records and some pages above it. A transaction copies each page that it
        changes, and LMDB reuses the old page only two transactions later. An eviction and a set are two
        transactions. So there must be room for four copies of all changed pages.
        """
        # Number of LMDB pages for the new records, and a few pages above them.
        added = records * RECORD.itemsize // self._page_bytes + 8
        # Number of pages that may be changed. Four copies of each such page fit beside the pages in use.
        touchable = (self._map_bytes // self._page_bytes - self._pages - 5 * added) // 4
        # A removal changes about two pages. If all pages in use may be changed, the room sets no limit. The
        # result is then larger than any batch.
        return touchable // 2 if touchable < self._pages else records + (1 << 20)

    def addable(self) -> int:
        """Return how many records a transaction may add without a removal before it (see `removable`)."""
        added = (self._map_bytes // self._page_bytes - self._pages) // 5 - 2
        return max(0, added - 8) * self._page_bytes // RECORD.itemsize

    def nbytes(self) -> int:
        """Return the bytes of the catalog's file, including those that are preallocated."""
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
            self._close_files()

    def _read(self, cursor: Any, chunks: Sequence[bytes]) -> npt.NDArray[Any]:
        """Return all records under these keys, each with its key, by LMDB's bulk read."""
        raw = (
            cursor.getmulti(chunks, dupdata=True, dupfixed_bytes=RECORD.itemsize, keyfixed=True)
            if chunks
            else b""
        )
        return np.frombuffer(raw, _STORED)

    def _transact(
        self,
        records: Records | None,
        further: Mapping[int, tuple[Extent, ...]],
        removals: Sequence[int],
        forgotten: Sequence[bytes],
    ) -> None:
        txn = self._begin(write=True)
        try:
            with txn.cursor(self._objects) as cursor:
                for number in removals:
                    self._remove(txn, cursor, number)
                if records is not None:
                    number_and_guard(records, self._next)
                    keys = map(_CHUNK.pack, (records["number"] >> _CHUNK_BITS).tolist())
                    pairs = list(zip(keys, rows(records), strict=True))
                    # With `append`, LMDB refuses a record that does not come after the last one.
                    if cursor.putmulti(pairs, dupdata=True, append=True)[1] != len(pairs):
                        self.is_damaged = True
                        raise DamagedError(EIO, "the catalog is out of order and takes no new records")
                    for index, extents in further.items():
                        txn.put(
                            _NUMBER.pack(int(records["number"][index])),
                            pack_extents(extents),
                            db=self._extents,
                        )
            # This transaction also saves the namespaces that a failed transaction left unsaved.
            for namespace in self._unsaved:
                txn.put(namespace, self._known.packed(namespace), db=self._names)
            for namespace in forgotten:
                txn.delete(namespace, db=self._names)
            pages = self._used_pages(txn)
        except BaseException:  # whatever it is, LMDB's writer is free again, and it is raised again
            txn.abort()
            raise
        try:
            self._env.commit(txn)
        except BaseException as error:
            txn.abort()
            if not isinstance(error, OSError | lmdb.Error) or not self._landed(records, removals):
                raise
            _log.warning("a commit in %s reported an error but took effect", self._path)
        if records is not None:
            self._next += len(records)
        self._unsaved.clear()
        self._known.forget(forgotten)
        self._pages = pages
        # This transaction is committed. If another process has cut the file meanwhile, the next transaction
        # reports the cut.
        with suppress(OSError):
            self._length.check()
        self._reserve()

    def _landed(self, records: Records | None, removals: Sequence[int]) -> bool:
        """Return whether a transaction took effect although its commit reported an error.

        If such a transaction counted as failed, its blocks would be reused although its records name them.
        """
        # A transaction takes effect completely or not at all, so test only one record or one removal.
        try:
            with self._begin() as txn, txn.cursor(self._objects) as cursor:
                if records is not None:
                    return self._is_there(cursor, int(records["number"][0]))
                return bool(removals) and not self._is_there(cursor, removals[0])
        except lmdb.Error:
            return False

    def _is_there(self, cursor: Any, number: int) -> bool:
        packed = _NUMBER.pack(number)
        return bool(
            cursor.set_range_dup(_CHUNK.pack(number >> _CHUNK_BITS), packed) and cursor.value()[:8] == packed
        )

    def _reserve(self) -> None:
        """Preallocate disk blocks for the next transactions, because even a deletion needs new pages."""
        if self._reserved - self._written() >= _RESERVE_BYTES // 2 or self._reserved >= self._map_bytes:
            return
        wanted = min(self._map_bytes, self._written() + _RESERVE_BYTES)
        try:
            fd = self._env.open(self._file, os.O_RDWR)
            try:
                self._env.fallocate(fd, 0, wanted)
                self._env.fdatasync(fd)
            finally:
                close_quietly(self._env, fd)
        except OSError as error:
            _log.debug("no space can be kept for the catalog in %s: %s", self._path, error)
            return
        self._reserved = wanted

    def _written(self) -> int:
        """Return the bytes up to the end of the last page that LMDB has written."""
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
        """Return the id by which records name this namespace; 0 if there is no room for another namespace.

        The next transaction saves a new id.
        """
        found = self._known.ids.get(namespace)
        if found is not None:
            return found
        with self._writer:
            # Test again: another thread may have added the namespace since.
            if namespace not in self._known.ids:
                if len(self._known.ids) >= self._map_bytes // _NAME_SHARE:
                    return 0
                self._unsaved.add(namespace)
            return self._known.number(namespace)

    def name_of(self, number: int) -> bytes:
        """Return the namespace with this id; empty if there is none, or if its name cannot be read."""
        return self._known.name(number)

    def check_there(self) -> None:
        """Raise OSError unless the catalog's path still names the open file."""
        if not self._length.same():
            raise OSError(
                ESTALE, f"{self._file} was replaced while it was open; close the store and open it again"
            )

    def _begin(self, *, write: bool = False, buffers: bool = False) -> Any:
        """Begin a transaction.

        Raises DamagedError if the file was cut. A read of the map behind the file's end would kill the
        process.
        """
        try:
            self._length.check()
        except DamagedError:
            self.is_damaged = True
            raise
        return self._lmdb.begin(None, None, write, buffers)  # type: ignore[call-overload]

    def _close_files(self) -> None:
        """Close the descriptors. A second call does nothing."""
        self._length.close()
        self._lmdb.close()
