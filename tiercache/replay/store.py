"""The null store: a disk that keeps keys and lengths, evicts by the policy contract, and forgets the bytes."""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from tiercache.core import ObjectKey, ObjectMeta, Outcome
from tiercache.errors import ConfigError
from tiercache.policy import Policy, UnitKind
from tiercache.policy.base import Column
from tiercache.policy.stored import StoredColumns
from tiercache.storage import StoreContext
from tiercache.storage.base import Capabilities, GetItem, NamespaceRecord, ScanEntry, ScanPage, SetItem, StorageBackend, Usage

_SHARE = 64


@dataclass(slots=True, eq=False)
class _Object:
    """`page`: the key of the page on which it ends; `parent`: of the page that it depends on, empty for none."""

    key: ObjectKey
    meta: ObjectMeta
    page: bytes
    parent: bytes
    is_state: bool
    tick: int
    hits: int = 0


@dataclass(slots=True, eq=False)
class _Page:
    """What is held of one page: how many states, and its KV with the page that this depends on."""

    parent: bytes = b""
    states: int = 0
    kv: list[_Object] = field(default_factory=list)


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
        self._pages: dict[bytes, _Page] = {}
        self._leaves: dict[bytes, _Object] = {}
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
        # What it hangs on would be orphaned by its eviction, as a state is whose page goes to make room for it.
        parents = {item.meta.parent for item in items if item.meta.parent}
        own |= {one.key.digest for page in parents if page in self._pages for one in self._pages[page].kv}
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
        self._add(
            _Object(item.key, item.meta, item.key.page_key, item.meta.parent or b"", item.meta.parent == item.key.page_key, self._tick)
        )
        self._used += item.meta.length
        self.peak = max(self.peak, self._used)
        self.written_bytes += item.meta.length
        return Outcome.STORED

    def _make_room(self, length: int, own: Iterable[bytes]) -> bool:
        """A batch does not evict its own, nor what it hangs on: what comes last is worth nothing without what came first."""
        if length > self._capacity:
            return False
        while self._used + length > self._capacity:
            if self._tick > self._until or not self._front:
                self._refill(own)
            if not self._front:
                return False
            rank, tick, digest = heapq.heappop(self._front)
            found = self._objects.get(digest)
            if found is not None and found.tick == tick and digest in self._leaves and digest not in own:
                self._drop(found)
                self.evicted += 1
                self._policy.evicted(rank)
        return True

    def _refill(self, own: Iterable[bytes]) -> None:
        leaves = [one for digest, one in self._leaves.items() if digest not in own]
        self._front = []
        if leaves:
            ranks = self._policy.rank(_Units(self, leaves))
            wanted = max(_SHARE, len(leaves) // _SHARE)
            least = np.argsort(ranks, kind="stable")[:wanted].tolist()
            self._front = [(float(ranks[i]), leaves[i].tick, leaves[i].key.digest) for i in least]
            self._until = self._tick + wanted

    def _add(self, one: _Object) -> None:
        self._objects[one.key.digest] = one
        page = self._pages.setdefault(one.page, _Page())
        if one.is_state:
            page.states += 1
        else:
            page.kv.append(one)
            page.parent = one.parent
        if one.is_state or not self._dependents[one.page]:
            self._leaves[one.key.digest] = one
        self._dependents[one.parent] += 1
        if self._dependents[one.parent] == 1 and one.parent in self._pages:
            for other in self._pages[one.parent].kv:
                del self._leaves[other.key.digest]

    def _drop(self, one: _Object) -> None:
        del self._objects[one.key.digest]
        self._leaves.pop(one.key.digest, None)
        page = self._pages[one.page]
        if one.is_state:
            page.states -= 1
        else:
            page.kv.remove(one)
        if not page.states and not page.kv:
            del self._pages[one.page]
        self._used -= one.meta.length
        self._dependents[one.parent] -= 1
        if not self._dependents[one.parent]:
            del self._dependents[one.parent]
            if one.parent in self._pages:
                self._leaves |= {other.key.digest: other for other in self._pages[one.parent].kv}

    def _replay(self, one: _Object) -> int:
        """Pages from the nearest state above to the object's end."""
        at, distance = self._pages.get(one.page), 0
        while at is not None and at.kv:
            distance += 1
            at = self._pages.get(at.parent)
            if at is not None and at.states:
                break
        return max(1, distance)


class _Units(StoredColumns):
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
        return np.array([self._store._dependents[one.page] - one.is_state for one in self._objects])

    @property
    def replay(self) -> Column:
        return np.array([self._store._replay(one) for one in self._objects])

    @property
    def nbytes(self) -> Column:
        return np.array([one.meta.length for one in self._objects])
