"""The class that vLLM calls as its KV connector, once for its scheduler and once for its worker."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
import vllm
from blake3 import blake3
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tiercache.controller import ControllerOptions, HybridCacheController
from tiercache.core import Locations, PoolName, TokenArray
from tiercache.errors import ConfigError
from tiercache.integrations.settings import CacheSettings, StoreSettings, of_rank, profile_for
from tiercache.integrations.vllm_connector.blocks import BlockPool, Reach, WindowPool, bytes_of
from tiercache.integrations.vllm_connector.cache import COUNTED, BlockLoad, BlockSave, EngineCache
from tiercache.integrations.vllm_connector.promises import Call, Promises
from tiercache.keys import Identity, Shard
from tiercache.metrics.table import PREFIX
from tiercache.pools import HostArena
from tiercache.settings import duration, read_section, size

_log = logging.getLogger(__name__)
T = TypeVar("T")
U = TypeVar("U")
_Pass = tuple[list[tuple[int, int]], Any, Any]
"""Pass that is measured: what it computes, and the marks before and behind it."""

PLACE: Final = "kv_connector_extra_config of TierCacheConnector"
"""Name of the settings in error messages."""
RELEASES: Final = ("0.32", "0.33")
"""Releases of vLLM whose connectors are called as this one expects; docs/engines.md says what was run."""
_KINDS: Final = {
    FullAttentionSpec: PoolName.KV,
    MLAAttentionSpec: PoolName.KV,
    SlidingWindowSpec: PoolName.SWA,
    ChunkedLocalAttentionSpec: PoolName.SWA,
    MambaSpec: PoolName.MAMBA,
}
"""Pool of each kind of group."""
_AHEAD: Final = 32
"""Number of waiting requests, at most, whose prompts come to the host before vLLM asks for them."""
_TOGETHER: Final = 64
"""Number of pages of an answer that are saved together."""
_CACHES: Final[dict[str, EngineCache]] = {}
"""Caches by the engine's id: that of the worker, which the scheduler in the same process shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings(StoreSettings, CacheSettings):
    """Settings of the connector, beside those that `tiercache.integrations.settings` explains."""

    host_bytes: Annotated[int, size(1 << 20)] = 4 << 30
    """Host memory for pages and states, taken at the start."""
    patience: Annotated[float, duration(0.0)] = 5.0
    """Time that a request waits for what storage has of its prompt, at most; and a call that hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHints:
    """Hints of a request: `tiercache` in its `kv_transfer_params`, or actions of this type in `kv_hints`."""

    pin: Annotated[float | None, duration(0.0)] = None
    """Time for which the host keeps the prompt; 0 ends that."""
    expected_in: Annotated[float | None, duration(0.0)] = None
    """Time after which a prompt will come that goes on with prompt and answer."""


@dataclass(slots=True)
class StepWork(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has no types
    """Work of the workers in one step."""

    calls: list[Call] = field(default_factory=list)
    loads: list[BlockLoad] = field(default_factory=list)
    saves: list[BlockSave] = field(default_factory=list)
    computed: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of prompts that the step computes."""


@dataclass(slots=True)
class Answers(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM has no types
    """Answers of all workers' `EngineCache.answers` to the scheduler."""

    told: list[tuple[str, int, int]]

    def aggregate(self, other: Answers) -> Answers:
        """Add the answers of another worker."""
        return Answers(self.told + other.told)


class Place(NamedTuple):
    """Place within a page at which a group has a block."""

    group: int
    number: int
    of: int
    """Number of the group's blocks in a page."""


class CacheStats(KVConnectorStats):  # type: ignore[misc]  # vLLM has no types
    """Increments of what the cache counts, which `EngineCache.counted` returns."""

    def reset(self) -> None:
        """Forget all."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: CacheStats) -> CacheStats:
        """Add what another step has counted."""
        for key, by in other.data.items():
            self.data[key] = self.data.get(key, 0.0) + by
        return self

    def reduce(self) -> dict[str, float]:
        """Return what vLLM's log says."""
        said = ("tokens_total", "restored_bytes_total", "written_bytes_total")
        return {key: by for key, by in self.data.items() if by and key.startswith(said)}

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not self.data


class CacheMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM has no types
    """Counters of `tiercache.metrics.table` in vLLM's `/metrics`, with vLLM's labels before their own."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], engines: Any) -> None:
        """`engines` has the values of vLLM's labels by the engine's number."""
        super().__init__(vllm_config, metric_types, labelnames, engines)
        self._counters = {
            row.name: self._counter_cls(PREFIX + row.name, row.help, [*labelnames, *row.label_names])
            for row in COUNTED
        }

    def observe(self, transfer_stats_data: dict[str, float], engine_idx: int = 0) -> None:
        """Add what an engine has counted."""
        for key, by in transfer_stats_data.items():
            name, *labels = key.split("|")
            self._counters[name].labels(*self.per_engine_labelvalues[engine_idx], *labels).inc(by)


class TierCacheConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM has no types
    """Connector of one engine: of its scheduler, or of the worker of one rank.

    Construction raises ConfigError for what cannot be served, in a sentence that says what to change, and
    StorageError for a store that cannot be opened. Later no method raises: a failure is logged, and a miss.

    Thread safety: vLLM's thread for the scheduler and the worker.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = read_section(
            ConnectorSettings, PLACE, self._kv_transfer_config.kv_connector_extra_config
        )
        self._page_size, self._places = _check(vllm_config, kv_cache_config)
        self._key, self._parallel = str(self._kv_transfer_config.engine_id), vllm_config.parallel_config
        self._requests: dict[str, Any] = {}
        self._promises = Promises(self._page_size, self._parallel.world_size, _CACHES.get(self._key))
        self._waiting: set[str] = set()
        """Requests that have not been given blocks."""
        self._known: dict[str, TokenArray] = {}
        self._saved: dict[str, int] = {}
        """Number of leading pages that have been saved of each request that computes."""
        self._work = StepWork()
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
        numbers = {name: n for n, name in enumerate(sorted(kv_caches))}
        pools: dict[PoolName, BlockPool] = {}
        for pool, places in sorted(self._places.items()):
            layers = [list(_layers(place, kv_caches, numbers, config)) for place in places]
            if pool is PoolName.SWA:
                reaches = [_reach(config.kv_cache_groups[place.group], place) for place in places]
                pools[pool] = WindowPool.over_windows(self._page_size, layers, reaches)
            else:
                pools[pool] = BlockPool.over(pool, self._page_size, layers)
        identity = _identity(chosen, self._vllm_config, config, self._page_size)
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

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the work of a step, and the time at its begin."""
        super().bind_connector_metadata(connector_metadata)
        for call in self._get_connector_metadata().calls:
            self._worker(call, None)
        measured, self._pass = self._pass, None
        if measured is not None:
            self._pass = self._worker(lambda cache: _noted(cache, measured), None)
        self._begin = self._guarded(_mark, None)

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Begin the loads of this step, which end in the background."""
        for load in self._get_connector_metadata().loads:
            self._worker(partial(EngineCache.load, load=load, fence=_fence()), None)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: no pass of the model uses blocks that are being loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Return at once: blocks are saved at the end of the step."""

    def wait_for_save(self) -> None:
        """Copy what this step has completed to the host; vLLM may use its blocks for others afterwards."""
        work = self._get_connector_metadata()
        if work.computed and self._pass is None and self._begin is not None:
            self._pass = self._guarded(lambda: (work.computed, self._begin, _mark()), None)
        if saves := work.saves:
            self._worker(partial(EngineCache.save, saves=saves, fence=_fence()), None)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose loads have ended, and those that have to compute everything.

        Single blocks are never reported: with several groups vLLM cannot know whose they are.
        """
        done, failed = self._worker(EngineCache.ended, (set[str](), set[str]()))
        saved = {save.request for save in self._get_connector_metadata().saves if save.is_last}
        return KVConnectorTransferResults(saved, finished_recving=done, failed_recving=failed)

    def build_connector_worker_meta(self) -> Answers | None:
        """Return the answers to questions of the scheduler; None if there are none."""
        told = self._worker(EngineCache.answers, None)
        return Answers(told) if told else None

    def get_kv_connector_stats(self) -> CacheStats | None:
        """Return what has been counted since the last call: by the first rank, and bytes by all."""
        if self.role is KVConnectorRole.SCHEDULER:
            return None
        counted = self._worker(EngineCache.counted, {})
        if self._parallel.rank:
            counted = {
                key: by for key, by in counted.items() if key.partition("|")[0].endswith("bytes_total")
            }
        return CacheStats(counted) if counted else None

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
            given = {"request": name, "tokens": self._tokens(request), "extra": _extra(request)}
            self._guarded(lambda: self._promises.tell(partial(EngineCache.expect, **given)), None)
        self._waiting.add(name)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded behind those that vLLM has; None to be asked again."""
        if request.request_id not in self._requests:
            return 0, False
        begin, rest = divmod(num_computed_tokens, self._page_size)
        if rest:
            return 0, False
        asked = (request.request_id, self._tokens(request), _extra(request), begin)
        depth = self._guarded(lambda: self._promises.find(*asked), begin)
        if depth is None:
            return None, False
        return (depth - begin) * self._page_size, depth > begin

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks into which the promised tokens are to be loaded."""
        name, pages = request.request_id, num_external_tokens // self._page_size
        self._waiting.discard(name)
        self._saved.pop(name, None)  # its blocks are others than before
        if not num_external_tokens:
            self._guarded(lambda: self._promises.decline(name), None)
            return

        def tables() -> dict[PoolName, Locations]:
            given = blocks.get_block_ids()
            return {pool: self._table(given, pool) for pool in self._places}

        # vLLM waits for the load, and has to be told if there will be none.
        self._work.loads.append(self._promises.claim(name, pages, self._guarded(tables, {})))

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

    def build_connector_meta(self, scheduler_output: Any) -> StepWork:
        """Return what the worker loads and saves in the step that vLLM has scheduled."""
        work, self._work = self._work, StepWork()
        self._guarded(lambda: self._note_saves(work, scheduler_output), None)
        work.calls = self._promises.take_calls()
        return work

    def _note_saves(self, work: StepWork, scheduler_output: Any) -> None:
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
        self, work: StepWork, name: str, tables: Any, entries: list[tuple[int, int, int]]
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
        new = (begin, tokens, _extra(request), pages[:, begin:], states, windows[:, begin:], is_last)
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
            self._guarded(lambda: [*map(self._promises.tell, _hinted(request, self._tokens(request)))], None)
        is_saved = self._guarded(lambda: self._save_last(request, block_ids), False)
        self._waiting.discard(name)
        for known in (self._requests, self._known, self._saved):
            known.pop(name, None)
        self._guarded(lambda: self._promises.forget(name, is_told=is_saved), None)
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
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CacheStats:
        """Return the object of increments that have come from an engine's process."""
        return CacheStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> CacheMetrics:
        """Return the metrics that vLLM's `/metrics` has beside its own."""
        return CacheMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def reset_cache(self) -> bool:
        """Empty the host, when an operator resets vLLM's prefix cache; the store stays."""
        return self._guarded(self._promises.reset, True)

    def _tokens(self, request: Any) -> TokenArray:
        """Return the known tokens of a request; vLLM asks many times about one that waits."""
        known = self._known.get(request.request_id)
        if known is None or len(known) != request.num_tokens:
            known = self._known[request.request_id] = np.array(request.all_token_ids[:], np.uint64)
        return known

    def _worker(self, call: Callable[[EngineCache], T], otherwise: U) -> T | U:
        """Call the cache of this rank."""
        return self._guarded(lambda: call(_CACHES[self._key]), otherwise)

    def _guarded(self, call: Callable[[], T], otherwise: U) -> T | U:
        """Make a call; after a failure log it, and answer `otherwise`."""
        try:
            return call()
        except Exception:  # noqa: BLE001
            # whatever a bug raises, vLLM's engine goes on without what the cache could have given
            _log.exception("tiercache: a call failed, and its tokens are computed")
            return otherwise


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


def _hinted(request: Any, tokens: TokenArray) -> list[Call]:
    """Return the call that follows the hints of a request; impossible ones are logged."""
    told = (request.kv_transfer_params or {}).get("tiercache")
    given = dict(told) if isinstance(told, dict) else {}
    for action in request.kv_hints.actions if request.kv_hints else ():
        if action.action_type == "tiercache":
            given |= action.payload
    if not given:
        return []
    try:
        wish = read_section(RequestHints, "the table tiercache of kv_transfer_params", given)
    except ConfigError as error:
        _log.info("tiercache: hints of request %s have no effect: %s", request.request_id, error)
        return []
    known = {"tokens": tokens, "prompt": request.num_prompt_tokens, "extra": _extra(request)}
    return [partial(EngineCache.keep, **known, pin=wish.pin, expected_in=wish.expected_in)]


def _extra(request: Any) -> bytes:
    """Return what a cached prefix depends on besides its tokens: the adapter and the caller's salt."""
    adapter = request.lora_request
    parts = (adapter and (adapter.lora_name, adapter.lora_path), request.cache_salt)
    return repr(parts).encode() if any(parts) else b""


def _layers(
    place: Place, kv_caches: dict[str, torch.Tensor], numbers: dict[str, int], config: Any
) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yield the number, the name and the bytes of each layer at a place, without the padding of blocks."""
    group = config.kv_cache_groups[place.group]
    for name in group.layer_names:
        label = f"{name} {place.number}" if place.of > 1 else name
        yield (numbers[name], label, bytes_of(kv_caches[name], config.num_blocks, _nbytes(group, name), name))


def _spec(group: Any, name: str) -> Any:
    """Return the specification of a layer; those of a group may differ in their sizes."""
    return getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)


def _reach(group: Any, place: Place) -> Reach:
    """Return what a token sees of the blocks at a place of a group with windows or with chunks."""
    spec, cut = _spec(group, group.layer_names[0]), place.of - 1 - place.number
    behind = cut * group.kv_cache_spec.block_size
    if isinstance(spec, SlidingWindowSpec):
        return Reach(spec.sliding_window, cut=behind)
    return Reach(spec.attention_chunk_size, is_chunk=True, cut=behind)


def _nbytes(group: Any, name: str) -> int:
    return int(replace(_spec(group, name), page_size_padded=None).page_size_bytes)


def _identity(settings: ConnectorSettings, config: Any, kv_cache_config: Any, page_size: int) -> Identity:
    """Return the identity of the cache, with a digest of all that vLLM tells of what changes its bytes."""
    model, cache = config.model_config, config.cache_config
    dtype = str(model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype).removeprefix("torch.")
    facts = [
        vllm.__version__,
        [str(model.dtype), model.quantization, model.max_model_len, model.revision],
        model.hf_config.to_json_string(),
        [cache.cache_dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype],
        kv_cache_config.kv_cache_layout,
        [(repr(group.kv_cache_spec), list(group.layer_names)) for group in kv_cache_config.kv_cache_groups],
    ]
    digest = blake3(repr(facts).encode()).hexdigest(16)
    return replace(
        settings.identity(str(model.model), dtype, page_size), weights_dtype=f"as by settings {digest}"
    )


def _check(config: Any, kv_cache_config: Any) -> tuple[int, dict[PoolName, list[Place]]]:
    """Return the tokens of a page, and the places of each pool; ConfigError for what is not served."""
    transfer, parallel, cache = config.kv_transfer_config, config.parallel_config, config.cache_config
    groups = kv_cache_config.kv_cache_groups
    specs = [{type(_spec(group, name)) for name in group.layer_names} for group in groups]
    kinds = [_KINDS[kind] for kind in set().union(*specs) if kind in _KINDS]
    others = sorted(kind.__name__ for kind in set().union(*specs) if kind not in _KINDS)
    sizes = [group.kv_cache_spec.block_size for group in groups]
    cannot = {
        f"vLLM {vllm.__version__}, but {' and '.join(RELEASES)}": not vllm.__version__.startswith(
            tuple(f"{release}." for release in RELEASES)
        ),
        "a kv_load_failure_policy other than recompute": transfer.kv_load_failure_policy != "recompute",
        "a kv_role other than kv_both": transfer.kv_role != "kv_both",
        "pipeline or context parallelism": parallel.world_size != parallel.tensor_parallel_size
        or parallel.decode_context_parallel_size > 1,
        f"--distributed-executor-backend {parallel.distributed_executor_backend}, but uni and mp": (
            parallel.distributed_executor_backend not in ("uni", "mp")
        ),
        "speculative decoding": config.speculative_config is not None,
        "--enable-sleep-mode": config.model_config.enable_sleep_mode,
        "a server without --enable-prefix-caching": not cache.enable_prefix_caching,
        f"groups of layers of the kind {', '.join(others)}": bool(others),
        "a --mamba-cache-mode other than align": PoolName.MAMBA in kinds
        and cache.mamba_cache_mode != "align",
        # vLLM resets the size there after the start, and then takes no state where a block ends.
        f"states on a CPU without --block-size; start vLLM with --block-size {max(sizes)}": (
            PoolName.MAMBA in kinds and current_platform.is_cpu() and not cache.user_specified_block_size
        ),
    }
    for what, asked in cannot.items():
        if asked:
            raise ConfigError(f"TierCacheConnector does not serve {what}")
    page, places = math.lcm(*sizes), dict[PoolName, list[Place]]()
    for n, kind in enumerate(specs):
        pool, count = _KINDS[next(iter(kind))], page // sizes[n]
        # A recurrent state stands at the end of a page.
        first = count - 1 if pool is PoolName.MAMBA else 0
        places.setdefault(pool, []).extend(Place(n, number, count) for number in range(first, count))
    return page, places
