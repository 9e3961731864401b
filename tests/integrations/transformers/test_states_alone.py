"""Models that keep states alone, through device, host and a real `file` store."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache

from tests.examples import slow_after
from tests.integrations.transformers.alone import build, loaded, serving, wrong_state
from tests.integrations.transformers.models import PAGE, prompt
from tests.integrations.transformers.serving import EVICTED, evict, joined, right, settle, store, tiers_of
from tests.integrations.transformers.sweep import small
from tests.integrity import check_controller
from tiercache.core import PoolName, Tier
from tiercache.errors import ConfigError, SlotError, TokenError, UnsupportedModelError
from tiercache.integrations.transformers import Generation, ModelRunner, Request
from tiercache.integrations.transformers.arguments import split_device_bytes
from tiercache.integrations.transformers.layout import StateCache
from tiercache_lab.demo.audit import Audit

SERVED = ["mamba2", "mistral", "mamba", "falcon_mamba"]
EACH = slow_after(2, SERVED)
CASES = slow_after(
    2,
    [
        (model, page, dtype)
        for page, dtype in (
            (64, torch.bfloat16), (16, torch.float32), (1, torch.float32), (256, torch.bfloat16),
        )
        for model in SERVED
    ],
)  # fmt: skip


@pytest.mark.parametrize("name", EACH)
def test_the_layout_has_states_and_no_pages(name: str) -> None:
    runner, report = loaded(name)
    has_windows = name == "mistral"
    assert set(runner.layout.geometries) == {PoolName.SWA if has_windows else PoolName.MAMBA}
    assert not runner.layout.has_pages
    assert isinstance(runner.new_cache(), StateCache) != has_windows, "windows count their tokens"
    assert "kv" not in report.reactions
    cache = runner.new_cache()
    runner.forward(cache, prompt(7, 1), 0)
    assert runner.layout.length(cache) == 7
    with pytest.raises(TokenError, match="the cache holds 7 tokens"):
        runner.forward(cache, [1], 8)


@pytest.mark.parametrize(("name", "page", "dtype"), slow_after(1, CASES))
def test_a_restored_conversation_equals_its_recompute(name, page, dtype, tmp_path):
    """From a file store, with device and host emptied: every state, logit and token, to the last bit."""
    with serving(name, store(tmp_path), page=page, dtype=dtype) as worker:
        audit = Audit(worker.runner, page_slots=1, state_slots=40)
        first = worker.serve(prompt(2 * page + 21, 1), page + 4 if page < 100 else 4, audit=True)
        right(audit, worker, first)
        for seed, tier in enumerate((Tier.DEVICE, Tier.HOST, Tier.STORAGE), 2):
            again = joined(first.tokens, prompt(5, seed))
            evict(worker, *EVICTED[tier])
            second = worker.serve(again, 2, audit=True)
            # With pages of one token, the prompt before this one has left a state where it left the first.
            assert second.restored - first.states[-1] in ((0, 1) if page == 1 else (0,))
            assert tiers_of(second) == {tier}
            right(audit, worker, second)
        worker.synchronize()
        settle(worker)
        check_controller(worker.controller)


@pytest.mark.parametrize("name", slow_after(1, EACH))
def test_a_branch_restores_where_the_prompts_part(name: str, tmp_path: Path) -> None:
    with serving(name, store(tmp_path)) as worker:
        audit = Audit(worker.runner, page_slots=1, state_slots=40)
        system = prompt(2 * PAGE + 5, 1)
        for seed, restored in ((2, 0), (3, 0), (4, 2 * PAGE)):
            generation = worker.serve(joined(system, prompt(20, seed)), 1, audit=True)
            assert generation.restored == restored
            right(audit, worker, generation)
            evict(worker, Tier.DEVICE, Tier.HOST)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("dtype", slow_after(1, [torch.float32, torch.bfloat16]))
def test_a_wrong_state_changes_the_logits(name: str, dtype: torch.dtype) -> None:
    runner, report = loaded(name, PAGE, dtype)
    nothing, foreign = wrong_state(runner, 4 * PAGE)
    assert min(nothing, foreign) > report.tolerance


def test_bytes_that_hold_no_request() -> None:
    layout = loaded("mamba2")[0].layout
    state = layout.state_geometries[PoolName.MAMBA].nbytes
    assert split_device_bytes(20 * state + 1, layout) == (0, 20)
    with pytest.raises(ConfigError, match="7 states and 0 pages of this model take"):
        split_device_bytes(7 * state - 1, layout)


def test_a_restore_needs_a_state_and_its_depth() -> None:
    runner = loaded("mamba2")[0]
    pool = runner.allocate_pools(5, 2)
    assert (pool.page_slots, pool.state_slots) == (0, 2)
    for slots, state, tokens in (((), 0, None), ((), 0, 0), ((0,), 0, PAGE)):
        with pytest.raises(SlotError):
            runner.restore(pool, slots, state, tokens=tokens)
    assert runner.layout.length(runner.restore(pool, (), 0, tokens=3 * PAGE)) == 3 * PAGE
    assert runner.layout.length(runner.restore(pool, (), None)) == 0


@pytest.mark.parametrize(("model_type", "message"), [("rwkv", "takes no"), ("xlstm", "cannot")])
def test_a_cache_of_a_model_s_own_is_refused(model_type: str, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ModelRunner(small(model_type), PAGE)


def test_a_model_that_returns_another_cache_than_it_was_given() -> None:
    model = build("mamba2")
    forward = model.forward

    def other(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.cache_params = DynamicCache(config=model.config)
        return out

    other.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    model.forward = other
    with pytest.raises(UnsupportedModelError, match="does not return the cache that it was given"):
        ModelRunner(model, PAGE)


def test_prompts_may_be_shorter_than_a_page() -> None:
    with serving("mamba2", page=64) as worker:
        audit = Audit(worker.runner, page_slots=1, state_slots=8)
        for n in range(1, 4):
            generation = worker.serve(np.arange(n), 2, audit=True)
            assert (generation.restored, generation.states) == (0, ())
            right(audit, worker, generation)
        check_controller(worker.controller)


@pytest.mark.parametrize("name", slow_after(1, ["mistral", "mamba2", "mamba"]))
def test_requests_in_turns_give_what_each_gives_alone(name: str, tmp_path: Path) -> None:
    with serving(name, store(tmp_path)) as worker:
        turns = worker.serve_all([Request(prompt(3 * PAGE + 3, seed), PAGE + 9) for seed in (2, 3)])
        for seed, answer in zip((2, 3), turns, strict=True):
            assert isinstance(answer, Generation)
            alone = worker.serve(prompt(3 * PAGE + 3, seed), PAGE + 9)
            assert np.array_equal(alone.tokens, answer.tokens)
            assert (alone.restored, answer.states) == (3 * PAGE, (3 * PAGE, 4 * PAGE))
        check_controller(worker.controller)
