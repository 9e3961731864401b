"""vLLM's own manager, primary tier, shared region and factory over a tier of ours, driven as it does."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tests.waiting import until
from tiercache.integrations.vllm import TierCacheTier
from tiercache.storage.base import StorageBackend

HIT, MISS = LookupResult.HIT, LookupResult.MISS
RETRY, HIT_PENDING = LookupResult.RETRY, LookupResult.HIT_PENDING
ROWS = 8
WORKER_BYTES = 12_000
ROW = 12_288
"""Bytes of a row: what the worker has for a block, rounded up to pages."""
FULL, WINDOW = 0, 2
"""Indices of groups as vLLM counts them; its group 1 is one that it does not offload."""
LAYERS = {FULL: ("layers.0", "layers.2"), WINDOW: ("layers.1",)}

SIZES = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size")
PARALLEL = OffloadingParallelConfig(
    rank=0,
    data_parallel_index=0,
    data_parallel_rank_local=None,
    is_parallelism_agnostic=False,
    **dict.fromkeys(SIZES, 1),
)


def groups(*, window: int = 1, **changes: Any) -> tuple[OffloadingGroupConfig, ...]:
    """A full group and one with a window of some chunks; `changes` to the first."""
    full = {"tokens_per_block": 16, "layer_names": LAYERS[FULL], "group_id": FULL} | changes
    return OffloadingGroupConfig(**full), OffloadingGroupConfig(16, LAYERS[WINDOW], WINDOW, window)


def config(tier: dict[str, Any], **changes: Any) -> OffloadingConfig:
    """Make vLLM's configuration; `changes` replaces fields of it or of its parts by their names."""
    parallel = {name: changes.pop(name) for name in tuple(changes) if hasattr(PARALLEL, name)}
    rows = changes.pop("rows", ROWS)
    named = {"type": "TierCacheTier", "module_path": "tiercache.integrations.vllm"} | tier
    fields: dict[str, Any] = {
        "groups": groups(),
        "worker_kv_bytes_per_block": WORKER_BYTES,
        "enable_kv_cache_events": False,
        "engine_id": f"tiercache-{uuid.uuid4().hex}",
        "model": OffloadingModelConfig(
            name=changes.pop("model", "some/model"),
            dtype=changes.pop("dtype", "bfloat16"),
            max_model_len=changes.pop("max_model_len", 4096),
        ),
        "cache": OffloadingCacheConfig(
            tokens_per_hash=16, blocks_per_chunk=changes.pop("blocks_per_chunk", 1)
        ),
        "parallel": OffloadingParallelConfig(**(vars(PARALLEL) | parallel)),
        "kv_cache_layout": "LBNHC",
    } | changes
    each = fields["worker_kv_bytes_per_block"] * fields["cache"].blocks_per_chunk
    row = -(-each * fields["parallel"].world_size // 4096) * 4096
    return OffloadingConfig(
        extra_config={"cpu_bytes_to_use": rows * row, "secondary_tiers": [named]}, **fields
    )


def key(name: object, group: int = FULL) -> OffloadKey:
    return make_offload_key(random.Random(f"hash of {name}").randbytes(32), group)


def keys(*names: object, group: int = FULL) -> list[OffloadKey]:
    return [key(name, group) for name in names]


def content(name: object, size: int = ROW) -> bytes:
    """Make the bytes of the row of this name: random, so that a misplaced part is noticed."""
    return random.Random(f"content of {name}").randbytes(size)


class Engine:
    """A scheduler's side of vLLM, without a GPU: `store` and `read` copy to and from rows as workers do."""

    def __init__(self, tier: dict[str, Any], **changes: Any) -> None:
        self.spec = TieringOffloadingSpec(config(tier, **changes))
        self.manager: Any = self.spec.get_manager()
        self.tier: TierCacheTier = self.manager.secondary_tiers[0]
        self.region = self.spec._scheduler_mmap
        self.requests = 0

    def request(self) -> ReqContext:
        self.requests += 1
        context = ReqContext(f"request {self.requests}")
        self.manager.on_new_request(context)
        return context

    def finish(self, context: ReqContext) -> None:
        self.manager.on_request_finished(context)

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    @property
    def jobs(self) -> Any:
        """The jobs of which the manager has no result yet, by number."""
        # private: vLLM tells nobody which jobs are under way
        return self.manager._jobs

    def settle(self, condition: Callable[[], bool] | None = None) -> None:
        """Step until no transfer is under way, or until something is so."""

        def settled() -> bool:
            self.step()
            self.manager._maybe_process_finished_jobs()
            return not self.jobs if condition is None else condition()

        until(settled, every=0.002)

    def offer(
        self, wanted: Sequence[OffloadKey], names: Iterable[object], context: ReqContext | None = None
    ) -> ReqContext:
        """The GPU has computed these blocks: bring them into the primary tier, which passes them on."""
        context = context or self.request()
        for i, each in enumerate(wanted):
            if context.get_offload_key_position(each) is None:
                context.set_offload_key_position(each, 16 * (i + 1))
        ready = self.manager.prepare_store(wanted, context)
        assert ready is not None, "the primary tier is full"
        named = dict(zip(wanted, names, strict=True))
        for each, chunk in zip(ready.keys_to_store, ready.store_spec.chunk_ids, strict=True):
            self.write(int(chunk), content(named[each], self.row_bytes))
        self.manager.complete_store(ready.keys_to_store, context)
        return context

    def store(self, *names: object, group: int = FULL) -> None:
        """Offer blocks as `offer` does, wait until all transfers have ended, and finish the request."""
        context = self.offer(keys(*names, group=group), names)
        self.settle()
        self.finish(context)

    def evict(self) -> None:
        """Empty the primary tier; what is below stays."""
        self.manager.reset_cache()
        self.manager.on_reset_flushed()

    def answers(
        self, wanted: Sequence[OffloadKey], context: ReqContext | None = None
    ) -> list[list[LookupResult]]:
        """Look keys up step by step until all are HIT or MISS; return each change of the answers."""
        mine = context or self.request()
        said: list[list[LookupResult]] = []

        def final() -> bool:
            now = [self.manager.lookup(each, mine) for each in wanted]
            if not said or said[-1] != now:
                said.append(now)
            self.step()
            return {RETRY, HIT_PENDING}.isdisjoint(now)

        until(final, every=0.002)
        if context is None:
            self.finish(mine)
        return said

    def found(self, *names: object, group: int = FULL) -> list[bool]:
        """Look names up until the answers are final; return which hit, after a check of their bytes."""
        wanted = keys(*names, group=group)
        last = [said is HIT for said in self.answers(wanted)[-1]]
        for name, each, there in zip(names, wanted, last, strict=True):
            if there:
                assert self.read(each) == content(name, self.row_bytes), f"{name} came back wrong"
        return last

    def read(self, wanted: OffloadKey) -> bytes:
        context = ReqContext("reader")
        [chunk] = self.manager.prepare_load([wanted], context).chunk_ids
        with memoryview(self.manager.primary_tier.get_kv_memoryview()).cast("B") as flat:
            data = bytes(flat[int(chunk) * self.row_bytes : (int(chunk) + 1) * self.row_bytes])
        self.manager.complete_load([wanted], context)
        return data

    def write(self, chunk: int, data: bytes) -> None:
        with memoryview(self.manager.primary_tier.get_kv_memoryview()).cast("B") as flat:
            flat[chunk * self.row_bytes : (chunk + 1) * self.row_bytes] = data

    def memory(self) -> bytes:
        return self.manager.primary_tier.get_kv_memoryview().tobytes()

    @property
    def row_bytes(self) -> int:
        return self.tier.block_size_bytes

    def close(self) -> None:
        self.manager.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def store_of(engine: Engine) -> StorageBackend:
    # private: the plug-in shows its store to nobody
    return engine.tier._store


def job(number: int, wanted: Sequence[bytes], chunks: Sequence[int], *, load: bool = False) -> TransferJob:
    """A job as the manager makes it, or never would."""
    return TransferJob(number, wanted, np.array(chunks, np.int32), load, ReqContext("a job"))


def outcome(tier: TierCacheTier, number: int) -> Any:
    """The result of one job, once it is there; nothing else may end."""
    results: list[Any] = []
    until(lambda: results.extend(tier.get_finished_jobs()) or results, every=0.002)
    [result] = results
    assert result.job_id == number
    return result
