"""The class that vLLM calls as its KV connector, once for its scheduler and once for its worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base as v1
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tiercache.controller import ControllerOptions, HybridCacheController
from tiercache.core import Locations, PoolName, TokenArray
from tiercache.integrations import attempt
from tiercache.integrations.settings import of_rank, profile_for
from tiercache.integrations.vllm_connector import engine
from tiercache.integrations.vllm_connector.cache import BlockSave, EngineCache
from tiercache.integrations.vllm_connector.promises import Promises
from tiercache.keys import Shard
from tiercache.pools import HostArena
from tiercache.settings import read_section

_log = logging.getLogger(__name__)
T = TypeVar("T")
U = TypeVar("U")
_guarded = partial(attempt, what="a call of vLLM")
_Pass = tuple[list[tuple[int, int]], Any, Any]
"""Pass that is measured: what it computes, and the marks before and behind it."""

_AHEAD: Final = 32
"""Number of waiting requests, at most, whose prompts come to the host before vLLM asks for them."""
_TOGETHER: Final = 64
"""Number of pages of an answer that are saved together."""
_CACHES: Final[dict[str, EngineCache]] = {}
"""Caches by the engine's id: that of the worker, which the scheduler in the same process shares."""


class TierCacheConnector(v1.KVConnectorBase_V1, v1.SupportsHMA):  # type: ignore[misc]  # untyped
    """Connector of one engine: of its scheduler, or of the worker of one rank.

    Construction raises ConfigError for what cannot be served, in a sentence that says what to change, and
    StorageError for a store that cannot be opened. Later no method raises: a failure is logged, and a miss.

    Thread safety: vLLM's thread for the scheduler and the worker.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: v1.KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = read_section(
            engine.ConnectorSettings, engine.PLACE, self._kv_transfer_config.kv_connector_extra_config
        )
        self._page_size, self._places = engine.checked(vllm_config, kv_cache_config)
        self._key, self._parallel = str(self._kv_transfer_config.engine_id), vllm_config.parallel_config
        self._requests: dict[str, Any] = {}
        self._promises = Promises(self._page_size, self._parallel.world_size, _CACHES.get(self._key))
        self._waiting: set[str] = set()
        """Requests that have not been given blocks."""
        self._known: dict[str, TokenArray] = {}
        self._saved: dict[str, int] = {}
        """Number of leading pages that have been saved of each request that computes."""
        self._work = engine.StepWork()
        self._begin: float | torch.cuda.Event | None = None
        self._pass: _Pass | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether a request may not end before its saves: never, because a save ends within its step."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        """Return the layout in which the bytes of a block of one layer are contiguous."""
        return "LBHNC"

    # The worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Make the cache over the tensors that vLLM has allocated for its layers."""
        config, chosen = self._kv_cache_config, self._settings
        pools = engine.pools_of(kv_caches, self._places, self._page_size, config)
        identity = engine.identity_of(chosen, self._vllm_config, config, self._page_size)
        rank, ranks = self._parallel.rank, self._parallel.world_size
        place = str(self._parallel.data_parallel_index) + (f"tp{rank}" if ranks > 1 else "")
        controller = HybridCacheController(
            identity,
            pools,
            HostArena(chosen.host_bytes, min(pool.geometry.padded_nbytes for pool in pools.values())),
            chosen.open(place, self._parallel.data_parallel_size * ranks),
            shard=Shard(rank, ranks),
            options=ControllerOptions(
                policy=chosen.policy,
                storage_deadline=max(1.0, chosen.patience),
                load_or_recompute=chosen.load_or_recompute,
                events=of_rank(chosen.events, self._parallel.data_parallel_index * ranks + rank),
            ),
            profile=profile_for(chosen.profile, identity.model),
        )
        _CACHES[self._key] = EngineCache(controller, pools, chosen.patience)
        _log.info(
            "tiercache: pages of %d tokens; %s; %d bytes on the host; policy %s",
            self._page_size,
            ", ".join(f"{pool} {one.geometry.nbytes} bytes" for pool, one in pools.items()),
            chosen.host_bytes,
            chosen.policy,
        )

    def bind_connector_metadata(self, connector_metadata: v1.KVConnectorMetadata) -> None:
        """Take the work of a step, and the time at its begin."""
        super().bind_connector_metadata(connector_metadata)
        for call in self._get_connector_metadata().calls:
            self._worker(call, None)
        measured, self._pass = self._pass, None
        if measured is not None:
            self._pass = self._worker(lambda cache: _noted(cache, measured), None)
        self._begin = _guarded(_mark, None)

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Begin the loads of this step, which end in the background."""
        for load in self._get_connector_metadata().loads:
            self._worker(partial(EngineCache.load, load=load, fence=_fence), None)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: no pass of the model uses blocks that are being loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Return at once: blocks are saved at the end of the step."""

    def wait_for_save(self) -> None:
        """Copy what this step has completed to the host; vLLM may use its blocks for others afterwards."""
        work = self._get_connector_metadata()
        if work.computed and self._pass is None and self._begin is not None:
            self._pass = _guarded(lambda: (work.computed, self._begin, _mark()), None)
        if saves := work.saves:
            self._worker(partial(EngineCache.save, saves=saves, fence=_fence), None)

    def get_transfer_results(self, finished_req_ids: set[str]) -> v1.KVConnectorTransferResults:
        """Return the requests whose loads have ended, and those that have to compute everything.

        Single blocks are never reported: with several groups vLLM cannot know whose they are.
        """
        done, failed = self._worker(EngineCache.ended, (set[str](), set[str]()))
        saved = {save.request for save in self._get_connector_metadata().saves if save.is_last}
        return v1.KVConnectorTransferResults(saved, finished_recving=done, failed_recving=failed)

    def build_connector_worker_meta(self) -> engine.Answers | None:
        """Return the answers to questions of the scheduler; None if there are none."""
        told = self._worker(EngineCache.answers, None)
        return engine.Answers(told) if told else None

    def get_kv_connector_stats(self) -> engine.CacheStats | None:
        """Return what has been counted since the last call: by the first rank, and bytes by all."""
        if self.role is v1.KVConnectorRole.SCHEDULER:
            return None
        counted = self._worker(EngineCache.counted, {})
        if self._parallel.rank:
            counted = {
                key: by for key, by in counted.items() if key.partition("|")[0].endswith("bytes_total")
            }
        return engine.CacheStats(counted) if counted else None

    def shutdown(self) -> None:
        """Write what is left, and close the store; the first call of scheduler and worker does it."""
        cache = _CACHES.pop(self._key, None)
        if cache is not None:
            cache.close()

    # The scheduler.

    def on_new_request(self, request: Any) -> None:
        """Note a request that may be cached: tokens say what is computed, and stay what they are."""
        told = not request.mm_features and request.prompt_embeds is None and not request.resumable
        if not told or not request.num_tokens:
            return
        name = request.request_id
        self._requests[name] = request
        if 0 < len(self._waiting) < _AHEAD:  # it has to wait, and vLLM does not ask before its turn
            given = {"request": name, "tokens": self._tokens(request), "extra": engine.extra_of(request)}
            _guarded(lambda: self._promises.tell(partial(EngineCache.expect, **given)), None)
        self._waiting.add(name)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded behind those that vLLM has; None to be asked again."""
        if request.request_id not in self._requests:
            return 0, False
        begin, rest = divmod(num_computed_tokens, self._page_size)
        if rest:
            return 0, False
        asked = (request.request_id, self._tokens(request), engine.extra_of(request), begin)
        depth = _guarded(lambda: self._promises.find(*asked), begin)
        if depth is None:
            return None, False
        return (depth - begin) * self._page_size, depth > begin

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks into which the promised tokens are to be loaded."""
        name, pages = request.request_id, num_external_tokens // self._page_size
        self._waiting.discard(name)
        self._saved.pop(name, None)  # its blocks are others than before
        if not num_external_tokens:
            _guarded(lambda: self._promises.decline(name), None)
            return

        def tables() -> dict[PoolName, Locations]:
            given = blocks.get_block_ids()
            return {pool: self._table(given, pool) for pool in self._places}

        # vLLM waits for the load, and has to be told if there will be none.
        self._work.loads.append(self._promises.claim(name, pages, _guarded(tables, {})))

    def _table(self, tables: Any, pool: PoolName) -> Locations:
        """Return the blocks of a request's whole pages: shape [places, pages]; 0 where is none."""
        mine = [
            tables[group][: len(tables[group]) // count * count][number::count]
            for group, number, count in self._places[pool]
        ]
        table = np.zeros((len(mine), max(map(len, mine))), np.int64)
        for row, blocks in zip(table, mine, strict=True):
            row[: len(blocks)] = blocks
        return table

    def build_connector_meta(self, scheduler_output: Any) -> engine.StepWork:
        """Return what the worker loads and saves in the step that vLLM has scheduled."""
        work, self._work = self._work, engine.StepWork()
        _guarded(lambda: self._note_saves(work, scheduler_output), None)
        work.calls = self._promises.take_calls()
        return work

    def _note_saves(self, work: engine.StepWork, scheduler_output: Any) -> None:
        offered = scheduler_output.kv_connector_block_state
        if PoolName.MAMBA in self._places:
            for name, entries in offered.boundary_state_offloads.items():
                self._save_states(work, name, offered.get_block_ids(name), entries)
        for name, count in scheduler_output.num_scheduled_tokens.items():
            request = self._requests.get(name)
            if request is None:
                continue
            known = min(request.num_computed_tokens + count, request.num_tokens)
            if count > 1:
                work.computed.append((request.num_computed_tokens, known))
            depth, saved = known // self._page_size, self._saved.setdefault(name, 0)
            # Of an answer, pages are saved together, and the last ones when it ends.
            least = 1 if count > 1 or PoolName.SWA in self._places else _TOGETHER
            if PoolName.MAMBA not in self._places and depth >= saved + least:
                work.saves += self._save(request, offered.get_block_ids(name), depth, {})

    def _save_states(
        self, work: engine.StepWork, name: str, tables: Any, entries: list[tuple[int, int, int]]
    ) -> None:
        """Save the states that a step completes: (group, block, tokens); each needs a block of each group."""
        request, groups = self._requests.get(name), [place.group for place in self._places[PoolName.MAMBA]]
        found: dict[int, dict[int, int]] = {}
        for group, block, tokens in entries:
            if block and tokens % self._page_size == 0:
                found.setdefault(tokens, {})[group] = block
        states = {
            tokens: np.array([[blocks[n]] for n in groups], np.int64)
            for tokens, blocks in found.items()
            if len(blocks) == len(groups)
        }
        if request is not None and states and max(states) <= request.num_tokens:
            work.saves += self._save(request, tables, max(states) // self._page_size, states)

    def _save(
        self, request: Any, tables: Any, depth: int, states: dict[int, Locations], *, is_last: bool = False
    ) -> list[BlockSave]:
        """Return the save of what is new up to `depth`; none if a block is missing."""
        begin = self._saved.get(request.request_id, 0)
        none = np.zeros((0, depth), np.int64)
        pages, windows = (
            self._table(tables, pool)[:, :depth] if pool in self._places else none
            for pool in (PoolName.KV, PoolName.SWA)
        )
        if not (pages.shape[1] == windows.shape[1] == depth and pages.all()):
            return []
        tokens = self._tokens(request)[begin * self._page_size : depth * self._page_size]
        new = (begin, tokens, engine.extra_of(request), pages[:, begin:], states, windows[:, begin:], is_last)
        self._saved[request.request_id] = depth
        return [BlockSave(request.request_id, *new)]

    def update_connector_output(self, connector_output: Any) -> None:
        """Note what the workers have answered, and which loads have ended on all of them."""
        answers = connector_output.kv_connector_worker_meta
        if answers is not None:
            self._promises.note_answers(answers.told)
        self._promises.note_ended(connector_output.finished_recving or ())

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """Forget a request; its blocks are vLLM's at once, or once the last pages of the answer are saved."""
        name = request.request_id
        if name in self._requests:
            told = (self._promises.tell, request, self._tokens(request))
            _guarded(partial(engine.tell_hints, *told), None)
        is_saved = _guarded(lambda: self._save_last(request, block_ids), False)
        self._waiting.discard(name)
        for known in (self._requests, self._known, self._saved):
            known.pop(name, None)
        _guarded(lambda: self._promises.forget(name, is_told=is_saved), None)
        return is_saved, None

    def _save_last(self, request: Any, tables: Any) -> bool:
        """Save with the next step what a request has computed since its last save; return whether it has."""
        name = request.request_id
        if name not in self._saved or PoolName.MAMBA in self._places:
            return False
        # The last token was sampled, and not computed.
        depth = min(request.num_computed_tokens, request.num_tokens - 1) // self._page_size
        if depth <= self._saved[name]:
            return False
        saves = self._save(request, tables, depth, {}, is_last=True)
        self._work.saves += saves
        return bool(saves)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> engine.CacheStats:
        """Return the object of increments that have come from an engine's process."""
        return engine.CacheStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> engine.CacheMetrics:
        """Return the metrics that vLLM's `/metrics` has beside its own."""
        return engine.CacheMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def reset_cache(self) -> bool:
        """Empty the host, when an operator resets vLLM's prefix cache; the store stays."""
        return _guarded(self._promises.reset, True)

    def _tokens(self, request: Any) -> TokenArray:
        """Return the known tokens of a request; vLLM asks many times about one that waits."""
        known = self._known.get(request.request_id)
        if known is None or len(known) != request.num_tokens:
            known = self._known[request.request_id] = np.array(request.all_token_ids[:], np.uint64)
        return known

    def _worker(self, call: Callable[[EngineCache], T], otherwise: U) -> T | U:
        """Call the cache of this rank."""
        return _guarded(lambda: call(_CACHES[self._key]), otherwise)


def _mark() -> float | torch.cuda.Event:
    """Return the time in seconds, or a point in the device's work whose time is known once it is reached."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    mark.record()
    return mark


def _noted(cache: EngineCache, measured: _Pass) -> _Pass | None:
    """Note a pass if its end is reached; return it if it is not."""
    computed, begin, end = measured
    if not isinstance(end, float) and not end.query():
        return measured
    cache.note_pass(computed, end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3)
    return None


def _fence() -> torch.cuda.Event | None:
    """Return a point behind all that the model has been given to do, for which copies have to wait."""
    return torch.cuda.current_stream().record_event() if torch.cuda.is_available() else None
