"""vLLM's side: settings, layers, identity by its configuration; messages of its processes; hints, metrics."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Final, NamedTuple

import torch
import vllm
from blake3 import blake3
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.platforms import current_platform
from vllm.v1 import kv_cache_interface as kv_specs

from tiercache.core import PoolName, TokenArray
from tiercache.errors import ConfigError
from tiercache.integrations.settings import CacheSettings, StoreSettings
from tiercache.integrations.vllm_connector.blocks import BlockPool, Reach, WindowPool, bytes_of
from tiercache.integrations.vllm_connector.cache import COUNTED, BlockLoad, BlockSave, EngineCache
from tiercache.integrations.vllm_connector.promises import Call
from tiercache.keys import Identity
from tiercache.metrics.table import PREFIX
from tiercache.settings import duration, read_section, size

_log = logging.getLogger(__name__)

PLACE: Final = "kv_connector_extra_config of TierCacheConnector"
"""Name of the settings in error messages."""
RELEASES: Final = ("0.32", "0.33")
"""Releases of vLLM whose connectors are called as this one expects; docs/engines.md says what was run."""
_KINDS: Final = {
    kv_specs.FullAttentionSpec: PoolName.KV,
    kv_specs.MLAAttentionSpec: PoolName.KV,
    kv_specs.SlidingWindowSpec: PoolName.SWA,
    kv_specs.ChunkedLocalAttentionSpec: PoolName.SWA,
    kv_specs.MambaSpec: PoolName.MAMBA,
}
"""Pool of each kind of group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings(StoreSettings, CacheSettings):
    """Settings of the connector, beside those that `tiercache.integrations.settings` explains."""

    host_bytes: Annotated[int, size(1 << 20)] = 4 << 30
    """Host memory for pages and states, taken at the start."""
    patience: Annotated[float, duration(0.0)] = 5.0
    """Time that a request waits for what storage has of its prompt, at most; and a call that hangs."""


class Place(NamedTuple):
    """Place within a page at which a group has a block."""

    group: int
    number: int
    of: int
    """Number of the group's blocks in a page."""


Places = Mapping[PoolName, Sequence[Place]]
"""Places of the groups of each pool."""


def pools_of(
    kv_caches: dict[str, torch.Tensor], places: Places, page_size: int, config: Any
) -> dict[PoolName, BlockPool]:
    """Return the pools over the tensors of vLLM's layers; ConfigError for blocks that are not contiguous."""
    numbers = {name: n for n, name in enumerate(sorted(kv_caches))}
    pools: dict[PoolName, BlockPool] = {}
    for pool, at in sorted(places.items()):
        layers = [list(_layers(place, kv_caches, numbers, config)) for place in at]
        if pool is PoolName.SWA:
            reaches = [_reach(config.kv_cache_groups[place.group], place) for place in at]
            pools[pool] = WindowPool.over_windows(page_size, layers, reaches)
        else:
            pools[pool] = BlockPool.over(pool, page_size, layers)
    return pools


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
    if isinstance(spec, kv_specs.SlidingWindowSpec):
        return Reach(spec.sliding_window, cut=behind)
    return Reach(spec.attention_chunk_size, is_chunk=True, cut=behind)


def _nbytes(group: Any, name: str) -> int:
    return int(replace(_spec(group, name), page_size_padded=None).page_size_bytes)


def identity_of(settings: ConnectorSettings, config: Any, kv_cache_config: Any, page_size: int) -> Identity:
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


def checked(config: Any, kv_cache_config: Any) -> tuple[int, Places]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHints:
    """Hints of a request: `tiercache` in its `kv_transfer_params`, or actions of this type in `kv_hints`."""

    pin: Annotated[float | None, duration(0.0)] = None
    """Time for which the host keeps the prompt; 0 ends that."""
    expected_in: Annotated[float | None, duration(0.0)] = None
    """Time after which a prompt will come that goes on with prompt and answer."""


def tell_hints(tell: Callable[[Call], None], request: Any, tokens: TokenArray) -> None:
    """Tell the workers of the hints of a request that is over, if there are any; wrong ones are logged."""
    told = (request.kv_transfer_params or {}).get("tiercache")
    given = dict(told) if isinstance(told, dict) else {}
    for action in request.kv_hints.actions if request.kv_hints else ():
        if action.action_type == "tiercache":
            given |= action.payload
    if not given:
        return
    try:
        wish = read_section(RequestHints, "the table tiercache of kv_transfer_params", given)
    except ConfigError as error:
        _log.info("tiercache: hints of request %s have no effect: %s", request.request_id, error)
        return
    known = {"tokens": tokens, "prompt": request.num_prompt_tokens, "extra": extra_of(request)}
    tell(partial(EngineCache.keep, **known, pin=wish.pin, expected_in=wish.expected_in))


def extra_of(request: Any) -> bytes:
    """Return what a cached prefix depends on besides its tokens: the adapter and the caller's salt."""
    adapter = request.lora_request
    parts = (adapter and (adapter.lora_name, adapter.lora_path), request.cache_salt)
    return repr(parts).encode() if any(parts) else b""
