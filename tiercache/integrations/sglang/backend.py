"""The class that SGLang calls as its storage backend, with a tiercache store behind it.

The docstring of `tiercache.integrations.sglang` explains SGLang's words: host pool, anchor pool, sidecar
pool, flat page, attach.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Annotated, Any, Final, TypeAlias

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

from tiercache.core import HitPolicy, ObjectKey, ObjectMeta, Outcome, PoolName
from tiercache.errors import ConfigError, RefusedError, StorageError, UnavailableError
from tiercache.events.settings import EventSettings
from tiercache.integrations import attempt
from tiercache.integrations.settings import StoreSettings, of_rank, read_events
from tiercache.integrations.sglang.events import PagePublisher
from tiercache.integrations.sglang.pools import HostPages, PageKeys, Traffic, flat_bytes, is_trailing, kind_of
from tiercache.integrations.sglang_server import OF_SGLANG, PLACE, Server
from tiercache.keys import Shard, namespace_of
from tiercache.settings import Kind, read_section
from tiercache.storage.base import GetItem, SetItem, StorageBackend
from tiercache.storage.transfers import PoolQuery, answer, wanted_objects

_log = logging.getLogger(__name__)

_POLICIES: Final = {PoolHitPolicy[policy.name]: policy for policy in HitPolicy}
_KV: Final = PoolName.KV.value
_DELETE_AT_ONCE: Final = 1024
"""Maximum number of objects that one `delete` call of `clear` removes."""

_ORDER_NEEDED: Final = (
    f"{PLACE}: a full store keeps what can be restored only if SGLang says which pages come before those"
    " that it writes; set interface_v1 to 1 and hicache_storage_pass_prefix_keys to true"
)

_Extra: TypeAlias = HiCacheStorageExtraInfo | None
_Work: TypeAlias = Callable[[HostPages, list[str], torch.Tensor, _Extra], list[bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings(StoreSettings):
    events: Annotated[EventSettings | None, Kind(read_events)] = None
    """Publisher of what is in the store; None for none."""


class TierCacheStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang has no types
    """Store of tiercache that serves as SGLang's third tier.

    The key of an object is made from SGLang's hash of the prefix, the identity (model, revision, dtype, page
    size, quantization, tenant), the layout of the host pool, and the rank. If any of these differs, the
    object is another object. Every byte that is read is verified.

    Construction and registration raise ConfigError or StorageError if a setting is wrong or the store cannot
    be opened; SGLang then gives up the attach. Reads, writes and queries never raise: a failed read counts as
    a miss, a failed write as not stored. `clear` raises StorageError.

    Thread safety: any number of threads may call at once. No other call overlaps with a registration, and
    `close` is the last call.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        extra = storage_config.extra_config or {}
        if not extra.get("interface_v1"):
            raise ConfigError(_ORDER_NEEDED)
        self._config = storage_config
        given = {key: value for key, value in extra.items() if key not in OF_SGLANG}
        self._settings = read_section(_Settings, PLACE, given)
        self._events: PagePublisher | None = None
        self._pools: dict[str, HostPages] = {}
        self._refused_pools: dict[str, str] = {}
        """Reasons why pools cannot be kept, by name."""
        self._order_warned = False
        self._traffic = Traffic(sampled=storage_config.enable_storage_metrics)
        self._closing = Lock()
        self._closed = False
        self._keys = PageKeys(b"")
        self._namespace = b""
        self._store = self._opened()

    def _opened(self) -> StorageBackend:
        c = self._config
        ranks = c.tp_size * c.pp_size * c.attn_cp_size
        if self._has_one_writer and self._settings.per_rank:
            raise ConfigError(
                f"{PLACE}: one rank writes the KV of this model for all {c.tp_size}, so a store per rank is"
                " never read; use lmdb:// or grpc://"
            )
        name = f"tp{c.tp_rank}pp{c.pp_rank}cp{c.attn_cp_rank}dp{c.dp_rank}"
        return self._settings.open(name, max(ranks, c.dp_rank + 1))

    @property
    def _has_one_writer(self) -> bool:
        """Whether SGLang lets one rank write what all tensor ranks have alike."""
        return bool(self._config.is_mla_model and self._config.tp_size > 1)

    # Registration.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register the anchor pool; its dtype and page size become part of the identity.

        Raises ConfigError if the pool gives no access to its pages, or holds plain bytes of an unknown dtype.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._server = Server(self._config.pp_size)
        if mem_pool_host.dtype is torch.uint8 and not self._server.known and not self._settings.kv_dtype:
            raise ConfigError(
                f"{PLACE}: the host pool holds plain bytes, and nothing says of which dtype; set kv_dtype"
            )
        dtype = str(mem_pool_host.dtype).removeprefix("torch.")
        identity = self._settings.identity(self._config.model_name or "", dtype, int(mem_pool_host.page_size))
        self._namespace = namespace_of(identity)
        self._keys = PageKeys(self._namespace)
        try:
            self._register(_KV, mem_pool_host)
        except (AttributeError, NotImplementedError, ValueError) as error:
            raise ConfigError(
                f"tiercache cannot keep this model: its host pool {type(mem_pool_host).__name__} shows no"
                f" pages ({error})"
            ) from error
        self._record = self._settings.record(identity)
        self._store.register_namespace(self._record)
        # One rank tells of its pages; the others have theirs of the same prefixes.
        first = not (self._config.tp_rank or self._config.pp_rank or self._config.attn_cp_rank)
        settings = of_rank(self._settings.events, self._config.dp_rank or 0)
        if settings is not None and settings.token_ids:
            raise ConfigError("events.token_ids: leave it out, for SGLang tells storage no tokens")
        if first and settings is not None and self._events is None:
            layout = self._pools[_KV].layout
            self._events = PagePublisher(settings, self._store, self._keys, layout, self._record)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register a sidecar pool, or the anchor pool again.

        SGLang may also call this method after the attach.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name in self._pools and self._pools[name].pool is host_pool:
            return
        try:
            self._register(name, host_pool)
        except Exception as error:  # noqa: BLE001  a pool of SGLang may raise anything
            # Do not raise here, where SGLang cannot undo the registration of a single pool. If the attach is
            # still going on, `on_host_pools_registered` raises.
            self._pools.pop(name, None)
            self._refused_pools[name] = f"{type(host_pool).__name__}: {error}"
            _log.warning(
                "tiercache: pool %s is not kept, and prefixes that need it are never restored: %r",
                name,
                error,
            )

    def on_host_pools_registered(self) -> None:
        """End the attach; if nothing could ever be restored, close the store and raise ConfigError.

        A restore needs the objects of all pools, and a full store the order of pages, without which it evicts
        pages that others need.
        """
        if self._refused_pools:
            self.close()
            pools = "; ".join(f"{name} ({why})" for name, why in self._refused_pools.items())
            raise ConfigError(
                f"tiercache cannot keep this model, because prefixes need all of its pools: {pools}"
            )
        if self._server.tells_prefixes is False:
            self.close()
            raise ConfigError(_ORDER_NEEDED)

    def _register(self, name: str, pool: Any) -> None:
        has_heads = isinstance(pool, MHATokenToKVPoolHost)
        if self._has_one_writer and kind_of(name) is PoolName.DRAFT and has_heads:
            raise ValueError("its heads differ from rank to rank, and SGLang lets one rank write for all")
        made = HostPages(name, pool, self._namespace, self._server, self._shard(name, pool))
        self._pools[name] = made
        if is_trailing(name):
            self._needs_states()
        how, layout = "zero copy" if made.zero_copy else "page by page", getattr(pool, "layout", "?")
        _log.info("tiercache: pool %s, layout %s, %d bytes a page, %s", name, layout, made.nbytes, how)

    def _needs_states(self) -> None:
        """Tell the store, once, that prefixes of this model need states besides KV."""
        if not self._record.states:
            self._record = replace(self._record, states=True)
            self._store.register_namespace(self._record)

    def _shard(self, name: str, pool: Any) -> Shard:
        """Return which shard of a page a pool of this rank holds.

        The KV of latent attention (MLA) is the same on all tensor-parallel ranks, so its shard does not
        depend on the tensor-parallel rank. States and heads differ from rank to rank.
        """
        # Shards are ordered by pipeline rank first, then by context rank, and last by tensor rank. If all
        # tensor ranks hold the same bytes, the tensor rank is left out.
        c = self._config
        rank, size = c.pp_rank * c.attn_cp_size + c.attn_cp_rank, c.pp_size * c.attn_cp_size
        has_own_part = kind_of(name) is PoolName.MAMBA or isinstance(pool, MHATokenToKVPoolHost)
        if c.is_mla_model and not has_own_part:
            return Shard(rank, size)
        return Shard(rank * c.tp_size + c.tp_rank, size * c.tp_size)

    # Queries.

    def batch_exists(self, keys: list[str], extra_info: _Extra = None) -> int:
        """Return the number of leading pages of `keys` whose KV is stored."""
        return int(self.batch_exists_v2(keys).kv_hit_pages)

    def exists(self, key: str) -> bool:
        """Return whether the KV of this page is stored."""
        return self.batch_exists([key]) == 1

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None, extra_info: _Extra = None
    ) -> PoolTransferResult:
        """Return the depths, in pages, at which everything that a restore needs is stored.

        One call of the store looks up all pools. A pool that is not kept, or that comes with an unknown hit
        policy, counts as a pool without pages.
        """
        call = partial(self._find, keys, pool_transfers or [])
        return attempt(call, PoolTransferResult.empty(), "batch_exists_v2")

    def _find(self, keys: list[str], transfers: list[PoolTransfer]) -> PoolTransferResult:
        page_keys = self._keys.keys_of(keys)
        queries = {_KV: PoolQuery(self._objects(_KV, page_keys))}
        for transfer in transfers:
            queries[str(transfer.name)] = self._query(transfer, page_keys)
        there = self._ask(wanted_objects(queries))
        if there is None:
            # The store gave no answer. The empty result says that no page of the KV is stored. SGLang does
            # not need results for the other pools.
            return PoolTransferResult.empty()
        if any(query.hit_policy is HitPolicy.TRAILING_PAGES for query in queries.values()):
            self._needs_states()
        folded = answer(queries, len(keys), there, _KV)
        hits = {str(name): pages for name, pages in folded.extra_pool_hit_pages.items()}
        hits = {_KV: folded.kv_run_pages} | hits
        return PoolTransferResult(folded.kv_hit_pages, hits, list(folded.restorable_prefix_pages))

    def _query(self, transfer: PoolTransfer, page_keys: Sequence[bytes]) -> PoolQuery:
        policy = _POLICIES.get(transfer.hit_policy)
        if policy is None:
            return PoolQuery(None)
        # The number of keys that SGLang passes is the number of trailing pages that a prefix needs.
        trailing = max(1, len(transfer.keys or ()))
        return PoolQuery(self._objects(str(transfer.name), page_keys), policy, trailing)

    def _objects(self, name: str, page_keys: Sequence[bytes]) -> list[ObjectKey] | None:
        """Return the keys of a pool's objects; None for a pool that is not kept."""
        pool = self._pools.get(name)
        return None if pool is None else pool.objects(page_keys)

    # Reads and writes.

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: _Extra = None
    ) -> list[bool]:
        """Read KV pages into the anchor pool; return for each page whether it arrived."""
        call = partial(self._get, self._pools[_KV], keys, host_indices, extra_info)
        return attempt(call, [False] * len(keys), "batch_get_v1")

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: _Extra = None
    ) -> list[bool]:
        """Store KV pages of the anchor pool; return for each page whether it is stored now."""
        call = partial(self._set, self._pools[_KV], keys, host_indices, extra_info)
        return attempt(call, [False] * len(keys), "batch_set_v1")

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: _Extra = None) -> dict[str, list[bool]]:
        """Read objects into sidecar pools; return for each pool and object whether it arrived."""
        return {t.name: self._sidecar(t, self._get, extra_info) for t in transfers}

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: _Extra = None) -> dict[str, list[bool]]:
        """Store objects of sidecar pools; return for each pool and object whether it is stored now."""
        return {t.name: self._sidecar(t, self._set, extra_info) for t in transfers}

    def get(self, *_: Any, **__: Any) -> None:
        """Do nothing: SGLang calls these four without interface_v1 only, which is refused."""

    batch_get = set = batch_set = get

    # The rest.

    def clear(self) -> None:
        """Delete all objects of this identity, of all pools and ranks.

        Raises StorageError, as SGLang expects, if some objects could not be deleted.
        """
        found = [entry.key for entry in self._store.scan_all(self._namespace)]
        deleted = left = 0
        for start in range(0, len(found), _DELETE_AT_ONCE):
            part = found[start : start + _DELETE_AT_ONCE]
            asked = 0 if self._events is None else self._events.age
            answers = self._store.delete(part)
            deleted += sum(answers)
            if self._events is not None:
                self._events.gone([key for key, gone in zip(part, answers, strict=True) if gone], asked)
            kept = [key for key, gone in zip(part, answers, strict=True) if not gone]
            left += sum(entry is not None for entry in self._store.describe(kept)) if kept else 0
        _log.info("tiercache: %d objects of this model deleted", deleted)
        if left:
            raise StorageError(
                f"{left} of {len(found)} objects of this model could not be deleted and may still be"
                " restored; clear it again"
            )

    def get_stats(self) -> Any:
        """Return the pages and the GB/s of each read and write since the last call, as a StorageMetrics."""
        return attempt(self._traffic.take_samples, None, "get_stats")

    def close(self) -> None:
        """Close the store; a second call does nothing."""
        with self._closing:
            closed, self._closed = self._closed, True
        if not closed:
            _log.info("tiercache: closed; %s", self._traffic.summary() or "nothing was read or written")
            if self._events is not None:
                self._events.close()
            self._store.close()

    def _sidecar(self, transfer: PoolTransfer, work: _Work, extra: _Extra) -> list[bool]:
        """Run `work` on one pool; if the pool fails, or is not kept, return False for each of its objects."""
        keys, pool = list(transfer.keys or ()), self._pools.get(str(transfer.name))

        def call() -> list[bool]:
            if _POLICIES.get(transfer.hit_policy) is HitPolicy.TRAILING_PAGES:
                self._needs_states()
            return [] if pool is None else work(pool, keys, transfer.host_indices, extra)

        return attempt(call, [], f"pool {transfer.name}") or [False] * len(keys)

    def _get(self, pool: HostPages, keys: Sequence[str], indices: torch.Tensor, extra: _Extra) -> list[bool]:
        pages, page_keys = pool.pages(indices, len(keys)), self._keys.keys_of(keys)
        flats = [] if pool.zero_copy else [pool.pool.get_dummy_flat_data_page() for _ in keys]
        if pool.zero_copy:
            buffers = pool.buffers(indices, len(keys))
        else:
            buffers = [[flat_bytes(flat)] for flat in flats]
        objects = pool.objects(page_keys)
        start = time.perf_counter()
        asked = 0 if self._events is None else self._events.age
        outcomes = self._store.get(
            [GetItem(key, views, pool.nbytes) for key, views in zip(objects, buffers, strict=True)]
        )
        if self._events is not None:
            before = extra.prefix_keys if extra is not None else None
            self._events.note(objects, outcomes, self._parents(pool, page_keys, before), asked)
        arrived = [outcome is Outcome.HIT for outcome in outcomes]
        there = sum(arrived)
        self._traffic.count("read", pool.name, len(keys), there, pool.nbytes, time.perf_counter() - start)
        for page, flat, is_there in zip(pages, flats, arrived, strict=False):
            if is_there:
                pool.pool.set_from_flat_data_page(page, flat)
        return arrived

    def _set(self, pool: HostPages, keys: Sequence[str], indices: torch.Tensor, extra: _Extra) -> list[bool]:
        pages, page_keys = pool.pages(indices, len(keys)), self._keys.keys_of(keys)
        # SGLang's names of all pages before `keys` in the sequence; None if SGLang does not pass them.
        before = extra.prefix_keys if extra is not None else None
        if before is None and not self._server.tells_prefixes:
            if not self._order_warned:
                self._order_warned = True
                _log.error("tiercache: nothing is stored: %s", _ORDER_NEEDED)
            return [False] * len(keys)
        objects, parents = pool.objects(page_keys), self._parents(pool, page_keys, before)
        if pool.zero_copy:
            kept = [False] * len(keys)
            buffers = pool.buffers(indices, len(keys))
        else:
            # Flat pages are copies, so make them only for pages that are not stored yet.
            kept = self._ask(objects) or [False] * len(keys)
            buffers = [
                [] if there else [flat_bytes(pool.pool.get_data_page(page, flat=True).contiguous())]
                for page, there in zip(pages, kept, strict=True)
            ]
        written = [i for i, there in enumerate(kept) if not there]
        # Depth of the page keys[0], in pages; the first page of a sequence has depth 1.
        first = len(before) + 1 if before is not None and pool.name == _KV else None
        items: list[SetItem] = []
        for i in written:
            depth = None if first is None else first + i
            meta = ObjectMeta(self._namespace, pool.nbytes, b"", parents[i], depth)
            items.append(SetItem(objects[i], buffers[i], meta))
        start = time.perf_counter()
        outcomes = self._store.set(items)
        if self._events is not None:
            self._events.note([item.key for item in items], outcomes, [item.meta.parent for item in items])
        for i, outcome in zip(written, outcomes, strict=True):
            kept[i] = outcome is Outcome.STORED or outcome is Outcome.HIT
        stored = outcomes.count(Outcome.STORED)
        self._traffic.count("write", pool.name, len(items), stored, pool.nbytes, time.perf_counter() - start)
        return kept

    def _ask(self, keys: Sequence[ObjectKey]) -> list[bool] | None:
        """Return which objects the store has, or None if the store gives no answer."""
        asked = 0 if self._events is None else self._events.age
        try:
            there = self._store.exists(keys)
        except (UnavailableError, RefusedError):  # the store has logged the failure
            return None
        except StorageError as error:
            _log.warning("tiercache: a query got no answer: %s", error)
            return None
        if self._events is not None:
            self._events.gone([key for key, found in zip(keys, there, strict=True) if not found], asked)
        return there

    def _parents(
        self, pool: HostPages, page_keys: Sequence[bytes], before: Sequence[str] | None
    ) -> Sequence[bytes | None]:
        """Return the page on which each object of a call depends.

        A KV page depends on the page before it, which is None for the first page of a sequence. An object of
        any other pool depends on its own page.
        """
        if pool.name != _KV:
            return page_keys
        last = self._keys.keys_of(before[-1:]) if before else [None]
        return [*last, *page_keys[:-1]]
