"""The `memory` store: objects as bytes in a dict.

This store is the reference for the behaviour of the other stores. It is used in tests and demos.
"""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain
from threading import Lock
from typing import Any, Final, Self

from tiercache.core import ObjectKey, ObjectMeta, Outcome
from tiercache.events.base import ChangeNote
from tiercache.settings import read_values, size
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
    meta_of,
    storable,
)
from tiercache.storage.checksum import checksum
from tiercache.storage.env import Env
from tiercache.storage.eviction import EvictionOrder
from tiercache.storage.gate import CallGate
from tiercache.storage.residents import Residents, parents_first
from tiercache.storage.restorable import Admissibility
from tiercache.storage.shares import INDEX_BYTES, Footprint, Shares, Writer
from tiercache.storage.vectors import copy_out, take, usable

_SCAN_PAGE: Final = 1024
"""Maximum number of entries per page of a scan."""
FOOTPRINT: Final = Footprint(fixed=INDEX_BYTES + 768, unit=16)
"""Bytes that an object takes: its Python objects have at most 760 bytes (`INDEX_BYTES`)."""


@dataclass(slots=True, eq=False)
class StoredObject:
    """An object and its bytes."""

    key: ObjectKey
    meta: ObjectMeta
    payload: bytes
    stored_at: float
    row: int = -1
    """Row of the object in `MemoryBackend._residents`; -1 until the object is added."""


class MemoryBackend(StorageBackend):
    """A dict of objects that take at most `capacity` bytes in all (`FOOTPRINT`); 0 means no limit.

    Everything is lost when the store closes.

    Thread safety: as `StorageBackend`. One mutex guards the dict and the counts. It is not held while bytes
    are copied or checked.
    """

    capabilities = Capabilities(shares=True)

    footprint: Footprint = FOOTPRINT
    is_sound: Callable[[SetItem], bool] = staticmethod(storable)
    """Whether an item can be stored, whatever else is stored."""

    def __init__(self, capacity: int = 0, env: Env | None = None) -> None:
        self.capabilities = Capabilities(bounded=capacity > 0, shares=True)
        self._capacity = capacity
        self._env = env or Env()
        self._gate = CallGate("the memory store")
        self._mutex = Lock()
        self._objects: dict[bytes, StoredObject] = {}
        self._residents = Residents(clock=self._env.monotonic, footprint=self.footprint)
        self._order = EvictionOrder(self._residents)
        self._namespace_ids: dict[bytes, int] = {}
        self._names: list[bytes] = []
        """Namespaces by number."""
        self._used = 0
        self._corrupt = 0
        self._evicted = 0
        self._not_worth = 0
        self._namespaces: dict[bytes, NamespaceRecord] = {}

    @classmethod
    def capabilities_of(cls, section: Mapping[str, Any]) -> Capabilities:
        return Capabilities(bounded=_capacity(section) > 0, shares=True)

    @classmethod
    def from_config(cls, section: Mapping[str, Any], context: StoreContext) -> Self:
        return cls(_capacity(section), context.env)

    @classmethod
    def check_config(cls, section: Mapping[str, Any], context: StoreContext) -> None:
        _capacity(section)

    @classmethod
    def check_shares(cls, section: Mapping[str, Any], shares: Shares) -> None:
        shares.check(_capacity(section), "the memory store")

    def share(self, shares: Shares) -> None:
        with self._gate:
            shares.check(self._capacity, "the memory store")
            with self._mutex:
                self._residents.share(shares, self._name_of)
                self._order.restart()
                self._trim()

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate, self._mutex:
            return [key.digest in self._objects for key in keys]

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        with self._gate:
            return [self._get(item) for item in items]

    def peek(self, items: Sequence[GetItem]) -> list[Outcome]:
        with self._gate:
            return [self._get(item, is_use=False) for item in items]

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        with self._gate:
            sound = [i for i, item in enumerate(items) if self.is_sound(item)]
            batch = [(items[i].key.page_key, items[i].meta.parent) for i in sound]
            outcomes = [Outcome.ERROR] * len(items)
            with self._mutex:
                # Hold the pages of the batch and their parents, so that the batch does not evict them. The
                # later pages of a sequence are useless without the earlier pages.
                held = [
                    self._residents.pages.hold(page)
                    for page in dict.fromkeys(chain.from_iterable(batch))
                    if page is not None
                ]
            # Keys of pages of this batch that were not stored. Objects that depend on them are useless.
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
                        self._residents.pages.release(node)
                    if self._residents.owners.active:
                        self._trim()
            return outcomes

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate, self._mutex:
            found = [self._objects.get(key.digest) for key in keys]
            return [self._drop(item) for item in found]

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        with self._gate, self._mutex:
            chosen = (o for o in self._objects.values() if namespace in (None, o.meta.namespace))
            behind = (o for o in chosen if o.key.digest > cursor)
            page: Iterable[StoredObject] = nsmallest(_SCAN_PAGE, behind, key=lambda o: o.key.digest)
            entries = [self._entry(o) for o in page]
        return ScanPage(entries, entries[-1].key.digest if len(entries) == _SCAN_PAGE else b"")

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        with self._gate, self._mutex:
            found = [self._objects.get(key.digest) for key in keys]
            return [None if o is None else self._entry(o) for o in found]

    def register_namespace(self, record: NamespaceRecord) -> None:
        with self._gate, self._mutex:
            self._namespaces[record.namespace] = kept = record.over(self._namespaces.get(record.namespace))
            if kept.states:
                self._residents.pages.require_states(self._namespace_id(record.namespace))

    def namespaces(self) -> list[NamespaceRecord]:
        with self._gate, self._mutex:
            return list(self._namespaces.values())

    def usage(self) -> Usage:
        with self._gate, self._mutex:
            figures = {
                "corrupt": self._corrupt,
                "evicted": self._evicted,
                "not_worth": self._not_worth,
                **self._residents.pages.worth()._asdict(),
            }
            return Usage(
                len(self._objects), self._residents.payload, self._used, self._capacity, figures,
                owners=self._residents.owners.use(),
            )  # fmt: skip

    def coldest(self, nbytes: int) -> Sequence[ScanEntry]:
        with self._gate:
            with self._mutex:
                survey = self._order.survey()
            found = survey.coldest(nbytes)
            with self._mutex:
                residents = self._residents
                there = [residents.digest(row) for row in residents.still_there(*found).tolist()]
                return [self._entry(self._objects[digest]) for digest in there]

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int = 0) -> None:
        with self._gate, self._mutex:
            self._residents.advise([key.digest for key in keys], values, worker)

    def watch(self, note: ChangeNote | None) -> bool:
        with self._gate, self._mutex:
            self._residents.note = note
        return True

    def flush(self) -> None:
        with self._gate:
            pass

    def close(self) -> None:
        if self._gate.close():
            self._objects = {}
            self._residents = Residents()

    def _entry(self, found: StoredObject) -> ScanEntry:
        return ScanEntry(found.key, self._residents.valued(found.row, found.meta), found.stored_at)

    def _get(self, item: GetItem, *, is_use: bool = True) -> Outcome:
        with self._mutex:
            found = self._objects.get(item.key.digest)
            if found is None:
                return Outcome.MISS
            if found.meta.length != item.length or not usable(item.buffers, item.length, writable=True):
                return Outcome.ERROR
            if is_use:
                self._residents.touch(found.row)
                self._residents.hits[found.row] += 1
            # The payload never changes, so check and copy it without the mutex.
            payload = memoryview(found.payload)
        if len(payload) != item.length or checksum(item.key, [payload], item.length) != found.meta.checksum:
            with self._mutex:
                self._corrupt += self._drop(found)
            return Outcome.CORRUPT
        copy_out(payload, item.buffers)
        return Outcome.HIT

    def _set(self, item: SetItem, *, refused: bool) -> Outcome:
        with self._mutex:
            outcome = self._refuse(item, refused=refused)
        if outcome is not None:
            return outcome
        meta = meta_of(item)
        fresh = StoredObject(
            item.key, meta, b"".join(take(item.buffers, 0, meta.length)), self._env.time_ns() / 1e9
        )
        with self._mutex:
            # Check again: another call may have stored the object while this call copied the bytes.
            return self._refuse(item, refused=refused) or self._add(fresh)

    def _refuse(self, item: SetItem, *, refused: bool) -> Outcome | None:
        """Return the outcome of a set that must not store its object; None if the object may be stored.

        `refused`: the item's page was part of the same batch and could not be stored.
        """
        found = self._objects.get(item.key.digest)
        if found is not None:
            self._residents.renew(found.row)
            self._residents.hint(found.row, item.meta.value, item.meta.worker)
            return Outcome.HIT
        parent = item.meta.parent
        node, above = self._nodes_of(item.key, parent)
        admissibility = self._residents.pages.admissibility(
            node, above, item.meta.depth or 0, self._namespace_id(item.meta.namespace), refused=refused
        )
        if admissibility is Admissibility.ABSENT_PARENT:
            self._note_refused(item.key, parent)
        return {
            Admissibility.FINE: None,
            Admissibility.ABSENT_PARENT: Outcome.THROTTLED,
            Admissibility.IMPOSSIBLE: Outcome.ERROR,
        }[admissibility]

    def _add(self, fresh: StoredObject) -> Outcome:
        """Evict until the object fits, and add it; return THROTTLED if too little can be evicted.

        The caller holds the object's page and parent.
        """
        residents, meta = self._residents, fresh.meta
        taken = self.footprint.of(meta.length)
        if self._capacity and taken > self._capacity:
            self._note_refused(fresh.key, meta.parent)
            return Outcome.THROTTLED
        owners = residents.owners
        node, parent = self._nodes_of(fresh.key, meta.parent)
        namespace_id = self._namespace_id(meta.namespace)
        # Promising: a restore can use the object as soon as it is stored.
        promising = residents.pages.is_promising(node, namespace_id, attached=parent == node)
        parents = () if parent is None else (parent,)
        rank = None if meta.value is None else residents.rank(meta.value)
        writer = Writer(owners.of(namespace_id), taken) if owners.active else None
        within = writer is None or self._fit_quota(writer, parents, rank, promising=promising)
        if within:
            self._order.evict(_Evicting(self, taken), parents, promising=promising, rank=rank, writer=writer)
            self._not_worth += self._order.not_worth
        elif writer is not None:
            owners.throttled[writer.owner] += 1
        fits = within and (not self._capacity or self._used + taken <= self._capacity)
        if fits:
            number = residents.newest + 1
            fresh.row = residents.add(
                fresh.key.digest, node, parent, number, meta.length, namespace_id, meta.depth or 0
            )
            residents.hint(fresh.row, meta.value, meta.worker)
            self._objects[fresh.key.digest] = fresh
            self._used += taken
        else:
            self._note_refused(fresh.key, meta.parent)
        return Outcome.STORED if fits else Outcome.THROTTLED

    def _nodes_of(self, k: ObjectKey, parent: bytes | None) -> tuple[int, int | None]:
        """Return the nodes of an object's page and of its parent, which the call holds."""
        pages = self._residents.pages
        return pages.find(k.page_key), None if parent is None else pages.find(parent)

    def _note_refused(self, k: ObjectKey, parent: bytes | None) -> None:
        """Note that this page was not stored; a state is no page."""
        if parent != k.page_key:
            self._residents.pages.refuse([k.page_key])

    def _fit_quota(
        self, writer: Writer, parents: Sequence[int], rank: float | None, *, promising: bool
    ) -> bool:
        """Evict the owner's objects until the new one is within the quota; return whether it is."""
        owners = self._residents.owners
        if owners.room(writer.owner) < writer.nbytes <= owners.quotas[writer.owner]:
            self._order.evict(
                _Evicting(self, writer.nbytes, writer.owner), parents, promising=promising, rank=rank,
                writer=writer._replace(for_quota=True),
            )  # fmt: skip
        return owners.room(writer.owner) >= writer.nbytes

    def _trim(self) -> None:
        """Evict what owners have beyond their quotas."""
        owners = self._residents.owners
        for owner in owners.beyond():
            self._order.evict(_Evicting(self, 0, owner), writer=Writer(owner, for_quota=True))

    def _namespace_id(self, namespace: bytes) -> int:
        if namespace not in self._namespace_ids:
            self._namespace_ids[namespace] = len(self._names)
            self._names.append(namespace)
        return self._namespace_ids[namespace]

    def _name_of(self, namespace_id: int) -> bytes:
        return self._names[namespace_id] if namespace_id < len(self._names) else b""

    def _drop(self, item: StoredObject | None) -> bool:
        if item is None or self._objects.get(item.key.digest) is not item:
            return False
        del self._objects[item.key.digest]
        self._residents.leave(item.row)
        self._residents.drop(item.row)
        self._used -= self.footprint.of(item.meta.length)
        return True


def _capacity(section: Mapping[str, Any]) -> int:
    """Return the capacity in a section of the configuration; raises ConfigError."""
    return int(read_values("storage type 'memory'", section, {"capacity": size()}).get("capacity", 0))


class _Evicting:
    """One eviction that makes room for `nbytes` bytes: in the quota of `owner` or, if None, in the store.

    See `eviction.Taker`.

    Thread safety: used only under the mutex of the store.
    """

    def __init__(self, store: MemoryBackend, nbytes: int, owner: int | None = None) -> None:
        self._store = store
        self._nbytes = nbytes
        self._owner = owner

    def take(self, rows: list[int]) -> None:
        """Drop the objects in these rows, and count them as evicted."""
        for row in rows:
            self._store._drop(self._store._objects[self._store._residents.digest(row)])
        self._store._evicted += len(rows)
        if self._owner is not None:
            self._store._residents.owners.evicted[self._owner] += len(rows)

    def enough(self) -> bool:
        """Return whether `nbytes` more bytes fit."""
        if self._owner is not None:
            return self._store._residents.owners.room(self._owner) >= self._nbytes
        return not self._store._capacity or self._store._used + self._nbytes <= self._store._capacity

    def full(self) -> bool:
        """Return False: one eviction may drop any number of objects."""
        return False
