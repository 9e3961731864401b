"""The null store, which keeps keys and lengths, evicts as every store does, and discards payloads."""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Self

from tiercache.core import ObjectKey, ObjectMeta, Outcome
from tiercache.errors import ConfigError
from tiercache.policy import Policy
from tiercache.storage import StoreContext
from tiercache.storage.base import (
    Capabilities,
    GetItem,
    NamespaceRecord,
    ScanEntry,
    ScanPage,
    SetItem,
    StorageBackend,
    Usage,
)
from tiercache.storage.eviction import EvictionOrder
from tiercache.storage.residents import Residents, parents_first
from tiercache.storage.restorable import Admissibility


class NullStore(StorageBackend):
    """Store that counts up to `capacity` payload bytes and keeps none of them.

    Objects are evicted in the order of `tiercache.storage.eviction`, and values age by the seconds of `clock`
    (default: they do not age). A get of a stored key is always a hit, because there are no bytes to verify.

    Thread safety: one thread, unlike other stores.
    """

    capabilities = Capabilities(bounded=True)

    def __init__(
        self, capacity: int, policy: Policy, page_tokens: int, clock: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._capacity = capacity
        self._residents = Residents(clock=clock)
        self._order = EvictionOrder(self._residents, policy, page_tokens)
        self._metas: dict[int, tuple[ObjectKey, ObjectMeta]] = {}
        self._namespace_ids: dict[bytes, int] = {}
        self._namespaces: dict[bytes, NamespaceRecord] = {}
        self.peak = self.evicted = self.read_bytes = self.written_bytes = 0

    @classmethod
    def from_config(cls, section: Mapping[str, Any], context: StoreContext) -> Self:
        raise ConfigError("a null store can only be made by a replay")

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

    def peek(self, items: Sequence[GetItem]) -> list[Outcome]:
        return [Outcome.HIT if row >= 0 else Outcome.MISS for row in self._rows([item.key for item in items])]

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        links = [(item.key.page_key, item.meta.parent) for item in items]
        # An object is useless without its ancestors. Therefore the pages of the batch and their parents are
        # held: nothing in this call evicts them. The order of the holds also decides which of two pages of
        # equal rank is evicted first, so it must be the same in every process. It is the order of the batch,
        # and not that of a set.
        held = {
            page: self._residents.pages.hold(page)
            for page in dict.fromkeys(chain.from_iterable(links))
            if page is not None
        }
        outcomes = [Outcome.ERROR] * len(items)
        missing: set[bytes] = set()  # pages of this batch that were not stored; their states are refused
        for i in parents_first(links):
            page, parent = links[i]
            outcomes[i] = self._set(items[i], held, refused=page in missing)
            if page != parent and outcomes[i] in (Outcome.THROTTLED, Outcome.ERROR):
                missing.add(page)
        for node in held.values():
            self._residents.pages.release(node)
        return outcomes

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        found = [self._residents.find(key.digest) for key in keys]
        for row in set(found) - {-1}:
            self._drop(row)
        return [row >= 0 for row in found]

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        return ScanPage(
            [
                self._entry(row)
                for row, (_, meta) in self._metas.items()
                if namespace in (None, meta.namespace)
            ],
            b"",
        )

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        return [None if row < 0 else self._entry(row) for row in self._rows(keys)]

    def register_namespace(self, record: NamespaceRecord) -> None:
        self._namespaces[record.namespace] = kept = record.over(self._namespaces.get(record.namespace))
        if kept.states:
            self._residents.pages.require_states(self._namespace_id(record.namespace))

    def namespaces(self) -> list[NamespaceRecord]:
        return list(self._namespaces.values())

    def usage(self) -> Usage:
        used = self._residents.payload
        return Usage(
            len(self._residents), used, used, self._capacity, self._residents.pages.worth()._asdict()
        )

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int = 0) -> None:
        self._residents.advise([key.digest for key in keys], values, worker)

    def coldest(self, nbytes: int) -> Sequence[ScanEntry]:
        found = self._order.survey().coldest(nbytes)
        return [self._entry(row) for row in self._residents.still_there(*found).tolist()]

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _set(self, item: SetItem, held: Mapping[bytes, int], *, refused: bool) -> Outcome:
        key, meta, residents = item.key, item.meta, self._residents
        row = residents.find(key.digest)
        if row >= 0:
            residents.renew(row)
            residents.hint(row, meta.value, meta.worker)
            return Outcome.HIT
        node, parent, depth, namespace_id = (
            held[key.page_key],
            held.get(meta.parent or b""),
            meta.depth or 0,
            self._namespace_id(meta.namespace),
        )
        admissibility = residents.pages.admissibility(node, parent, depth, namespace_id, refused=refused)
        if admissibility is not Admissibility.FINE:
            return Outcome.ERROR if admissibility is Admissibility.IMPOSSIBLE else Outcome.THROTTLED
        if meta.length > self._capacity:
            return Outcome.THROTTLED
        evicting = _Evicting(self, meta.length)
        # The parent of a state is its own page, so `parent == node` tells a state from a page.
        write_parents = () if parent is None else (parent,)
        self._order.evict(
            evicting,
            write_parents,
            promising=residents.pages.is_promising(node, namespace_id, attached=parent == node),
            rank=None if meta.value is None else residents.rank(meta.value),
        )
        if not evicting.enough():
            return Outcome.THROTTLED
        row = residents.add(key.digest, node, parent, residents.newest + 1, meta.length, namespace_id, depth)
        residents.hint(row, meta.value, meta.worker)
        self._metas[row] = key, meta
        self.peak = max(self.peak, residents.payload)
        self.written_bytes += meta.length
        return Outcome.STORED

    def _entry(self, row: int) -> ScanEntry:
        key, meta = self._metas[row]
        return ScanEntry(key, self._residents.valued(row, meta))

    def _rows(self, keys: Sequence[ObjectKey]) -> Sequence[int]:
        return self._residents.find_many([key.digest for key in keys])

    def _drop(self, row: int) -> None:
        self._residents.leave(row)
        self._residents.drop(row)
        del self._metas[row]

    def _namespace_id(self, namespace: bytes) -> int:
        return self._namespace_ids.setdefault(namespace, len(self._namespace_ids))


class _Evicting:
    """Eviction of objects until `nbytes` more bytes fit: the `Taker` for `EvictionOrder.evict`.

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
        """Return whether `nbytes` more bytes fit now."""
        return self._store._residents.payload + self._nbytes <= self._store._capacity

    def full(self) -> bool:
        """Return False, because the number of objects evicted at a time has no limit here."""
        return False
