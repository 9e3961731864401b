"""The `file` store, which moves bytes between buffers and slabs and keeps catalog and holdings consistent.

A set: claim -> reserve blocks -> write -> one catalog transaction -> publish. A get: pin -> read -> verify -> unpin. Only three locks are
held during disk I/O: the catalog's writer lock, the one that lets a single thread grow the slabs, and the one that lets a single thread
verify a stored object again.
"""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from errno import EDQUOT, EIO, ENOSPC
from functools import partial
from itertools import chain
from mmap import mmap
from threading import Lock
from typing import Any, Final, Self

from tiercache.core import BLOCK_ALIGN, ObjectKey, Outcome, PoolName
from tiercache.errors import StorageError
from tiercache.policy import Lru, Policy, policy_named
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
    storable,
)
from tiercache.storage.checksum import Seal, Sealed
from tiercache.storage.env import Env
from tiercache.storage.gate import CallGate
from tiercache.storage.pages import PAGE_KEY_BYTES
from tiercache.storage.vectors import usable
from tiercache_backends.file.catalog import Catalog, Loaded
from tiercache_backends.file.holdings import Holdings, Pin, Wanted, blocks_for
from tiercache_backends.file.movement import Mover
from tiercache_backends.file.removal import Removal
from tiercache_backends.file.runs import Movement, pieces_of
from tiercache_backends.file.salvage import salvage
from tiercache_backends.file.shares import CATALOG_SHARE, SMALLEST_CAPACITY, as_found, divide, slab_blocks_for
from tiercache_backends.file.slabs import Slabs, blocks_named, blocks_there, goes_direct
from tiercache_backends.file.snapshot import Snapshot
from tiercache_backends.file.space import Extent
from tiercache_backends.file.writing import BATCH, Writer
from tiercache_backends.local.directory import StoreDirectory, sync_directory
from tiercache_backends.local.failures import DamagedError
from tiercache_backends.local.settings import between, check_capacity, local_settings, looks, one_of, refused

_log = logging.getLogger(__name__)

KIND: Final = "tiercache.file"
VERSION: Final = 2
_NEW: Final = "data.new"
"""File name of a catalog that is being rewritten, beside the old one."""
_SCAN_PAGE: Final = 1024
_IO_THREADS: Final = 8
_MOST_IO_THREADS: Final = 64


class FileBackend(StorageBackend):
    """Store of objects in preallocated slab files of one directory, at most `capacity` bytes in all, with an LMDB catalog.

    - `durability` "process": acknowledged objects survive the death of the process; after a power cut each object is intact or fails its
      checksum. "power": they survive a power cut as well, at the price of one data sync per set.
    - `io` "auto": blocks that are not in the page cache may be moved past it with O_DIRECT, on `io_threads` threads (see `movement`);
      "buffered": never.
    - `seal`: with a key, it adds a MAC to every object.
    - `capacity` None ("kept" in a URL): opens an existing store as it is; opening it makes, grows and gives up nothing.
    - `access` "read", the default where `capacity` is None: nothing is written; a set of an object that is not stored is THROTTLED,
      deletions are False, and corrupt objects stay. "write" allows changes to such a store.

    Thread safety: as the contract says; reads and writes of several threads run in parallel.
    """

    capabilities = Capabilities(persistent=True, bounded=True)

    def __init__(
        self,
        path: str,
        capacity: int | None,
        durability: str = "process",
        env: Env | None = None,
        *,
        io: str = "auto",
        io_threads: int = _IO_THREADS,
        policy: Policy | None = None,
        seal: Seal | None = None,
        access: str = "",
    ) -> None:
        self._env = env or Env()
        self._seal = seal or Seal()
        self._looks = looks(access, capacity)
        self._gate = CallGate(f"the store in {path}", self._env.getpid)
        self._flushed = 0
        self._looking = Lock()
        self._doubtful = False
        self._directory = StoreDirectory(
            self._env, path, kind=KIND, version=VERSION, database="catalog", as_found=capacity is None, looks=self._looks
        )
        check_capacity(capacity, (capacity or 0) // CATALOG_SHARE)
        self._directory.claim()
        with ExitStack() as undo:
            undo.callback(self._directory.release, clean=False)
            try:
                self._open(undo, capacity, durability, io, io_threads, policy or Lru())
            except OSError as error:
                if isinstance(error, StorageError):
                    raise
                raise StorageError(f"the store in {self._directory.path} cannot be opened: {error}") from error
            undo.pop_all()

    @classmethod
    def from_config(cls, section: Mapping[str, Any], context: StoreContext) -> Self:
        return cls(**cls._settings(section, context), env=context.env)

    @classmethod
    def check_config(cls, section: Mapping[str, Any], context: StoreContext) -> None:
        values = cls._settings(section, context)
        capacity = values["capacity"]
        looks(values.get("access", ""), capacity)
        check_capacity(capacity, (capacity or 0) // CATALOG_SHARE, least=SMALLEST_CAPACITY)
        StoreDirectory(context.env, values["path"], kind=KIND, version=VERSION, database="catalog", as_found=capacity is None).check_place()

    @staticmethod
    def _settings(section: Mapping[str, Any], context: StoreContext) -> dict[str, Any]:
        return local_settings(
            "file", section, context, "file:///var/lib/tiercache?capacity=200GiB",
            io=one_of("auto", "buffered"), io_threads=between(1, _MOST_IO_THREADS, "threads"), policy=_policy,
        )  # fmt: skip

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate:
            return self._holdings.present([key.digest for key in keys])

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        with self._gate:
            pins = self._holdings.pin([item.key.digest for item in items])
            try:
                return self._read(items, pins)
            finally:
                self._removal.settle(self._holdings.unpin(pins))

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        with self._gate:
            if self._looks:
                return refused(items, self._holdings.present([item.key.digest for item in items]))
            outcomes = [Outcome.ERROR] * len(items)
            try:
                self._directory.check_there()
            except OSError as error:
                failed = self._removal.failed("set", error)
                return [failed if storable(item) else Outcome.ERROR for item in items]
            todo = [i for i, item in enumerate(items) if storable(item)]
            held: list[int] = []
            missing: set[bytes] = set()
            try:
                while todo:
                    claims = self._holdings.claim([self._wanted(i, items[i]) for i in todo], BATCH, missing)
                    missing = claims.missing
                    held += claims.held.values()
                    outcomes = [claims.refused.get(i, outcome) for i, outcome in enumerate(outcomes)] if claims.refused else outcomes
                    for i in claims.hits:
                        outcomes[i] = Outcome.HIT
                    if claims.fresh:
                        self._writer.store(items, claims, outcomes)
                    # This call's own claims are settled by now, so two calls that wait for each other's objects cannot deadlock.
                    for event in claims.waits:
                        event.wait()
                    todo = claims.later
            finally:
                self._holdings.let_go(held)
            return outcomes

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate:
            if self._looks:
                return [False] * len(keys)
            departure = self._holdings.take_out([key.digest for key in keys])
            gone = {leaver.digest for leaver in departure.leavers} if self._removal.forget(departure) else set()
            answers: list[bool] = []
            for key in keys:
                answers.append(key.digest in gone)
                gone.discard(key.digest)
            return answers

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        with self._gate:
            try:
                records = [record for part in self._catalog.page(cursor, _SCAN_PAGE) for record in part]
            except OSError as error:
                self._removal.failed("scan", error)
                raise StorageError(f"the store in {self._directory.path} cannot be scanned: {error}") from error
            found = [(int(record["number"]), self._catalog.entry(record)) for record in records]
            current = self._holdings.current([(number, entry.key.digest) for number, entry in found])
            entries = [e for (_, e), there in zip(found, current, strict=True) if there and namespace in (None, e.meta.namespace)]
            return ScanPage(entries, int(records[-1]["number"]).to_bytes(8) if len(records) == _SCAN_PAGE else b"")

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        with self._gate:
            # Look up the residents first, then their records: a record never changes and its number is never reused. So a record that is
            # found is true of the object that was there, and an object that left in between is not found.
            numbers = self._holdings.numbers([key.digest for key in keys])
            try:
                records = self._catalog.find(sorted({*numbers} - {0}))
            except OSError as error:
                self._removal.failed("describe", error)
                raise StorageError(f"the catalog of the store in {self._directory.path} cannot be read: {error}") from error
            entries = {int(record["number"]): self._catalog.entry(record) for record in records}
            return [entries.get(number) for number in numbers]

    def register_namespace(self, record: NamespaceRecord) -> None:
        with self._gate:
            if self._looks:
                return
            if record.states:
                self._holdings.require_states(self._catalog.id_of(record.namespace))
            try:
                self._catalog.register(record)
            except OSError as error:
                # It is kept in memory, and the catalog's next transaction saves it.
                self._removal.failed("namespace", error)

    def namespaces(self) -> list[NamespaceRecord]:
        with self._gate:
            return self._catalog.namespaces()

    def usage(self) -> Usage:
        with self._gate:
            figures = self._holdings.figures()
            used = figures["blocks_used"] * BLOCK_ALIGN + self._catalog.nbytes()
            objects, payload = figures.pop("objects"), figures.pop("payload_bytes")
            io = "direct" if self._direct else "buffered"
            if self._looks and (self._directory.suspect or self._lost):
                figures["catalog_damaged"] = 1
            return Usage(objects, payload, used, self._capacity, {"io": io, **figures})

    def flush(self) -> None:
        with self._gate:
            if self._looks:
                return
            try:
                self._flush()
            except OSError as error:
                self._removal.failed("flush", error)
                raise StorageError(f"the store in {self._directory.path} cannot be flushed: {error}") from error

    def close(self) -> None:
        if self._gate.close():
            self._mover.close()
            self._slabs.close()
            self._catalog.close()
            self._directory.release(clean=not self._catalog.is_damaged, suspect=self._catalog.is_damaged)

    def locate(self, key: ObjectKey) -> list[tuple[str, int, int]]:
        """Return where an object lies, as (file, offset, bytes) in payload order; empty where it is not stored. For `inspect` and tests."""
        with self._gate:
            [pin] = pins = self._holdings.pin([key.digest])
            try:
                extents = pin.placement.extents if pin else ()
                return [(*self._slabs.locate(extent), extent.blocks * BLOCK_ALIGN) for extent in extents]
            finally:
                self._removal.settle(self._holdings.unpin(pins))

    def orphans(self) -> int:
        """Return the number of objects left unreachable by a crash or a deletion: a page before them, or a state's own page, is gone."""
        with self._gate:
            return self._holdings.figures()["orphans"]

    def check_integrity(self) -> None:
        """Raise AssertionError unless all counts add up; call it only while no other call is running."""
        self._holdings.check_integrity()

    def _wanted(self, index: int, item: SetItem) -> Wanted:
        meta, digest = item.meta, item.key.digest
        space = self._catalog.id_of(meta.namespace)
        return Wanted(index, digest, digest[-PAGE_KEY_BYTES:], meta.parent, blocks_for(meta.length), meta.depth or 0, space)

    def _open(self, undo: ExitStack, capacity: int | None, durability: str, io: str, io_threads: int, policy: Policy) -> None:
        directory = self._directory
        fresh = {"block": BLOCK_ALIGN, "slab_blocks": slab_blocks_for(capacity or 0), "mac": self._seal.fingerprint}
        settled = directory.settle(fresh)
        if not _is_possible(settled) and capacity is not None and not blocks_there(self._env, directory.at("slabs"), 1):
            settled = directory.settle_anew(fresh)
        self._seal.match(settled["mac"], directory.path)
        slab_blocks = settled["slab_blocks"]
        if not _is_possible(settled):
            raise StorageError(f"{directory.at('format')} names impossible sizes; remove {directory.path} to start with an empty store")
        if not self._looks:
            directory.part(directory.at("slabs"), make=True)
        sound = directory.prove(closely=True)
        if capacity is None:
            shares = as_found(blocks_there(self._env, directory.at("slabs"), slab_blocks), directory)
        else:
            shares = divide(capacity, directory)
            directory.keep(capacity)
        self._capacity = shares.capacity
        self._direct = not self._looks and io == "auto" and goes_direct(self._env, directory.at("slabs"))
        loaded = self._snapshot() if self._looks else self._open_catalog(undo, shares.map_bytes, sound)
        self._slabs = Slabs(self._env, directory.at("slabs"), slab_blocks, shares.budget_blocks, direct=self._direct, looks=self._looks)
        undo.callback(self._slabs.close)
        self._mover = Mover(self._env, self._slabs, io_threads, direct=self._direct)
        undo.callback(self._mover.close)
        self._holdings = Holdings(slab_blocks, policy, with_macs=self._seal.fingerprint is not None)
        for record in self._catalog.namespaces():
            if record.states:
                self._holdings.require_states(self._catalog.id_of(record.namespace))
        self._removal = Removal(directory.path, self._catalog, self._slabs, self._holdings)
        self._writer = Writer(
            self._env, self._catalog, self._slabs, self._mover, self._holdings, self._removal, self._seal, power=durability == "power"
        )
        if self._looks:
            extents = self._slabs.look(blocks_named(loaded.records, chain.from_iterable(loaded.extents.values()), slab_blocks))
        else:
            sync_directory(self._env, directory.database)
            extents = self._slabs.open()
        unsound = self._holdings.load(loaded, extents, partial(self._has_bytes, loaded))
        self._lost = len(unsound)
        if unsound and not self._looks:
            _log.warning("%d records in %s have no sound place and are dropped", len(unsound), directory.path)
            self._catalog.apply(removals=unsound)
        if not self._looks:
            self._slabs.trim()
        directory.opened()

    def _snapshot(self) -> Loaded:
        """Read the catalog as it is, damaged or not, for a store that is opened for reading only."""
        found = salvage(self._env, self._directory.database)
        self._catalog: Catalog = Snapshot(found, self._directory.database_bytes())
        return found.loaded

    def _open_catalog(self, undo: ExitStack, map_bytes: int, sound: bool) -> Loaded:
        """Open and read the catalog; rewrite a damaged one from all records that can still be read."""
        directory = self._directory
        beside = os.path.join(directory.database, _NEW)
        directory.remove(beside)
        if sound and not directory.suspect:
            try:
                loaded = self._opened(undo, map_bytes).load()
                if not loaded.damaged and self._is_writable():
                    return loaded
            except DamagedError as error:
                _log.error("the catalog in %s is damaged: %s", directory.database, error)
            self._catalog.close()
        found = salvage(self._env, directory.database)
        _log.error("the catalog in %s is damaged; it is written anew from %d records", directory.database, len(found.loaded.records))
        new = Catalog(self._env, directory.database, map_bytes, name=_NEW)
        try:
            new.restore(found.loaded, found.names)
        finally:
            new.close()
        # The rename is atomic: at every instant the name refers to a whole file that is on the medium, the old one or the new one.
        directory.replace(beside)
        directory.healed()
        return self._opened(undo, map_bytes).load()

    def _opened(self, undo: ExitStack, map_bytes: int) -> Catalog:
        self._catalog = Catalog(self._env, self._directory.database, map_bytes)
        undo.callback(self._catalog.close)  # closing twice is harmless
        return self._catalog

    def _is_writable(self) -> bool:
        try:
            self._catalog.try_writing()
        except DamagedError:
            return False
        except OSError as error:
            if error.errno not in (ENOSPC, EDQUOT):
                raise
        return True

    def _has_bytes(self, loaded: Loaded, index: int) -> bool:
        """Return whether the blocks named by the record at position `index` hold the object that it describes."""
        record = loaded.records[index]
        found = self._catalog.entry(record)
        extents = (Extent(int(record["start"]), int(record["blocks"])), *loaded.extents.get(int(record["number"]), ()))
        sealed = Sealed(record["checksum"].tobytes(), record["mac"].tobytes())
        return self._is_sound(found.key, found.meta.length, sealed, extents)

    def _read(self, items: Sequence[GetItem], pins: Sequence[Pin | None]) -> list[Outcome]:
        """Read pinned objects, and remove damaged ones unless the store is opened for reading only."""
        outcomes = [Outcome.MISS] * len(items)
        reads: list[tuple[int, Pin, Movement]] = []
        for index, (item, pin) in enumerate(zip(items, pins, strict=True)):
            if pin is None:
                continue
            length = pin.placement.length
            if length != item.length or not usable(item.buffers, length, writable=True):
                outcomes[index] = Outcome.ERROR
                continue
            proof = self._seal.proof(item.key, length)
            reads.append((index, pin, Movement(pin.placement.extents, item.buffers, length, proof, pin.reused)))
        self._mover.read([movement for _, _, movement in reads])
        corrupt: list[Pin] = []
        unreadable: list[Pin] = []
        for index, pin, movement in reads:
            outcomes[index] = self._judge(items[index].key, pin, movement)
            if outcomes[index] is Outcome.CORRUPT:
                corrupt.append(pin)
            elif movement.error is not None and movement.error.errno == EIO:
                # An unreadable block stays so until it is written. If the object were kept, its next set would be a HIT and write nothing.
                unreadable.append(pin)
        if self._looks:
            self._holdings.count("corrupt", len(corrupt))
        elif corrupt or unreadable:
            self._holdings.count("corrupt", self._removal.give_up(corrupt))
            self._removal.give_up(unreadable)
        return outcomes

    def _judge(self, key: ObjectKey, pin: Pin, movement: Movement) -> Outcome:
        if movement.error is not None:
            return self._removal.failed("get", movement.error)
        assert movement.proof is not None, "a read brings its proof"
        if not movement.short and movement.proof.holds(pin.placement.sealed):
            return Outcome.HIT
        # Another thread or process may have written to the buffers meanwhile, so verify the stored bytes before the object is given up.
        return Outcome.ERROR if self._is_sound(key, *pin.placement) else Outcome.CORRUPT

    def _is_sound(self, key: ObjectKey, length: int, sealed: Sealed, extents: tuple[Extent, ...]) -> bool:
        """Verify an object in private memory; one at a time, because a process that writes to shared buffers can cause this at will."""
        proof = self._seal.proof(key, length)
        left = length
        with self._looking:
            for extent in pieces_of(extents):
                size = min(left, extent.blocks * BLOCK_ALIGN)
                room = memoryview(mmap(-1, extent.blocks * BLOCK_ALIGN))
                movement = Movement((extent,), [room], size)
                self._mover.read([movement])
                if movement.failed:
                    return False
                proof.add([room[:size]])
                left -= size
        return proof.holds(sealed)

    def _flush(self) -> None:
        self._directory.check_there()
        self._slabs.check_there()
        self._catalog.check_there()
        newest = self._catalog.newest
        try:
            self._slabs.sync()
        except OSError:
            self._doubtful = True
            raise
        if self._doubtful:
            # The kernel reports a failed write-back once, and treats the pages as clean from then on.
            self._verify_since(self._flushed)
        self._catalog.sync()
        self._doubtful, self._flushed = False, newest

    def _verify_since(self, number: int) -> None:
        """Give up the objects that were stored after record `number` and whose bytes are not on the medium."""
        for digest in self._holdings.digests_since(number):
            [pin] = pins = self._holdings.pin([digest])
            try:
                if pin is not None:
                    for extent in pin.placement.extents:
                        self._slabs.forget(extent)
                    # Verification uses only the digest, which covers the pool, so any pool will do here.
                    key = ObjectKey(PoolName.KV, digest)
                    self._read([GetItem(key, [memoryview(bytearray(pin.placement.length))], pin.placement.length)], pins)
            finally:
                self._removal.settle(self._holdings.unpin(pins))


def _is_possible(settled: Mapping[str, Any]) -> bool:
    """Return whether this version can work with the block and slab sizes in a store's format."""
    return settled["block"] == BLOCK_ALIGN and isinstance(settled["slab_blocks"], int) and 0 < settled["slab_blocks"] < 2**31


def _policy(value: Any) -> Policy:
    return value if isinstance(value, Policy) else policy_named(str(value))
