"""The `memory` store: objects as bytes in a dict. The reference that other stores are compared with, and a store for tests and demos."""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import chain
from threading import Lock
from typing import Any, Final, Self

from tiercache.config import parse_size
from tiercache.core import ObjectKey, ObjectMeta, Outcome
from tiercache.policy import Lru
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
from tiercache.storage.eviction import EvictionOrder
from tiercache.storage.gate import CallGate
from tiercache.storage.registry import settings_of
from tiercache.storage.residents import Residents, Standing, parents_first
from tiercache.storage.vectors import take, usable

_SCAN_PAGE: Final = 1024


@dataclass(slots=True, eq=False)
class _Object:
    """An object and its bytes."""

    key: ObjectKey
    meta: ObjectMeta
    payload: bytes
    stored_at: float
    row: int = -1

    def entry(self) -> ScanEntry:
        """Return the object's entry in a scan."""
        return ScanEntry(self.key, self.meta, self.stored_at)


class MemoryBackend(StorageBackend):
    """A dict of bytes with a cap (`capacity`, payload bytes; 0 for none). Everything is lost when the store closes.

    Thread safety: as `StorageBackend`; one mutex, never held while bytes are copied or checked.
    """

    capabilities = Capabilities(bounded=True)

    def __init__(self, capacity: int = 0, env: Env | None = None) -> None:
        self._capacity = capacity
        self._env = env or Env()
        self._gate = CallGate("the memory store")
        self._mutex = Lock()
        self._objects: dict[bytes, _Object] = {}
        self._residents = Residents()
        self._order = EvictionOrder(self._residents, Lru())
        self._spaces: dict[bytes, int] = {}
        self._used = 0
        self._corrupt = 0
        self._evicted = 0
        self._namespaces: dict[bytes, NamespaceRecord] = {}

    @classmethod
    def from_config(cls, section: Mapping[str, Any], context: StoreContext) -> Self:
        return cls(**settings_of("memory", section, {"capacity": parse_size}), env=context.env)

    @classmethod
    def check_config(cls, section: Mapping[str, Any], context: StoreContext) -> None:
        settings_of("memory", section, {"capacity": parse_size})

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate, self._mutex:
            return [key.digest in self._objects for key in keys]

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        with self._gate:
            return [self._get(item) for item in items]

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        with self._gate:
            sound = [i for i, item in enumerate(items) if storable(item)]
            batch = [(items[i].key.page_key, items[i].meta.parent) for i in sound]
            outcomes = [Outcome.ERROR] * len(items)
            with self._mutex:
                # A batch must not evict its own pages: the first ones begin a sequence, and the last ones are worth nothing without them.
                held = [self._residents.hold(page) for page in dict.fromkeys(chain.from_iterable(batch)) if page is not None]
            missing: set[bytes] = set()
            try:
                for i in parents_first(batch):
                    page, parent = batch[i]
                    outcomes[sound[i]] = outcome = self._set(items[sound[i]], refused=page in missing)
                    if page != parent and outcome in (Outcome.THROTTLED, Outcome.ERROR):
                        missing.add(page)
            finally:
                with self._mutex:
                    for node in held:
                        self._residents.release(node)
            return outcomes

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate, self._mutex:
            found = [self._objects.get(key.digest) for key in keys]
            return [self._drop(item) for item in found]

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        with self._gate, self._mutex:
            behind = (o for o in self._objects.values() if o.key.digest > cursor and namespace in (None, o.meta.namespace))
            page: Iterable[_Object] = nsmallest(_SCAN_PAGE, behind, key=lambda o: o.key.digest)
        entries = [o.entry() for o in page]
        return ScanPage(entries, entries[-1].key.digest if len(entries) == _SCAN_PAGE else b"")

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        with self._gate, self._mutex:
            found = [self._objects.get(key.digest) for key in keys]
        return [None if o is None else o.entry() for o in found]

    def register_namespace(self, record: NamespaceRecord) -> None:
        with self._gate, self._mutex:
            self._namespaces[record.namespace] = kept = record.over(self._namespaces.get(record.namespace))
            if kept.states:
                self._residents.require_states(self._space(record.namespace))

    def namespaces(self) -> list[NamespaceRecord]:
        with self._gate, self._mutex:
            return list(self._namespaces.values())

    def usage(self) -> Usage:
        with self._gate, self._mutex:
            figures = {"corrupt": self._corrupt, "evicted": self._evicted, **self._residents.worth()._asdict()}
            return Usage(len(self._objects), self._used, self._used, self._capacity, figures)

    def flush(self) -> None:
        with self._gate:
            pass

    def close(self) -> None:
        if self._gate.close():
            self._objects = {}
            self._residents = Residents()

    def _get(self, item: GetItem) -> Outcome:
        with self._mutex:
            found = self._objects.get(item.key.digest)
            if found is None:
                return Outcome.MISS
            if found.meta.length != item.length or not usable(item.buffers, item.length, writable=True):
                return Outcome.ERROR
            self._residents.touch(found.row)
            self._residents.hits[found.row] += 1
            payload = memoryview(found.payload)
        if len(payload) != item.length or checksum(item.key, [payload], item.length) != found.meta.checksum:
            with self._mutex:
                self._corrupt += self._drop(found)
            return Outcome.CORRUPT
        for view in take(item.buffers, 0, item.length):
            view[:] = payload[: view.nbytes]
            payload = payload[view.nbytes :]
        return Outcome.HIT

    def _set(self, item: SetItem, *, refused: bool) -> Outcome:
        with self._mutex:
            outcome = self._refuse(item, refused=refused)
        if outcome is not None:
            return outcome
        meta = replace(item.meta, checksum=checksum_of(item))
        fresh = _Object(item.key, meta, b"".join(take(item.buffers, 0, meta.length)), self._env.time_ns() / 1e9)
        with self._mutex:
            return self._refuse(item, refused=refused) or self._add(fresh)

    def _refuse(self, item: SetItem, *, refused: bool) -> Outcome | None:
        """Return the outcome of a set that ends before it stores anything, else None. `refused`: its page's own set was refused."""
        found = self._objects.get(item.key.digest)
        if found is not None:
            self._residents.renew(found.row)
            return Outcome.HIT
        residents, parent = self._residents, item.meta.parent
        node, above = residents.hold(item.key.page_key), None if parent is None else residents.hold(parent)
        standing = residents.standing(node, above, item.meta.depth or 0, self._space(item.meta.namespace), refused=refused)
        for held in (node, above):
            if held is not None:
                residents.release(held)
        return {Standing.FINE: None, Standing.ABSENT_PARENT: Outcome.THROTTLED, Standing.IMPOSSIBLE: Outcome.ERROR}[standing]

    def _add(self, fresh: _Object) -> Outcome:
        """Evict until the object fits, and add it. The caller guarantees that its page and its parent are held by the batch."""
        if self._capacity and len(fresh.payload) > self._capacity:
            return Outcome.THROTTLED
        residents, meta = self._residents, fresh.meta
        node, parent = residents.hold(fresh.key.page_key), None if meta.parent is None else residents.hold(meta.parent)
        space = self._space(meta.namespace)
        promising = residents.is_promising(node, space, hangs=parent == node)
        self._order.evict(_Evicting(self, len(fresh.payload)), promising=promising)
        fits = not self._capacity or self._used + len(fresh.payload) <= self._capacity
        if fits:
            number = residents.newest + 1
            fresh.row = residents.add(fresh.key.digest, node, parent, number, meta.length, space, meta.depth or 0)
            self._objects[fresh.key.digest] = fresh
            self._used += meta.length
        for held in (node, parent):
            if held is not None:
                residents.release(held)
        return Outcome.STORED if fits else Outcome.THROTTLED

    def _space(self, namespace: bytes) -> int:
        return self._spaces.setdefault(namespace, len(self._spaces))

    def _drop(self, item: _Object | None) -> bool:
        if item is None or self._objects.get(item.key.digest) is not item:
            return False
        del self._objects[item.key.digest]
        self._residents.leave(item.row)
        self._residents.drop(item.row)
        self._used -= item.meta.length
        return True


class _Evicting:
    """One eviction, for `nbytes` bytes of room in a store. See `eviction.Taker`.

    Thread safety: under the mutex of its store.
    """

    def __init__(self, store: MemoryBackend, nbytes: int) -> None:
        self._store = store
        self._nbytes = nbytes

    def take(self, rows: list[int]) -> None:
        """Drop the objects in these rows, and count them as evicted."""
        for row in rows:
            self._store._drop(self._store._objects[self._store._residents.digest(row)])
        self._store._evicted += len(rows)

    def enough(self) -> bool:
        """Return whether `nbytes` more bytes fit."""
        return not self._store._capacity or self._store._used + self._nbytes <= self._store._capacity

    def full(self) -> bool:
        """Return False: one eviction may drop any number of objects."""
        return False
