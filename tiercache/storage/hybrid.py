"""Storage calls of controllers, in terms of pools and pages (version 2 of these calls).

The backend knows only single objects. This module makes object keys from page keys. The hit policies of pools
are applied to a backend's answers in `transfers.answer`, and nowhere else.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Final

from tiercache.core import (
    HitPolicy,
    ObjectKey,
    ObjectMeta,
    Outcome,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
    Reason,
)
from tiercache.errors import InputError, RefusedError, StorageError, UnavailableError
from tiercache.keys import Shard, layout_digest, object_keys
from tiercache.pools import HostPool
from tiercache.storage.base import SPEED_FIELD, GetItem, NamespaceRecord, SetItem, StorageBackend
from tiercache.storage.transfers import (
    ANCHOR,
    PoolQuery,
    answer,
    check_keys,
    check_transfers,
    depths_of,
    handles_of,
    parents_of,
    values_of,
    wanted_objects,
)
from tiercache.storage.vectors import take, zero_tail

_UNANSWERED: Final = frozenset({Reason.UNAVAILABLE, Reason.REFUSED, Reason.TIMEOUT})


def is_outage(reason: Reason) -> bool:
    """Return whether a miss with this reason means that the store did not answer.

    Such a miss does not tell whether the store has the object.
    """
    return reason in _UNANSWERED


@dataclass(frozen=True, slots=True)
class _Registered:
    pool: HostPool
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

    def buffers_of(self, handles: Sequence[int]) -> list[list[memoryview]]:
        """Return each object's blocks, up to the first multiple of 4 KiB behind its payload."""
        size = self.pool.geometry.padded_nbytes
        return [take(blocks, 0, size) for blocks in self.pool.buffers_of(handles)]


@dataclass(frozen=True, slots=True)
class _Part:
    """A checked transfer of a get or a set, with the buffers, depths and parents of its objects.

    States are attached to the pages on which they end. Where no pages are kept, a state is an object like a
    first page: it has no parent, and is of use alone.
    """

    transfer: PoolTransfer
    pool: _Registered
    handles: list[int]
    buffers: list[list[memoryview]]
    depths: list[int | None]
    parents: list[bytes | None]
    values: list[float | None]
    attached: bool
    """Whether the objects are attached to pages, as states are, instead of being pages."""

    def object_keys(self) -> list[ObjectKey]:
        return self.pool.keys(self.transfer.keys)

    def set_items(self, namespace: bytes, worker: int) -> list[SetItem]:
        """Return an item to write for each object; `worker` gives the values.

        Checksums are left empty: the store computes them while it writes, so the bytes are read only once.
        """
        length, parents = self.pool.length, self.transfer.keys if self.attached else self.parents
        return [
            SetItem(key, buffers, ObjectMeta(namespace, length, b"", parent, depth, value, worker))
            for key, buffers, parent, depth, value in zip(
                self.object_keys(), self.buffers, parents, self.depths, self.values, strict=True
            )
        ]


class HybridStorage:
    """Pages and states of all registered pools in one backend, under one namespace.

    `shard` is the shard of every pool that is registered without a shard of its own. `namespace` is the
    record that is registered with the store. Its `states` becomes True when both a page pool and a trailing
    pool are registered (a pool with `HitPolicy.TRAILING_PAGES`, such as a pool of states): only then is KV
    useless without a state. With trailing pools alone, their objects need no pages.

    A set zeroes the bytes between the end of each payload and the end of the payload's last 4 KiB block. A
    store may write whole blocks. Without the zeros, bytes of earlier objects in the same memory could then
    reach the medium.

    Thread safety: register the pools first; then any thread may call. During a call the handles in its
    transfers must stay allocated, and the payloads of a set must not change.

    Three pages go to a store, and are found there as the beginning of a longer prompt:

        >>> from tiercache import Identity, PoolTransfer, namespace_of, open_backend, page_keys
        >>> from tiercache.geometry import kv_geometry
        >>> from tiercache.pools import HostArena, HostPool
        >>> from tiercache.storage import NamespaceRecord
        >>> namespace = namespace_of(Identity("toy", "1", "float32", "float32", "float32", page_size=16))
        >>> pool = HostPool(
        ...     kv_geometry(layers=[0], kv_heads=1, head_dim=8, dtype="float32", page_size=16),
        ...     HostArena(1 << 20, block_bytes=4096),
        ... )
        >>> hybrid = HybridStorage(
        ...     open_backend("memory://"), namespace=NamespaceRecord(namespace, {"model": "toy"})
        ... )
        >>> hybrid.register_pool(pool)
        >>> keys = page_keys(namespace, range(64), page_size=16)
        >>> handles = pool.alloc(3)
        >>> hybrid.batch_set_v2([PoolTransfer(PoolName.KV, keys[:3], handles)])[PoolName.KV][2]
        <Outcome.STORED: 'stored'>
        >>> hybrid.batch_exists_v2(keys, [PoolTransfer(PoolName.KV)]).restorable_prefix_pages
        (1, 2, 3)
    """

    def __init__(
        self,
        backend: StorageBackend,
        *,
        namespace: NamespaceRecord,
        shard: Shard = Shard(),  # noqa: B008
    ) -> None:
        self.backend = backend
        self.namespace = namespace
        self.shard = shard
        self.worker = secrets.randbits(64)
        """Number that tells the values that this object gives from those of others."""
        self._pools: dict[PoolName, _Registered] = {}
        backend.register_namespace(namespace)

    def register_pool(self, pool: HostPool, shard: Shard | None = None) -> None:
        """Register the host pool of a cache kind, and attach its memory to the store.

        `shard`: which part of each object this rank holds (default: `self.shard`). If every rank holds a
        whole copy of a pool, such as the KV of latent attention, register that pool with `Shard()`. The ranks
        then share the objects of the pool, even if each rank has its own part of the states. Raises
        InputError if a pool of this name is already registered with another geometry or shard.
        """
        name = pool.geometry.pool
        layout = layout_digest(name, pool.geometry.fingerprint, self.shard if shard is None else shard)
        if name in self._pools and self._pools[name].layout != layout:
            raise InputError(
                f"pool {name} is registered with another geometry or shard; make a HybridStorage of its own"
                " for this one"
            )
        self._pools[name] = _Registered(pool, layout)
        kinds = {one.pool.geometry.hit_policy for one in self._pools.values()}
        if len(kinds) == len(HitPolicy) and not self.namespace.states:
            self.namespace = replace(self.namespace, states=True)
            self.backend.register_namespace(self.namespace)
        self.backend.attach(pool.arena)

    def register_speed(self, flops_per_second: int) -> bool:
        """Add the speed of this worker's prefill to its record; return whether the store took it."""
        record = replace(self.namespace, identity={**self.namespace.identity, SPEED_FIELD: flops_per_second})
        try:
            self.backend.register_namespace(record)
        except StorageError:
            return False
        self.namespace = record
        return True

    def holds(self, wanted: Mapping[PoolName, Sequence[bytes]]) -> tuple[dict[PoolName, list[bool]], Reason]:
        """Return which of these pages and states (by page key) the store has, with one call of the backend.

        The second value is a reason: UNAVAILABLE or REFUSED if the store could not be asked, otherwise NONE.
        """
        keys = [key for name, page_keys in wanted.items() for key in self._registered(name).keys(page_keys)]
        there, reason = self._exists(keys)
        answers = iter(there)
        return {name: [next(answers) for _ in page_keys] for name, page_keys in wanted.items()}, reason

    def advise(self, values: Mapping[PoolName, Mapping[bytes, float]]) -> None:
        """Tell the store the present values of pages and states, by pool and page key."""
        keys = [key for name, given in values.items() for key in self._registered(name).keys(list(given))]
        self.backend.advise(keys, [one for given in values.values() for one in given.values()], self.worker)

    def forget(self, wanted: Mapping[PoolName, Sequence[bytes]]) -> None:
        """Delete these pages and states, by page key, with one call of the backend; raises as it does."""
        self.backend.delete(
            [key for name, keys in wanted.items() for key in self._registered(name).keys(keys)]
        )

    def probe(self, pool: PoolName, page_key: bytes, *, read: bool) -> bool:
        """Test the store with one object, and return whether the store works.

        The test looks the object up or, with `read`, reads the object into a buffer made for the test.

        The store does not work if the call raises, or if a read answers ERROR. A lookup that raises
        UnavailableError or RefusedError counts as an answer.
        """
        registered = self._registered(pool)
        [key] = registered.keys([page_key])
        item = GetItem(
            key, [memoryview(bytearray(registered.pool.geometry.padded_nbytes))], registered.length
        )
        try:
            return (
                self.backend.get([item])[0] is not Outcome.ERROR if read else len(self._exists([key])[0]) == 1
            )
        except Exception:  # noqa: BLE001
            # A store that raises breaks its contract. The caller logs that the store does not work.
            return False

    def batch_exists_v2(
        self, keys: Sequence[bytes], transfers: Sequence[PoolTransfer], known: int = 0
    ) -> PoolTransferResult:
        """Return the depths at which everything that a restore needs is stored.

        `keys` are the page keys of a sequence. Each transfer names a pool and its hit policy, and has no
        keys. The anchor pool is looked up even if no transfer names it, but only after the first `known`
        pages, which count as stored. The other pools are looked up there as well, because a restore may end
        there. Where no page pool is registered, every page counts as stored.

        This makes one call of the backend; if the store could not be asked, `reason` says why. Raises
        InputError.
        """
        check_transfers(transfers)
        check_keys(keys)
        if not 0 <= known <= len(keys):
            raise InputError(f"{known} of {len(keys)} pages cannot be known; give how many the caller has")
        asked = {self._registered(t.pool).name: t for t in transfers}
        if len(asked) < len(transfers) or any(t.keys for t in transfers):
            raise InputError(
                "batch_exists_v2 takes each pool once, without keys: the call has keys of its own"
            )
        anchor = ANCHOR if self._has_pages or not asked else None
        if anchor is not None:
            asked.setdefault(ANCHOR, PoolTransfer(ANCHOR))
        queries: dict[PoolName, PoolQuery] = {}
        for name, transfer in asked.items():
            start = known if name is anchor else 0
            wanted = self._registered(name).keys(keys[start:])
            queries[name] = PoolQuery(wanted, transfer.hit_policy, transfer.trailing, start)
        there, reason = self._exists(wanted_objects(queries))
        return replace(answer(queries, len(keys), there, anchor), reason=reason)

    def batch_get_v2(self, transfers: Sequence[PoolTransfer]) -> dict[PoolName, list[Outcome]]:
        """Read objects into host handles, all pools in one call of the backend.

        Returns for each pool the outcomes in the order of its keys. If two transfers name the same pool, the
        outcomes of the second follow the outcomes of the first. Raises InputError or SlotError before any
        buffer changes.
        """
        parts = self._checked(transfers)
        _check_apart(parts)
        items: list[GetItem] = []
        for part in parts:
            items += map(GetItem, part.object_keys(), part.buffers, repeat(part.pool.length))
        outcomes = iter(self.backend.get(items) if items else ())
        result: dict[PoolName, list[Outcome]] = {}
        for part in parts:
            result.setdefault(part.pool.name, []).extend(next(outcomes) for _ in part.buffers)
        return result

    def batch_set_v2(self, transfers: Sequence[PoolTransfer]) -> dict[PoolName, list[Outcome]]:
        """Write host objects: first pages, then states, so that no state is stored before its KV.

        An object of a trailing pool is THROTTLED, and not written, if a page that the object needs failed in
        this call. Returns the outcomes in the same form as `batch_get_v2`. Raises InputError or SlotError
        before anything is read or written.
        """
        parts = self._checked(transfers)
        pages = [part for part in parts if not part.attached]
        attached = [part for part in parts if part.attached]
        stored = self._set(pages, [[False] * len(part.buffers) for part in pages])
        failed = [(page.transfer, outcomes) for page, outcomes in zip(pages, stored, strict=True)]
        added = self._set(attached, [_blocked(part.transfer, failed) for part in attached])
        first, then = iter(stored), iter(added)
        result: dict[PoolName, list[Outcome]] = {}
        for part in parts:
            result.setdefault(part.pool.name, []).extend(next(then if part.attached else first))
        return result

    def _set(self, parts: Sequence[_Part], blocked: Sequence[Sequence[bool]]) -> list[list[Outcome]]:
        """Write the objects of `parts` in one call of the backend.

        Objects that are `blocked` are not written; their outcome is THROTTLED.
        """
        outcomes = [[Outcome.THROTTLED] * len(part.buffers) for part in parts]
        items: list[SetItem] = []
        open_to = [[j for j, held in enumerate(each) if not held] for each in blocked]
        for part, chosen in zip(parts, open_to, strict=True):
            if part.pool.length < part.pool.pool.geometry.padded_nbytes:
                for j in chosen:
                    zero_tail(part.buffers[j], part.pool.length)
            offered = part.set_items(self.namespace.namespace, self.worker)
            items += [offered[j] for j in chosen]
        places = [(found, j) for found, chosen in zip(outcomes, open_to, strict=True) for j in chosen]
        for (found, j), outcome in zip(places, self.backend.set(items) if items else (), strict=True):
            found[j] = outcome
        return outcomes

    def _exists(self, keys: Sequence[ObjectKey]) -> tuple[list[bool], Reason]:
        """Return for each object whether the store has it, and why the store could not be asked.

        If the store could be asked, the reason is NONE. Otherwise all answers are False.
        """
        try:
            return self.backend.exists(keys), Reason.NONE
        except (UnavailableError, RefusedError) as error:
            reason = Reason.REFUSED if isinstance(error, RefusedError) else Reason.UNAVAILABLE
            return [False] * len(keys), reason if keys else Reason.NONE

    @property
    def _has_pages(self) -> bool:
        """Whether a page pool is registered."""
        return any(one.pool.geometry.hit_policy is HitPolicy.ALL_PAGES for one in self._pools.values())

    def _registered(self, name: PoolName) -> _Registered:
        try:
            return self._pools[name]
        except (KeyError, TypeError):
            known = ", ".join(self._pools) or "none"
            raise InputError(
                f"pool {name} is not registered (registered: {known}); call register_pool first"
            ) from None

    def _checked(self, transfers: Sequence[PoolTransfer]) -> list[_Part]:
        """Return every transfer with the buffers of its objects.

        Raises InputError or SlotError if anything in the call is wrong.
        """
        check_transfers(transfers)
        return [self._part(transfer) for transfer in transfers]

    def _part(self, transfer: PoolTransfer) -> _Part:
        pool = self._registered(transfer.pool)
        check_keys(transfer.keys)
        handles, depths, parents = handles_of(transfer), depths_of(transfer), parents_of(transfer)
        values, attached = values_of(transfer), False
        if transfer.hit_policy is not HitPolicy.ALL_PAGES:
            attached, parents = self._has_pages, [None] * len(handles)
        return _Part(transfer, pool, handles, pool.buffers_of(handles), depths, parents, values, attached)


def _check_apart(parts: Sequence[_Part]) -> None:
    """Raise InputError if an object is named twice, because one read would overwrite the other.

    Pools of one arena number their objects by blocks, so two objects share memory only if they have the same
    handle.
    """
    seen: dict[int, set[int]] = {}
    for part in parts:
        taken, handles = seen.setdefault(id(part.pool.pool.arena), set()), part.handles
        if len(set(handles)) < len(handles) or not taken.isdisjoint(handles):
            twice = next(h for i, h in enumerate(handles) if h in taken or h in handles[:i])
            raise InputError(
                f"pool {part.pool.name}: handle {twice} is given twice; each key that is read needs a place"
                " of its own"
            )
        taken.update(handles)


def _blocked(transfer: PoolTransfer, pages: Sequence[tuple[PoolTransfer, Sequence[Outcome]]]) -> list[bool]:
    """Return which objects of a trailing pool need a page that failed in this call.

    An object needs its page and the pages before that page. If the transfer of the pages gives parents, they
    tell which pages come before. Otherwise all earlier pages of the transfer count as pages before. That is
    exact if the transfer has one sequence. With several sequences, more objects are blocked than necessary.
    """
    blocked = [False] * len(transfer.keys)
    for page_transfer, outcomes in pages:
        failed: dict[bytes, bool] = {}
        before = False
        for j, (key, outcome) in enumerate(zip(page_transfer.keys, outcomes, strict=True)):
            # `before`: whether this page, or a page before it, failed.
            if page_transfer.parents:
                before = failed.get(page_transfer.parents[j], False)
            before = before or outcome not in (Outcome.HIT, Outcome.STORED)
            failed[key] = before
        for j, key in enumerate(transfer.keys):
            # An object whose page is not in the transfer is blocked if any page of the transfer failed.
            blocked[j] = blocked[j] or failed.get(key, any(failed.values()))
    return blocked
