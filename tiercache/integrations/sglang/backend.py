"""The storage backend class that SGLang calls; a tiercache store answers."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from tiercache.core import HitPolicy, ObjectMeta, Outcome, PoolName, PoolPresence, Reason, restorable_prefixes
from tiercache.errors import ConfigError, StorageError
from tiercache.integrations.parents import Once, Successions
from tiercache.integrations.settings import settings_of
from tiercache.integrations.sglang.keys import PageKeys
from tiercache.integrations.sglang.pools import HostPages, flat_bytes, is_trailing, kind_of
from tiercache.integrations.sglang.server import Server
from tiercache.integrations.sglang.traffic import Traffic
from tiercache.keys import Shard, namespace_of
from tiercache.storage.base import GetItem, NamespaceRecord, SetItem, StorageBackend

_log = logging.getLogger(__name__)

_PLACE: Final = "hicache-storage-backend-extra-config"
_OF_SGLANG: Final = frozenset({
    "backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size", "prefetch_threshold", "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys",
})  # fmt: skip
"""Keys of the extra config that SGLang itself reads; all other keys are settings of tiercache."""

_POLICIES: Final = {PoolHitPolicy.ALL_PAGES: HitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES: HitPolicy.TRAILING_PAGES}
_KV: Final = PoolName.KV.value
_DELETE_AT_ONCE: Final = 1024
"""Objects that one `delete` call of `clear` removes at most."""

_UNTOLD: Final = (
    "tiercache: SGLang does not say which pages come before those that it writes. What queries tell makes up for a part of that, but a full"
    " store keeps less that can be restored; in %s set %shicache_storage_pass_prefix_keys to true"
)

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Method = Callable[Concatenate["TierCacheStorage", _P], _T]


def _never_raises(nothing: Callable[..., _T]) -> Callable[[_Method[_P, _T]], _Method[_P, _T]]:
    """Decorate a method that SGLang's threads call: log any exception and return `nothing(*args, **kwargs)` instead.

    `nothing` makes the answer that says that nothing was found or kept.
    """

    def wrap(call: _Method[_P, _T]) -> _Method[_P, _T]:
        def guarded(self: TierCacheStorage, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
            try:
                return call(self, *args, **kwargs)
            except Exception:  # noqa: BLE001  SGLang's threads are none of ours
                _log.exception("tiercache: %s failed", call.__name__)
                return nothing(*args, **kwargs)

        functools.update_wrapper(guarded, call)
        return guarded

    return wrap


def _none_of(keys: Sequence[str], *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys)


def _none_of_each(transfers: Sequence[PoolTransfer], *_: Any, **__: Any) -> dict[str, list[bool]]:
    return {t.name: [False] * len(t.keys or ()) for t in transfers}


class TierCacheStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang has no types
    """A tiercache store that serves as SGLang's third tier.

    The key of a page is SGLang's hash of its prefix, bound to the identity (model, revision, dtype, page size, quantization, tenant), to
    the layout of its host pool, and to the rank; a difference in any of these gives another object. Every byte that is read is verified.

    Construction and registration raise ConfigError or StorageError if a setting is wrong or the store cannot be opened; that ends the
    attach. Reads, writes and queries never raise: a read that fails counts as a miss, a write that fails as not kept. `clear` raises
    StorageError.

    Thread safety: any number of threads at once; registration comes first and alone, `close` last.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        extra = storage_config.extra_config or {}
        self._config = storage_config
        self._flat_kv = not extra.get("interface_v1")
        self._settings = settings_of(_PLACE, {key: value for key, value in extra.items() if key not in _OF_SGLANG})
        self._pools: dict[str, HostPages] = {}
        self._unkept: dict[str, str] = {}
        self._successions = Successions()
        self._untold = Once()
        self._traffic = Traffic(sampled=storage_config.enable_storage_metrics)
        self._closing = Lock()
        self._closed = False
        self._keys = PageKeys(b"")
        self._namespace = b""
        self._store = self._opened()

    def _opened(self) -> StorageBackend:
        c = self._config
        ranks = c.tp_size * c.pp_size * c.attn_cp_size
        if c.is_mla_model and c.tp_size > 1 and self._settings.per_rank:
            raise ConfigError(
                f"{_PLACE}: one rank writes the KV of this model for all {c.tp_size}, so a store per rank is never read; use lmdb:// or grpc://"
            )
        return self._settings.open(f"tp{c.tp_rank}pp{c.pp_rank}cp{c.attn_cp_rank}dp{c.dp_rank}", max(ranks, c.dp_rank + 1))

    # Registration.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register the anchor pool; its dtype and page size become part of the identity.

        Raises ConfigError if the pool shows no pages, or holds plain bytes of an unknown dtype.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._server = Server(self._config.pp_size)
        if mem_pool_host.dtype is torch.uint8 and not self._server.known and not self._settings.kv_dtype:
            raise ConfigError(f"{_PLACE}: the host pool holds plain bytes, and nothing says of which dtype; set kv_dtype")
        dtype = str(mem_pool_host.dtype).removeprefix("torch.")
        identity = self._settings.identity(self._config.model_name or "", dtype, int(mem_pool_host.page_size))
        self._namespace = namespace_of(identity)
        self._keys = PageKeys(self._namespace)
        try:
            self._register(_KV, mem_pool_host)
        except (AttributeError, NotImplementedError, ValueError) as error:
            raise ConfigError(
                f"tiercache cannot keep this model: its host pool {type(mem_pool_host).__name__} shows no pages ({error})"
            ) from error
        self._record = NamespaceRecord(self._namespace, identity.public_record())
        self._store.register_namespace(self._record)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register the pool of a sidecar, or the anchor pool once more; SGLang may also call this after the attach."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name in self._pools and self._pools[name].pool is host_pool:
            return
        try:
            self._register(name, host_pool)
        except Exception as error:  # noqa: BLE001  whatever a pool of theirs raises
            # `on_host_pools_registered` reports it: at this point SGLang cannot undo the registration of one pool.
            self._pools.pop(name, None)
            self._unkept[name] = f"{type(host_pool).__name__}: {error}"
            _log.warning("tiercache: pool %s is not kept, and prefixes that need it are never restored: %r", name, error)

    def on_host_pools_registered(self) -> None:
        """End the attach.

        Raises ConfigError, after closing the store, if a pool cannot be kept: prefixes need all pools, so nothing that is written could
        be restored.
        """
        if self._unkept:
            self.close()
            pools = "; ".join(f"{name} ({why})" for name, why in self._unkept.items())
            raise ConfigError(f"tiercache cannot keep this model, for prefixes need all of its pools: {pools}")

    def _register(self, name: str, pool: Any) -> None:
        if (
            self._config.is_mla_model
            and self._config.tp_size > 1
            and kind_of(name) is PoolName.DRAFT
            and isinstance(pool, MHATokenToKVPoolHost)
        ):
            raise ValueError("its heads differ from rank to rank, and SGLang lets one rank write for all")
        flat = name == _KV and self._flat_kv
        made = HostPages(name, pool, self._namespace, self._server, self._shard(name, pool), flat=flat)
        self._pools[name] = made
        if is_trailing(name):
            self._needs_states()
        how = "zero copy" if made.zero_copy else "page by page"
        _log.info("tiercache: pool %s, layout %s, %d bytes a page, %s", name, getattr(pool, "layout", "?"), made.nbytes, how)

    def _needs_states(self) -> None:
        """Tell the store, once, that a prefix of this model needs states besides KV."""
        if not self._record.states:
            self._record = replace(self._record, states=True)
            self._store.register_namespace(self._record)

    def _shard(self, name: str, pool: Any) -> Shard:
        """Return the shard of a page that a pool of this rank holds.

        Latent attention is the same on all tensor-parallel ranks, so the tensor-parallel rank is left out; states and heads differ.
        """
        c = self._config
        rank, size = c.pp_rank * c.attn_cp_size + c.attn_cp_rank, c.pp_size * c.attn_cp_size
        if c.is_mla_model and kind_of(name) is not PoolName.MAMBA and not isinstance(pool, MHATokenToKVPoolHost):
            return Shard(rank, size)
        return Shard(rank * c.tp_size + c.tp_rank, size * c.tp_size)

    # Queries.

    @_never_raises(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return the number of leading pages of `keys` whose KV is stored."""
        page_keys = self._keys.of(keys)
        self._note(page_keys, extra_info)
        found = self._store.exists(self._pools[_KV].objects(page_keys))
        return found.index(False) if False in found else len(found)

    def exists(self, key: str) -> bool:
        """Return whether the KV of this page is stored."""
        return self.batch_exists([key]) == 1

    @_never_raises(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> PoolTransferResult:
        """Return the depths, in pages, at which everything is stored that a restore needs. One call of the store asks for all pools.

        A pool that is not kept, or that comes with an unknown hit policy, has no pages.
        """
        transfers = pool_transfers or []
        names = [_KV, *(str(t.name) for t in transfers)]
        pools = [self._pools.get(name) for name in names]
        page_keys = self._keys.of(keys)
        self._note(page_keys, extra_info)
        wanted = [key for pool in pools if pool is not None for key in pool.objects(page_keys)]
        found = np.array(self._store.exists(wanted), np.bool_)
        if self._store.outage() is not Reason.NONE:
            return PoolTransferResult.empty()  # during an outage only the KV gets a verdict, which SGLang always makes; no other pool does
        masks = iter(found.reshape(-1, len(keys)))
        presence: dict[Any, PoolPresence] = {}
        for name, pool, transfer in zip(names, pools, [None, *transfers], strict=True):
            mask = next(masks) if pool is not None else np.zeros(len(keys), np.bool_)
            policy = HitPolicy.ALL_PAGES if transfer is None else _POLICIES.get(transfer.hit_policy)
            if policy is HitPolicy.TRAILING_PAGES:
                self._needs_states()
            if policy is None:
                policy, mask = HitPolicy.ALL_PAGES, np.zeros(len(keys), np.bool_)
            presence[name] = PoolPresence(policy, mask, max(1, len(transfer.keys or ())) if transfer is not None else 1)
        folded = restorable_prefixes(presence, anchor=_KV)  # type: ignore[arg-type]  # several pools of SGLang's can be of one kind
        hits = {_KV: folded.kv_run_pages} | {str(name): pages for name, pages in folded.extra_pool_hit_pages.items()}
        return PoolTransferResult(folded.kv_hit_pages, hits, list(folded.restorable_prefix_pages))

    # Reads and writes.

    @_never_raises(_none_of)
    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None) -> list[bool]:
        """Read KV pages into the anchor pool; return for each page whether it arrived."""
        return self._get(self._pools[_KV], keys, host_indices)

    @_never_raises(_none_of)
    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None) -> list[bool]:
        """Store KV pages of the anchor pool; return for each page whether it is stored now."""
        return self._set(self._pools[_KV], keys, host_indices, extra_info)

    @_never_raises(_none_of_each)
    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None) -> dict[str, list[bool]]:
        """Read objects into sidecar pools; return for each pool and object whether it arrived."""
        return {t.name: self._sidecar(t, self._get) for t in transfers}

    @_never_raises(_none_of_each)
    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None) -> dict[str, list[bool]]:
        """Store objects of sidecar pools; return for each pool and object whether it is stored now.

        The objects of a pool that shares its indices with the KV come first, all in one call. That call shows which page follows which,
        so it is noted.
        """
        for t in transfers:
            if getattr(t, "indices_from_pool", None) == _KV and t.keys:
                self._note(self._keys.of(t.keys), None)
        return {t.name: self._sidecar(t, functools.partial(self._set, extra=extra_info)) for t in transfers}

    @_never_raises(lambda keys, *_, **__: [None] * len(keys))
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[torch.Tensor | None]:
        """Read flat KV pages into `target_locations`, or into new pages; return None for each page that is not there."""
        pool = self._pools[_KV]
        targets = target_locations or [pool.pool.get_dummy_flat_data_page() for _ in keys]
        arrived = self._read(pool, keys, [[flat_bytes(target)] for target in targets])
        return [target if there else None for target, there in zip(targets, arrived, strict=True)]

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Read one flat KV page; return None if it is not there."""
        [found] = self.batch_get([key], None if target_location is None else [target_location])
        return found  # type: ignore[no-any-return]  # torch is Any here

    @_never_raises(lambda *_, **__: False)
    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        """Store flat KV pages; return whether all of them are stored now."""
        return all(self._write(self._pools[_KV], keys, [[flat_bytes(value.contiguous())] for value in values]))

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store one flat KV page; return whether it is stored now."""
        return self.batch_set([key], [value])

    # The rest.

    def clear(self) -> None:
        """Delete all objects of this identity, of all pools and ranks. Raises StorageError, as SGLang expects, if some are left."""
        found = [entry.key for entry in self._store.scan_all(self._namespace)]
        deleted = left = 0
        for start in range(0, len(found), _DELETE_AT_ONCE):
            part = found[start : start + _DELETE_AT_ONCE]
            answers = self._store.delete(part)
            deleted += sum(answers)
            kept = [key for key, gone in zip(part, answers, strict=True) if not gone]
            left += sum(entry is not None for entry in self._store.describe(kept)) if kept else 0
        _log.info("tiercache: %d objects of this model deleted", deleted)
        if left:
            raise StorageError(
                f"{left} of {len(found)} objects of this model could not be deleted and may still be restored; clear it again"
            )

    @_never_raises(lambda *_, **__: None)
    def get_stats(self) -> Any:
        """Return the pages and the GB/s of each read and write since the last call, as SGLang's StorageMetrics."""
        return self._traffic.take()

    def close(self) -> None:
        """Close the store; a second call does nothing."""
        with self._closing:
            closed, self._closed = self._closed, True
        if not closed:
            _log.info("tiercache: closed; %s", self._traffic.summary() or "nothing was read or written")
            self._store.close()

    def _sidecar(self, transfer: PoolTransfer, work: Callable[[HostPages, list[str], torch.Tensor], list[bool]]) -> list[bool]:
        """Run `work` on one pool; if that pool fails, or is not kept, the others are not affected."""
        keys, pool = list(transfer.keys or ()), self._pools.get(str(transfer.name))
        if _POLICIES.get(transfer.hit_policy) is HitPolicy.TRAILING_PAGES:
            self._needs_states()
        if pool is None:
            return [False] * len(keys)
        try:
            return work(pool, keys, transfer.host_indices)
        except Exception:  # noqa: BLE001  the other pools go on
            _log.exception("tiercache: pool %s failed", transfer.name)
            return [False] * len(keys)

    def _get(self, pool: HostPages, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        pages = pool.pages(indices, len(keys))
        if pool.zero_copy:
            return self._read(pool, keys, pool.buffers(indices, len(keys)))
        flats = [pool.pool.get_dummy_flat_data_page() for _ in keys]
        arrived = self._read(pool, keys, [[flat_bytes(flat)] for flat in flats])
        for page, flat, there in zip(pages, flats, arrived, strict=True):
            if there:
                pool.pool.set_from_flat_data_page(page, flat)
        return arrived

    def _set(self, pool: HostPages, keys: Sequence[str], indices: torch.Tensor, extra: HiCacheStorageExtraInfo | None = None) -> list[bool]:
        pages = pool.pages(indices, len(keys))
        before = extra.prefix_keys if extra is not None else None
        if pool.zero_copy:
            return self._write(pool, keys, pool.buffers(indices, len(keys)), before)
        # A flat page has to be copied out of the pool, so pages that are stored already are left out.
        there = self._store.exists(pool.objects(self._keys.of(keys)))
        missing = [i for i, is_there in enumerate(there) if not is_there]
        flats = [[flat_bytes(pool.pool.get_data_page(pages[i], flat=True).contiguous())] for i in missing]
        for i, kept in zip(missing, self._write(pool, keys, flats, before, missing), strict=True):
            there[i] = kept
        return there

    def _read(self, pool: HostPages, keys: Sequence[str], buffers: Sequence[list[memoryview]]) -> list[bool]:
        objects = pool.objects(self._keys.of(keys))
        start = time.perf_counter()
        outcomes = self._store.get([GetItem(key, views, pool.nbytes) for key, views in zip(objects, buffers, strict=True)])
        arrived = [outcome is Outcome.HIT for outcome in outcomes]
        there = sum(arrived)
        self._traffic.read(pool.name, len(keys), there, there * pool.nbytes, time.perf_counter() - start)
        return arrived

    def _write(
        self,
        pool: HostPages,
        keys: Sequence[str],
        buffers: Sequence[list[memoryview]],
        before: Sequence[str] | None = None,
        chosen: Sequence[int] | None = None,
    ) -> list[bool]:
        """Store the pages of all `keys`, or only those at the indices `chosen`; return for each whether it is stored now.

        `before` holds the keys from the start of the sequence up to these, or None where SGLang does not tell them. A KV page depends on
        the page before it; an object of any other pool depends on the page on which it ends.
        """
        page_keys = self._keys.of(keys)
        parents: Sequence[bytes | None] = page_keys
        if pool.name == _KV:
            parents = self._parents(page_keys, before)
        # The depth of the first page, in pages from the start of the sequence; the first page of a sequence has depth 1.
        first = len(before) + 1 if before is not None and pool.name == _KV else None
        objects = pool.objects(page_keys)
        items = [
            SetItem(objects[i], views, ObjectMeta(self._namespace, pool.nbytes, b"", parents[i], None if first is None else first + i))
            for i, views in zip(range(len(keys)) if chosen is None else chosen, buffers, strict=True)
        ]
        start = time.perf_counter()
        outcomes = self._store.set(items)
        kept = [outcome is Outcome.STORED or outcome is Outcome.HIT for outcome in outcomes]
        stored = outcomes.count(Outcome.STORED)
        self._traffic.wrote(pool.name, len(items), stored, stored * pool.nbytes, time.perf_counter() - start)
        return kept

    def _parents(self, page_keys: Sequence[bytes], before: Sequence[str] | None) -> list[bytes | None]:
        """Return the page that comes before each page of a write; None where it is not known or there is none."""
        if before is None:
            if self._untold.first():
                _log.warning(_UNTOLD, _PLACE, "" if not self._flat_kv else "interface_v1 to 1 and ")
            return self._successions.parents(page_keys)
        last = self._keys.of(before[-1:])
        self._successions.note([*last, *page_keys])
        return [last[0] if last else None, *page_keys[:-1]]

    def _note(self, page_keys: Sequence[bytes], extra: HiCacheStorageExtraInfo | None) -> None:
        """Note what a query tells about the order of pages: its pages are one sequence, behind the last of `extra.prefix_keys`."""
        before = extra.prefix_keys if extra is not None else None
        self._successions.note([*self._keys.of((before or [])[-1:]), *page_keys])
