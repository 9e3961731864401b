"""Arguments of the server: settings, identity, refusals; and the store below device and host.

SGLang asks for a fetch when it queues a request, and before each batch whether the request may begin. How
long a request may wait is SGLang's rule, `--hicache-storage-prefetch-policy`. A store that hangs, fails or
lies costs hits: what has not arrived, verified, is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any, Final, NamedTuple
from uuid import uuid4

from blake3 import blake3
from sglang.srt import runtime_context
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller as hicache
from sglang.srt.mem_cache.registry import TreeCacheBuildContext
from sglang.srt.runtime_context import get_memory, get_parallel

from tiercache.controller import HybridCacheController
from tiercache.controller.prefetch import PrefetchTicket
from tiercache.core import PoolName
from tiercache.errors import ConfigError, TierCacheError
from tiercache.integrations.settings import CacheSettings, StoreSettings
from tiercache.integrations.sglang_server import OF_SGLANG, PLACE, Server
from tiercache.keys import Identity, namespace_of
from tiercache.pools import DevicePool
from tiercache.settings import read_section
from tiercache.storage.base import StorageBackend

_log = logging.getLogger(__name__)
_DELETE_AT_ONCE: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSettings(StoreSettings, CacheSettings):
    """Settings of a cache with a store, as keys of the JSON or TOML that SGLang passes on."""


class FetchRule(NamedTuple):
    """How long a request waits for what storage has of its prompt."""

    policy: str
    """`best_effort`: not at all; `timeout`: so many seconds; `wait_complete`: until the fetch is over."""
    least_tokens: int
    """Least number of tokens that are asked for."""
    base_s: float
    per_1024_tokens_s: float

    def seconds(self, tokens: int) -> float:
        """Return how long a fetch of so many tokens may last."""
        if self.policy == "wait_complete":  # the controller ends calls that hang
            return float("inf")
        return self.base_s + self.per_1024_tokens_s * tokens / 1024 if self.policy == "timeout" else 0.0


def read_settings() -> tuple[CacheSettings, FetchRule]:
    """Return the settings that the server has been given. Raises ConfigError for wrong ones."""
    memory = get_memory()
    parse = hicache.HybridCacheController.parse_storage_backend_extra_config  # also reads "@file"
    given, least, base, more, _ = parse(memory.hicache_storage_backend_extra_config)
    rule = FetchRule(memory.hicache_storage_prefetch_policy, least, base, more)
    given = {key: value for key, value in given.items() if key not in OF_SGLANG}
    if memory.hicache_storage_backend is not None:
        return read_section(StoredSettings, PLACE, given), rule
    if "storage" in given:
        needed = "--enable-hierarchical-cache --hicache-storage-backend dynamic"
        raise ConfigError(f"{PLACE}: a storage needs {needed}")
    return read_section(CacheSettings, PLACE, given), rule


def identity_of(settings: CacheSettings, ctx: TreeCacheBuildContext, kv_dtype: str) -> Identity:
    """Return the identity of the cache; in a store it has a digest of all settings that change its bytes."""
    model, page_size = str(ctx.model_config.model_path), int(ctx.params.page_size)
    if not isinstance(settings, StoredSettings):
        return Identity(model, "", weights_dtype="", kv_dtype=kv_dtype, state_dtype="", page_size=page_size)
    facts = blake3(repr(Server(1).facts(draft=False)).encode()).hexdigest(16)
    return replace(settings.identity(model, kv_dtype, page_size), weights_dtype=f"as by settings {facts}")


def opened(settings: CacheSettings, ctx: TreeCacheBuildContext) -> StorageBackend | None:
    """Open the store for this scheduler; None if there is to be none. Raises ConfigError or StorageError."""
    if not isinstance(settings, StoredSettings):
        return None
    parallel = get_parallel()
    rank = f"dp{parallel.dp_rank or 0}" + (f"tp{ctx.tp_rank}" if ctx.tp_size > 1 else "")
    return settings.open(rank, parallel.num_dp_ranks * ctx.tp_size)


def host_sizes(pools: Mapping[PoolName, DevicePool]) -> tuple[int, int]:
    """Return the bytes of the host tier and of a block of it.

    The tier has the size that SGLang was told, or a multiple of the device's pools. A block has an object of
    the pool with the smallest ones, so that no object is a long list of blocks.
    """
    memory, block = get_memory(), min(pool.geometry.padded_nbytes for pool in pools.values())
    if memory.hicache_size > 0:
        return int(memory.hicache_size * 1e9), block
    return int(memory.hicache_ratio * sum(p.capacity * p.geometry.nbytes for p in pools.values())), block


def refuse(ctx: TreeCacheBuildContext) -> None:
    """Raise ConfigError, in one sentence, for an option of the server that this cache cannot serve."""
    params, parallel, storage = ctx.params, get_parallel(), get_memory().hicache_storage_backend
    cannot = {
        "--disable-radix-cache": params.disable,
        "--hicache-storage-backend other than dynamic": storage not in (None, "dynamic"),
        "--hicache-storage-backend without --enable-hierarchical-cache": storage is not None
        and not ctx.enable_hierarchical_cache,
        "--hicache-host-memory-mode buffer_only": get_memory().hicache_host_memory_mode == "buffer_only",
        "--hicache-write-policy other than write_through": ctx.enable_hierarchical_cache
        and get_memory().hicache_write_policy != "write_through",
        "speculative decoding": params.is_eagle
        or params.mtp_draft_device_pools
        or params.sidecar_draft_device_pools,
        "a model with sliding windows": ctx.is_hybrid_swa,
        "--disaggregation-mode": runtime_context.get_disagg().disaggregation_mode != "null",
        "attention on a part of the ranks (--dp-size with --enable-dp-attention)": parallel.attn_dp_size > 1,
        "decode context parallelism": parallel.dcp_enabled,
        "context parallelism": params.attn_cp_size > 1,
        "pipeline parallelism": params.pp_size > 1,
        "--kv-events-config": params.enable_kv_cache_events,
        "--enable-session-radix-cache": params.enable_session_radix_cache,
        "--schedule-policy dfs-weight": runtime_context.get_schedule().schedule_policy == "dfs-weight",
        "--mamba-radix-cache-strategy no_buffer": ctx.is_hybrid_ssm and not params.enable_mamba_extra_buffer,
        "--mamba-radix-cache-strategy extra_buffer_lazy": params.enable_mamba_extra_buffer_lazy,
    }
    for what, asked in cannot.items():
        if asked:
            raise ConfigError(f"--radix-cache-backend tiercache does not serve {what}; leave one of them out")


class _Waiting(NamedTuple):
    """Fetch for a request that waits in SGLang's queue."""

    ticket: PrefetchTicket
    begin: int
    """Number of tokens that device and host had already."""
    until: float
    """Time of the controller after which the request waits no longer."""


class StoreBelow(BasePrefixCache):  # type: ignore[misc]  # SGLang has no types
    """Answers of a cache to what SGLang asks of the store below the host.

    Thread safety: the scheduler's thread.
    """

    hicache_storage_pass_prefix_keys = False
    ongoing_backup = ()
    """Writes that a flush of device and host would have to wait for: none."""

    _controller: HybridCacheController

    def _set_store(self, store: StorageBackend | None, identity: Identity, rule: FetchRule) -> None:
        """Answer for the controller, which owns `store`."""
        self.enable_storage = store is not None
        self._store = store
        self._namespace = namespace_of(identity)
        self.ongoing_prefetch: dict[Any, _Waiting] = {}
        """Fetches by the request's handle."""
        self._rule = rule
        self._least_tokens = max(rule.least_tokens, self.page_size)

    _weights = b""
    """Part of all keys: empty until the weights are replaced in the running server."""

    def _watch_weights(self, worker: Any) -> None:
        """Use what is stored no more once SGLang replaces the weights, of which it tells no cache.

        Until this process ends, other keys are used then, which no other process has. Without a store,
        SGLang's own flush after the change is enough.
        """
        runners = worker.weight_update_runners  # SGLang asks for them when it changes their weights

        def asked() -> Any:
            if self.enable_storage:
                self._weights = uuid4().bytes
                _log.warning("tiercache: the weights change; what was stored before is used no more")
            return runners()

        worker.weight_update_runners = asked

    def is_backuped(self, node: Any) -> bool:
        """Say that whatever is behind `node` may be asked for, wherever its own pages are."""
        return True

    is_root = is_backuped

    def get_last_hash_value(self, node: Any) -> None:
        """Return no key, because the index keys what it stores itself."""

    def prefetch_from_storage(
        self, handle: Any, last_host_node: Any, new_input_tokens: Any, *_: Any, **__: Any
    ) -> None:
        """Begin to fetch what storage has of a prompt, of which `last_host_node` is the last match."""
        self.release_aborted_request(handle)  # the host has lost a part of an earlier fetch
        count, node = len(new_input_tokens), last_host_node
        # A request that may not be cached is matched without tokens.
        if not self.enable_storage or min(count, len(node.tokens)) < self._least_tokens:
            return
        ticket = self._controller.prefetch(node.tokens, node.extra)
        until = self._controller.lent.now() + self._rule.seconds(count)
        self.ongoing_prefetch[handle] = _Waiting(ticket, node.depth * self.page_size, until)

    def check_prefetch_progress(self, handle: Any) -> bool:
        """Return whether a request need not wait any longer for its fetch, which ends then."""
        waiting = self.ongoing_prefetch.get(handle)
        if waiting is None:
            return True
        if not waiting.ticket.done and self._controller.lent.now() < waiting.until:
            return False
        waiting.ticket.cancel()
        return True

    def pop_prefetch_loaded_span(self, handle: Any) -> tuple[int, int | None]:
        """Return how many tokens a fetch has brought, and behind how many; forget the fetch."""
        waiting = self.ongoing_prefetch.pop(handle, None)
        if waiting is None:
            return 0, None
        return max(0, waiting.ticket.tokens - waiting.begin), waiting.begin

    def release_aborted_request(self, handle: Any) -> None:
        """End the fetch for a request that waits no more."""
        waiting = self.ongoing_prefetch.pop(handle, None)
        if waiting is not None:
            waiting.ticket.cancel()

    def clear_storage_backend(self) -> bool:
        """Delete what storage has of this cache, in the background, when an operator asks SGLang for it."""
        if self._store is None:
            _log.warning("tiercache: there is no store below the host; /flush_cache empties device and host")
            return False
        args = (self._store, self._namespace)
        Thread(target=_clear, args=args, name="tiercache-clear", daemon=True).start()
        return True


def _clear(store: StorageBackend, namespace: bytes) -> None:
    try:
        keys = [entry.key for entry in store.scan_all(namespace)]
        for start in range(0, len(keys), _DELETE_AT_ONCE):
            store.delete(keys[start : start + _DELETE_AT_ONCE])
        left = sum(entry is not None for entry in store.describe(keys))
    except TierCacheError as error:
        _log.error("tiercache: not everything of this cache has been deleted from storage: %s", error)
    else:
        _log.info("tiercache: %d objects of this cache deleted from storage; %d left", len(keys) - left, left)
