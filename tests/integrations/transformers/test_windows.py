"""Windows as states: what a layer keeps below, at and above its window comes back to the last bit."""

from __future__ import annotations

import functools
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from tests.examples import slow_after
from tests.integrations.transformers.models import PAGE, WINDOW, build, prompt
from tests.integrations.transformers.serving import AMPLE, context_of, evict, right, store
from tests.integrations.transformers.test_probe import max_error, spoiled
from tests.integrity import check_controller
from tiercache.controller import ControllerOptions
from tiercache.core import PoolName, Tier
from tiercache.errors import ConfigError, SlotError, UnsupportedModelError
from tiercache.integrations.transformers import ModelRunner, ProbeReport, differences, load
from tiercache.integrations.transformers.arguments import split_device_bytes
from tiercache.integrations.transformers.worker import Worker
from tiercache_lab.demo.audit import Audit

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWS = {"gemma3": "sliding_window", "gpt_oss": "sliding_window", "llama4": "attention_chunk_size",
           "inkling": "sliding_window_size"}  # fmt: skip
"""The name of the window in the configuration of each family."""
TOKENS = prompt(640, 5)


@functools.cache
def _runner(name: str, window: int, page: int, dtype: torch.dtype) -> ModelRunner:
    return ModelRunner(build(name, **{WINDOWS[name]: window}).to(dtype), page)


# (window, page, depths): below the window, on it as far as pages allow, above, far above.
DEPTHS = [
    (41, 1, (1, 2, 39, 40, 41, 42, 100)), (41, 7, (7, 35, 42, 49)), (33, 16, (16, 32, 48, 96)),
    (41, 16, (16, 32, 48, 96)), (65, 64, (64, 128)), (100, 64, (64, 128)), (300, 256, (256, 512)),
    (2, 16, (16, 48)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype", "case"),
    slow_after(
        6,
        [
            ("gemma3", torch.float32, DEPTHS[0]), ("gemma3", torch.bfloat16, DEPTHS[3]),
            ("inkling", torch.float32, DEPTHS[3]), ("llama4", torch.float32, DEPTHS[1]),
            ("gpt_oss", torch.bfloat16, DEPTHS[2]), ("gemma3", torch.float32, DEPTHS[6]),
            *product(("gemma3", "inkling"), (torch.float32, torch.bfloat16), DEPTHS),
        ],
    ),
)  # fmt: skip
def test_a_restored_window_continues_bit_for_bit(name, dtype, case):
    """From slots that held something else before, with a chunk and with single tokens after the restore."""
    window, page, depths = case
    runner = _runner(name, window, page, dtype)
    for depth in depths:
        pages = depth // page
        pool = runner.allocate_pools(pages, 2)
        for tensor in pool.states.values():
            tensor.fill_(7)
        cold = runner.new_cache()
        runner.forward(cold, TOKENS[:depth], 0)
        runner.export_pages(cold, pool, 0, np.arange(pages))
        runner.export_state(cold, pool, 1)
        held = pool.of(PoolName.SWA)
        assert held
        for tensor in held.values():
            assert tensor.shape[2] == window - 1
            assert not tensor[1, :, depth:].any(), "what the window does not hold yet is zero"
            assert tensor[1, :, : min(depth, window - 1)].any()
        hot = runner.restore(pool, np.arange(pages), 1)
        for start, end in ((depth, depth + 3), (depth + 3, depth + 4), (depth + 4, depth + 60)):
            assert torch.equal(
                runner.forward(cold, TOKENS[start:end], start), runner.forward(hot, TOKENS[start:end], start)
            )
            assert differences(runner.layout, hot, cold) == ()


def _worker(model: Any, page: int, path: Path) -> Worker:
    return Worker(
        model, device_bytes=AMPLE, host_bytes=AMPLE, storage=store(path), page_size=page,
        options=ControllerOptions(restore_deadline=30.0, load_or_recompute=False),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "page", "dtype"),
    slow_after(
        1,
        [
            ("gemma3", 16, torch.float32), ("gemma3", 1, torch.float32), ("inkling", 16, torch.float32),
            ("llama4", 64, torch.float32), ("gpt_oss", 256, torch.bfloat16), ("inkling", 7, torch.float32),
        ],
    ),
)  # fmt: skip
def test_turns_across_the_window_come_back_from_disk(name, page, dtype, tmp_path):
    """Turns begin with empty tiers; answers cross the window, so that states of decoding are used."""
    model = build(name).to(dtype)
    with _worker(model, page, tmp_path) as worker:
        audit = Audit(worker.runner, page_slots=2048, state_slots=512)
        tokens = prompt(max(page + 2, 20), 3).tolist()
        answers = min(max(page, 16), 64)
        for turn in range(3):
            generation = worker.serve(tokens, answers, audit=True)
            right(audit, worker, generation)
            expected = 0 if turn == 0 else (len(tokens) - 6) // page * page
            assert generation.restored == expected
            assert generation.tier is (Tier.STORAGE if turn else None)
            tokens = [*generation.tokens.tolist(), *prompt(5, 50 + turn).tolist()]
            evict(worker, Tier.DEVICE, Tier.HOST)
        assert len(tokens) > WINDOW
        check_controller(worker.controller)
        pools = worker.runner.layout.geometries
        assert PoolName.SWA in pools
        held = {entry.key.pool for entry in context_of(worker).storage.backend.scan_all()}
        assert held == set(pools)


def test_each_state_pool_needs_its_slot() -> None:
    runner = ModelRunner(build("inkling"), PAGE)
    pool, cache = runner.allocate_pools(2, 3), runner.new_cache()
    runner.forward(cache, TOKENS[:PAGE], 0)
    with pytest.raises(SlotError, match="needs a slot of each of mamba, swa, not of swa"):
        runner.export_state(cache, pool, {PoolName.SWA: 0})
    with pytest.raises(SlotError, match="not all in a pool of 3"):
        runner.export_state(cache, pool, {PoolName.SWA: 0, PoolName.MAMBA: 3})
    assert not any(tensor.any() for tensor in pool.states.values())
    runner.export_pages(cache, pool, 0, [0])
    runner.export_state(cache, pool, {PoolName.SWA: 2, PoolName.MAMBA: 1})
    restored = runner.restore(pool, [0], {PoolName.SWA: 2, PoolName.MAMBA: 1})
    assert differences(runner.layout, restored, cache) == ()


def test_the_pools_of_states_share_half_of_the_device() -> None:
    layout = ModelRunner(build("inkling"), PAGE).layout
    geometries = layout.geometries
    state = geometries[PoolName.MAMBA].nbytes + geometries[PoolName.SWA].nbytes
    pages, states = split_device_bytes(AMPLE, layout)
    assert states == AMPLE // 2 // state
    assert pages == (AMPLE - states * state) // geometries[PoolName.KV].nbytes
    with pytest.raises(ConfigError, match="device bytes are too few"):
        split_device_bytes(7 * state + geometries[PoolName.KV].nbytes, layout)


# --- windows that cannot be, and windows that never forget


@pytest.mark.parametrize("window", [0, 1, -5])
def test_a_window_that_cannot_be_is_refused(window: int) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        ModelRunner(build("gemma3", sliding_window=window), PAGE)
    assert "\n" not in str(error.value)


def test_a_window_longer_than_all_sequences_is_kept_in_pages(tmp_path: Path) -> None:
    for window, pools in ((256, {PoolName.KV, PoolName.SWA}), (257, {PoolName.KV})):
        model = build("gemma3", sliding_window=window, max_position_embeddings=256)
        assert set(ModelRunner(model, PAGE).layout.geometries) == pools
    mistral = build("mistral", sliding_window=1 << 20, max_position_embeddings=256)
    with _worker(mistral, PAGE, tmp_path) as worker:
        audit = Audit(worker.runner, page_slots=64, state_slots=4)
        for restored in (0, 6 * PAGE):
            generation = worker.serve(TOKENS[: 6 * PAGE + 3], 3, audit=True)
            assert generation.restored == restored
            right(audit, worker, generation)
            evict(worker, Tier.DEVICE, Tier.HOST)


def test_a_page_that_no_prompt_can_fill_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="has 256 positions, and a page of 1024 tokens"):
        load(build("gemma3", max_position_embeddings=256), 1024)


# --- what the probe finds


def _windowed(arguments: dict[str, Any]) -> Any:
    cache = arguments.get("past_key_values")
    return cache.layers[1] if cache is not None and cache.layers[1].is_initialized else None


def test_a_model_that_does_not_read_its_window_is_refused() -> None:
    def forget(arguments: dict[str, Any]) -> None:
        if (layer := _windowed(arguments)) is not None:
            layer.values = torch.zeros_like(layer.values)

    with pytest.raises(UnsupportedModelError, match=r"ignores v of layer 1 \(DynamicSlidingWindowLayer\)"):
        load(spoiled("gemma3", forget), PAGE)


def test_a_model_whose_window_hardly_matters_cannot_be_judged() -> None:
    model = build("gemma3")
    with torch.no_grad():
        model.model.layers[1].post_attention_layernorm.weight.fill_(-1 + 3e-7)
    with pytest.raises(UnsupportedModelError, match="hardly reads its window"):
        load(model, PAGE)


def _with_notes(window: int, depth: int) -> ProbeReport | UnsupportedModelError:
    """The verdict on a model whose windowed layer notes what a restored one lacks, at one depth only."""

    def before(arguments: dict[str, Any]) -> None:
        layer = _windowed(arguments)
        if layer is not None and layer.cumulative_length == depth and not hasattr(layer, "noted"):
            arguments["input_ids"] = arguments["input_ids"] * 0

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.noted = True
        return original(self, *args, **kwargs)

    original = DynamicSlidingWindowLayer.update
    model = spoiled("gemma3", before, sliding_window=window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DynamicSlidingWindowLayer, "update", update)
        try:
            return load(model, PAGE)[1]
        except UnsupportedModelError as error:
            return error


@pytest.mark.parametrize(
    ("window", "depth", "limit"),
    slow_after(
        3,
        [
            (41, 32, None),  # before the window is full
            (41, 48, None),  # when it has forgotten
            (
                577,
                576,
                577,
            ),  # longer than the usual prompts, so that the search must find it: when it is full,
            (577, 560, 577),  # before,
            (577, 592, 577),  # and when it has forgotten
        ],
    ),
)
def test_what_a_window_keeps_elsewhere_is_found_around_its_end(window, depth, limit):
    found = _with_notes(window, depth)
    if isinstance(found, UnsupportedModelError):
        why = str(found)
        assert limit is None
    else:
        why = found.why
        assert limit is not None
        assert found.limit is not None
        assert found.limit <= limit
    assert f"at {depth} tokens, does not continue as before" in why


@pytest.mark.parametrize(
    ("name", "length"),
    slow_after(1, [("gemma3", {"sliding_window": 100}), ("deepseek_v32", {"index_topk": 100})]),
)
def test_the_prompts_fill_the_window_and_what_an_indexer_selects(name: str, length: dict[str, int]) -> None:
    assert load(build(name, **length), PAGE)[1].tokens > 2 * 100


def test_a_window_that_is_not_reached_limits_the_cache() -> None:
    model = build("gemma3", sliding_window=4096, max_position_embeddings=1 << 17)
    _, report = load(model, PAGE, seconds=0)
    assert report.limit == report.tokens
    assert "sliding_window 4096: not reached" in report.why


# --- models that take no positions


def _without_positions(start: Any) -> Any:
    """A model whose forward takes no positions, and takes them from its cache as `start` says."""
    model = build("llama")
    original = model.forward

    def forward(
        input_ids: torch.Tensor, past_key_values: Any = None, use_cache: bool | None = None, **more: Any
    ) -> Any:
        first = start(past_key_values) if past_key_values is not None else 0
        position_ids = torch.arange(first, first + input_ids.shape[1])[None]
        return original(
            input_ids=input_ids, past_key_values=past_key_values, use_cache=use_cache,
            position_ids=position_ids, **more,
        )  # fmt: skip

    model.forward = forward
    return model


def test_positions_that_follow_the_cache_are_served_and_others_are_not() -> None:
    runner, report = load(_without_positions(lambda cache: cache.get_seq_length()), PAGE)
    assert not runner.takes_positions
    assert max_error(report) <= report.tolerance
    with pytest.raises(UnsupportedModelError, match="its logits are off by"):
        load(_without_positions(lambda cache: 0), PAGE)
    fed = [0]

    def counted(cache: Any) -> int:
        """Count the calls instead of the cache."""
        fed[0] = 0 if cache.get_seq_length() == 0 else fed[0] + 1
        return fed[0]

    with pytest.raises(UnsupportedModelError):
        load(_without_positions(counted), PAGE)
