"""Storage v2: the calls of controllers and plug-ins, in terms of pools and pages, over one backend that knows neither.

This is the only place that turns hit policies into answers; the fold itself is `core.restorable_prefixes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from tiercache.keys import KEY_BYTES, Shard, layout_digest, object_keys
from tiercache.storage.base import GetItem, NamespaceRecord, SetItem, SharedMemory, StorageBackend
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
    """Does the reason of a failed get or set come from the store's outage? Then it says nothing of the object."""
    return reason not in _REASONS.values()


class HostObjects(Protocol):
    """What storage needs of a host pool (`pools.HostPool` is one)."""

    @property
    def geometry(self) -> Geometry:
        """The bytes of one object."""

    @property
    def memory(self) -> SharedMemory | None:
        """The memory in which all buffers lie, if it is one that another process can map; the store may use it until it is closed."""

    def buffers(self, handle: int) -> list[memoryview]:
        """The blocks of an object in order: writable byte views, each a multiple of 4 KiB; raises SlotError for an unknown handle."""


@dataclass(frozen=True, slots=True)
class _Registered:
    pool: HostObjects
    layout: bytes

    @property
    def name(self) -> PoolName:
        return self.pool.geometry.pool

    def keys(self, page_keys: Sequence[bytes]) -> list[ObjectKey]:
        return object_keys(self.name, self.layout, page_keys)

    def buffers(self, handle: int) -> list[memoryview]:
        """The object's blocks up to the last one that holds payload, cut at a multiple of 4 KiB."""
        return take(self.pool.buffers(handle), 0, self.pool.geometry.padded_nbytes)


class HybridStorage:
    """Pages and states of all registered pools in one backend, under one namespace and one shard.

    Thread rule: register the pools first; then any thread may call. The caller keeps every handle of a call allocated until it returns, and
    unchanged during a set; a set zeroes the slack behind the payloads.
    """

    def __init__(self, backend: StorageBackend, *, namespace: NamespaceRecord, shard: Shard = Shard()) -> None:  # noqa: B008 (frozen)
        self.backend = backend
        self.namespace = namespace
        self.shard = shard
        self._pools: dict[PoolName, _Registered] = {}
        backend.register_namespace(namespace)

    def register_pool(self, pool: HostObjects) -> None:
        """Make a cache kind known, and its memory to the store. Raises InputError if its name is taken by a pool of another geometry."""
        name = pool.geometry.pool
        layout = layout_digest(name, pool.geometry.fingerprint, self.shard)
        if name in self._pools and self._pools[name].layout != layout:
            raise InputError(f"pool {name} is registered with another geometry; make a HybridStorage of its own for this one")
        self._pools[name] = _Registered(pool, layout)
        if pool.memory is not None:
            self.backend.attach(pool.memory)

    def reason_of(self, outcome: Outcome) -> Reason:
        """Why an object of a get or a set did not make it, asked right after the call; NONE where it did.

        A store that is out of reach answers MISS or ERROR without knowing: the reason is the outage's then. Where another thread's call
        ends or meets the outage in between, the reason may be the wrong one of the two.
        """
        away = self.backend.outage() if outcome in (Outcome.MISS, Outcome.ERROR) else Reason.NONE
        return _REASONS[outcome] if away is Reason.NONE else away

    def batch_exists_v2(
        self, keys: Sequence[bytes], transfers: Sequence[PoolTransfer], extra: StorageExtra | None = None
    ) -> PoolTransferResult:
        """Which depths could be restored. `keys` follow `extra.prefix_keys`; a transfer gives a pool's hit policy, and no keys of its own.

        The anchor pool is always asked for `keys`, and counts as present in the prefix. All other pools are looked up inside the prefix
        too, because every depth in 1 .. K is answered for. One call of the backend; where that met an outage, `reason` says so. Raises
        InputError.
        """
        prefix = (extra or StorageExtra()).prefix_keys
        sequence = [*prefix, *keys]
        _check_keys(sequence)
        asked = {t.pool: t for t in transfers}
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
        return replace(restorable_prefixes(presence, ANCHOR), reason=reason)

    def batch_get_v2(self, transfers: Sequence[PoolTransfer], extra: StorageExtra | None = None) -> dict[PoolName, list[Outcome]]:
        """Read objects into host handles, all pools in one call of the backend; outcomes in the order of each pool's keys.

        A pool that comes twice has its outcomes one after the other. Raises InputError or SlotError before anything is touched.
        """
        items: list[GetItem] = []
        for transfer, buffers in zip(transfers, self._checked(transfers, extra), strict=True):
            registered = self._registered(transfer.pool)
            length = registered.pool.geometry.nbytes
            items += [GetItem(k, b, length) for k, b in zip(registered.keys(transfer.keys), buffers, strict=True)]
        outcomes = iter(self.backend.get(items) if items else ())
        result: dict[PoolName, list[Outcome]] = {}
        for transfer in transfers:
            result.setdefault(transfer.pool, []).extend(next(outcomes) for _ in transfer.keys)
        return result

    def batch_set_v2(self, transfers: Sequence[PoolTransfer], extra: StorageExtra | None = None) -> dict[PoolName, list[Outcome]]:
        """Write host objects, pages first; then what hangs on pages, so that no state is stored ahead of its KV.

        An object of a trailing pool is THROTTLED, and not written, if a page that it needs failed in this call. Outcomes as in
        `batch_get_v2`. Raises InputError or SlotError before anything is touched.
        """
        buffers = self._checked(transfers, extra)
        pages = [i for i, t in enumerate(transfers) if t.hit_policy is HitPolicy.ALL_PAGES]
        hanging = [i for i, t in enumerate(transfers) if t.hit_policy is not HitPolicy.ALL_PAGES]
        outcomes: dict[int, list[Outcome]] = {}
        outcomes |= self._set({i: (transfers[i], buffers[i], [False] * len(transfers[i].keys)) for i in pages})
        blocked = {i: _blocked(transfers[i], [(transfers[p], outcomes[p]) for p in pages]) for i in hanging}
        outcomes |= self._set({i: (transfers[i], buffers[i], blocked[i]) for i in hanging})
        result: dict[PoolName, list[Outcome]] = {}
        for i, transfer in enumerate(transfers):
            result.setdefault(transfer.pool, []).extend(outcomes[i])
        return result

    def _set(self, parts: Mapping[int, tuple[PoolTransfer, list[list[memoryview]], list[bool]]]) -> dict[int, list[Outcome]]:
        """One round of writes; `parts` holds a transfer, its buffers and which of its objects are to be held back."""
        keys = {i: self._registered(t.pool).keys(t.keys) for i, (t, _, _) in parts.items()}
        outcomes: dict[int, list[Outcome]] = {}
        items: list[SetItem] = []
        places: list[tuple[int, int]] = []
        for i, (transfer, buffers, blocked) in parts.items():
            outcomes[i] = [Outcome.THROTTLED] * len(transfer.keys)
            for j, key in enumerate(keys[i]):
                if not blocked[j]:
                    items.append(SetItem(key, buffers[j], self._meta(transfer, j, key, buffers[j])))
                    places.append((i, j))
        for (i, j), outcome in zip(places, self.backend.set(items) if items else (), strict=True):
            outcomes[i][j] = outcome
        return outcomes

    def _meta(self, transfer: PoolTransfer, j: int, key: ObjectKey, buffers: list[memoryview]) -> ObjectMeta:
        """Zero the object's slack and describe it. The store computes the checksum while it writes: the bytes pass once."""
        length = self._registered(transfer.pool).pool.geometry.nbytes
        zero_tail(buffers, length)
        hangs = transfer.hit_policy is not HitPolicy.ALL_PAGES
        parent = key.page_key if hangs else (transfer.parents[j] if transfer.parents else b"")
        return ObjectMeta(
            namespace=self.namespace.namespace,
            length=length,
            checksum=b"",
            parent=parent or None,
            depth=transfer.depths[j] if transfer.depths else None,
        )

    def _registered(self, name: PoolName) -> _Registered:
        try:
            return self._pools[name]
        except KeyError:
            known = ", ".join(self._pools) or "none"
            raise InputError(f"pool {name} is not registered (registered: {known}); call register_pool first") from None

    def _checked(self, transfers: Sequence[PoolTransfer], extra: StorageExtra | None) -> list[list[list[memoryview]]]:
        """The buffers of every object of every transfer; raises InputError or SlotError if anything in the call is wrong."""
        _check_keys((extra or StorageExtra()).prefix_keys)
        return [self._buffers(transfer) for transfer in transfers]

    def _buffers(self, transfer: PoolTransfer) -> list[list[memoryview]]:
        registered = self._registered(transfer.pool)
        _check_keys(transfer.keys)
        n = len(transfer.keys)
        if len(transfer.handles) != n:
            raise InputError(f"pool {transfer.pool}: {n} keys and {len(transfer.handles)} handles; give one handle per key")
        for name, column in (("depths", transfer.depths), ("parents", transfer.parents)):
            if len(column) not in (0, n):
                raise InputError(f"pool {transfer.pool}: {n} keys and {len(column)} {name}; give one per key, or none")
        buffers = [registered.buffers(handle) for handle in transfer.handles.tolist()]
        for handle, room in zip(transfer.handles.tolist(), map(total, buffers), strict=True):
            if room < registered.pool.geometry.nbytes:
                raise InputError(f"pool {transfer.pool}: handle {handle} has {room} bytes, fewer than one object needs")
        return buffers


def _check_keys(keys: Sequence[bytes]) -> None:
    for key in keys:
        if len(key) != KEY_BYTES:
            raise InputError(f"a page key of {len(key)} bytes is not possible; page keys have {KEY_BYTES} bytes (see tiercache.page_keys)")


def _blocked(transfer: PoolTransfer, pages: Sequence[tuple[PoolTransfer, Sequence[Outcome]]]) -> list[bool]:
    """Which objects of a trailing pool need a page that failed in this call.

    Where a pool's parents are given, a page needs its ancestors among this call's keys; else it needs all keys before it, which is
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
