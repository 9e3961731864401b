"""The verdicts of the probe: real families, and models that were broken on purpose."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.examples import slow_after
from tests.integrations.transformers.models import EACH, FAMILIES, PAGE, build, loaded, prompt
from tiercache.core import PoolName
from tiercache.errors import UnsupportedModelError
from tiercache.integrations.transformers import ModelRunner, ProbeReport, TailMode, load, probe
from tiercache_lab.demo.small import build_small_hybrid

Before = Callable[[dict[str, Any]], None]


def spoiled(name: str, before: Before, **overrides: Any) -> PreTrainedModel:
    """A family's model that runs `before` on the arguments of each forward."""
    model = build(name, **overrides)
    original = model.forward

    @functools.wraps(original)
    def forward(**arguments: Any) -> Any:
        before(arguments)
        return original(**arguments)

    model.forward = forward
    return model


def max_error(report: ProbeReport) -> float:
    """The largest difference between a cut and an uncut prefill, of the cuts that the tail mode allows."""
    by_token = report.tail_mode is TailMode.TOKEN
    return max(check.error for check in report.checks if check.mode is TailMode.TOKEN or not by_token)


def continues(arguments: dict[str, Any]) -> bool:
    return "position_ids" in arguments and int(arguments["position_ids"][0, 0]) > 0


@pytest.mark.parametrize("name", EACH)
def test_the_verdict_on_each_family(name: str) -> None:
    runner, report = loaded(name)
    assert report.tail_mode == runner.tail_mode == FAMILIES[name].mode
    assert max_error(report) <= report.tolerance <= 1e-4 * report.scale
    kinds = {PoolName.MAMBA: "state", PoolName.SWA: "window"}
    assert set(report.reactions) == {"kv", *(kinds[pool] for pool in FAMILIES[name].states)}
    assert min(report.reactions.values()) >= 100 * report.tolerance
    assert bool(report.chunk_fault) == (report.tail_mode is TailMode.TOKEN)


@pytest.mark.parametrize("name", slow_after(1, ["bamba", "qwen3_next", "llama", "jamba", "falcon_h1"]))
def test_the_verdict_is_the_same_in_bfloat16(name: str) -> None:
    _, report = load(build(name).bfloat16(), PAGE)
    assert report.tail_mode == FAMILIES[name].mode
    assert max_error(report) <= report.tolerance


def test_the_prompt_is_longer_than_the_models_own_chunks_and_pages() -> None:
    assert loaded("llama")[1].tokens > 2 * 64
    assert load(build("bamba", mamba_chunk_size=80), PAGE)[1].tokens > 2 * 80
    assert load(build("llama"), 100)[1].tokens > 2 * 100


def test_jamba_is_said_to_ignore_its_state_in_chunks() -> None:
    _, report = loaded("jamba")
    assert report.chunk_fault.startswith(
        "fed several tokens at a time, it ignores recurrent_0 of layer 0 (LinearAttentionLayer)"
    )
    assert (
        max(check.error for check in report.checks if check.mode is TailMode.CHUNK) > 1000 * report.tolerance
    )


@pytest.mark.parametrize("attribute", ["conv", "recurrent"])
def test_a_model_that_forgets_its_state_is_refused(attribute: str) -> None:
    def forget(arguments: dict[str, Any]) -> None:
        if continues(arguments):
            getattr(arguments["past_key_values"].layers[2], f"{attribute}_states")[0].zero_()

    with pytest.raises(
        UnsupportedModelError, match=f"fed one token at a time, it ignores {attribute}_0 of layer 2"
    ):
        load(spoiled("bamba", forget), PAGE)


def test_a_model_that_forgets_its_state_in_chunks_is_fed_token_by_token() -> None:
    def forget(arguments: dict[str, Any]) -> None:
        if continues(arguments) and arguments["input_ids"].shape[1] > 1:
            arguments["past_key_values"].layers[3].recurrent_states[0].zero_()

    model = spoiled("qwen3_next", forget)
    runner, report = load(model, PAGE)
    assert runner.tail_mode is TailMode.TOKEN
    assert "ignores recurrent_0 of layer 3" in report.chunk_fault
    tokens = prompt(5 * PAGE, 3)
    cut = runner.prefill(runner.new_cache(), tokens, 0, [2 * PAGE])
    uncut = runner.forward(runner.new_cache(), tokens, 0)
    assert float((cut - uncut).abs().max()) <= report.tolerance


def test_a_model_that_does_not_read_its_kv_is_refused() -> None:
    def forget(arguments: dict[str, Any]) -> None:
        if continues(arguments):
            arguments["past_key_values"].layers[1].values.zero_()

    with pytest.raises(UnsupportedModelError, match=r"ignores v of layer 1 \(DynamicLayer\)"):
        load(spoiled("llama", forget), PAGE)


def test_a_model_that_distorts_its_state_a_little_is_refused() -> None:
    def fade(arguments: dict[str, Any]) -> None:
        if continues(arguments):
            arguments["past_key_values"].layers[0].recurrent_states[0].mul_(0.99)

    with pytest.raises(
        UnsupportedModelError,
        match="fed one token at a time after a cut at 140 of 141 tokens, its logits are off by",
    ):
        load(spoiled("bamba", fade), PAGE)


def test_a_model_that_starts_its_positions_anew_is_refused() -> None:
    def restart(arguments: dict[str, Any]) -> None:
        arguments["position_ids"] = torch.arange(arguments["input_ids"].shape[1])[None]

    with pytest.raises(UnsupportedModelError, match="its logits are off by"):
        load(spoiled("llama", restart), PAGE)


def test_a_model_that_does_not_repeat_itself_is_refused() -> None:
    calls: list[None] = []

    def drift(arguments: dict[str, Any]) -> None:
        calls.append(None)
        arguments["input_ids"] = (arguments["input_ids"] + len(calls)) % 256

    with pytest.raises(UnsupportedModelError, match="gives other logits for a repeated prompt"):
        load(spoiled("llama", drift), PAGE)


def test_a_model_that_keeps_something_beside_its_layers_is_refused() -> None:
    def remember(arguments: dict[str, Any]) -> None:
        cache = arguments.get("past_key_values")
        if cache is None:
            return
        if continues(arguments) and not getattr(cache, "seen", 0):
            arguments["input_ids"] = arguments["input_ids"].roll(1) * 0
        cache.seen = 1

    with pytest.raises(
        UnsupportedModelError, match=r"does not continue as before: .* it keeps something outside its cache"
    ):
        load(spoiled("llama", remember), PAGE)


def test_logits_that_are_not_finite_are_refused() -> None:
    model = build("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(torch.inf)
    with pytest.raises(UnsupportedModelError, match="not finite"):
        load(model, PAGE)


def test_a_model_whose_states_hardly_matter_cannot_be_judged() -> None:
    """A state that is read, but moves the logits less than rounding does."""
    model = build("bamba")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("mamba.out_proj.weight"):
                weight.mul_(3e-7)
    with pytest.raises(UnsupportedModelError, match="hardly reads its state"):
        probe(ModelRunner(model, PAGE))


@pytest.mark.slow
def test_the_demonstration_model_is_served_in_chunks() -> None:
    runner, report = load(build_small_hybrid(0), 64)
    assert report.tail_mode is TailMode.CHUNK
    assert report.reactions["state"] >= 1000 * report.tolerance
    assert runner.vocab_size == 256
    assert runner.layout.kv_geometry.nbytes == 64 * 3072
    assert runner.layout.state_geometries[PoolName.MAMBA].nbytes == 663552
