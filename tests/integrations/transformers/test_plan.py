"""Prefills in chunks, and the plan of a request: `Worker(chunk_limit=...)` and `Worker.plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.examples import slow_after
from tests.integrations.transformers.models import FAMILIES, PAGE, loaded, prompt
from tests.integrations.transformers.serving import (
    EVICTED,
    SYSTEM,
    context_of,
    evict,
    joined,
    right,
    serving,
    store,
)
from tiercache.core import PoolName, Tier
from tiercache.errors import InputError, TokenError
from tiercache.index import Chunk
from tiercache.integrations.transformers import RequestPlan
from tiercache.integrations.transformers.stream import TorchStream
from tiercache.integrations.transformers.worker import Worker
from tiercache_lab.demo.audit import Audit

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT = 2 * PAGE
BEGINNING = prompt(5 * PAGE + 3, seed=1)
LONGER = joined(BEGINNING, prompt(4 * PAGE, seed=2))


@pytest.mark.parametrize("name", slow_after(2, ["qwen3_next", "llama", "bamba", "falcon_h1", "jamba"]))
def test_a_prefill_in_chunks_is_planned_and_equals_its_recompute(name: str, tmp_path: Path) -> None:
    """From nothing, and then what a longer prompt has beyond the part that each of the tiers restores."""
    has_states = FAMILIES[name].states
    audit = Audit(loaded(name)[0], page_slots=256, state_slots=64)
    with serving(name, store(tmp_path), chunk_limit=LIMIT) as worker:
        for tier in (None, *Tier):
            extra = str(tier).encode()
            if tier is not None:
                worker.serve(BEGINNING, 1, extra=extra)
                evict(worker, *EVICTED[tier])
            tokens, depth = (LONGER, 5 * PAGE) if tier is not None else (BEGINNING, 0)
            lookups = worker.controller.metrics.total("lookups_total")
            plan = worker.plan(tokens, 2, extra=extra)
            assert plan == worker.plan(tokens, 2, extra=extra)
            assert context_of(worker).in_flight.count("query") == 0, "storage is not asked"
            assert worker.controller.metrics.total("lookups_total") == lookups
            generation = worker.serve(tokens, 2, extra=extra, audit=True)
            assert generation.tier is tier
            assert plan.restored == generation.restored == depth
            ends = tuple(chunk.end for chunk in plan.chunks)
            assert generation.bounds[: len(ends)] == ends
            assert ends == (
                (7 * PAGE, 9 * PAGE, len(LONGER)) if depth else
                (LIMIT, 2 * LIMIT, 5 * PAGE, len(BEGINNING)) if has_states else
                (LIMIT, 2 * LIMIT, len(BEGINNING))
            )  # fmt: skip
            assert plan.checkpoints == generation.states == (ends[-2:-1] if has_states else ())
            right(audit, worker, generation)
        worker.controller.check_integrity()


def test_the_branch_and_the_limit_cut_the_same_prefill() -> None:
    audit = Audit(loaded("qwen3_next")[0], page_slots=64, state_slots=16)
    with serving("qwen3_next", chunk_limit=3 * PAGE) as worker:
        for seed in (2, 3):
            tokens = joined(SYSTEM, prompt(5 * PAGE, seed))
            plan = worker.plan(tokens)
            generation = worker.serve(tokens, 1)
            right(audit, worker, generation)
            assert tuple(chunk.end for chunk in plan.chunks) == generation.bounds
    assert plan.chunks == (
        Chunk(0, 2 * PAGE, checkpoint=True),
        Chunk(2 * PAGE, 5 * PAGE),
        Chunk(5 * PAGE, 7 * PAGE, checkpoint=True),
        Chunk(7 * PAGE, len(tokens)),
    )
    assert generation.states == plan.checkpoints == (2 * PAGE, 7 * PAGE)


def test_bytes_that_were_computed_in_other_chunks_are_restored_exactly(tmp_path: Path) -> None:
    audit = Audit(loaded("qwen3_next")[0], page_slots=128, state_slots=32)
    history = BEGINNING.tolist()
    for restored, limit in ((0, None), (5 * PAGE, PAGE), (10 * PAGE, 3 * PAGE)):
        with serving("qwen3_next", store(tmp_path), chunk_limit=limit) as worker:
            generation = worker.serve(history, 2, audit=True)
            assert generation.restored == restored
            right(audit, worker, generation)
            history = joined(history, prompt(5 * PAGE, seed=restored + 7))
            assert worker.controller.flush()


class Watching(TorchStream):
    """A stream that notes, when the prefill begins, how many slots of each pool are in use."""

    def __init__(self) -> None:
        self.seen: list[dict[PoolName, int]] = []
        self.worker: Worker | None = None

    def mark(self) -> Any:
        assert self.worker is not None
        pools = context_of(self.worker).device
        self.seen.append({name: pool.capacity - pool.available for name, pool in pools.items()})
        return super().mark()


@pytest.mark.parametrize("name", ["qwen3_next", "llama", pytest.param("inkling", marks=pytest.mark.slow)])
def test_the_slots_of_a_plan_are_those_that_the_request_takes(name: str) -> None:
    stream = Watching()
    geometries = loaded(name)[0].layout.geometries
    with serving(name, stream=stream) as worker:
        stream.worker = worker
        for restored in (0, 5 * PAGE):
            evict(worker, Tier.DEVICE)
            plan = worker.plan(BEGINNING, PAGE)
            stream.seen.clear()
            assert worker.serve(BEGINNING, PAGE).restored == restored
            pools = FAMILIES[name].states
            assert stream.seen[0] == {PoolName.KV: plan.pages} | dict.fromkeys(pools, plan.states)
            assert plan.pages == 7
            assert plan.page_bytes == 7 * geometries[PoolName.KV].nbytes
            assert plan.state_bytes == plan.states * sum(geometries[pool].nbytes for pool in pools)
        assert bool(plan.states) == bool(FAMILIES[name].states)


def test_a_plan_is_readable() -> None:
    plan = RequestPlan(
        75, (Chunk(16, 32), Chunk(32, 64, checkpoint=True), Chunk(64, 75)), 5, 6, 5 << 10, 6 << 20
    )
    assert str(plan) == (
        "16 of 75 tokens restored, the rest computed up to 32, 64 (state), 75; on the device: pages 5"
        " (5.0 KiB), states 6 (6.0 MiB)"
    )
    without = RequestPlan(3, (Chunk(0, 3),), 1, 0, 1 << 10, 0)
    assert (
        str(without) == "0 of 3 tokens restored, the rest computed up to 3; on the device: pages 1 (1.0 KiB)"
    )


def test_a_plan_refuses_what_a_request_refuses() -> None:
    with serving("llama") as worker:
        for tokens, count, extra in (([], 1, b""), ([1 << 30], 1, b""), ([1] * (1 << 20), 1, b"")):
            with pytest.raises(TokenError):
                worker.plan(tokens, count, extra=extra)
        with pytest.raises(InputError, match="new_tokens is 0"):
            worker.plan([1], 0)
        with pytest.raises(InputError, match="extra"):
            worker.plan([1], extra="tenant")  # type: ignore[arg-type]
