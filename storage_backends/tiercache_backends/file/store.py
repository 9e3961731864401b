"""The `file` store: moves bytes between buffers and slabs, and keeps catalog and holdings in step.

A set: claim -> reserve blocks -> write -> one catalog transaction -> publish. A get: pin -> read -> verify -> unpin. No lock is held while
the disk works, but for the catalog's writer lock and the one that lets a single thread grow the slabs.
"""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from errno import EDQUOT, EIO, ENOSPC
from threading import Event, Lock
from typing import Any, ClassVar, Final, Self

from tiercache.config import parse_size
from tiercache.core import BLOCK_ALIGN, ObjectKey, Outcome
from tiercache.errors import ConfigError, StorageError
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
from tiercache.storage.checksum import Checksum
from tiercache.storage.env import Env
from tiercache.storage.gate import CallGate
from tiercache.storage.registry import settings_of
from tiercache.storage.vectors import usable
from tiercache_backends.file.catalog import MAX_EXTENTS, Catalog
from tiercache_backends.file.directory import Directory
from tiercache_backends.file.holdings import Claim, Claims, Entry, Holdings, blocks_for
from tiercache_backends.file.slabs import Slabs, sync_directory
from tiercache_backends.file.space import Extent

_log = logging.getLogger(__name__)

_BATCH: Final = 4096
"""Objects per catalog transaction."""
_SCAN_PAGE: Final = 1024
_SLACK: Final = 64
"""An eviction frees up to 1/64 of the store, so that a full store does not pay one catalog transaction for every set."""


class FileBackend(StorageBackend):
    """Objects in preallocated slab files of one directory, at most `capacity` bytes in all, with an LMDB catalog.

    `durability`: "process": acknowledged objects survive the death of the process, and after a power cut every object is right or is found
    out by its checksum; "power": they survive the power cut as well, at the price of one data sync per set.

    Thread rule: as the contract says; reads and writes of several threads run in parallel.
    """

    capabilities: ClassVar = Capabilities(persistent=True, bounded=True)

    def __init__(self, path: str, capacity: int, durability: str = "process", env: Env | None = None) -> None:
        self._env = env or Env()
        self._capacity = capacity
        self._power = durability == "power"
        self._gate = CallGate(f"the store in {path}")
        self._growth = Lock()
        self._cramped = False
        self._directory = Directory(self._env, path)
        self._directory.claim()
        try:
            self._open()
        except OSError as error:
            self._directory.release(clean=False)
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"the store in {self._directory.path} cannot be opened: {error}") from error
        except BaseException:
            self._directory.release(clean=False)
            raise

    @classmethod
    def from_config(cls, section: Mapping[str, Any], context: StoreContext) -> Self:
        if "address" in section:
            raise ConfigError(
                f"'file://{section['address']}...' names a host; write three slashes and the whole path, as in file:///var/lib/tiercache"
            )
        values = settings_of("file", section, {"path": _path, "capacity": parse_size, "durability": _durability})
        for name in ("path", "capacity"):
            if name not in values:
                raise ConfigError(f"storage type 'file' needs {name!r}, as in file:///var/lib/tiercache?capacity=200GiB")
        return cls(**values, env=context.env)

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate:
            return self._holdings.present([key.digest for key in keys])

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        with self._gate:
            entries = self._holdings.pin([item.key.digest for item in items])
            spoiled: dict[bytes, Entry] = {}
            try:
                return [self._read(item, entry, spoiled) for item, entry in zip(items, entries, strict=True)]
            finally:
                self._drop(spoiled)
                self._settle(self._holdings.unpin([entry for entry in entries if entry is not None]))

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        with self._gate:
            outcomes = [Outcome.ERROR] * len(items)
            todo = [i for i, item in enumerate(items) if storable(item)]
            while todo:
                claims = self._holdings.claim([_wanted(i, items[i]) for i in todo], _BATCH)
                for i in claims.hits:
                    outcomes[i] = Outcome.HIT
                if claims.fresh:
                    self._store(items, claims, outcomes)
                # Our own claims are settled by now, so two calls that wait for each other's objects cannot both wait for ever.
                for event in claims.waits:
                    event.wait()
                todo = claims.later
            return outcomes

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate:
            entries, done = self._holdings.take_out([key.digest for key in keys])
            gone = {entry.digest for entry in entries} if self._forget(entries, done) else set()
            answers: list[bool] = []
            for key in keys:
                answers.append(key.digest in gone)
                gone.discard(key.digest)
            return answers

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        with self._gate:
            try:
                page = self._catalog.page(cursor, _SCAN_PAGE)
            except OSError:
                _log.exception("the catalog in %s cannot be read", self._directory.path)
                return ScanPage([], b"")
            resident = self._holdings.present([digest for digest, _ in page])
            found = [ScanEntry(*self._catalog.unpack(*pair)) for pair, there in zip(page, resident, strict=True) if there]
            entries = [entry for entry in found if namespace in (None, entry.meta.namespace)]
            return ScanPage(entries, page[-1][0] if len(page) == _SCAN_PAGE else b"")

    def register_namespace(self, record: NamespaceRecord) -> None:
        with self._gate:
            try:
                self._catalog.register(record)
            except OSError:
                # It is written along with the next batch; until then only people miss it.
                _log.warning("the identity of a namespace cannot be saved in %s now", self._directory.path, exc_info=True)

    def namespaces(self) -> list[NamespaceRecord]:
        with self._gate:
            return self._catalog.namespaces()

    def usage(self) -> Usage:
        with self._gate:
            figures = self._holdings.figures()
            used = figures["blocks_used"] * BLOCK_ALIGN + self._catalog.nbytes()
            return Usage(figures.pop("objects"), figures.pop("payload_bytes"), used, self._capacity, figures)

    def flush(self) -> None:
        with self._gate:
            try:
                self._slabs.sync()
                self._catalog.sync()
            except OSError as error:
                raise StorageError(f"the store in {self._directory.path} cannot be flushed: {error}") from error

    def close(self) -> None:
        if self._gate.close():
            self._slabs.close()
            self._catalog.close()
            self._directory.release(clean=True)

    def locate(self, key: ObjectKey) -> list[tuple[str, int, int]]:
        """Where an object lies, for `inspect` and for tests: (file, offset, bytes) in payload order; empty where it is not stored."""
        with self._gate:
            [entry] = self._holdings.pin([key.digest])
            if entry is None:
                return []
            try:
                return [(*self._slabs.locate(extent), extent.blocks * BLOCK_ALIGN) for extent in entry.placement.extents]
            finally:
                self._settle(self._holdings.unpin([entry]))

    def orphans(self) -> int:
        """Objects whose page is known and not stored: what a crash or a deletion left behind. Walks over all objects."""
        with self._gate:
            return self._holdings.orphans()

    def check_integrity(self) -> None:
        """Raise AssertionError unless all counts add up; only when no other call is inside."""
        self._holdings.check_integrity()

    def _open(self) -> None:
        shares = self._directory.prepare(self._capacity)
        self._catalog = Catalog(self._env, self._directory.catalog, shares.map_bytes)
        self._slabs = Slabs(self._env, self._directory.slabs, shares.slab_blocks, shares.budget_blocks)
        try:
            self._holdings = Holdings(shares.slab_blocks)
            sync_directory(self._env, self._directory.catalog)
            stale = self._holdings.load(self._catalog.load(), self._slabs.open())
            if stale:
                _log.warning("%d objects in %s have no sound place and are dropped", len(stale), self._directory.path)
                self._catalog.apply({}, stale)
            self._slabs.trim()
        except BaseException:
            self._slabs.close()
            self._catalog.close()
            raise

    def _read(self, item: GetItem, entry: Entry | None, spoiled: dict[bytes, Entry]) -> Outcome:
        """Read one pinned object; what turns out to be damaged goes into `spoiled`."""
        if entry is None:
            return Outcome.MISS
        length, expected, extents = entry.placement
        if length != item.length or not usable(item.buffers, length, writable=True):
            return Outcome.ERROR
        found = Checksum()
        try:
            whole = self._slabs.read(extents, item.buffers, length, found.add)
        except OSError as error:
            if error.errno == EIO:
                # A block that cannot be read stays so until it is written: keeping the object would keep its next set from healing it.
                spoiled[entry.digest] = entry
            _log.warning("an object in %s cannot be read: %s", self._directory.path, error)
            return Outcome.ERROR
        if whole and found.seal(item.key) == expected:
            return Outcome.HIT
        spoiled[entry.digest] = entry
        return Outcome.CORRUPT

    def _drop(self, spoiled: Mapping[bytes, Entry]) -> None:
        """Give up damaged objects; their blocks are proven before anything is written there again."""
        if not spoiled:
            return
        entries, done = self._holdings.take_out(spoiled, only=lambda entry: spoiled[entry.digest] is entry)
        self._holdings.count("corrupt", len(entries))
        for entry in entries:
            entry.suspect = True
        self._forget(entries, done, keep=False)

    def _forget(self, entries: Sequence[Entry], done: Event, *, keep: bool = True) -> bool:
        """Remove objects that were taken out from the catalog. Where that fails they come back, or without `keep` stay out of sight."""
        if not entries:
            done.set()
            return True
        try:
            self._catalog.apply({}, [entry.digest for entry in entries])
        except OSError as error:
            _log.warning("the catalog in %s cannot remove %d objects: %s", self._directory.path, len(entries), error)
            (self._holdings.restored if keep else self._holdings.strand)(entries, done)
            return False
        self._settle(self._holdings.removed(entries, done))
        return True

    def _settle(self, suspects: Sequence[Extent]) -> None:
        """Prove blocks that held a damaged object, and retire those that fail."""
        for extent in suspects:
            if self._slabs.proven(extent):
                self._holdings.give(extent)
            else:
                _log.error("%d blocks in %s do not keep their data and are retired", extent.blocks, self._slabs.locate(extent)[0])
                self._holdings.retire(extent)

    def _store(self, items: Sequence[SetItem], claims: Claims, outcomes: list[Outcome]) -> None:
        """Write what is claimed and settle every claim, whatever happens."""
        records: dict[bytes, bytes] = {}
        try:
            self._reserve(claims.fresh)
            written = [claim for claim in claims.fresh if self._write(items[claim.index], claim, outcomes)]
            records = self._acknowledge(items, written, outcomes)
        finally:
            self._holdings.publish(claims, records)

    def _reserve(self, claims: Sequence[Claim]) -> None:
        """Find blocks for the claims, growing the slabs first and then evicting. Those that get none are left without."""
        limit = self._slabs.budget_blocks
        fitting = [c for c in claims if c.blocks <= limit]
        if self._catalog.crowded(len(claims)):
            self._evict(0, len(claims))
        while missing := self._holdings.allocate(fitting):
            if not self._grow() and not self._evict(missing, 1):
                break
        # What did not fit in order may still fit out of it: a small object behind a large one.
        for claim in fitting:
            if not claim.extents:
                self._holdings.allocate([claim])

    def _grow(self) -> bool:
        """Preallocate one more slab; False where the budget or the disk is used up."""
        with self._growth:
            try:
                extent = self._slabs.grow()
            except OSError as error:
                if not self._cramped:
                    _log.warning("the store in %s cannot grow and goes on with what it has: %s", self._directory.path, error)
                self._cramped = True
                return False
            if extent is None:
                return False
            self._cramped = False
            self._holdings.grow(extent)
            return True

    def _evict(self, blocks: int, objects: int) -> bool:
        """Give up objects for at least `blocks` blocks; False if none could be given up."""
        entries, done = self._holdings.evict(blocks, objects, self._slabs.budget_blocks // _SLACK if blocks else 0)
        if not self._forget(entries, done) or not entries:
            return False
        self._holdings.count("evicted", len(entries))
        return True

    def _write(self, item: SetItem, claim: Claim, outcomes: list[Outcome]) -> bool:
        """Write one object's bytes; False, with its outcome noted, where that cannot be."""
        outcomes[claim.index] = Outcome.THROTTLED
        if not claim.extents or len(claim.extents) > MAX_EXTENTS:
            return False
        try:
            self._slabs.write(claim.extents, item.buffers, item.meta.length)
        except OSError as error:
            outcomes[claim.index] = self._failed(error)
            if error.errno == EIO:
                extents, claim.extents = claim.extents, ()
                self._settle(extents)
            return False
        return True

    def _acknowledge(self, items: Sequence[SetItem], written: Sequence[Claim], outcomes: list[Outcome]) -> dict[bytes, bytes]:
        """Sync where that was promised, and enter the batch into the catalog: the records, or none if it fails."""
        if not written:
            return {}
        now = self._env.time_ns()
        records = {c.digest: self._catalog.pack(items[c.index].key, items[c.index].meta, c.extents, now + n) for n, c in enumerate(written)}
        try:
            if self._power:
                self._slabs.sync(extent for claim in written for extent in claim.extents)
            self._catalog.apply(records)
        except OSError as error:
            outcome = self._failed(error)
            records = {}
        else:
            outcome = Outcome.STORED
        for claim in written:
            outcomes[claim.index] = outcome
        return records

    def _failed(self, error: OSError) -> Outcome:
        """A full disk is a set that comes back later; anything else is an error. Neither touches what is stored."""
        _log.warning("a set in %s failed: %s", self._directory.path, error)
        return Outcome.THROTTLED if error.errno in (ENOSPC, EDQUOT) else Outcome.ERROR


def _wanted(index: int, item: SetItem) -> tuple[int, bytes, bytes, int]:
    return index, item.key.digest, item.meta.parent or b"", blocks_for(item.meta.length)


def _path(value: Any) -> str:
    if not isinstance(value, str) or not value.startswith("/"):
        raise ConfigError(f"{value!r} is not an absolute path; write it like /var/lib/tiercache")
    return value


def _durability(value: Any) -> str:
    if value not in ("process", "power"):
        raise ConfigError(f"{value!r} is not possible; use 'process' or 'power'")
    return str(value)
