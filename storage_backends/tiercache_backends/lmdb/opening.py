"""Opening of the directory of an `lmdb` store: lock it, check or repair its data, and agree on its size.

While one process opens the store for writing, no other process can open it: `StoreDirectory.claim` takes a
lock, which `admit_others` releases.

A damaged file is read without LMDB (`salvage`), and its readable objects are copied into a new environment.
Every LMDB page in use is read by itself, whether or not the tree still leads to it. An object is copied if
its record and all pieces of its payload are found and its checksum is right. So only the objects on damaged
LMDB pages are lost. If the list of free LMDB pages or a head page is damaged, free pages are read too, and an
object that was deleted shortly before may come back.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from tiercache.core import DIGEST_BYTES
from tiercache.errors import ConfigError, StorageError, StoreDamagedError
from tiercache.storage.base import NamespaceRecord, SetItem
from tiercache.storage.checksum import MacKey
from tiercache.storage.env import Env
from tiercache_backends.lmdb.budget import (
    SMALLEST_CAPACITY,
    PageBudget,
    capacity_for,
    keep_freed_memory,
    map_bytes,
)
from tiercache_backends.lmdb.environment import Environment
from tiercache_backends.lmdb.payload import PART_PAGES, part_key
from tiercache_backends.lmdb.records import SIZE, Record, Size
from tiercache_backends.lmdb.transaction import Transaction
from tiercache_backends.local.directory import StoreDirectory, tree_bytes
from tiercache_backends.local.failures import DamagedError
from tiercache_backends.local.lmdb_file import LmdbFile, LmdbPages
from tiercache_backends.local.lmdb_file import LmdbPlace as Value
from tiercache_backends.local.names import unpack_name
from tiercache_backends.local.settings import check_capacity

_log = logging.getLogger(__name__)

KIND: Final = "tiercache.lmdb"
VERSION: Final = 1
_DATABASE: Final = "database"
_REPAIR: Final = "database.new"
"""Name of the directory in which a repair writes the new environment."""
_ASIDE_SHARE: Final = 16
"""Divisor of the capacity: damaged data that was put aside for inspection may take one byte in 16."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Parts of an open store.

    Thread safety: immutable; one thread calls `close`, once.
    """

    env: Env
    directory: StoreDirectory
    environment: Environment
    budget: PageBudget
    capacity: int
    """Bytes that the directory may take."""

    @property
    def path(self) -> str:
        """Path of the store's directory."""
        return self.directory.path

    def disk_bytes(self) -> int:
        """Return the bytes that the directory and everything in it take on the disk now. Raises OSError."""
        return tree_bytes(self.env, self.path)

    def data_bytes(self) -> int:
        """Return the bytes that LMDB's file takes on the disk. Raises OSError.

        The file grows up to the map's size and never shrinks.
        """
        return tree_bytes(self.env, os.path.join(self.directory.database, "data.mdb"))

    def mend(self, mac_key: MacKey) -> None:
        """Open LMDB again after damage, and rewrite the environment first if no other process has it open.

        The caller guarantees that no transaction is under way. Raises OSError; the environment is damaged
        then.
        """

        def rewrite() -> bool:
            self.directory.rejoin()
            if self.directory.sole:
                _repair(self.env, self.directory, self.capacity, mac_key)
            return self.directory.sole

        try:
            self.environment.reopen(rewrite)
        finally:
            self.directory.admit_others()

    def close(self) -> None:
        """Close the environment and release the directory; do nothing in a forked child."""
        if self.environment.is_ours():
            sound = self.environment.close()
            self.directory.release(clean=sound, suspect=not sound)


def open_environment(
    env: Env, path: str, capacity: int | None, mac_key: MacKey, *, last_sync: bool, read_only: bool
) -> Opened:
    """Open the store in `path`, or make it where there is none.

    `capacity` None: open an existing store, with the capacity that it has. `last_sync`: see `Environment`.

    Raises ConfigError, StorageError and the errors of StoreDirectory. After an error nothing stays open.
    """
    directory = StoreDirectory(
        env,
        path,
        kind=KIND,
        version=VERSION,
        database=_DATABASE,
        must_exist=capacity is None,
        read_only=read_only,
    )
    check_capacity(capacity, capacity or 0)
    directory.claim(shared=True)
    try:
        try:
            opened = _open(env, directory, capacity, mac_key, last_sync, read_only)
        except DamagedError:
            if read_only or not directory.sole:
                raise
            directory.suspect = True
            opened = _open(env, directory, capacity, mac_key, last_sync, read_only)
        directory.admit_others()
    except BaseException as error:
        directory.release(clean=False)
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise StorageError(f"the store in {directory.path} cannot be opened: {error}") from error
        raise
    return opened


def _open(
    env: Env,
    directory: StoreDirectory,
    capacity: int | None,
    mac_key: MacKey,
    last_sync: bool,
    read_only: bool,
) -> Opened:
    mac_key.match(directory.settle_format({"mac": mac_key.fingerprint}).get("mac"), directory.path)
    sound = directory.check_environment(closely=False)
    if read_only and not sound:
        raise StoreDamagedError(
            f"{directory.database} is damaged; open the store for writing, which rewrites it from what can be"
            " read"
        )
    if directory.sole and not read_only:
        _clear(env, directory)
        if not sound or directory.suspect:
            _repair(env, directory, capacity, mac_key)
    for name in ("data.mdb", "lock.mdb"):  # `stat` refuses symbolic links; LMDB would follow them
        directory.stat(os.path.join(_DATABASE, name))
    wanted = None if capacity is None else _size_for(env, directory, capacity)
    # A size of 0 makes LMDB use the map size that the last writer stored in the file.
    environment = Environment(
        env,
        directory.database,
        wanted.map_bytes if wanted else 0,
        last_sync=last_sync,
        read_only=read_only,
        alone=directory.sole,
    )
    try:
        if not read_only:
            environment.clear_readers()
            keep_freed_memory()
        size = (
            _agreed_size(directory, environment, wanted) if wanted else _existing_size(directory, environment)
        )
        budget = PageBudget(size.map_bytes // environment.page_bytes, environment.page_bytes)
        return Opened(env, directory, environment, budget, size.capacity)
    except BaseException:
        environment.close()
        raise


def _repair(env: Env, directory: StoreDirectory, capacity: int | None, mac_key: MacKey) -> None:
    """Copy the readable objects of a damaged environment into a new one, which replaces the old file."""
    _clear(env, directory)  # what is left there would count twice
    beside = directory.at(_REPAIR)
    directory.make_part(beside, make=True)
    # The new LMDB pages may be less full than the old ones, so the new map is twice as large as the old file.
    map_size = 2 * max(directory.database_bytes(), capacity or 0, SMALLEST_CAPACITY)
    try:
        environment = Environment(env, beside, map_size, last_sync=True)
        try:
            copied = salvage(env, data_file(directory.database), environment, mac_key)
            environment.sync()
        finally:
            environment.close()
        _log.error("%s is damaged; it was written anew from %d objects", directory.database, copied)
        directory.replace(data_file(beside))  # atomic
        directory.mark_repaired()
    finally:
        _clear(env, directory)


def _clear(env: Env, directory: StoreDirectory) -> None:
    """Remove the files that a finished or an interrupted repair left behind."""
    beside = directory.at(_REPAIR)
    if directory.stat(_REPAIR) is not None:
        for name in env.listdir(beside):
            env.unlink(os.path.join(beside, name))


def _size_for(env: Env, directory: StoreDirectory, capacity: int) -> Size:
    """Return the sizes for a capacity; raise ConfigError if the store is larger already.

    If no other process has the store open, this function first removes damaged data that was put aside and
    that exceeds its share of the capacity.
    """
    if directory.sole:
        _trim_aside(env, directory, capacity)
    foreign = directory.foreign_bytes()
    wanted = Size(capacity, map_bytes(capacity, foreign, directory.path))
    if directory.sole and directory.database_bytes() > wanted.map_bytes:
        raise ConfigError(
            f"the store in {directory.path} has grown to {directory.database_bytes()} bytes, which a capacity"
            f" of {capacity} does not hold; set capacity to"
            f" {capacity_for(directory.database_bytes(), foreign)} or more, or remove the directory to start"
            " empty"
        )
    return wanted


def _existing_size(directory: StoreDirectory, environment: Environment) -> Size:
    """Return the stored sizes and resize the map to them; raise StorageError if none are stored yet."""
    found = environment.read(lambda txn: Size.unpack(txn.get(SIZE, db=environment.facts)))
    if found is None:
        raise StorageError(
            f"{directory.database} has no stored size, and so no objects; open it with a capacity first"
        )
    if environment.map_bytes() != found.map_bytes:
        environment.resize(found.map_bytes)
    return found


def _agreed_size(directory: StoreDirectory, environment: Environment, wanted: Size) -> Size:
    """Return the sizes that all processes that have the store open use.

    If no other process has the store open, these are the `wanted` sizes. Otherwise they are the stored sizes,
    and ConfigError is raised if the stored capacity differs from `wanted.capacity`.
    """
    found = environment.read(lambda txn: Size.unpack(txn.get(SIZE, db=environment.facts)))
    if directory.sole or found is None:
        if found != wanted:
            environment.write(lambda txn: txn.put(SIZE, wanted.pack(), db=environment.facts))
        return wanted
    if found.capacity != wanted.capacity:
        raise ConfigError(
            f"the store in {directory.path} is in use with a capacity of {found.capacity} bytes and cannot be"
            f" opened with {wanted.capacity}; give the same capacity, or close it in all other processes"
            " first"
        )
    if found.map_bytes != wanted.map_bytes:
        environment.resize(found.map_bytes)
    return found


def _trim_aside(env: Env, directory: StoreDirectory, capacity: int) -> None:
    """Remove damaged data that was put aside, the oldest first, until the rest is within its share."""
    asides = directory.asides()
    left = sum(tree_bytes(env, aside) for aside in asides)
    for aside in asides:
        if left <= capacity // _ASIDE_SHARE:
            return
        left -= tree_bytes(env, aside)
        _log.warning("%s takes too much of the store's capacity and is removed", aside)
        for inner in env.listdir(aside):
            env.unlink(os.path.join(aside, inner))


_PART_KEY_BYTES: Final = len(part_key(0, 0))
_MAX_NAME_BYTES: Final = 64
"""Maximum length of a namespace in bytes."""
_MAX_VALUE_BYTES: Final = 1 << 16
"""Maximum bytes of a value that may be a record, a namespace or the size; longer values are not read."""
_BATCH_OBJECTS: Final = 64
"""Maximum number of objects written in one transaction."""


@dataclass(slots=True)
class SalvagedData:
    """Everything of use that was found in the damaged file.

    A damaged file may hold outdated copies of an entry, so a key can have several records or pieces. They are
    in the order of their LMDB pages in the file.

    Thread safety: one thread uses it.
    """

    records: dict[bytes, list[Record]] = field(default_factory=dict)
    """Records by the place of their object."""
    pieces: dict[bytes, list[Value]] = field(default_factory=dict)
    """Places of the pieces of payloads in the file, by their keys in the database `parts`."""
    size: bytes = b""
    """The stored `Size`, packed; empty where none was found."""
    names: dict[int, bytes] = field(default_factory=dict)
    """Namespaces by their numbers."""
    registered: dict[bytes, NamespaceRecord] = field(default_factory=dict)
    """Namespace records by namespace."""


def salvage(env: Env, source: str, target: Environment, mac_key: MacKey) -> int:
    """Copy all readable objects of the file `source` into the empty environment `target`.

    Returns the number of objects copied. Raises OSError.
    """
    copied = 0
    with closing(LmdbFile(env, source)) as file:
        found = _find(file)
        batch: list[tuple[bytes, SetItem, Record]] = []
        for place, item, record in _objects(file, found, mac_key):
            batch.append((place, item, record))
            if len(batch) == _BATCH_OBJECTS:
                copied += _write(target, batch)
                batch = []
        copied += _write(target, batch)
        target.write(lambda txn: _finish(target, txn, found))
    return copied


def _find(file: LmdbFile) -> SalvagedData:
    found = SalvagedData()
    inside = 0
    for number, page in _pages(file):
        # A run of LMDB pages holds one large value, and only its first page has a header. Skip the others,
        # because payload bytes could look like a header:
        #   | header, piece ... | ... piece ... | ... piece |    `inside` is the page behind the run
        if number < inside or not file.is_whole(page, number):
            continue
        inside = number + file.run_of(page)
        for value in file.places(page, number):
            if len(value.key) == _PART_KEY_BYTES:
                found.pieces.setdefault(value.key, []).append(value)
            elif value.size <= _MAX_VALUE_BYTES:
                _keep(found, value.key, bytes(file.read(value)))
    return found


def _pages(file: LmdbFile) -> Iterator[tuple[int, LmdbPages]]:
    for first, pages in file.pages():
        yield from enumerate(pages, first)


def _keep(found: SalvagedData, key: bytes, value: bytes) -> None:
    record = Record.unpack(value) if len(key) == DIGEST_BYTES else None
    if key == SIZE and Size.unpack(value) is not None:
        found.size = value
    elif record is not None and record.key(key) is not None:
        found.records.setdefault(key, []).append(record)
    elif 0 < len(key) <= _MAX_NAME_BYTES:
        with suppress(ValueError):
            number, named = unpack_name(key, value)
            found.names[number] = key
            if named is not None:
                found.registered[key] = named


def _objects(file: LmdbFile, found: SalvagedData, mac_key: MacKey) -> Iterator[tuple[bytes, SetItem, Record]]:
    """Yield each whole object with its place and record, the least recently used object first.

    If a place has several records, only the newest record whose object is whole is used.
    """
    ordered = sorted(found.records.items(), key=lambda entry: max(record.tick for record in entry[1]))
    for place, records in ordered:
        for record in sorted(records, key=lambda record: (record.number, record.tick), reverse=True):
            item = _object(file, found, mac_key, place, record)
            if item is not None:
                yield place, item, record
                break


def _object(
    file: LmdbFile, found: SalvagedData, mac_key: MacKey, place: bytes, record: Record
) -> SetItem | None:
    """Return the object of a record; None where a piece is missing or the checksum does not match."""
    key = record.key(place)
    assert key is not None, "records of unknown pools were left out"
    payload = bytearray()
    part = 0
    while len(payload) < record.length:
        # If there are several copies of a piece, use the last. The checksum tells whether all pieces match.
        pieces = found.pieces.get(part_key(record.number, part))
        if not pieces or pieces[-1].size == 0 or len(payload) + pieces[-1].size > record.length:
            return None
        payload += file.read(pieces[-1])
        part += 1
    verifier = mac_key.verifier(key, record.length)
    verifier.add([memoryview(payload)])
    return (
        SetItem(
            key,
            [memoryview(payload)],
            record.meta(found.names.get(record.namespace, b"unknown namespace %d" % record.namespace)),
        )
        if verifier.matches(record.checksums)
        else None
    )


def _write(target: Environment, batch: list[tuple[bytes, SetItem, Record]]) -> int:
    def work(txn: Any) -> None:
        transaction = Transaction(target, txn)
        transaction.add([(place, item, record.checksums) for place, item, record in batch], PART_PAGES)
        transaction.save()

    if batch:
        target.write(work)
    return len(batch)


def _finish(target: Environment, txn: Any, found: SalvagedData) -> None:
    transaction = Transaction(target, txn)
    for named in found.registered.values():
        transaction.register(named)
    transaction.save()
    if found.size:
        txn.put(SIZE, found.size, db=target.facts)


def data_file(directory: str) -> str:
    """Return the path of LMDB's file in a directory."""
    return os.path.join(directory, "data.mdb")
