"""A restored cache continues bitwise as the exported one would have."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

from tests.examples import slow_after
from tests.integrations.transformers.models import EACH, PAGE, build, loaded, prompt
from tiercache.errors import InputError, SlotError, TokenError
from tiercache.integrations.transformers import ModelRunner, PoolTensors, TailMode, differences

TOKENS = prompt(6 * PAGE + 5, seed=11)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def export(
    runner: ModelRunner, cache: DynamicCache, slots: list[int], state_slot: int = 1
) -> tuple[PoolTensors, int | None]:
    """The first pages of a cache and its state in a new pool."""
    pool = runner.allocate_pools(8, 3)
    runner.export_pages(cache, pool, 0, slots)
    if not pool.states:
        return pool, None
    runner.export_state(cache, pool, state_slot)
    return pool, state_slot


def decode(runner: ModelRunner, cache: DynamicCache, start: int, steps: int = 4) -> torch.Tensor:
    rows, token = [], 7
    for n in range(steps):
        rows.append(runner.forward(cache, [token], start + n))
        token = int(rows[-1].argmax())
    return torch.stack(rows)


@pytest.mark.parametrize("name", EACH)
def test_restored_equals_cold_with_the_same_cuts(name: str) -> None:
    """A cold sequence, cut and fed its last tokens one by one, against one that starts there from slots."""
    runner, _ = loaded(name)
    depth, slots = 2 * PAGE, [6, 3]
    cold = runner.new_cache()
    runner.prefill(cold, TOKENS[:depth], 0, range(depth - 5, depth))
    pool, state_slot = export(runner, cold, slots)
    cold_logits = runner.prefill(cold, TOKENS, depth, [5 * PAGE])
    hot = runner.restore(pool, slots, state_slot)
    assert runner.layout.length(hot) == depth
    hot_logits = runner.prefill(hot, TOKENS, depth, [5 * PAGE])
    assert torch.equal(hot_logits, cold_logits)
    assert differences(runner.layout, hot, cold) == ()
    assert torch.equal(decode(runner, hot, len(TOKENS)), decode(runner, cold, len(TOKENS)))
    assert differences(runner.layout, hot, cold) == ()


def test_a_restored_cache_shares_no_memory_with_the_pool() -> None:
    runner, _ = loaded("qwen3_next")
    cache = runner.new_cache()
    runner.forward(cache, TOKENS[: 2 * PAGE], 0)
    pool, state_slot = export(runner, cache, [0, 1])
    before = copy.deepcopy(pool)
    decode(runner, runner.restore(pool, [0, 1], state_slot), 2 * PAGE)
    for held, kept in ((pool.kv, before.kv), (pool.states, before.states)):
        assert all(torch.equal(held[key], kept[key]) for key in kept)


def test_pages_are_exported_where_they_were_asked_for() -> None:
    runner, _ = loaded("llama")
    cache = runner.new_cache()
    runner.forward(cache, TOKENS, 0)
    pool = runner.allocate_pools(4, 0)
    runner.export_pages(cache, pool, 3, [2, 0])
    for t in runner.layout.kv_tensors():
        held = runner.layout.tensor_of(cache, t.layer, t.name)[0].transpose(0, 1)
        slots = pool.pages(t.layer, t.name)
        assert torch.equal(slots[2], held[3 * PAGE : 4 * PAGE])
        assert torch.equal(slots[0], held[4 * PAGE : 5 * PAGE])
        assert not slots[[1, 3]].any()


@pytest.mark.parametrize("name", ["falcon_h1", "nemotron_h"])
def test_a_layer_is_waited_for_before_its_slots_are_read(name: str) -> None:
    runner, _ = loaded(name)
    cache = runner.new_cache()
    runner.forward(cache, TOKENS[: 2 * PAGE], 0)
    full, state_slot = export(runner, cache, [0, 1])
    late, order = runner.allocate_pools(8, 3), []

    def arrive(layer: int) -> None:
        order.append(layer)
        for to, source in ((late.kv, full.kv), (late.states, full.states)):
            for key, tensor in source.items():
                if key[0] == layer:
                    to[key].copy_(tensor)

    restored = runner.restore(late, [0, 1], state_slot, wait_layer=arrive)
    assert order == [layer.layer for layer in runner.layout.layers if layer.tensors]
    assert differences(runner.layout, restored, cache) == ()


def test_a_failed_wait_is_passed_on() -> None:
    runner, _ = loaded("bamba")
    pool = runner.allocate_pools(2, 1)

    def fail(layer: int) -> None:
        raise RuntimeError(f"layer {layer} never came")

    with pytest.raises(RuntimeError, match="layer 0 never came"):
        runner.restore(pool, [0], 0, wait_layer=fail)


def test_in_token_mode_only_the_first_cut_matters() -> None:
    runner, _ = loaded("jamba")
    assert runner.tail_mode is TailMode.TOKEN
    first = runner.prefill(runner.new_cache(), TOKENS, 0, [PAGE])
    second = runner.prefill(runner.new_cache(), TOKENS, 0, [PAGE, 3 * PAGE, 4 * PAGE + 1])
    assert torch.equal(first, second)


def test_several_rows_of_logits_are_the_same_in_either_mode() -> None:
    _, report = loaded("bamba")
    rows = []
    for runner in map(ModelRunner(build("bamba"), PAGE).like, (TailMode.TOKEN, TailMode.CHUNK)):
        cache = runner.new_cache()
        runner.forward(cache, TOKENS[:PAGE], 0)
        rows.append(runner.logits(cache, TOKENS[PAGE : PAGE + 6], PAGE, keep=4))
    assert rows[0].shape == rows[1].shape == (4, 256)
    assert rows[0].dtype == torch.float32
    assert float((rows[0] - rows[1]).abs().max()) <= report.tolerance


@pytest.mark.parametrize("count", slow_after(1, [1, 2]))
@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
@pytest.mark.usefixtures("threads")
def test_repeated_prefills_are_bitwise_equal(name: str, count: int) -> None:
    torch.set_num_threads(count)
    runner, tokens = loaded(name)[0], prompt(150, 5)
    first, *others = (runner.prefill(runner.new_cache(), tokens, 0, [PAGE, 7 * PAGE]) for _ in range(3))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("cuts", [[0], [32, 16], [16, 16], [len(TOKENS) + 1]])
def test_cuts_out_of_place_are_refused(cuts: list[int]) -> None:
    runner, _ = loaded("llama")
    with pytest.raises(TokenError, match="cuts"):
        runner.prefill(runner.new_cache(), TOKENS, 0, cuts)


def test_wrong_arguments_change_nothing() -> None:
    runner, _ = loaded("llama")
    cache = runner.new_cache()
    runner.forward(cache, TOKENS[:PAGE], 0)
    with pytest.raises(TokenError, match="vocabulary of 256"):
        runner.forward(cache, [256], PAGE)
    with pytest.raises(TokenError, match="pass start=16"):
        runner.forward(cache, [1], 0)
    with pytest.raises(TokenError, match="at least one token"):
        runner.forward(cache, [], PAGE)
    with pytest.raises(TokenError, match="nothing to compute"):
        runner.prefill(cache, TOKENS[:PAGE], PAGE)
    assert runner.layout.length(cache) == PAGE
    with pytest.raises(InputError, match="page size 0"):
        ModelRunner(build("llama"), 0)


def test_slots_and_pages_that_do_not_exist_are_refused() -> None:
    runner, _ = loaded("bamba")
    cache, pool = runner.new_cache(), runner.allocate_pools(4, 2)
    runner.forward(cache, TOKENS[: 2 * PAGE + 3], 0)
    with pytest.raises(TokenError, match="holds 35 tokens"):
        runner.export_pages(cache, pool, 1, [0, 1])
    for slots in ([0, 4], [-1, 0]):
        with pytest.raises(SlotError, match="pool of 4"):
            runner.export_pages(cache, pool, 0, slots)
    with pytest.raises(SlotError, match="pool of 2"):
        runner.export_state(cache, pool, 2)
    with pytest.raises(SlotError, match="pool of 4"):
        runner.restore(pool, [9], 0)
    assert not any(tensor.any() for tensor in (*pool.kv.values(), *pool.states.values()))


def test_a_hit_is_all_or_nothing() -> None:
    hybrid, plain = loaded("bamba")[0], loaded("llama")[0]
    for runner, pages, state in ((hybrid, [0], None), (hybrid, [], 0), (plain, [0], 0)):
        with pytest.raises(SlotError, match="no prefix of this model"):
            runner.restore(runner.allocate_pools(2, 1), pages, state)
    assert hybrid.layout.length(hybrid.restore(hybrid.allocate_pools(2, 1), [], None)) == 0


def test_differences_are_found_by_bits_and_by_flags() -> None:
    runner, _ = loaded("falcon_h1")
    cache = runner.new_cache()
    runner.forward(cache, TOKENS[:PAGE], 0)
    layout, other = runner.layout, copy.deepcopy(cache)
    assert differences(layout, cache, other) == ()
    with torch.inference_mode():
        for one in (cache, other):
            layout.tensor_of(one, 0, "v")[..., 0] = torch.nan
        layout.tensor_of(other, 1, "recurrent_0").view(torch.int32)[0, 0, 0, 0] ^= 1
    assert differences(layout, cache, other) == ("layer 1 recurrent_0",)
    held: Any = other.layers[2]
    held.has_previous_state = {0: False}
    assert differences(layout, cache, other) == ("layer 1 recurrent_0", "layer 2 has_previous_state")
