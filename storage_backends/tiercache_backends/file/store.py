"""The `file` store: objects in preallocated slab files, with a log as catalog.

    set    claim -> reserve blocks -> write -> append to the catalog -> publish
    get    pin -> read -> verify -> unpin

Only these locks are ever held during disk I/O: the catalog's two, that for growing the slabs, and that for
verifying stored bytes again.
"""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from errno import EIO
from typing import Any, Final, Self

from tiercache.core import BLOCK_ALIGN, ObjectKey, Outcome
from tiercache.errors import StorageError
from tiercache.events.base import ChangeNote
from tiercache.settings import one_of
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
from tiercache.storage.env import Env, close_quietly, moves_direct
from tiercache.storage.gate import CallGate
from tiercache.storage.pages import PAGE_KEY_BYTES
from tiercache.storage.shares import Shares
from tiercache_backends.file.catalog import Catalog
from tiercache_backends.file.claims import Claim, blocks_for
from tiercache_backends.file.io_engine import IoEngine
from tiercache_backends.file.opening import find_log, sound_records, store_id
from tiercache_backends.file.reading import ObjectReader
from tiercache_backends.file.records import FOOTPRINT, ID_BYTES, RECORD_BYTES
from tiercache_backends.file.slabs import (
    CATALOG_SHARE,
    MIN_CAPACITY,
    Slabs,
    blocks_there,
    divide,
    existing_sizes,
    slab_blocks_for,
)
from tiercache_backends.file.state import StoreState
from tiercache_backends.file.writing import BATCH, ObjectWriter, Remover
from tiercache_backends.local.directory import StoreDirectory
from tiercache_backends.local.settings import (
    check_capacity,
    given_capacity,
    local_settings,
    opens_read_only,
    refused,
)

_log = logging.getLogger(__name__)

KIND: Final = "tiercache.file"
VERSION: Final = 3
"""Version of the format on disk that this module reads and writes (see `catalog.py`)."""
_SCAN_PAGE: Final = 1024
"""Maximum number of records per page of a scan."""
_ROUND_SHARE: Final = 16
"""Divisor of the blocks: a set writes at most a 16th of them at once.

What is written counts as restorable or not from then on, which decides what the rest of the set may evict.
"""
_IO_THREADS: Final = 8
"""Calls that go to the device at once."""


class FileBackend(StorageBackend):
    """Store of objects in preallocated slab files, with a log as catalog, at most `capacity` bytes in all.

    - `capacity`: None ("kept" in a URL) opens an existing store and keeps its present size. The store must
      exist.
    - `durability`: with "process", acknowledged objects survive the death of the process. After a power cut
      each object is intact or fails its checksum. With "power", acknowledged objects also survive a power
      cut, at the price of one data sync per set.
    - `io`: with "auto", blocks that are not in the page cache may be read and written with O_DIRECT, on
      several threads (see `io_engine`). With "buffered", O_DIRECT is never used.
    - `mac_key`: if it contains a key, a MAC is stored with every object.
    - `access`: "read" is the default if `capacity` is None, otherwise "write". With "write" the store may be
      changed. With "read" nothing is written: a set answers HIT for an object that is stored and THROTTLED
      for any other, a deletion answers False, and corrupt objects stay.

    Thread safety: as the contract says. Reads and writes of several threads run in parallel.
    """

    capabilities = Capabilities(persistent=True, bounded=True, shares=True)

    def __init__(
        self,
        path: str,
        capacity: int | None,
        durability: str = "process",
        env: Env | None = None,
        *,
        io: str = "auto",
        mac_key: MacKey | None = None,
        access: str = "",
    ) -> None:
        self._env = env or Env()
        self._mac_key = mac_key or MacKey()
        self._read_only = opens_read_only(access, capacity)
        self._gate = CallGate(f"the store in {path}", self._env.getpid)
        self._doubtful = False
        """Whether a flush has failed to sync, so that nobody knows what is on the medium."""
        self._directory = StoreDirectory(
            self._env,
            path,
            kind=KIND,
            version=VERSION,
            database="catalog",
            must_exist=capacity is None,
            read_only=self._read_only,
        )
        check_capacity(capacity, 0)
        self._directory.claim()
        with ExitStack() as undo:
            undo.callback(self._directory.release)
            try:
                self._open(undo, capacity, durability, io)
            except OSError as error:
                if isinstance(error, StorageError):
                    raise
                raise StorageError(
                    f"the store in {self._directory.path} cannot be opened: {error}"
                ) from error
            undo.pop_all()

    @classmethod
    def from_config(cls, section: Mapping[str, Any], context: StoreContext) -> Self:
        return cls(**cls._settings(section, context), env=context.env)

    @classmethod
    def check_config(cls, section: Mapping[str, Any], context: StoreContext) -> None:
        values = cls._settings(section, context)
        capacity = values["capacity"]
        opens_read_only(values.get("access", ""), capacity)
        check_capacity(capacity, 0, min_bytes=MIN_CAPACITY)
        StoreDirectory(
            context.env,
            values["path"],
            kind=KIND,
            version=VERSION,
            database="catalog",
            must_exist=capacity is None,
        ).check_place()

    @classmethod
    def check_shares(cls, section: Mapping[str, Any], shares: Shares) -> None:
        room = given_capacity(section)
        shares.check(room - room // CATALOG_SHARE, "the store that are left for objects")

    def share(self, shares: Shares) -> None:
        with self._gate:
            shares.check(self._slabs.budget_blocks * BLOCK_ALIGN, "the store that are left for objects")
            self._state.share(shares, self._catalog.name_of)
            if not self._read_only:
                self._writer.trim()

    @staticmethod
    def _settings(section: Mapping[str, Any], context: StoreContext) -> dict[str, Any]:
        return local_settings(
            "file",
            section,
            context,
            "file:///var/lib/tiercache?capacity=200GiB",
            io=one_of("auto", "buffered"),
        )

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate:
            return self._state.present([key.digest for key in keys])

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        return self._get(items)

    def peek(self, items: Sequence[GetItem]) -> list[Outcome]:
        return self._get(items, is_use=False)

    def _get(self, items: Sequence[GetItem], *, is_use: bool = True) -> list[Outcome]:
        with self._gate:
            pins = self._state.pin([item.key.digest for item in items], is_use=is_use)
            try:
                return self._reader.read(items, pins)
            finally:
                self._state.unpin(pins)

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        with self._gate:
            if self._read_only:
                return refused(items, self._state.present([item.key.digest for item in items]))
            outcomes = [Outcome.ERROR] * len(items)
            try:
                self._directory.check_there()
            except OSError as error:
                failed = self._remover.failed("set", error)
                return [failed if storable(item) else Outcome.ERROR for item in items]
            sound = [i for i, item in enumerate(items) if storable(item)]
            names = dict.fromkeys([items[i].meta.namespace for i in sound])
            ids = {name: self._catalog.id_of(name) for name in names}
            todo = [i for i in sound if ids[items[i].meta.namespace]]
            for i in set(sound).difference(todo):  # there is no room for another namespace
                outcomes[i] = Outcome.THROTTLED
            held: list[int] = []
            missing: set[bytes] = set()
            try:
                while todo:
                    wanted = [_wanted(i, items[i], ids) for i in todo]
                    claims = self._state.claim(wanted, BATCH, missing, self._round_blocks)
                    missing = claims.missing
                    held += claims.held.values()
                    for i, refusal in claims.refused.items():
                        outcomes[i] = refusal
                    for i in claims.hits:
                        outcomes[i] = Outcome.HIT
                    if claims.fresh:
                        self._writer.store(items, claims, outcomes)
                    # This call's own claims are published by now. Two calls that wait for each other's
                    # objects therefore cannot deadlock (race 3 in state.py).
                    for event in claims.waits:
                        event.wait()
                    todo = claims.later
            finally:
                self._state.release_nodes(held)
            if self._state.is_shared:
                self._writer.trim()
            return outcomes

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate:
            if self._read_only:
                return [False] * len(keys)
            removal = self._state.take_out([key.digest for key in keys])
            gone = set(removal.digests) if self._remover.remove(removal, durable=True) else set()
            return first_of_each(keys, gone)

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        with self._gate:
            with self._failing("scan", "scanned"):
                records = self._catalog.page(cursor, _SCAN_PAGE)
            found = [self._catalog.entry(record) for record in records]
            current = self._state.numbers([entry.key.digest for entry in found])
            entries = [
                entry
                for entry, number, now in zip(found, records["number"].tolist(), current, strict=True)
                if number == now and namespace in (None, entry.meta.namespace)
            ]
            return ScanPage(
                entries, int(records[-1]["number"]).to_bytes(8) if len(records) == _SCAN_PAGE else b""
            )

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        with self._gate:
            # Look up the record numbers of the objects first, then the records. A record never changes, and
            # its number is never reused. So a record that is found describes the right object. If an object
            # was removed in between, no record is found.
            return self._entries(self._state.numbers([key.digest for key in keys]))

    def _entries(self, numbers: Sequence[int]) -> list[ScanEntry | None]:
        """Return the entry of the object of each record number, or None if there is no such record."""
        with self._failing("describe", "read"):
            records = self._catalog.find(sorted({*numbers} - {0}))
        entries = {int(record["number"]): self._catalog.entry(record) for record in records}
        return self._state.valued([entries.get(number) for number in numbers])

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int = 0) -> None:
        with self._gate:
            self._state.advise([key.digest for key in keys], values, worker)

    def watch(self, note: ChangeNote | None) -> bool:
        with self._gate:
            self._state.watch(note)
        return not self._read_only

    def coldest(self, nbytes: int) -> Sequence[ScanEntry]:
        with self._gate:
            return [entry for entry in self._entries(self._state.coldest(nbytes)) if entry is not None]

    def register_namespace(self, record: NamespaceRecord) -> None:
        with self._gate:
            if self._read_only or not record.is_possible:
                return
            try:
                if record.states and (namespace_id := self._catalog.id_of(record.namespace)):
                    self._state.require_states(namespace_id)
                self._catalog.register(record)
            except OSError as error:
                # The identity is kept in memory, and the catalog's next write saves it.
                self._remover.failed("namespace", error)

    def namespaces(self) -> list[NamespaceRecord]:
        with self._gate:
            return self._catalog.namespaces()

    def usage(self) -> Usage:
        with self._gate:
            figures = self._state.figures()
            used = figures["blocks_used"] * BLOCK_ALIGN + self._catalog.nbytes()
            objects, payload = figures.pop("objects"), figures.pop("payload_bytes")
            io = "direct" if self._direct else "buffered"
            if self._read_only and (self._catalog.damaged or self._lost):
                figures["catalog_damaged"] = 1
            return Usage(
                objects, payload, used, self._capacity, {"io": io, **figures}, owners=self._state.owners()
            )

    def flush(self) -> None:
        with self._gate:
            if self._read_only:
                return
            with self._failing("flush", "flushed"):
                self._directory.check_there()
                self._slabs.check_there()
                self._catalog.check_there()
                # The kernel reports a failed write-back only once, and then treats the lost pages as clean.
                if self._doubtful:
                    raise OSError(EIO, "an earlier flush failed; close the store and open it again")
                try:
                    self._slabs.sync()
                    self._catalog.sync()
                except OSError:
                    self._doubtful = True
                    raise

    def close(self) -> None:
        if self._gate.close():
            self._io.close()
            self._slabs.close()
            self._catalog.close()
            self._directory.release()

    @contextmanager
    def _failing(self, call: str, done: str) -> Iterator[None]:
        """Count a failure of the disk in a `with` block, and raise StorageError instead."""
        try:
            yield
        except OSError as error:
            self._remover.failed(call, error)
            raise StorageError(f"the store in {self._directory.path} cannot be {done}: {error}") from error

    def _open(self, undo: ExitStack, capacity: int | None, durability: str, io: str) -> None:
        directory = self._directory
        fresh = {
            "block": BLOCK_ALIGN,
            "slab_blocks": slab_blocks_for(capacity or 0),
            "mac": self._mac_key.fingerprint,
            "store": (store_id(self._env, directory.database) or os.urandom(ID_BYTES)).hex(),
        }
        settled = directory.settle_format(fresh)
        self._mac_key.match(settled["mac"], directory.path)
        slab_blocks = settled["slab_blocks"]
        if not _is_possible(settled):
            raise StorageError(
                f"{directory.at('format')} names impossible sizes; remove {directory.path} to start with an"
                " empty store"
            )
        if not self._read_only:
            directory.make_part(directory.at("slabs"))
        directory.make_part(directory.database)
        store = bytes.fromhex(settled["store"])
        log = find_log(self._env, directory, store, read_only=self._read_only)
        undo.callback(log.close, self._env)
        loaded, log_bytes = log.contents, len(log.numbers) * RECORD_BYTES
        if capacity is None:
            sizing = existing_sizes(
                blocks_there(self._env, directory.at("slabs"), slab_blocks), directory, log_bytes
            )
        else:
            sizing = divide(capacity, directory, log_bytes)
            directory.record_capacity(capacity)
        self._capacity = sizing.capacity
        self._round_blocks = sizing.budget_blocks // _ROUND_SHARE
        self._direct = (
            not self._read_only and io == "auto" and _moves_direct(self._env, directory.at("slabs"))
        )
        self._catalog = Catalog(
            self._env,
            directory,
            log,
            sizing.catalog_bytes,
            power=durability == "power",
            read_only=self._read_only,
        )
        undo.callback(self._catalog.close)
        self._slabs = Slabs(
            self._env,
            directory.at("slabs"),
            slab_blocks,
            sizing.budget_blocks,
            direct=self._direct,
            read_only=self._read_only,
        )
        undo.callback(self._slabs.close)
        self._io = IoEngine(self._env, self._slabs, _IO_THREADS, direct=self._direct)
        undo.callback(self._io.close)
        with_macs = self._mac_key.fingerprint is not None
        self._state = StoreState(slab_blocks, with_macs=with_macs, clock=self._env.monotonic)
        for record in self._catalog.namespaces():
            if record.states:
                self._state.require_states(self._catalog.id_of(record.namespace))
        self._remover = Remover(directory.path, self._catalog, self._state)
        self._reader = ObjectReader(
            self._io, self._state, self._remover, self._mac_key, read_only=self._read_only
        )
        self._writer = ObjectWriter(
            self._env,
            self._catalog,
            self._slabs,
            self._io,
            self._state,
            self._remover,
            self._mac_key,
            power=durability == "power",
        )
        extents = self._slabs.open()
        # Order: (1) find the unsound records, (2) remove them, (3) cut off the blocks beyond the budget. With
        # this order no record names a block that was cut off, even after a crash between two steps.
        sound, unsound, gaps = sound_records(loaded, extents, slab_blocks)
        self._state.load(sound, extents, gaps)
        self._lost = len(unsound)
        """Number of records whose objects cannot be read."""
        if unsound and not self._read_only:
            _log.warning("%d records in %s have no sound place and are dropped", len(unsound), directory.path)
            self._catalog.apply(removals=unsound)
        if not self._read_only:
            self._slabs.trim()
        directory.admit_others()


def _wanted(index: int, item: SetItem, ids: Mapping[bytes, int]) -> Claim:
    """Return what a set wants to store for an item; `ids` has the number of its namespace."""
    (_, digest), meta = item.key, item.meta
    return Claim(
        index,
        digest,
        digest[-PAGE_KEY_BYTES:],
        meta.parent,
        blocks_for(meta.length),
        meta.depth or 0,
        ids[meta.namespace],
        meta.value,
        meta.worker,
        FOOTPRINT.of(meta.length),
    )


def _is_possible(settled: Mapping[str, Any]) -> bool:
    """Return whether this version can work with the block and slab sizes in the store's file `format`."""
    return (
        settled["block"] == BLOCK_ALIGN
        and isinstance(settled["slab_blocks"], int)
        and 0 < settled["slab_blocks"] < 2**31
        and re.fullmatch(r"[0-9a-f]{32}", str(settled["store"])) is not None
    )


def _moves_direct(env: Env, directory: str) -> bool:
    """Return whether the store can read and write with O_DIRECT in this directory.

    Also returns False if the kernel cannot tell which blocks are cached, because the store would then bypass
    the cache even for cached blocks.
    """
    path = os.path.join(directory, "probe")
    try:
        fd = env.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        try:
            moved = moves_direct(env, fd)
            env.cached(fd, 0, BLOCK_ALIGN)
            return moved
        finally:
            close_quietly(env, fd)
    except OSError:
        return False
    finally:
        with suppress(OSError):
            env.unlink(path)
