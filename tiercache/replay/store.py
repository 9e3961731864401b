"""The null store: a disk that keeps keys and lengths, evicts in the same order as every store, and discards the bytes."""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Self

from tiercache.core import ObjectKey, ObjectMeta, Outcome
from tiercache.errors import ConfigError
from tiercache.policy import Policy
from tiercache.storage import StoreContext
from tiercache.storage.base import Capabilities, GetItem, NamespaceRecord, ScanEntry, ScanPage, SetItem, StorageBackend, Usage
from tiercache.storage.eviction import EvictionOrder
from tiercache.storage.residents import Residents, Standing, parents_first


class NullStore(StorageBackend):
    """A store of at most `capacity` payload bytes. The order of eviction is that of `tiercache.storage.eviction`.

    Every get of a key that is present is a hit: there are no bytes to verify. Thread safety: one thread, unlike other stores.
    """

    capabilities = Capabilities(bounded=True)

    def __init__(self, capacity: int, policy: Policy, page_tokens: int) -> None:
        self._capacity = capacity
        self._residents = Residents()
        self._order = EvictionOrder(self._residents, policy, page_tokens)
        self._metas: dict[int, tuple[ObjectKey, ObjectMeta]] = {}
        self._spaces: dict[bytes, int] = {}
        self._namespaces: dict[bytes, NamespaceRecord] = {}
        self.peak = self.evicted = self.read_bytes = self.written_bytes = 0

    @classmethod
    def from_config(cls, section: Mapping[str, Any], context: StoreContext) -> Self:
        raise ConfigError("a null store is made by a replay and by nothing else")

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [row >= 0 for row in self._rows(keys)]

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        rows = self._rows([item.key for item in items])
        for row in rows:
            if row >= 0:
                self._residents.touch(row)
                self._residents.hits[row] += 1
                self.read_bytes += self._residents.length[row]
        return [Outcome.HIT if row >= 0 else Outcome.MISS for row in rows]

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        # A batch evicts neither its own objects nor their parents: an object is worth nothing without those before it on its path.
        links = [(item.key.page_key, item.meta.parent) for item in items]
        # Nodes are held in the order of the batch, so that a repeated replay breaks ties in the same way.
        held = {page: self._residents.hold(page) for page in dict.fromkeys(chain.from_iterable(links)) if page is not None}
        outcomes = [Outcome.ERROR] * len(items)
        missing: set[bytes] = set()
        for i in parents_first(links):
            page, parent = links[i]
            outcomes[i] = self._set(items[i], held, refused=page in missing)
            if page != parent and outcomes[i] in (Outcome.THROTTLED, Outcome.ERROR):
                missing.add(page)
        for node in held.values():
            self._residents.release(node)
        return outcomes

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        found = [self._residents.find(key.digest) for key in keys]
        for row in set(found) - {-1}:
            self._drop(row)
        return [row >= 0 for row in found]

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        return ScanPage([ScanEntry(key, meta) for key, meta in self._metas.values() if namespace in (None, meta.namespace)], b"")

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        return [ScanEntry(*self._metas[row]) if row >= 0 else None for row in self._rows(keys)]

    def register_namespace(self, record: NamespaceRecord) -> None:
        self._namespaces[record.namespace] = kept = record.over(self._namespaces.get(record.namespace))
        if kept.states:
            self._residents.require_states(self._space(record.namespace))

    def namespaces(self) -> list[NamespaceRecord]:
        return list(self._namespaces.values())

    def usage(self) -> Usage:
        used = self._residents.payload
        return Usage(len(self._residents), used, used, self._capacity, self._residents.worth()._asdict())

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _set(self, item: SetItem, held: Mapping[bytes, int], *, refused: bool) -> Outcome:
        key, meta, residents = item.key, item.meta, self._residents
        row = residents.find(key.digest)
        if row >= 0:
            residents.renew(row)
            return Outcome.HIT
        node, parent, depth, space = held[key.page_key], held.get(meta.parent or b""), meta.depth or 0, self._space(meta.namespace)
        standing = residents.standing(node, parent, depth, space, refused=refused)
        if standing is not Standing.FINE:
            return Outcome.ERROR if standing is Standing.IMPOSSIBLE else Outcome.THROTTLED
        if meta.length > self._capacity:
            return Outcome.THROTTLED
        evicting = _Evicting(self, meta.length)
        attached = () if parent is None else (parent,)
        self._order.evict(evicting, attached, promising=residents.is_promising(node, space, hangs=parent == node))
        if not evicting.enough():
            return Outcome.THROTTLED
        row = residents.add(key.digest, node, parent, residents.newest + 1, meta.length, space, depth)
        self._metas[row] = key, meta
        self.peak = max(self.peak, residents.payload)
        self.written_bytes += meta.length
        return Outcome.STORED

    def _rows(self, keys: Sequence[ObjectKey]) -> Sequence[int]:
        return self._residents.find_many([key.digest for key in keys])

    def _drop(self, row: int) -> None:
        self._residents.leave(row)
        self._residents.drop(row)
        del self._metas[row]

    def _space(self, namespace: bytes) -> int:
        return self._spaces.setdefault(namespace, len(self._spaces))


class _Evicting:
    """Eviction of objects until `nbytes` more fit. See `eviction.Taker`.

    Thread safety: one thread.
    """

    def __init__(self, store: NullStore, nbytes: int) -> None:
        self._store = store
        self._nbytes = nbytes

    def take(self, rows: list[int]) -> None:
        """Evict the objects of these rows."""
        for row in rows:
            self._store._drop(row)
        self._store.evicted += len(rows)

    def enough(self) -> bool:
        """Return whether the object now fits."""
        return self._store._residents.payload + self._nbytes <= self._store._capacity

    def full(self) -> bool:
        """Return False: this store does not limit how many objects go at a time."""
        return False
