"""The layout is read off the cache; what cannot be restored exactly is refused by layer and class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    StaticCache,
    StaticLayer,
)

from tests.examples import slow_after
from tests.integrations.transformers.models import EACH, FAMILIES, PAGE, REFUSED, build, loaded, prompt
from tiercache.core import HitPolicy, PoolName
from tiercache.errors import UnsupportedModelError
from tiercache.integrations.transformers import ModelRunner, inspect_cache


@pytest.mark.parametrize("name", slow_after(3, EACH))
def test_geometries_describe_the_tensors_of_a_long_cache(name: str) -> None:
    runner, _ = loaded(name)
    layout, cache = runner.layout, runner.new_cache()
    runner.forward(cache, prompt(3 * PAGE, 0), 0)
    geometries = layout.geometries
    assert set(geometries) == {PoolName.KV, *FAMILIES[name].states}
    for segment in geometries[PoolName.KV].segments:
        held = layout.tensor_of(cache, segment.layer, segment.name)
        assert segment.shape == (PAGE, held.shape[1], held.shape[3])
        assert getattr(torch, segment.dtype) == held.dtype
    for pool in FAMILIES[name].states:
        for segment in geometries[pool].segments:
            held = layout.tensor_of(cache, segment.layer, segment.name)
            assert (1, *segment.shape) == tuple(held.shape)
            assert getattr(torch, segment.dtype) == held.dtype


@pytest.mark.parametrize("name", EACH)
def test_nothing_that_the_cache_holds_is_left_out(name: str) -> None:
    runner, _ = loaded(name)
    cache = runner.new_cache()
    runner.forward(cache, prompt(PAGE, 0), 0)
    held: set[tuple[int, str]] = set()
    for n, layer in enumerate(cache.layers):
        if isinstance(getattr(layer, "keys", None), torch.Tensor):
            held |= {(n, "k"), (n, "v")}
        if getattr(layer, "indexer_keys", None) is not None:
            held.add((n, "indexer"))
        for kind in ("conv", "recurrent"):
            states: dict[int, Any] = getattr(layer, f"{kind}_states", {})
            held |= {(n, f"{kind}_{i}") for i, tensor in states.items() if tensor is not None}
    assert held == {(s.layer, s.name) for g in runner.layout.geometries.values() for s in g.segments}


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_be_restored_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        ModelRunner(build(name), PAGE)
    assert str(error.value).startswith(FAMILIES[name].refused)
    assert "\n" not in str(error.value)


def test_a_layer_may_be_in_both_geometries_or_in_none() -> None:
    both = loaded("falcon_h1")[0].layout
    assert both.kv_geometry.layers == both.state_geometries[PoolName.MAMBA].layers == (0, 1, 2)
    none = loaded("nemotron_h")[0].layout
    assert [layer.layer for layer in none.layers if not layer.tensors] == [1, 4]


@pytest.mark.slow
def test_mla_has_keys_and_values_of_different_widths() -> None:
    for name in ("deepseek_v3", "kimi_linear"):
        first = loaded(name)[0].layout.kv_geometry.segments[:2]
        assert [s.name for s in first] == ["k", "v"]
        assert first[0].shape != first[1].shape


def test_a_short_convolution_has_no_recurrent_part() -> None:
    state = loaded("lfm2")[0].layout.state_geometries[PoolName.MAMBA]
    assert {s.name for s in state.segments} == {"conv_0"}
    assert state.hit_policy is HitPolicy.TRAILING_PAGES


def test_the_page_size_and_the_dtype_are_in_the_fingerprint() -> None:
    model = build("llama")
    prints = {ModelRunner(model, size).layout.kv_geometry.fingerprint for size in (16, 32)}
    prints.add(ModelRunner(build("llama").bfloat16(), 16).layout.kv_geometry.fingerprint)
    assert len(prints) == 3


class Secretive(DynamicLayer):
    """A subclass, which might hold anything."""


class Compressing(DynamicSlidingWindowLayer):
    """A subclass with a window, which might also keep the rest in some form."""


def _cache_with(*layers: Any) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = list(layers)
    return cache


def _attention(tokens: int = 4) -> DynamicLayer:
    layer = DynamicLayer()
    layer.update(torch.zeros(1, 2, tokens, 8), torch.zeros(1, 2, tokens, 8))
    return layer


def _window(tokens: int, kind: type[DynamicSlidingWindowLayer] = DynamicSlidingWindowLayer) -> DynamicLayer:
    layer = kind(8)
    layer.update(torch.zeros(1, 2, tokens, 8), torch.zeros(1, 2, tokens, 8))
    return layer


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (Secretive(), "layer 1 keeps its cache in a Secretive, whose content is not known"),
        (
            StaticLayer(max_cache_len=64),
            "layer 1 keeps its cache in a StaticLayer, whose content is not known",
        ),
        (_window(4, Compressing), "layer 1 keeps its cache in a Compressing, whose content is not known"),
        (_window(3), r"holds keys of shape \(1, 2, 3, 8\) after 4 tokens .* to keep its window of 8 tokens"),
        (_attention(3), r"layer 1 \(DynamicLayer\) holds keys of shape \(1, 2, 3, 8\) after 4 tokens"),
    ],
)
def test_a_layer_that_is_not_understood_is_refused_by_name(layer: Any, sentence: str) -> None:
    with pytest.raises(UnsupportedModelError, match=sentence):
        inspect_cache(_cache_with(_attention(), layer), PAGE, 4)


def test_a_state_of_several_sequences_is_refused() -> None:
    layer = LinearAttentionLayer()
    layer.update_conv_state(torch.zeros(2, 8, 4))
    with pytest.raises(
        UnsupportedModelError,
        match=r"layer 1 \(LinearAttentionLayer\) holds a conv state of shape \(2, 8, 4\)",
    ):
        inspect_cache(_cache_with(_attention(), layer), PAGE, 4)


def test_several_states_in_one_layer_are_all_kept() -> None:
    layer = LinearAttentionLayer(number_of_states=3)
    layer.update_conv_state(torch.zeros(1, 8, 4), state_idx=0)
    layer.update_conv_state(torch.zeros(1, 2, 3, dtype=torch.int64), state_idx=2)
    layer.update_recurrent_state(torch.zeros(1, 2, 8, 8), state_idx=1)
    layout = inspect_cache(_cache_with(_attention(), layer, DummyLayer()), PAGE, 4)
    assert [(s.name, s.dtype) for s in layout.state_geometries[PoolName.MAMBA].segments] == [
        ("conv_0", "float32"),
        ("conv_2", "int64"),
        ("recurrent_1", "float32"),
    ]
    assert layout.layers[1].has_previous == (True, False, True)


def test_a_model_without_attention_has_states_alone() -> None:
    layer = LinearAttentionLayer()
    layer.update_conv_state(torch.zeros(1, 8, 4))
    layout = inspect_cache(_cache_with(layer), PAGE, 4)
    assert (set(layout.geometries), layout.has_pages, layout.counts_tokens) == (
        {PoolName.MAMBA},
        False,
        False,
    )


def test_a_model_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no layer of the model keeps KV or a state"):
        inspect_cache(_cache_with(DummyLayer()), PAGE, 4)


def test_another_cache_class_is_refused() -> None:
    static = StaticCache(config=build("llama").config, max_cache_len=16)
    with pytest.raises(UnsupportedModelError, match="keeps its cache in a StaticCache"):
        inspect_cache(static, PAGE, 4)
