"""`memory`: objects as bytes in a dict. The oracle that other stores are compared with, and a store for tests and demos."""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from heapq import nsmallest
from threading import Lock
from typing import Any, Final, Self

from tiercache.config import parse_size
from tiercache.core import ObjectKey, ObjectMeta, Outcome
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
    checksum_of,
    storable,
)
from tiercache.storage.checksum import checksum
from tiercache.storage.env import Env
from tiercache.storage.gate import CallGate
from tiercache.storage.registry import settings_of
from tiercache.storage.residents import Resident, Residents
from tiercache.storage.vectors import take, usable

_SCAN_PAGE: Final = 1024


class _Object(Resident):
    """An object and its bytes."""

    __slots__ = ("key", "meta", "payload", "stored_at")

    def __init__(self, key: ObjectKey, meta: ObjectMeta, payload: bytes, stored_at: float) -> None:
        super().__init__(key.digest, meta.parent)
        self.key = key
        self.meta = meta
        self.payload = payload
        self.stored_at = stored_at

    def entry(self) -> ScanEntry:
        """What a scan says of it."""
        return ScanEntry(self.key, self.meta, self.stored_at)


class MemoryBackend(StorageBackend):
    """A dict of bytes with a cap (`capacity`, payload bytes; 0 is without). Everything is gone when it closes.

    Thread rule: as the contract says; one mutex, never held while bytes are copied or checked.
    """

    capabilities = Capabilities(bounded=True)

    def __init__(self, capacity: int = 0, env: Env | None = None) -> None:
        self._capacity = capacity
        self._env = env or Env()
        self._gate = CallGate("the memory store")
        self._mutex = Lock()
        self._objects: Residents[_Object] = Residents()
        self._used = 0
        self._corrupt = 0
        self._namespaces: dict[bytes, NamespaceRecord] = {}

    @classmethod
    def from_config(cls, section: Mapping[str, Any], context: StoreContext) -> Self:
        return cls(**settings_of("memory", section, {"capacity": parse_size}), env=context.env)

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate, self._mutex:
            return [key.digest in self._objects for key in keys]

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        with self._gate:
            return [self._get(item) for item in items]

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        with self._gate:
            # A batch does not evict its own: what comes first begins a sequence, and what comes last is worth nothing without it.
            own = {item.key.digest for item in items}
            return [self._set(item, own) for item in items]

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate, self._mutex:
            found = [self._objects.get(key.digest) for key in keys]
            return [self._drop(item) for item in found]

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        with self._gate, self._mutex:
            behind = (o for o in self._objects if o.digest > cursor and namespace in (None, o.meta.namespace))
            page: Iterable[_Object] = nsmallest(_SCAN_PAGE, behind, key=lambda o: o.digest)
        entries = [o.entry() for o in page]
        return ScanPage(entries, entries[-1].key.digest if len(entries) == _SCAN_PAGE else b"")

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        with self._gate, self._mutex:
            found = [self._objects.get(key.digest) for key in keys]
        return [None if o is None else o.entry() for o in found]

    def register_namespace(self, record: NamespaceRecord) -> None:
        with self._gate, self._mutex:
            self._namespaces[record.namespace] = record

    def namespaces(self) -> list[NamespaceRecord]:
        with self._gate, self._mutex:
            return list(self._namespaces.values())

    def usage(self) -> Usage:
        with self._gate, self._mutex:
            return Usage(len(self._objects), self._used, self._used, self._capacity, {"corrupt": self._corrupt})

    def flush(self) -> None:
        with self._gate:
            pass

    def close(self) -> None:
        if self._gate.close():
            self._objects = Residents()

    def _get(self, item: GetItem) -> Outcome:
        with self._mutex:
            found = self._objects.get(item.key.digest)
            if found is None:
                return Outcome.MISS
            if found.meta.length != item.length or not usable(item.buffers, item.length, writable=True):
                return Outcome.ERROR
            self._objects.touch(found)
            payload = memoryview(found.payload)
        if len(payload) != item.length or checksum(item.key, [payload], item.length) != found.meta.checksum:
            with self._mutex:
                self._corrupt += self._drop(found)
            return Outcome.CORRUPT
        for view in take(item.buffers, 0, item.length):
            view[:] = payload[: view.nbytes]
            payload = payload[view.nbytes :]
        return Outcome.HIT

    def _set(self, item: SetItem, own: AbstractSet[bytes]) -> Outcome:
        if not storable(item):
            return Outcome.ERROR
        with self._mutex:
            if self._touched(item.key.digest):
                return Outcome.HIT
        meta = replace(item.meta, checksum=checksum_of(item))
        fresh = _Object(item.key, meta, b"".join(take(item.buffers, 0, meta.length)), self._env.time_ns() / 1e9)
        with self._mutex:
            if self._touched(fresh.digest):
                return Outcome.HIT
            if not self._make_room(fresh, own):
                return Outcome.THROTTLED
            self._objects.add(fresh)
            self._used += fresh.meta.length
        return Outcome.STORED

    def _touched(self, digest: bytes) -> bool:
        found = self._objects.get(digest)
        if found is not None:
            self._objects.touch(found)
        return found is not None

    def _make_room(self, fresh: _Object, own: AbstractSet[bytes]) -> bool:
        """Evict until the object fits, sparing its own batch and the page that it depends on."""
        size = len(fresh.payload)

        def fits() -> bool:
            return not self._capacity or self._used + size <= self._capacity

        def paid(gone: _Object) -> bool:
            self._used -= gone.meta.length
            return fits()

        if not fits() and size <= self._capacity:
            self._objects.hold(fresh.parent)
            self._objects.victims(enough=paid, spare=lambda o: o.digest in own)
            self._objects.release(fresh.parent)
        return fits()

    def _drop(self, item: _Object | None) -> bool:
        if item is None or self._objects.get(item.digest) is not item:
            return False
        self._objects.pop(item)
        item.payload = b""  # its entry in the queue for eviction may stay for a while
        self._used -= item.meta.length
        return True
