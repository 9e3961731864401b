"""Storage v2: the calls of controllers and plug-ins, in terms of pools and pages, over one backend that knows neither.

This is the only place that turns hit policies into answers; the fold itself is `core.restorable_prefixes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from tiercache.core import (
    HitPolicy,
    ObjectKey,
    ObjectMeta,
    Outcome,
    PoolName,
    PoolPresence,
    PoolTransfer,
    PoolTransferResult,
    Reason,
    StorageExtra,
    restorable_prefixes,
)
from tiercache.errors import InputError
from tiercache.geometry import Geometry
from tiercache.keys import Shard, layout_digest, object_keys
from tiercache.pools import HostPool
from tiercache.storage.base import GetItem, NamespaceRecord, SetItem, SharedMemory, StorageBackend
from tiercache.storage.transfers import Place, check_keys, check_places, check_transfers, depths_of, handles_of, parents_of
from tiercache.storage.vectors import take, total, zero_tail

ANCHOR: Final = PoolName.KV
"""The pool whose leading run of stored pages bounds every depth (see `core.restorable_prefixes`)."""

_REASONS: Final = {
    Outcome.HIT: Reason.NONE,
    Outcome.STORED: Reason.NONE,
    Outcome.MISS: Reason.ABSENT,
    Outcome.CORRUPT: Reason.CHECKSUM,
    Outcome.THROTTLED: Reason.BUSY,
    Outcome.ERROR: Reason.IO_ERROR,
}


def is_outage(reason: Reason) -> bool:
    """Return whether the reason of a failed get or set is an outage of the store, which says nothing about the object."""
    return reason not in _REASONS.values()


class HostObjects(Protocol):
    """Interface of a host pool as storage needs it; `pools.HostPool` provides it."""

    @property
    def geometry(self) -> Geometry:
        """The geometry of one object: the bytes that make it."""

    @property
    def memory(self) -> SharedMemory | None:
        """The memory in which all buffers lie, or None if no other process can map it. The store may use it until the store is closed."""

    def buffers(self, handle: int) -> list[memoryview]:
        """Return an object's blocks in order: writable byte views, each a multiple of 4 KiB. Raises SlotError for an unknown handle."""


@dataclass(frozen=True, slots=True)
class _Registered:
    pool: HostObjects
    layout: bytes

    @property
    def name(self) -> PoolName:
        return self.pool.geometry.pool

    @property
    def length(self) -> int:
        """Payload bytes of one object."""
        return self.pool.geometry.nbytes

    def keys(self, page_keys: Sequence[bytes]) -> list[ObjectKey]:
        return object_keys(self.name, self.layout, page_keys)

    def buffers(self, handle: int) -> list[memoryview]:
        """Return the object's blocks up to the last one that holds payload, cut at a multiple of 4 KiB."""
        return take(self.pool.buffers(handle), 0, self.pool.geometry.padded_nbytes)


@dataclass(frozen=True, slots=True)
class _Part:
    """A checked transfer of a get or a set, with what the store is told of each object."""

    transfer: PoolTransfer
    pool: _Registered
    handles: list[int]
    buffers: list[list[memoryview]]
    depths: list[int | None]
    parents: list[bytes | None]

    @property
    def hangs(self) -> bool:
        """Whether its objects hang on pages, as states do."""
        return self.transfer.hit_policy is not HitPolicy.ALL_PAGES

    def object_keys(self) -> list[ObjectKey]:
        return self.pool.keys(self.transfer.keys)

    def places(self) -> Iterator[tuple[Place, list[memoryview]]]:
        """Yield each object's place (pool and handle) and its buffers."""
        for handle, buffers in zip(self.handles, self.buffers, strict=True):
            yield (self.pool.name, handle), buffers

    def meta(self, j: int, key: ObjectKey, namespace: bytes) -> ObjectMeta:
        """Describe object `j`. The checksum is empty: the store computes it while it writes, so the bytes are read only once."""
        parent = key.page_key if self.hangs else self.parents[j]
        return ObjectMeta(namespace, self.pool.length, checksum=b"", parent=parent, depth=self.depths[j])


class HybridStorage:
    """Pages and states of all registered pools in one backend, under one namespace.

    `shard`: the shard of pools that are registered without one of their own. `namespace`: the record as the store knows it; its `states` is
    set when the first pool is registered of which a prefix needs only the last pages.

    Thread safety: register the pools first; then any thread may call. The caller keeps every handle of a call allocated until it returns,
    and unchanged during a set; a set zeroes the slack behind the payloads.
    """

    def __init__(self, backend: StorageBackend, *, namespace: NamespaceRecord, shard: Shard = Shard()) -> None:  # noqa: B008 (frozen)
        self.backend = backend
        self.namespace = namespace
        self.shard = shard
        self._pools: dict[PoolName, _Registered] = {}
        backend.register_namespace(namespace)

    def register_pool(self, pool: HostObjects, shard: Shard | None = None) -> None:
        """Make a cache kind known, and make its memory known to the store.

        `shard`: which part of each object this rank holds (default: that of the storage). Ranks that hold whole copies of a pool, such as
        the KV of latent attention, give that pool `Shard()` and share its objects, whatever parts of the states each has. Raises InputError
        if a pool of this name is registered with another geometry or shard.
        """
        name = pool.geometry.pool
        layout = layout_digest(name, pool.geometry.fingerprint, self.shard if shard is None else shard)
        if name in self._pools and self._pools[name].layout != layout:
            raise InputError(f"pool {name} is registered with another geometry or shard; make a HybridStorage of its own for this one")
        self._pools[name] = _Registered(pool, layout)
        if pool.geometry.hit_policy is not HitPolicy.ALL_PAGES and not self.namespace.states:
            self.namespace = replace(self.namespace, states=True)
            self.backend.register_namespace(self.namespace)
        if pool.memory is not None:
            self.backend.attach(pool.memory)

    def reason_of(self, outcome: Outcome) -> Reason:
        """Return why an object of a get or a set failed, NONE where it did not; call it right after the get or set.

        A store that is out of reach answers MISS or ERROR without knowing; the reason is then that of the outage. Where a call of another
        thread ends or meets the outage in between, the reason may be the wrong one of the two.
        """
        away = self.backend.outage() if outcome in (Outcome.MISS, Outcome.ERROR) else Reason.NONE
        return _REASONS[outcome] if away is Reason.NONE else away

    def holds(self, wanted: Mapping[PoolName, Sequence[bytes]]) -> tuple[dict[PoolName, list[bool]], Reason]:
        """Return which of these pages and states (by page key) the store has, and the reason if it could not be asked; make one call."""
        keys = [key for name, page_keys in wanted.items() for key in self._registered(name).keys(page_keys)]
        there = self.backend.exists(keys)
        answers = iter(there)
        reason = Reason.NONE if any(there) else self.backend.outage()
        return {name: [next(answers) for _ in page_keys] for name, page_keys in wanted.items()}, reason

    def probe(self, pool: PoolName, page_key: bytes, *, read: bool) -> bool:
        """Test the store with one object: look it up, or with `read` read it into memory of its own. Return whether the store works.

        A lookup passes with any answer, a read with any answer but ERROR; a call that raises fails.
        """
        registered = self._registered(pool)
        [key] = registered.keys([page_key])
        item = GetItem(key, [memoryview(bytearray(registered.pool.geometry.padded_nbytes))], registered.length)
        try:
            return self.backend.get([item])[0] is not Outcome.ERROR if read else len(self.backend.exists([key])) == 1
        except Exception:  # noqa: BLE001  a store that breaks its contract does not work; the caller logs that
            return False

    def batch_exists_v2(
        self, keys: Sequence[bytes], transfers: Sequence[PoolTransfer], extra: StorageExtra | None = None
    ) -> PoolTransferResult:
        """Return which depths could be restored.

        `keys` follow `extra.prefix_keys`; a transfer gives a pool's hit policy, and no keys of its own. The anchor pool is always asked for
        `keys`, and counts as present in the prefix. All other pools are looked up inside the prefix too, because every depth in 1 .. K is
        answered for. This makes one call of the backend; where that met an outage, `reason` says so. Raises InputError.
        """
        check_transfers(transfers, extra)
        check_keys(keys)
        prefix = (extra or StorageExtra()).prefix_keys
        sequence = [*prefix, *keys]
        asked = {self._registered(t.pool).name: t for t in transfers}
        if len(asked) < len(transfers) or any(t.keys for t in transfers):
            raise InputError("batch_exists_v2 takes each pool once, without keys: the call's own keys are meant")
        asked.setdefault(ANCHOR, PoolTransfer(ANCHOR))
        wanted: list[ObjectKey] = []
        for name in asked:
            registered = self._registered(name)
            wanted += registered.keys(keys if name is ANCHOR else sequence)
        there = self.backend.exists(wanted)
        reason = self.backend.outage() if wanted and not any(there) else Reason.NONE
        answers = iter(there)
        presence: dict[PoolName, PoolPresence] = {}
        for name, transfer in asked.items():
            known = len(prefix) if name is ANCHOR else 0
            found = [True] * known + [next(answers) for _ in range(len(sequence) - known)]
            presence[name] = PoolPresence(transfer.hit_policy, np.array(found, np.bool_), transfer.trailing)
        present = {name: pool.present for name, pool in presence.items()}
        return replace(restorable_prefixes(presence, ANCHOR), reason=reason, present=present)

    def batch_get_v2(self, transfers: Sequence[PoolTransfer], extra: StorageExtra | None = None) -> dict[PoolName, list[Outcome]]:
        """Read objects into host handles, all pools in one call of the backend; return outcomes in the order of each pool's keys.

        The outcomes of a pool that comes twice follow one another. Raises InputError or SlotError before anything is touched.
        """
        parts = self._checked(transfers, extra)
        _check_apart(parts)
        items = [
            GetItem(key, buffers, part.pool.length) for part in parts for key, buffers in zip(part.object_keys(), part.buffers, strict=True)
        ]
        outcomes = iter(self.backend.get(items) if items else ())
        result: dict[PoolName, list[Outcome]] = {}
        for part in parts:
            result.setdefault(part.pool.name, []).extend(next(outcomes) for _ in part.buffers)
        return result

    def batch_set_v2(self, transfers: Sequence[PoolTransfer], extra: StorageExtra | None = None) -> dict[PoolName, list[Outcome]]:
        """Write host objects, first pages, then what hangs on pages, so that no state is stored ahead of its KV.

        An object of a trailing pool is THROTTLED, and not written, if a page that it needs failed in this call. Returns outcomes as
        `batch_get_v2` does. Raises InputError or SlotError before anything is touched.
        """
        parts = self._checked(transfers, extra)
        if not _host_pools(parts):
            # One place may be written under several keys, but the slack that is zeroed must not be the payload of another object.
            check_places({place: buffers for part in parts for place, buffers in part.places()}.items())
        pages = [part for part in parts if not part.hangs]
        hanging = [part for part in parts if part.hangs]
        stored = self._set(pages, [[False] * len(part.buffers) for part in pages])
        failed = [(page.transfer, outcomes) for page, outcomes in zip(pages, stored, strict=True)]
        added = self._set(hanging, [_blocked(part.transfer, failed) for part in hanging])
        first, then = iter(stored), iter(added)
        result: dict[PoolName, list[Outcome]] = {}
        for part in parts:
            result.setdefault(part.pool.name, []).extend(next(then if part.hangs else first))
        return result

    def _set(self, parts: Sequence[_Part], blocked: Sequence[Sequence[bool]]) -> list[list[Outcome]]:
        """Write the objects of `parts` in one call of the backend, without those that are `blocked`, whose outcome is THROTTLED."""
        outcomes = [[Outcome.THROTTLED] * len(part.buffers) for part in parts]
        items: list[SetItem] = []
        places: list[tuple[list[Outcome], int]] = []
        for part, held, answers in zip(parts, blocked, outcomes, strict=True):
            for j, key in enumerate(part.object_keys()):
                if not held[j]:
                    zero_tail(part.buffers[j], part.pool.length)
                    items.append(SetItem(key, part.buffers[j], part.meta(j, key, self.namespace.namespace)))
                    places.append((answers, j))
        for (answers, j), outcome in zip(places, self.backend.set(items) if items else (), strict=True):
            answers[j] = outcome
        return outcomes

    def _registered(self, name: PoolName) -> _Registered:
        try:
            return self._pools[name]
        except (KeyError, TypeError):
            known = ", ".join(self._pools) or "none"
            raise InputError(f"pool {name} is not registered (registered: {known}); call register_pool first") from None

    def _checked(self, transfers: Sequence[PoolTransfer], extra: StorageExtra | None) -> list[_Part]:
        """Return every transfer with the buffers of its objects; raise InputError or SlotError if anything in the call is wrong."""
        check_transfers(transfers, extra)
        return [self._part(transfer) for transfer in transfers]

    def _part(self, transfer: PoolTransfer) -> _Part:
        pool = self._registered(transfer.pool)
        check_keys(transfer.keys)
        handles, depths, parents = handles_of(transfer), depths_of(transfer), parents_of(transfer)
        buffers = [pool.buffers(handle) for handle in handles]
        for handle, room in zip(handles, map(total, buffers), strict=True):
            if room < pool.length:
                raise InputError(f"pool {transfer.pool}: handle {handle} has {room} bytes, fewer than one object needs")
        return _Part(transfer, pool, handles, buffers, depths, parents)


def _host_pools(parts: Sequence[_Part]) -> bool:
    """Return whether every pool is a plain `HostPool`, whose objects share a block only if they have the same handle."""
    return all(type(part.pool.pool) is HostPool for part in parts)


def _check_apart(parts: Sequence[_Part]) -> None:
    """Raise InputError if any two objects share memory.

    Getting the address of a block takes 0.5 us, so host pools are checked by their handles instead.
    """
    if not _host_pools(parts):
        check_places(place for part in parts for place in part.places())
        return
    seen: set[tuple[int, int]] = set()
    for part in parts:
        arena = id(part.pool.pool.memory)
        for handle in part.handles:
            if (arena, handle) in seen:
                raise InputError(f"pool {part.pool.name}: handle {handle} is given twice; what is read needs a place for each key")
            seen.add((arena, handle))


def _blocked(transfer: PoolTransfer, pages: Sequence[tuple[PoolTransfer, Sequence[Outcome]]]) -> list[bool]:
    """Return for each object of a trailing pool whether it needs a page that failed in this call.

    Where a pool's parents are given, a page needs its ancestors among this call's keys; otherwise it needs all keys before it, which is
    right for one sequence and only too careful for several.
    """
    blocked = [False] * len(transfer.keys)
    for page_transfer, outcomes in pages:
        failed: dict[bytes, bool] = {}
        before = False
        for j, (key, outcome) in enumerate(zip(page_transfer.keys, outcomes, strict=True)):
            if page_transfer.parents:
                before = failed.get(page_transfer.parents[j], False)
            before = before or outcome not in (Outcome.HIT, Outcome.STORED)
            failed[key] = before
        for j, key in enumerate(transfer.keys):
            blocked[j] = blocked[j] or failed.get(key, any(failed.values()))
    return blocked
