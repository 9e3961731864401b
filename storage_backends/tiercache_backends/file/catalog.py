"""Catalog of a `file` store: an append-only log that records where every object lies.

Format, version 3. `records.py` describes the records, and all integers are little-endian.

    DIR/LOCK, state         see local/directory.py
    DIR/format              {"block": 4096, "slab_blocks": N, "mac": fingerprint or null, "store": id}
    DIR/slabs/%06d.slab     slab_blocks blocks of 4,096 bytes each; block b is in slab b // slab_blocks.
                            Blocks that no record names are not in use
    DIR/catalog/%06d.log    records of 192 bytes, at their position times 192. The name is the generation
    DIR/catalog/new.log     a log that is being written; nobody reads it

    position  0     1 ...                                           end
              HEAD  NAME  STORED STORED  EXTENTS  STORED  GONE ...  | reserved zeros, or a torn tail

Promises:

1. What `apply` has returned from is found by the next opening: after a kill always, after a power cut if the
   store has `durability=power`; deletions by a caller always. A record is appended after the object's bytes
   are in their blocks, a GONE record before the blocks of its objects are used again. All records of one call
   are one write.
2. Every record is believed for itself, because its guard covers its place. Damage costs the records that it
   lies on: an object's own record costs the object, a GONE record may bring removed objects back, whose bytes
   are checked when they are read. The log ends behind its last right record.
3. A log that is more than half dead is written anew beside the old one: new.log, sync, rename, sync of the
   directory, and only then is the old one removed. The highest generation with a right record is the log, so
   that a kill or a power cut anywhere leaves one whole log that has everything acknowledged.
4. The catalog never takes more than its budget, old and new log together. What is live may take 45 %.
5. Nothing is mapped. A log that was cut under an open store is noticed at the next change and written anew
   without what was lost; until then calls that need the lost part fail.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from errno import EIO, ENOSPC, EROFS
from threading import Lock
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tiercache.storage.base import NamespaceRecord, ScanEntry
from tiercache.storage.env import Env, close_quietly, read_all, write_all
from tiercache_backends.file.opening import NEW, FoundLog, log_path
from tiercache_backends.file.records import (
    NO_RECORDS,
    RECORD,
    RECORD_BYTES,
    Extent,
    LogHead,
    RecordKind,
    Records,
    entry,
    guards,
    keys_of,
    notes_for,
    pack_extents,
    pack_gone,
    pack_value,
    sound,
)
from tiercache_backends.local.directory import StoreDirectory, check_named, sync_directory
from tiercache_backends.local.names import pack_name

_log = logging.getLogger(__name__)

_MIN_REWRITE: Final = (8 << 20) // RECORD_BYTES
"""Records that a log must have to be rewritten because more than half of it is dead."""
_RESERVE: Final = (1 << 20) // RECORD_BYTES
"""Records for which disk space is preallocated at once. The last part of it is for removals."""
_LIVE_SHARE: Final = 0.45
"""Largest part of the budget that live records may take, so that old and new log fit into it together."""
_PART: Final = 1 << 14
"""Records that are read and written at once."""
_NAME_SHARE: Final = 2048
"""Bytes of the budget for each namespace that the catalog may have."""
_VALUE_SHARE: Final = 8
"""Divisor of the budget: so much of it may be records of namespaces."""
_LIVE: Final = (RecordKind.STORED, RecordKind.EXTENTS)
"""Kinds of the records that a rewritten log takes over."""


class Catalog:
    """Records of a store, appended by one writer at a time. Every failure is an OSError.

    Thread safety: any thread may call. `_writer` is held while the log is written, synced or rewritten,
    `_index` for reads of the log and for changes of what is known of it. Lock order: `_writer`, `_index`.
    """

    def __init__(
        self,
        env: Env,
        directory: StoreDirectory,
        found: FoundLog,
        budget: int,
        *,
        power: bool = False,
        read_only: bool = False,
    ) -> None:
        """Open the log that was found, and make a first one if there was none.

        `budget`: maximum bytes of all logs. `power`: every change is on the medium when `apply` returns.
        """
        self._env = env
        self._directory = directory
        self._store = found.store
        self._generation = found.generation
        self._budget = budget
        self._limit = budget // RECORD_BYTES
        self._reserve = min(_RESERVE, self._limit // 16)
        self._power = power
        self._read_only = read_only
        self.damaged: Final = found.damaged
        """Whether the log was damaged when it was opened."""
        self._writer = Lock()
        self._index = Lock()
        self._fd, found.fd = found.fd, -1
        first = self._fd < 0
        self._keys = keys_of(found.store, found.generation)
        self._known = found.names
        self._unsaved: set[bytes] = set()
        """Namespaces that the next change must save."""
        self._last = found.last
        """Number of the newest object."""
        self._end = len(found.numbers)
        """Position of the next record."""
        self._numbers, self._alive = found.numbers, found.alive
        """Columns by position: the number of the record, and whether a rewritten log must have it."""
        self._live = int(np.count_nonzero(found.alive))
        """Number of records that are alive."""
        self._torn = 0
        """Records behind the end that a failed write may have left, which must be overwritten first."""
        self._stale = found.older
        """Older logs, removed as soon as the name of the present one is on the medium."""
        self._renamed = bool(found.older)
        """Whether the name of the present log may not be on the medium."""
        self._rewrite_at = 0
        """Position before which the log is not rewritten again."""
        self._lost = 0
        """Number of live records that a rewrite could not read, because the log was cut or has rotted."""
        self._size = 0
        """Length of the log's file, in records."""
        self._named: int = self._name_records()
        self._path = log_path(directory.database, found.generation)
        if read_only:
            return
        try:
            with self._writer:
                if first or found.damaged:
                    self._rewrite()
                else:
                    self._size = self._env.fstat(self._fd).st_size // RECORD_BYTES
                    self._settle()
                with suppress(OSError):  # a full disk: the next change tries again
                    self._allocate(self._end)
        except OSError:
            if first:
                self.close()
                raise
            _log.warning("the catalog in %s cannot be rewritten now", directory.database, exc_info=True)

    def apply(
        self,
        records: Records = NO_RECORDS,
        further: Mapping[int, tuple[Extent, ...]] | None = None,
        removals: Sequence[int] = (),
        *,
        durable: bool = False,
    ) -> None:
        """Append records and removals in one write. If the call raises OSError, nothing was changed.

        `records`: records to add; this call sets their numbers. `further`: their extents after the first, by
        position. `removals`: numbers of objects to remove; numbers without a record are ignored. `durable`:
        return when the change is on the medium, also without `power`.
        """
        with self._writer:
            if self._read_only:
                raise OSError(EROFS, os.strerror(EROFS))
            parts = self._parts(records, further or {}, removals)
            count = sum(map(len, parts))
            if not count:
                return
            self._make_room(count, adding=len(records) > 0)
            self._clear_torn()
            position = self._end
            for part in parts:
                part["guard"] = guards(part, position, self._keys)
                position += len(part)
            try:
                write_all(
                    self._env,
                    self._fd,
                    [part.view(np.uint8).data for part in parts],
                    self._end * RECORD_BYTES,
                )
                if self._power or durable:
                    self._settle()
                    self._env.fdatasync(self._fd)
            except BaseException:  # whatever it is, no record of a failed call stays, and it is raised again
                self._torn = count
                with suppress(OSError):
                    self._clear_torn()
                raise
            self._last += len(records)
            self._unsaved.clear()
            self._appended(parts, removals)

    def page(self, cursor: bytes, count: int) -> Records:
        """Return at most `count` records of objects after `cursor`, oldest first.

        Raises OSError. `cursor`: the number of a record as 8 bytes; empty to begin with the first record.
        """
        found: list[Records] = [NO_RECORDS]
        with self._index:
            after = min(int.from_bytes(cursor[:8]), 2**62)
            at = int(np.searchsorted(self._numbers[: self._end], after, "right"))
            while count > 0 and at < self._end:
                stop = min(at + _PART, self._end, at + max(64, count))
                part = self._read(at, stop)
                right = sound(part, at, self._keys) & (part["kind"] == RecordKind.STORED)
                part = part[right & self._alive[at:stop]][:count]
                found.append(part)
                count -= len(part)
                at = stop
        return np.concatenate([part.view(np.uint8) for part in found]).view(RECORD)

    def find(self, numbers: Sequence[int]) -> Records:
        """Return the records of the objects with these numbers, in any order, as far as they are right.

        Raises OSError.
        """
        found: list[Records] = [NO_RECORDS]
        with self._index:
            at, there = self._positions(np.unique(np.array(numbers, np.int64)))
            at = at[there]
            # Adjacent records are read at once.
            for run in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1):
                if len(run):
                    part = self._read(int(run[0]), int(run[-1]) + 1)
                    found.append(part[sound(part, int(run[0]), self._keys)])
        return np.concatenate([part.view(np.uint8) for part in found]).view(RECORD)

    def entry(self, record: Any) -> ScanEntry:
        """Return the scan entry of the object that a record describes."""
        return entry(record, self._known.name(int(record["namespace"])))

    def register(self, record: NamespaceRecord) -> None:
        """Record a namespace's identity.

        Raises OSError if the identity cannot be saved. The next change tries again, unless the reason is that
        there are too many already.
        """
        there = self.id_of(record.namespace)
        with self._writer:
            known = self._known.records.get(record.namespace)
            kept = record.over(known)
            if kept == known:
                return
            others = [self._known.packed(name) for name in self._known.records if name != record.namespace]
            packed = pack_name(there, kept)
            if not there or sum(map(len, [*others, packed])) > self._budget // _VALUE_SHARE:
                raise OSError(ENOSPC, "there are too many namespaces, or their records are too long")
            self._known.records[record.namespace] = kept
            self._unsaved.add(record.namespace)
            self._named = self._name_records()
        self.apply()

    def id_of(self, namespace: bytes) -> int:
        """Return the id by which records name this namespace; 0 if there is no room for another namespace.

        The next change saves a new id.
        """
        found = self._known.ids.get(namespace)
        if found is not None:
            return found
        with self._writer:
            # Test again: another thread may have added the namespace since.
            if namespace not in self._known.ids:
                if len(self._known.ids) >= self._budget // _NAME_SHARE:
                    return 0
                self._unsaved.add(namespace)
                self._named += 1
            return self._known.number(namespace)

    def name_of(self, number: int) -> bytes:
        """Return the namespace with this id; empty if there is none, or if its name cannot be read."""
        return self._known.name(number)

    def namespaces(self) -> list[NamespaceRecord]:
        """Return the record of every namespace whose identity is known."""
        with self._writer:
            return list(self._known.records.values())

    def room(self) -> int:
        """Return how many records may be added before others must be removed; negative if there are too many.

        An object takes one record, and another one for each 14 extents after its first.
        """
        return int((self._limit - 2 * self._reserve) * _LIVE_SHARE) - self._live - self._named

    def nbytes(self) -> int:
        """Return the bytes of the log's file, including those that are preallocated."""
        return max(self._size, self._end) * RECORD_BYTES

    def sync(self) -> None:
        """Return once the catalog is on the medium; raise OSError if that fails."""
        with self._writer:
            if self._lost:
                raise OSError(
                    EIO,
                    f"{self._lost} records were lost while the store was open; their objects will be missed"
                    " at the next start, so close the store and open it again",
                )
            self._settle()
            self._env.fdatasync(self._fd)

    def check_there(self) -> None:
        """Raise OSError unless the log's path still names the open file."""
        with self._index:
            check_named(self._env, self._path, self._fd)

    def close(self) -> None:
        """Close the log. A second call does nothing."""
        with self._writer, self._index:
            if self._fd >= 0:
                close_quietly(self._env, self._fd)
                self._fd = -1

    def _parts(
        self, records: Records, further: Mapping[int, tuple[Extent, ...]], removals: Sequence[int]
    ) -> list[Records]:
        """Number the records; return all records to append, in the order in which they are written."""
        parts = self._names(self._unsaved)
        for part in parts:
            part["number"] = self._last
        records["number"] = np.arange(self._last + 1, self._last + 1 + len(records))
        done = 0
        for index in sorted(further):
            notes = pack_value(RecordKind.EXTENTS, pack_extents(further[index]))
            notes["number"] = records["number"][index]
            parts += [records[done : index + 1], notes]
            done = index + 1
        parts.append(records[done:])
        if removals:
            parts.append(gone := pack_gone(removals))
            gone["number"] = self._last + len(records)
        return [part for part in parts if len(part)]

    def _names(self, namespaces: set[bytes] | dict[bytes, int]) -> list[Records]:
        return [
            pack_value(RecordKind.NAME, bytes([len(name)]) + name + self._known.packed(name))
            for name in namespaces
        ]

    def _name_records(self) -> int:
        """Return the number of records that the namespaces take in a rewritten log."""
        return sum(notes_for(1 + len(name) + len(self._known.packed(name))) for name in self._known.ids)

    def _appended(self, parts: Sequence[Records], removals: Sequence[int]) -> None:
        """Note what was appended and removed."""
        with self._index:
            end = self._end + sum(map(len, parts))
            if end > len(self._numbers):
                self._numbers, self._alive = (
                    np.concatenate([column[: self._end], np.zeros(end, column.dtype)])
                    for column in (self._numbers, self._alive)
                )
            for part in parts:
                there = slice(self._end, self._end + len(part))
                self._numbers[there] = part["number"]
                if part["kind"][0] in _LIVE:
                    self._alive[there] = True
                    self._live += len(part)
                self._end = there.stop
            if removals:
                numbers = np.array(removals, np.int64)
                at, known = self._positions(numbers)
                ends = np.searchsorted(self._numbers[: self._end], numbers[known], "right")
                for first, last in zip(at[known].tolist(), ends.tolist(), strict=True):
                    # With the record of the object go those of its further extents, which have its number.
                    self._live -= int(np.count_nonzero(self._alive[first:last])) if last > first + 1 else 1
                    self._alive[first:last] = False

    def _positions(self, numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
        """Return the positions of the records of these objects, and which of them are there."""
        if not self._end:
            return numbers, np.zeros(len(numbers), np.bool_)
        at = np.searchsorted(self._numbers[: self._end], numbers)
        inside = np.minimum(at, self._end - 1)
        return at, (at < self._end) & (self._numbers[inside] == numbers) & self._alive[inside]

    def _read(self, start: int, stop: int) -> Records:
        """Return the records of these positions; the caller holds `_index` or `_writer`."""
        records = np.empty(stop - start, RECORD)
        whole = records.view(np.uint8).data
        if read_all(self._env, self._fd, [whole], start * RECORD_BYTES) < len(whole):
            raise OSError(EIO, f"{self._path} was cut while it was open; close the store and open it again")
        return records

    def _make_room(self, count: int, *, adding: bool) -> None:
        """Make sure that `count` records fit into the budget and on the disk."""
        size = self._env.fstat(self._fd).st_size
        if size < self._size * RECORD_BYTES:
            # What was removed must not come back with the next opening, and only this process knows it.
            _log.error("%s was cut to %d bytes while it was open; it is written anew", self._path, size)
            self._rewrite()
        kept = self._live + self._named
        if adding and count > self.room():
            raise OSError(ENOSPC, "the catalog is full")
        dead = (
            self._end > max(_MIN_REWRITE, 2 * kept) or self._end + count + kept > self._limit - self._reserve
        )
        if dead and self._end + count > self._rewrite_at:
            try:
                self._rewrite()
            except OSError as error:
                # The old log is whole, and is used as long as there is room.
                _log.warning("the catalog in %s cannot be rewritten: %s", self._directory.database, error)
                self._rewrite_at = self._end + count + self._reserve
        if self._end + count > self._limit:
            raise OSError(ENOSPC, "the catalog is full")
        # A removal may use the last preallocated part, because a full disk must not stop removals.
        self._allocate(self._end + count + (self._reserve // 4 if adding else 0))

    def _allocate(self, needed: int) -> None:
        """Preallocate the log's file for `needed` records and more, so that no append meets a full disk."""
        if needed <= self._size and self._size:
            return
        size = min(needed + self._reserve, max(needed, self._limit - self._live - self._named))
        self._env.fallocate(self._fd, 0, size * RECORD_BYTES)
        self._size = size

    def _clear_torn(self) -> None:
        """Overwrite what a failed write may have left behind the end, so that nobody takes it for records."""
        if self._torn:
            zeros = memoryview(bytes(self._torn * RECORD_BYTES))
            write_all(self._env, self._fd, [zeros], self._end * RECORD_BYTES)
            self._torn = 0

    def _rewrite(self) -> None:
        """Write a log of the next generation with all that is alive, and use it from now on."""
        database, generation = self._directory.database, self._generation + 1
        path, new = log_path(database, generation), os.path.join(database, NEW)
        keys = keys_of(self._store, generation)
        columns: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]] = []
        end = 0
        fd = self._env.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            for part, numbers, alive in self._survivors():
                part["guard"] = guards(part, end, keys)
                write_all(self._env, fd, [part.view(np.uint8).data], end * RECORD_BYTES)
                columns.append((numbers, alive))
                end += len(part)
            self._env.fdatasync(fd)
            self._env.rename(new, path)
        except BaseException:  # whatever it is, the old log stays, and it is raised again
            close_quietly(self._env, fd)
            with suppress(OSError):
                self._env.unlink(new)
            raise
        # From here on, the next opening takes the new log.
        with self._index:
            if self._fd >= 0:
                close_quietly(self._env, self._fd)
                self._stale.append(self._path)
            self._fd, self._path, self._generation, self._keys = fd, path, generation, keys
            self._numbers, self._alive = (np.concatenate(some) for some in zip(*columns, strict=True))
            self._end, self._size, self._torn = end, 0, 0
            before, self._live = self._live, int(np.count_nonzero(self._alive))
        self._lost += before - self._live
        self._unsaved.clear()
        self._rewrite_at = end + self._reserve // 2
        self._renamed = True
        self._settle()

    def _survivors(self) -> Iterator[tuple[Records, npt.NDArray[np.int64], npt.NDArray[np.bool_]]]:
        """Yield the records of a rewritten log, with their numbers and whether they are alive."""
        head = LogHead(self._store, self._last, self._known.last).pack()
        for part in (head, *self._names(self._known.ids)):
            yield part, np.zeros(len(part), np.int64), np.zeros(len(part), np.bool_)
        for start in range(0, self._end, _PART):
            there = slice(start, min(self._end, start + _PART))
            if not self._alive[there].any():
                continue
            records = np.zeros(there.stop - start, RECORD)
            # What cannot be read, because the file was cut or has rotted, is not right and is left out.
            read_all(self._env, self._fd, [records.view(np.uint8).data], start * RECORD_BYTES)
            kept = self._alive[there] & sound(records, start, self._keys)
            if kept.any():
                yield records[kept], self._numbers[there][kept], np.ones(int(kept.sum()), np.bool_)

    def _settle(self) -> None:
        """Make the present log's name durable, and remove the older logs."""
        if self._renamed:
            sync_directory(self._env, self._directory.database)
            for path in self._stale:
                self._directory.remove(path)
            self._renamed, self._stale = False, []
