"""The `lmdb` store: values inside LMDB, shared by the processes of one host without a daemon.

A set: look up which objects are missing -> one write transaction per few megabytes, which first evicts what it needs. A get: one short
read transaction per object, which is checked while it is copied. Readers never wait; a writer waits for the other writers of all processes,
one of which writes at a time.
"""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Self

from tiercache.core import ObjectKey, Outcome
from tiercache.errors import StorageError
from tiercache.storage.base import (
    DIGEST_BYTES,
    Capabilities,
    GetItem,
    NamespaceRecord,
    ScanEntry,
    ScanPage,
    SetItem,
    StorageBackend,
    StoreContext,
    Usage,
    storable,
)
from tiercache.storage.checksum import Seal
from tiercache.storage.env import Env
from tiercache.storage.gate import CallGate
from tiercache_backends.lmdb import audit
from tiercache_backends.lmdb.budget import SMALLEST_CAPACITY
from tiercache_backends.lmdb.chores import Chores
from tiercache_backends.lmdb.disk import Disk
from tiercache_backends.lmdb.mirror import Mirror
from tiercache_backends.lmdb.names import names_in
from tiercache_backends.lmdb.opening import KIND, VERSION, Opened, open_environment
from tiercache_backends.lmdb.reading import Reader
from tiercache_backends.lmdb.records import FACTS, Facts, Record, place_of
from tiercache_backends.lmdb.tally import Tally
from tiercache_backends.lmdb.writing import Writer
from tiercache_backends.local.directory import StoreDirectory
from tiercache_backends.local.failures import DamagedError
from tiercache_backends.local.settings import check_capacity, local_settings, looks, refused

_EXAMPLE: Final = "lmdb:///var/lib/tiercache-lmdb?capacity=8GiB"
_SCAN_PAGE: Final = 1024
"""Entries of `objects` that one transaction of a scan or a description looks at."""


class LmdbBackend(StorageBackend):
    """Objects inside one LMDB environment, shared by any number of processes of one host.

    `capacity`: bytes that the directory may take, everything beside the objects included. All processes give the same capacity, or None
    ("kept" in a URL), which opens a store that exists already, with the capacity that it has. The processes must see each other's process
    ids: containers that share a directory share their pid namespace.

    `access`: with capacity None the store is opened for reading only, unless this is "write". A store opened for reading is never changed:
    sets are THROTTLED (HIT where the object is stored), deletions answer False, and corrupt objects stay. While a process reads a store in
    this way that no other process has open, processes that open it to write wait.

    `durability`: with "process" acknowledged objects survive the death of any process, and after a power cut the store is as it was after
    some transaction; only the last transaction may be missing, and never a deletion. With "power" the last one survives as well, at the
    price of a second sync per transaction.

    A process that forks opens the store again in the child. While a process is stopped within a write, the sets of all others are
    THROTTLED, until it goes on or dies. A process that is stopped within a get holds up no other until the map is full. Nothing may cut
    LMDB's file while it is open: if that happens in the middle of a transaction, reading the mapped file behind its end ends the process.

    Thread safety: as the contract says; reads run in parallel, and writes one at a time, among all processes.
    """

    capabilities = Capabilities(persistent=True, shared=True, bounded=True)

    def __init__(
        self, path: str, capacity: int | None, durability: str = "process", env: Env | None = None, *, seal: Seal | None = None,
        access: str = "",
    ) -> None:  # fmt: skip
        env, seal = env or Env(), seal or Seal()
        self._looks = looks(access, capacity)
        self._gate = CallGate(f"the store in {path}", env.getpid)
        self._power = durability == "power"
        self._store: Opened = open_environment(env, path, capacity, seal, last_sync=self._power, looks=self._looks)
        self._capacity = self._store.capacity
        self._environment = self._store.environment
        self._tally = Tally(path)
        self._chores = Chores(self._environment, self._store.budget, self._tally)
        self._reader = Reader(self._environment, seal, self._chores, self._tally)
        self._disk = Disk(env, self._environment, self._store.budget)
        self._mirror = Mirror(self._environment)
        self._writer = Writer(self._environment, self._mirror, self._disk, seal, self._chores, self._tally)

    @classmethod
    def from_config(cls, section: Mapping[str, Any], context: StoreContext) -> Self:
        return cls(**local_settings("lmdb", section, context, _EXAMPLE), env=context.env)

    @classmethod
    def check_config(cls, section: Mapping[str, Any], context: StoreContext) -> None:
        values = local_settings("lmdb", section, context, _EXAMPLE)
        capacity = values["capacity"]
        looks(values.get("access", ""), capacity)
        check_capacity(capacity, capacity or 0, least=SMALLEST_CAPACITY)
        StoreDirectory(context.env, values["path"], kind=KIND, version=VERSION, database="", as_found=capacity is None).check_place()

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate:
            return self._reader.present([place_of(key.digest) for key in keys])

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        with self._gate:
            found = [self._reader.fetch(item) for item in items]
            outcomes = [f.outcome for f in found]
            if self._looks:
                return outcomes
            if Outcome.CORRUPT in outcomes:
                damaged = ((i.key.digest, f.number) for i, f in zip(items, found, strict=True) if f.outcome is Outcome.CORRUPT)
                self._chores.drop({place_of(digest): number for digest, number in damaged})
            used = [place_of(item.key.digest) for item, outcome in zip(items, outcomes, strict=True) if outcome is Outcome.HIT]
            self._chores.touch(used)
            self._mirror.note(used)
            return outcomes

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        with self._gate:
            if self._looks:
                return refused(items, self._reader.present([place_of(item.key.digest) for item in items]))
            try:
                self._store.directory.check_there()
            except OSError as error:
                failed = self._tally.failed("a set", error)
                return [failed if storable(item) else Outcome.ERROR for item in items]
            sound = {i: place_of(item.key.digest) for i, item in enumerate(items) if storable(item)}
            first: dict[bytes, int] = {}
            for i, place in sound.items():
                first.setdefault(place, i)
            there = dict(zip(first, self._reader.present(list(first)), strict=True))
            stored = self._writer.store({place: items[i] for place, i in first.items() if not there[place]}, list(first))
            self._chores.touch([place for place in first if there[place]])
            outcomes = [Outcome.ERROR] * len(items)
            for i, place in sound.items():
                outcome = stored.get(place, Outcome.HIT)
                outcomes[i] = Outcome.HIT if outcome is Outcome.STORED and first[place] != i else outcome
            return outcomes

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate:
            if self._looks:
                return [False] * len(keys)
            places = dict.fromkeys(place_of(key.digest) for key in keys if len(key.digest) == DIGEST_BYTES)
            gone = self._chores.remove(list(places))
            if gone and not self._power:
                self._make_last()
            answers: list[bool] = []
            for key in keys:
                answers.append(place_of(key.digest) in gone)
                gone.discard(place_of(key.digest))
            return answers

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        with self._gate:
            try:
                return self._environment.read(partial(self._page, namespace, cursor))
            except OSError as error:
                raise self._unreadable("a scan", error) from error

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        with self._gate:
            places = [place_of(key.digest) for key in keys]
            entries: list[ScanEntry | None] = []
            try:
                for start in range(0, len(places), _SCAN_PAGE):
                    entries += self._environment.read(partial(self._entries, places[start : start + _SCAN_PAGE]))
            except OSError as error:
                raise self._unreadable("a description", error) from error
            return entries

    def register_namespace(self, record: NamespaceRecord) -> None:
        with self._gate:
            if not self._looks:
                self._chores.register(record)

    def namespaces(self) -> list[NamespaceRecord]:
        with self._gate:
            try:
                known = self._environment.read(partial(names_in, self._environment))
            except OSError as error:
                raise self._unreadable("reading the namespaces", error) from error
            return [name.record for name in known.values() if name.record is not None]

    def usage(self) -> Usage:
        with self._gate:
            try:
                facts, pages = self._environment.read(self._totals)
                hidden = self._chores.hidden()
                disk = self._store.disk_bytes()
                # Pages of the file that are not in use do not count: they are used before the file grows.
                used = disk - max(0, self._store.data_bytes() - pages * self._environment.page_bytes)
                figures = {"map_pages_used": pages, "disk_bytes": disk, "readers": self._environment.readers()}
                figures |= self._worth()
            except OSError as error:
                raise self._unreadable("counting what is used", error) from error
            figures |= self._tally.figures() | {
                "evicted": facts.evicted,
                "corrupt": facts.corrupt,
                "map_pages": self._store.budget.map_pages,
                "map_pages_limit": self._disk.budget().limit,
                "disk_is_short": int(self._disk.is_short()),
                "recency_waiting": self._chores.waiting(),
            }
            return Usage(facts.objects - hidden.objects, facts.payload_bytes - hidden.payload_bytes, used, self._capacity, figures)

    def flush(self) -> None:
        with self._gate:
            if self._looks:
                return
            try:
                self._store.directory.check_there()
                self._environment.check_there()
                self._chores.settle()
                self._environment.sync()
            except OSError as error:
                raise StorageError(f"the store in {self._store.path} cannot be flushed: {error}") from error

    def close(self) -> None:
        if self._gate.close():
            if self._environment.is_ours() and not self._looks:
                self._chores.settle()
            self._store.close()

    def orphans(self) -> int:
        """Return the number of objects that a deletion left behind: their page is known and not stored. Walks over all; raises OSError."""
        with self._gate:
            return audit.orphans(self._environment)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all databases agree, and OSError where they cannot be read.

        The caller guarantees that no other thread is inside the store.
        """
        with self._gate:
            audit.check(self._environment)

    def _worth(self) -> dict[str, int]:
        """Return the details of `usage` that say which bytes are of use; none where a damaged page keeps that from being known."""
        try:
            with self._mirror.lock:
                while not self._mirror.is_read or not self._environment.read(self._mirror.keep_up):
                    self._mirror.read()
                return self._mirror.worth()._asdict()
        except DamagedError:
            return {}

    def _unreadable(self, what: str, error: OSError) -> StorageError:
        self._tally.failed(what, error)
        return StorageError(f"the store in {self._store.path} cannot be read: {error}")

    def _make_last(self) -> None:
        """Sync, so that the last transaction survives a power cut: an object that was deleted must not come back."""
        try:
            self._environment.sync()
        except OSError as error:
            self._tally.failed("making a deletion last", error)

    def _totals(self, txn: Any) -> tuple[Facts, int]:
        return Facts.unpack(txn.get(FACTS, db=self._environment.facts)), self._environment.used_pages(txn)

    def _page(self, namespace: bytes | None, cursor: bytes, txn: Any) -> ScanPage:
        names = self._names(txn)
        entries: list[ScanEntry] = []
        seen = 0
        with txn.cursor(self._environment.objects) as walk:
            found = walk.set_range(cursor[:DIGEST_BYTES] + b"\0" if cursor else b"\0")
            while found and seen < _SCAN_PAGE:
                place = bytes(walk.key())
                entry = self._entry(place, walk.value(), names)
                seen += 1
                if entry is not None and namespace in (None, entry.meta.namespace):
                    entries.append(entry)
                found = walk.next()
            return ScanPage(entries, place if found else b"")

    def _entries(self, places: Sequence[bytes], txn: Any) -> list[ScanEntry | None]:
        names = self._names(txn)
        values = ((place, txn.get(place, db=self._environment.objects) if len(place) == DIGEST_BYTES else None) for place in places)
        return [None if value is None else self._entry(place, value, names) for place, value in values]

    def _entry(self, place: bytes, value: Any, names: Mapping[int, bytes]) -> ScanEntry | None:
        """Return the scan entry of the object at a place; None where there is none, or none that a caller could read."""
        record = Record.unpack(value) if len(place) == DIGEST_BYTES else None
        key = record.key(place) if record is not None else None
        if record is None or key is None or self._chores.is_spoiled(place, record.number):
            return None
        return ScanEntry(key, record.meta(names.get(record.namespace, b"")))

    def _names(self, txn: Any) -> dict[int, bytes]:
        return {name.number: namespace for namespace, name in names_in(self._environment, txn).items()}
