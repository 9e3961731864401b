"""The null store: a disk that keeps keys and lengths, evicts by the policy contract, and forgets the bytes."""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from tiercache.core import ObjectKey, ObjectMeta, Outcome
from tiercache.errors import ConfigError
from tiercache.policy import Policy, UnitKind
from tiercache.policy.base import Column
from tiercache.storage import StoreContext
from tiercache.storage.base import Capabilities, GetItem, NamespaceRecord, ScanEntry, ScanPage, SetItem, StorageBackend, Usage

_SHARE = 64


@dataclass(slots=True, eq=False)
class _Object:
    key: ObjectKey
    meta: ObjectMeta
    tick: int = 0
    hits: int = 0

    @property
    def is_state(self) -> bool:
        """Does it lie on the page that it depends on?"""
        return self.meta.parent == self.key.page_key

    @property
    def parent(self) -> bytes:
        return self.meta.parent or b""


class NullStore(StorageBackend):
    """At most `capacity` payload bytes. What nothing else depends on goes first, in the order of the policy.

    Every get is a hit if the key is there: there are no bytes to verify. Thread rule: one thread, unlike other stores.
    """

    capabilities = Capabilities(bounded=True)

    def __init__(self, capacity: int, policy: Policy, page_tokens: int) -> None:
        self._capacity = capacity
        self._policy = policy
        self._page_tokens = page_tokens
        self._objects: dict[bytes, _Object] = {}
        self._on_page: dict[bytes, list[_Object]] = {}
        self._dependents: Counter[bytes] = Counter()
        self._front: list[tuple[float, int, bytes]] = []
        self._until = -1
        self._tick = 0
        self._used = 0
        self.peak = self.evicted = self.read_bytes = self.written_bytes = 0

    @classmethod
    def from_config(cls, section: Mapping[str, Any], context: StoreContext) -> Self:
        raise ConfigError("a null store is made by a replay and by nothing else")

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [key.digest in self._objects for key in keys]

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        outcomes = []
        for item in items:
            found = self._objects.get(item.key.digest)
            if found is not None:
                self._tick += 1
                found.tick, found.hits = self._tick, found.hits + 1
                self.read_bytes += found.meta.length
            outcomes.append(Outcome.MISS if found is None else Outcome.HIT)
        return outcomes

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        own = {item.key.digest for item in items}
        return [self._set(item, own) for item in items]

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        found = [self._objects.get(key.digest) for key in keys]
        for one in found:
            if one is not None:
                self._drop(one)
        return [one is not None for one in found]

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        return ScanPage([ScanEntry(one.key, one.meta) for one in self._objects.values() if namespace in (None, one.meta.namespace)], b"")

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        found = [self._objects.get(key.digest) for key in keys]
        return [None if one is None else ScanEntry(one.key, one.meta) for one in found]

    def register_namespace(self, record: NamespaceRecord) -> None:
        pass

    def namespaces(self) -> list[NamespaceRecord]:
        return []

    def usage(self) -> Usage:
        return Usage(len(self._objects), self._used, self._used, self._capacity)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _set(self, item: SetItem, own: Iterable[bytes]) -> Outcome:
        if item.key.digest in self._objects:
            return Outcome.HIT
        if not self._make_room(item.meta.length, own):
            return Outcome.THROTTLED
        self._tick += 1
        made = _Object(item.key, item.meta, self._tick)
        self._objects[item.key.digest] = made
        self._on_page.setdefault(item.key.page_key, []).append(made)
        self._dependents[made.parent] += 1
        self._used += item.meta.length
        self.peak = max(self.peak, self._used)
        self.written_bytes += item.meta.length
        return Outcome.STORED

    def _make_room(self, length: int, own: Iterable[bytes]) -> bool:
        """A batch does not evict its own: what comes last is worth nothing without what came first."""
        while self._used + length > self._capacity:
            if self._tick > self._until or not self._front:
                self._refill(own)
            if not self._front:
                return False
            rank, tick, digest = heapq.heappop(self._front)
            found = self._objects.get(digest)
            if found is not None and found.tick == tick and self._is_leaf(found) and digest not in own:
                self._drop(found)
                self.evicted += 1
                self._policy.evicted(rank)
        return True

    def _refill(self, own: Iterable[bytes]) -> None:
        leaves = [one for digest, one in self._objects.items() if digest not in own and self._is_leaf(one)]
        self._front = []
        if leaves:
            ranks = self._policy.rank(_Units(self, leaves))
            wanted = max(_SHARE, len(leaves) // _SHARE)
            least = np.argsort(ranks, kind="stable")[:wanted].tolist()
            self._front = [(float(ranks[i]), leaves[i].tick, leaves[i].key.digest) for i in least]
            self._until = self._tick + wanted

    def _is_leaf(self, one: _Object) -> bool:
        return one.is_state or not self._dependents[one.key.page_key]

    def _drop(self, one: _Object) -> None:
        del self._objects[one.key.digest]
        page = self._on_page[one.key.page_key]
        page.remove(one)
        if not page:
            del self._on_page[one.key.page_key]
        self._dependents[one.parent] -= 1
        if not self._dependents[one.parent]:
            del self._dependents[one.parent]
        self._used -= one.meta.length

    def _replay(self, one: _Object) -> int:
        at, distance = one.key.page_key, 0
        while True:
            here = self._on_page.get(at, ())
            if distance and any(other.is_state for other in here):
                return distance
            distance += 1
            at = next((other.parent for other in here if not other.is_state), b"")
            if not at:
                return distance


class _Units:
    """Objects as a policy sees them. See `Units`. Thread rule: during one call of the policy."""

    def __init__(self, store: NullStore, objects: Sequence[_Object]) -> None:
        self.now = store._tick
        self.page_tokens = store._page_tokens
        self._store = store
        self._objects = objects

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def kind(self) -> Column:
        return np.array([UnitKind.STATE if one.is_state else UnitKind.LEAF for one in self._objects])

    @property
    def last_access(self) -> Column:
        return np.array([one.tick for one in self._objects])

    @property
    def hits(self) -> Column:
        return np.array([one.hits for one in self._objects])

    @property
    def depth(self) -> Column:
        return np.array([one.meta.depth or 0 for one in self._objects])

    @property
    def children(self) -> Column:
        return np.array([self._store._dependents[one.key.page_key] - one.is_state for one in self._objects])

    @property
    def replay(self) -> Column:
        return np.array([self._store._replay(one) for one in self._objects])

    @property
    def nbytes(self) -> Column:
        return np.array([one.meta.length for one in self._objects])

    @property
    def checkpoint(self) -> Column:
        return np.zeros(len(self), np.int64)

    @property
    def lineage(self) -> Column:
        return np.zeros(len(self), np.int64)

    @property
    def covered(self) -> Column:
        return np.zeros(len(self), np.int64)

    @property
    def grown(self) -> Column:
        return np.ones(len(self), np.int64)

    @property
    def digest(self) -> Column:
        return np.zeros(len(self), np.int64)
