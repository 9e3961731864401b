"""The `lmdb` store: objects as values in LMDB, shared by the processes of one host without a daemon.

A set looks up which of its objects are missing, and stores these objects in write transactions of a few
megabytes each. Each transaction first evicts as much as it needs. A get uses short read transactions, and
verifies each object while it is copied. Readers never wait. Only one thread of all processes writes at a
time; the other writers wait.

A payload that does not have its checksum costs that object. Where LMDB reports damage, or an entry is not as
it was written, the store answers nothing but errors until it is opened again: then the environment is put
aside, and the store starts empty (`opening.py`).
"""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, Self

from tiercache.core import DIGEST_BYTES, ObjectKey, Outcome
from tiercache.errors import ClosedError, StorageError
from tiercache.events.base import ChangeNote
from tiercache.storage.base import (
    Capabilities,
    GetItem,
    NamespaceRecord,
    ScanEntry,
    ScanPage,
    SetItem,
    StorageBackend,
    StoreContext,
    Usage,
    first_of_each,
    storable,
)
from tiercache.storage.checksum import MacKey
from tiercache.storage.env import Env
from tiercache.storage.gate import CallGate
from tiercache.storage.store_events import Following
from tiercache_backends.lmdb.environment import ErrorCounters
from tiercache_backends.lmdb.mirror import Mirror
from tiercache_backends.lmdb.opening import KIND, SMALLEST_CAPACITY, VERSION, open_environment
from tiercache_backends.lmdb.reading import Reader
from tiercache_backends.lmdb.records import FACTS, Record, StoreTotals, place_of
from tiercache_backends.lmdb.transaction import Pending, names_in
from tiercache_backends.lmdb.writing import BatchWriter
from tiercache_backends.local.directory import StoreDirectory
from tiercache_backends.local.settings import check_capacity, local_settings, opens_read_only, refused

_EXAMPLE: Final = "lmdb:///var/lib/tiercache-lmdb?capacity=8GiB"
_ENTRIES_PER_TRANSACTION: Final = 1024
"""Maximum entries of the database `objects` that one transaction of `scan` or `describe` looks at."""
_FOLLOW_S: Final = 0.05
"""Seconds after which a store that is watched looks for changes again, also for those of other processes."""


class LmdbBackend(StorageBackend):
    """Objects inside one LMDB environment, shared by any number of processes of one host.

    `capacity`: bytes that the whole directory may take. All processes give the same capacity, or None ("kept"
    in a URL). None opens an existing store with the capacity that it has. The processes must see each other's
    process ids, so containers that share a directory must share a pid namespace too.

    `access`: with capacity None the store is opened for reading only, unless `access` is "write". A process
    never changes a store that it opened for reading: its sets are THROTTLED (HIT where the object is stored),
    its deletions answer False, and it leaves corrupt objects in place. If a process opens a store for reading
    and no other process has the store open, later processes can open the store only for reading, and a
    process that wants to write waits. This ends when all readers have closed the store.

    `durability`: with "process", acknowledged objects survive the death of any process. A power cut can undo
    the last transaction, unless that transaction was a deletion; all earlier transactions are complete. With
    "power" the last transaction survives too, but every transaction syncs the file twice instead of once.

    After a fork, the child opens the store again. While a process is stopped (SIGSTOP) within a write, the
    sets of all other processes are THROTTLED, until that process continues or dies. A process that is stopped
    within a get does no harm to the others until the map is full. No program may shorten LMDB's file while a
    process has it open: a process that reads its map behind the file's new end is killed.

    Thread safety: as the contract says. Reads run in parallel; of all processes one thread writes at a time.
    """

    capabilities = Capabilities(persistent=True, shared=True, bounded=True)

    def __init__(
        self, path: str, capacity: int | None, durability: str = "process", env: Env | None = None, *,
        mac_key: MacKey | None = None,
        access: str = "",
    ) -> None:  # fmt: skip
        env, mac_key = env or Env(), mac_key or MacKey()
        self._read_only = opens_read_only(access, capacity)
        self._gate = CallGate(f"the store in {path}", env.getpid)
        self._power = durability == "power"
        self._store = open_environment(
            env, path, capacity, mac_key, last_sync=self._power, read_only=self._read_only
        )
        self._environment = self._store.environment
        self._errors = ErrorCounters(path)
        self._pending = Pending(self._environment, self._errors)
        self._reader = Reader(self._environment, mac_key, self._pending, self._errors)
        self._mirror = Mirror(self._environment)
        self._following = Following("lmdb-changes", _FOLLOW_S, self._follow)
        self._writer = BatchWriter(self._environment, self._mirror, self._pending, self._errors, mac_key)

    @classmethod
    def from_config(cls, section: Mapping[str, Any], context: StoreContext) -> Self:
        return cls(**local_settings("lmdb", section, context, _EXAMPLE), env=context.env)

    @classmethod
    def check_config(cls, section: Mapping[str, Any], context: StoreContext) -> None:
        values = local_settings("lmdb", section, context, _EXAMPLE)
        capacity = values["capacity"]
        opens_read_only(values.get("access", ""), capacity)
        check_capacity(capacity, capacity or 0, min_bytes=SMALLEST_CAPACITY)
        StoreDirectory(
            context.env, values["path"], kind=KIND, version=VERSION, database="", must_exist=capacity is None
        ).check_place()

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate:
            return self._reader.present([place_of(key.digest) for key in keys])

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        return self._get(items)

    def peek(self, items: Sequence[GetItem]) -> list[Outcome]:
        return self._get(items, is_use=False)

    def _get(self, items: Sequence[GetItem], *, is_use: bool = True) -> list[Outcome]:
        with self._gate:
            outcomes, damaged = self._reader.fetch(items)
            if self._read_only:  # do not remove damaged objects, and record no use
                return outcomes
            if damaged:
                self._pending.drop(damaged)
            if not is_use:
                return outcomes
            # A get never waits for a writer: some later write transaction writes these uses to LMDB.
            used = [
                place_of(item.key.digest)
                for item, outcome in zip(items, outcomes, strict=True)
                if outcome is Outcome.HIT
            ]
            self._pending.touch(used)
            self._mirror.note(used)
            return outcomes

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        with self._gate:
            if self._read_only:
                return refused(items, self._reader.present([place_of(item.key.digest) for item in items]))
            try:
                self._store.directory.check_there()
            except OSError as error:
                failed = self._errors.failed("a set", error)
                return [failed if storable(item) else Outcome.ERROR for item in items]
            # An object may occur several times in a batch: the first item is stored, the others are HITs.
            storable_places = {i: place_of(item.key.digest) for i, item in enumerate(items) if storable(item)}
            first: dict[bytes, int] = {}  # index of the first item of each place
            for i, place in storable_places.items():
                first.setdefault(place, i)
            # Look the objects up in read transactions first: stored objects need no writer lock.
            there = dict(zip(first, self._reader.present(list(first)), strict=True))
            stored = self._writer.store(
                {place: items[i] for place, i in first.items() if not there[place]}, list(first)
            )
            self._pending.touch([place for place in first if there[place]])
            outcomes = [Outcome.ERROR] * len(items)
            for i, place in storable_places.items():
                outcome = stored.get(place, Outcome.HIT)
                outcomes[i] = Outcome.HIT if outcome is Outcome.STORED and first[place] != i else outcome
            return outcomes

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate:
            if self._read_only:
                return [False] * len(keys)
            places = dict.fromkeys(place_of(key.digest) for key in keys if len(key.digest) == DIGEST_BYTES)
            gone = self._pending.remove(list(places))
            # Without this sync, a power cut could undo the last transaction and bring deleted objects back.
            if gone and not self._power:
                try:
                    self._environment.sync()
                except OSError as error:
                    self._errors.failed("syncing a deletion", error)
            return first_of_each(keys, {place_of(place) for place in gone})

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        with self._gate, self._readable("a scan"):
            return self._environment.read(partial(self._scan_batch, namespace, cursor))

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        with self._gate, self._readable("a description"):
            return self._described([place_of(key.digest) for key in keys])

    def _described(self, places: Sequence[bytes]) -> list[ScanEntry | None]:
        entries: list[ScanEntry | None] = []
        for start in range(0, len(places), _ENTRIES_PER_TRANSACTION):
            entries += self._environment.read(
                partial(self._entries, places[start : start + _ENTRIES_PER_TRANSACTION])
            )
        return entries

    def coldest(self, nbytes: int) -> Sequence[ScanEntry]:
        with self._gate, self._readable("looking for the coldest objects"):
            with self._mirror.lock:
                self._mirror.refresh()
                residents, survey = self._mirror.residents, self._mirror.order.survey()
            found = survey.coldest(nbytes)
            with self._mirror.lock:
                there = residents.still_there(*found).tolist()
                places = [place_of(residents.digest(row)) for row in there]
            return [entry for entry in self._described(places) if entry is not None]

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int = 0) -> None:
        with self._gate:
            if len(values) or self._read_only:  # uses rank here, and not values
                return
            places = [place_of(key.digest) for key in keys]
            with suppress(StorageError):
                there = self._reader.present(places)
                self._pending.touch([place for place, yes in zip(places, there, strict=True) if yes])

    def watch(self, note: ChangeNote | None) -> bool:
        with self._gate:
            with self._readable("reading all records"), self._mirror.lock:
                self._mirror.watch(note)
            self._following.start()
            return True

    def register_namespace(self, record: NamespaceRecord) -> None:
        with self._gate:
            if record.is_possible and not self._read_only:
                self._pending.register(record)

    def namespaces(self) -> list[NamespaceRecord]:
        with self._gate, self._readable("reading the namespaces"):
            known = self._environment.read(partial(names_in, self._environment))
            return [name.record for name in known.values() if name.record is not None]

    def usage(self) -> Usage:
        with self._gate, self._readable("counting what is used"):
            facts, pages = self._environment.read(self._totals)
            disk = self._store.disk_bytes()
            # Do not count free LMDB pages of the file: LMDB uses them before it lets the file grow.
            used = disk - max(0, self._store.data_bytes() - pages * self._environment.page_bytes)
            with self._mirror.lock:
                self._mirror.refresh()
                hidden, hidden_bytes = self._mirror.hidden(self._pending.damaged())
                residents = self._mirror.residents
                objects, payload = residents.count - hidden, residents.payload - hidden_bytes
                worth = residents.pages.worth()
            budget = self._environment.budget
            figures = {
                **worth._asdict(),
                **self._errors.figures(),
                "map_pages_used": pages,
                "disk_bytes": disk,
                "readers": len(self._environment.readers()),
                "evicted": facts.evicted,
                "corrupt": facts.corrupt,
                "map_pages": budget.map_pages,
                "map_pages_limit": budget.limit,
                "disk_is_short": int(budget.is_short),
                "recency_waiting": self._pending.waiting(),
            }
            return Usage(objects, payload, used, self._store.capacity, figures)

    def flush(self) -> None:
        with self._gate:
            if self._read_only:
                return
            try:
                self._store.directory.check_there()
                self._environment.check_there()
                self._pending.flush()
                self._environment.sync()
            except OSError as error:
                raise StorageError(f"the store in {self._store.path} cannot be flushed: {error}") from error

    def close(self) -> None:
        if self._gate.close():
            self._following.close()
            if not self._read_only:
                self._pending.flush()
            self._store.close()

    def _follow(self) -> None:
        """Let the mirror tell of what has changed, if anybody watches."""
        with suppress(ClosedError), self._gate, self._mirror.lock:
            if self._mirror.is_watched:
                self._mirror.refresh()

    @contextmanager
    def _readable(self, what: str) -> Iterator[None]:
        """Raise StorageError if the store cannot be read, and count it."""
        try:
            yield
        except OSError as error:
            self._errors.failed(what, error)
            raise StorageError(f"the store in {self._store.path} cannot be read: {error}") from error

    def _totals(self, txn: Any) -> tuple[StoreTotals, int]:
        return StoreTotals.unpack(txn.get(FACTS, db=self._environment.facts)), self._environment.used_pages(
            txn
        )

    def _scan_batch(self, namespace: bytes | None, cursor: bytes, txn: Any) -> ScanPage:
        names = self._names(txn)
        entries: list[ScanEntry] = []
        seen = 0
        with txn.cursor(self._environment.objects) as walk:
            found = walk.set_range(cursor[:DIGEST_BYTES] + b"\0" if cursor else b"\0")
            while found and seen < _ENTRIES_PER_TRANSACTION:
                place = bytes(walk.key())
                entry = self._entry(place, walk.value(), names)
                seen += 1
                if entry is not None and namespace in (None, entry.meta.namespace):
                    entries.append(entry)
                found = walk.next()
            return ScanPage(entries, place if found else b"")

    def _entries(self, places: Sequence[bytes], txn: Any) -> list[ScanEntry | None]:
        names = self._names(txn)
        entries: list[ScanEntry | None] = []
        for place in places:
            value = txn.get(place, db=self._environment.objects) if len(place) == DIGEST_BYTES else None
            entries.append(None if value is None else self._entry(place, value, names))
        return entries

    def _entry(self, place: bytes, value: Any, names: Mapping[int, bytes]) -> ScanEntry | None:
        """Return the scan entry of the object at a place; None where the object cannot be read."""
        record = Record.unpack(value)
        key = record.key(place)
        if key is None or self._pending.is_damaged(place, record.number):
            return None
        return ScanEntry(key, record.meta(names.get(record.namespace, b"")))

    def _names(self, txn: Any) -> dict[int, bytes]:
        return {name.number: namespace for namespace, name in names_in(self._environment, txn).items()}
