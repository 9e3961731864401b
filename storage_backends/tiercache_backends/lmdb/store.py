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

import os
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
from tiercache_backends.lmdb.opening import (
    KIND,
    SMALLEST_CAPACITY,
    VERSION,
    close_environment,
    open_environment,
)
from tiercache_backends.lmdb.reading import Reader
from tiercache_backends.lmdb.records import Record
from tiercache_backends.lmdb.transaction import Pending, names_in
from tiercache_backends.lmdb.writing import BatchWriter
from tiercache_backends.local.directory import StoreDirectory, tree_bytes
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
        self._env = env
        self._read_only = opens_read_only(access, capacity)
        self._gate = CallGate(f"the store in {path}", env.getpid)
        self._power = durability == "power"
        self._store = open_environment(
            env, path, capacity, mac_key, last_sync=self._power, read_only=self._read_only
        )
        self._environment = self._store.environment
        self._errors = ErrorCounters(path)
        self._pending = Pending()
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
            return self._reader.present([key.digest for key in keys])

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        return self._get(items)

    def peek(self, items: Sequence[GetItem]) -> list[Outcome]:
        return self._get(items, is_use=False)

    def _get(self, items: Sequence[GetItem], *, is_use: bool = True) -> list[Outcome]:
        with self._gate:
            damaged: dict[bytes, int] = {}
            outcomes = self._reader.fetch(items, damaged)
            if self._read_only:  # do not remove damaged objects, and record no use
                return outcomes
            if damaged:
                self._pending.hide(damaged)
                self._writer.flush()
            if is_use:
                # A get never waits for a writer: some later write transaction writes these uses to LMDB.
                self._note_uses(
                    [
                        item.key.digest
                        for item, outcome in zip(items, outcomes, strict=True)
                        if outcome is Outcome.HIT
                    ]
                )
            return outcomes

    def _note_uses(self, digests: Sequence[bytes], *, brought: bool = False) -> None:
        if self._pending.note_uses(digests, brought=brought):
            self._writer.flush()

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        with self._gate:
            if self._read_only:
                return refused(items, self._reader.present([item.key.digest for item in items]))
            try:
                self._store.directory.check_there()
            except OSError as error:
                failed = self._errors.failed("a set", error)
                return [failed if storable(item) else Outcome.ERROR for item in items]
            # An object may occur several times in a batch: the first item is stored, the others are HITs.
            first: dict[bytes, int] = {}
            for i, item in enumerate(items):
                if storable(item):
                    first.setdefault(item.key.digest, i)
            # Look the objects up in read transactions first: stored objects need no writer lock.
            there = dict(zip(first, self._reader.present(list(first)), strict=True))
            self._note_uses([digest for digest in first if there[digest]], brought=True)
            missing = {digest: items[i] for digest, i in first.items() if not there[digest]}
            stored = self._writer.store(missing, first) if missing else {}
            outcomes = [Outcome.ERROR] * len(items)
            for i, item in enumerate(items):
                if (digest := item.key.digest) in first and (first[digest] == i or storable(item)):
                    outcome = stored.get(digest, Outcome.HIT)
                    again = outcome is Outcome.STORED and first[digest] != i
                    outcomes[i] = Outcome.HIT if again else outcome
            return outcomes

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate:
            if self._read_only:
                return [False] * len(keys)
            digests = dict.fromkeys(key.digest for key in keys if len(key.digest) == DIGEST_BYTES)
            gone = self._writer.remove(list(digests))
            # Without this sync, a power cut could undo the last transaction and bring deleted objects back.
            if gone and not self._power:
                try:
                    self._environment.sync()
                except OSError as error:
                    self._errors.failed("syncing a deletion", error)
            return first_of_each(keys, gone)

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        def work(txn: Any) -> ScanPage:
            found = self._environment.objects_after(txn, cursor[:DIGEST_BYTES], _ENTRIES_PER_TRANSACTION)
            entries = [entry for entry in self._entries(txn, found) if entry is not None]
            return ScanPage(
                [entry for entry in entries if namespace in (None, entry.meta.namespace)],
                found[-1][0] if len(found) == _ENTRIES_PER_TRANSACTION else b"",
            )

        with self._gate, self._readable("a scan"):
            return self._environment.read(work)

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        with self._gate, self._readable("a description"):
            return self._described([key.digest for key in keys])

    def _described(self, digests: Sequence[bytes]) -> list[ScanEntry | None]:
        def work(txn: Any) -> list[ScanEntry | None]:
            get, objects = txn.get, self._environment.objects
            return self._entries(
                txn, [(d, get(d, db=objects) if len(d) == DIGEST_BYTES else None) for d in some]
            )

        entries: list[ScanEntry | None] = []
        for start in range(0, len(digests), _ENTRIES_PER_TRANSACTION):
            some = digests[start : start + _ENTRIES_PER_TRANSACTION]
            entries += self._environment.read(work)
        return entries

    def _entries(self, txn: Any, found: Sequence[tuple[bytes, Any]]) -> list[ScanEntry | None]:
        """Return the scan entries of objects, digest and record each; None where one cannot be read."""
        names = names_in(self._environment, txn)
        entries: list[ScanEntry | None] = []
        for digest, value in found:
            record = None if value is None else Record.unpack(value)
            key = None if record is None else record.key(digest)
            if record is None or key is None or self._pending.is_damaged(digest, record.number):
                entries.append(None)
            else:
                entries.append(ScanEntry(key, record.meta(names.name(record.namespace))))
        return entries

    def coldest(self, nbytes: int) -> Sequence[ScanEntry]:
        with self._gate, self._readable("looking for the coldest objects"):
            with self._mirror.lock:
                self._mirror.refresh()
                self._pending.tell_uses(residents := self._mirror.residents)
                survey = self._mirror.order.survey()
            found = survey.coldest(nbytes)
            with self._mirror.lock:
                digests = [residents.digest(row) for row in residents.still_there(*found).tolist()]
            return [entry for entry in self._described(digests) if entry is not None]

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int = 0) -> None:
        with self._gate:
            if len(values) or self._read_only:  # uses rank here, and not values
                return
            digests = [key.digest for key in keys]
            there = self._reader.present(digests)
            self._note_uses([digest for digest, yes in zip(digests, there, strict=True) if yes])

    def watch(self, note: ChangeNote | None) -> bool:
        with self._gate:
            with self._readable("reading all records"), self._mirror.lock:
                self._mirror.watch(note)
            self._following.start()
            return True

    def register_namespace(self, record: NamespaceRecord) -> None:
        with self._gate:
            if record.is_possible and not self._read_only:
                self._pending.add_namespace(record)
                self._writer.flush()  # if that fails, a later transaction repeats it

    def namespaces(self) -> list[NamespaceRecord]:
        with self._gate, self._readable("reading the namespaces"):
            return list(self._environment.read(partial(names_in, self._environment)).records.values())

    def usage(self) -> Usage:
        with self._gate, self._readable("counting what is used"):
            environment, directory = self._environment, self._store.directory
            facts, pages = environment.read(
                lambda txn: (environment.facts_in(txn), environment.used_pages(txn))
            )
            disk = tree_bytes(self._env, directory.path)
            # Do not count free LMDB pages of the file: LMDB uses them before it lets the file grow.
            there = tree_bytes(self._env, os.path.join(directory.database, "data.mdb"))
            used = disk - max(0, there - pages * environment.page_bytes)
            with self._mirror.lock:
                self._mirror.refresh()
                hidden, hidden_bytes = self._mirror.hidden(self._pending.damaged)
                residents = self._mirror.residents
                objects, payload = residents.count - hidden, residents.payload - hidden_bytes
                worth = residents.pages.worth()
            budget = environment.budget
            figures = {
                **worth._asdict(),
                **self._errors.figures(),
                "map_pages_used": pages,
                "disk_bytes": disk,
                "readers": len(environment.readers()),
                "evicted": facts.evicted,
                "corrupt": facts.corrupt,
                "map_pages": budget.map_pages,
                "map_pages_limit": budget.limit,
                "disk_is_short": int(budget.is_short),
                "recency_waiting": self._pending.uses_waiting(),
            }
            return Usage(objects, payload, used, self._store.capacity, figures)

    def flush(self) -> None:
        with self._gate:
            if self._read_only:
                return
            try:
                self._store.directory.check_there()
                self._environment.check_there()
                self._writer.flush()
                self._environment.sync()
            except OSError as error:
                raise StorageError(
                    f"the store in {self._store.directory.path} cannot be flushed: {error}"
                ) from error

    def close(self) -> None:
        if self._gate.close():
            self._following.close()
            if not self._read_only:
                self._writer.flush()
            close_environment(self._store)

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
            raise StorageError(
                f"the store in {self._store.directory.path} cannot be read: {error}"
            ) from error
