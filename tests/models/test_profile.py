"""Model profiles: the design's figures, published sizes, and the layers that Transformers builds."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.examples import example_count
from tiercache.errors import ConfigError
from tiercache.models.architecture import ARCHITECTURES, cost_of
from tiercache.models.profile import (
    CONFIGS,
    MAX_CONFIG_BYTES,
    PROFILES,
    ModelProfile,
    profile_named,
    profile_of,
)

PUBLIC = Path(__file__).parent / "configs"
KIB, MIB, GIGA = 1024, 1024**2, 1e9


def public(name):
    return json.loads((PUBLIC / f"{name}.json").read_text())


# The figures of the design


def test_qwen3_next():
    profile = profile_named("qwen3-next-80b-a3b")
    assert profile.kv_bytes_per_token == 24 * KIB
    assert profile.state_bytes == 3144 * profile.kv_bytes_per_token
    assert round(profile.state_bytes / MIB, 1) == 73.7
    assert profile.flops_per_context_token * 10_000 == pytest.approx(1.97 * GIGA, rel=0.0025)
    # The design's estimate of 5.95 GFLOP holds 2.9 G weights active per token; the layers of the public
    # config have 3.25 G.
    assert profile.flops_per_token == pytest.approx(2 * 3.2525e9 + 7 * 36 * 32 * 128 * 128, rel=1e-3)


# Public configs


@pytest.mark.parametrize(
    ("name", "kv_kib", "state_mib", "full_heads", "active"),
    [
        ("qwen3.5-9b", 32, 24 * (2 + 8192 * 3 * 2 / MIB), 8 * 16 * 256, 9),
        ("qwen3.5-27b", 64, 48 * (3 + 10240 * 3 * 2 / MIB), 16 * 24 * 256, 27),
        ("jamba-1.5-mini", 16, 28 * 8192 * (16 * 4 + 3 * 2) / MIB, 4 * 32 * 128, 12),
        ("nemotron-h-8b", 16, 24 * (4 + 10240 * 3 * 2 / MIB), 4 * 32 * 128, 8.1),
        ("falcon-h1-7b", 44, 44 * (3 + 3584 * 3 * 2 / MIB), 44 * 12 * 128, 7.59),
        ("granite-4.0-h-small", 16, 36 * (4 + 8448 * 3 * 2 / MIB), 4 * 32 * 128, 9),
        ("kimi-linear-48b-a3b", 7 * 576 * 2 / KIB, 20 * (2 + 12288 * 3 * 2 / MIB), 7 * 32 * 160, None),
        ("lfm2-8b-a1b", 12, 18 * 2048 * 2 * 2 / MIB, 6 * 32 * 64, 1.5),
        ("qwen3-30b-a3b", 96, 0, 48 * 32 * 128, 3.3),
        ("mixtral-8x7b", 128, 0, 32 * 32 * 128, 12.9),
        ("mistral-7b-v0.1", 0, 4095 * 128 / KIB, 0, 7.24),
        ("gpt-oss-20b", 24, 127 * 24 / KIB, 12 * 64 * 64, None),
        ("deepseek-v3", 61 * 576 * 2 / KIB, 0, 61 * 128 * 160, 37),
    ],
)
def test_public_configs(name, kv_kib, state_mib, full_heads, active):
    """`full_heads`: head dimensions that attend to the whole context.

    `active`: published, in billions, with embeddings and head.
    """
    config = public(name)
    profile = profile_of(config, name)
    assert profile.name == name
    assert profile.kv_bytes_per_token == kv_kib * KIB
    assert profile.state_bytes == state_mib * MIB
    assert profile.flops_per_context_token == 4 * full_heads
    if active is not None:
        text = config.get("text_config", config)
        embeddings = text["vocab_size"] * text["hidden_size"] * (1 if config["tie_word_embeddings"] else 2)
        assert cost_of(config)[0].weights + embeddings == pytest.approx(active * 1e9, rel=0.04)


@pytest.mark.parametrize("name", sorted(path.stem for path in PUBLIC.glob("*.json")))
def test_a_known_model_is_its_public_config(name):
    from_file = profile_named(str(PUBLIC / f"{name}.json"))
    assert from_file == profile_of(public(name), name)
    if name in PROFILES:
        assert from_file == profile_named(name.upper())


def test_a_sliding_window_is_kept_as_a_state_and_bounds_the_attention():
    sliding = public("mistral-7b-v0.1")
    windowed, full = profile_of(sliding), profile_of(sliding | {"sliding_window": None})
    assert windowed.flops_per_token == full.flops_per_token
    assert windowed.window_flops == ((4096, full.flops_per_context_token),)
    assert (windowed.kv_bytes_per_token, full.state_bytes) == (0, 0)
    assert windowed.state_bytes == 4095 * full.kv_bytes_per_token
    for start, end in ((0, 4096), (100, 200), (4000, 4096)):
        assert windowed.flops(start, end) == full.flops(start, end)
    token = full.flops_per_token + 4096 * full.flops_per_context_token
    assert windowed.flops(4096, 9000) == windowed.flops(100_000, 104_904) == (9000 - 4096) * token
    across = windowed.flops(4000, 5000)
    assert across == full.flops(4000, 4096) + (5000 - 4096) * token < full.flops(4000, 5000)


@pytest.mark.parametrize("windows", [((0, 1.0),), ((4, -1.0),), ((4, math.inf),), ((4, math.nan),)])
def test_an_impossible_window_is_refused(windows):
    with pytest.raises(ConfigError, match="a window of a model profile is"):
        ModelProfile("m", 1, 1, 1.0, 1.0, windows)


def test_the_dtype_sets_the_width_of_kv_and_convolutions_but_not_of_recurrent_state():
    half, double = (
        profile_of(CONFIGS["qwen3-next-80b-a3b"] | {"dtype": dtype}) for dtype in ("torch.float16", "float32")
    )
    assert double.kv_bytes_per_token == 2 * half.kv_bytes_per_token
    assert double.state_bytes - half.state_bytes == 36 * 8192 * 3 * 2
    outside = public("qwen3.5-9b") | {"dtype": "float32"}
    assert profile_of(outside).kv_bytes_per_token == 32 * KIB
    del outside["text_config"]["dtype"]
    assert profile_of(outside).kv_bytes_per_token == 64 * KIB


# The layers that Transformers builds, in sizes of which no two are alike

BASE = {
    "vocab_size": 96, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20,
    "intermediate_size": 112,
    "num_hidden_layers": 4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
DELTA = {
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 28,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 16,
}  # fmt: skip
MLA = {
    "num_key_value_heads": 6, "kv_lora_rank": 22, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10,
    "v_head_dim": 14,
}  # fmt: skip
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 36}
HYBRID = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
CONV = ["conv", "full_attention", "conv", "conv"]
NO_HEAD_DIM = {k: v for k, v in BASE.items() if k != "head_dim"}
SMALL = {
    "llama": BASE,
    "mistral": NO_HEAD_DIM | {"sliding_window": None},
    "phi3": NO_HEAD_DIM,
    "qwen2": NO_HEAD_DIM,
    "qwen3": BASE,
    **{
        name: (BASE if name.startswith("gemma") else NO_HEAD_DIM) | {
            "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}
        for name in ("gemma2", "gemma3_text", "cohere2", "exaone4", "olmo3")
    },
    "mixtral": BASE | {"num_local_experts": 5, "num_experts_per_tok": 2},
    "gpt_oss": BASE | {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 32},
    "qwen2_moe": NO_HEAD_DIM | MOE | {"num_hidden_layers": 5, "shared_expert_intermediate_size": 52,
     "decoder_sparse_step": 2},
    "qwen3_moe": BASE | MOE | {"mlp_only_layers": [2]},
    "deepseek_v2": NO_HEAD_DIM | MLA | MOE | {
        "n_routed_experts": 5, "n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": None,
    },
    "deepseek_v3": NO_HEAD_DIM | MLA | MOE | {
        "n_routed_experts": 5, "n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": 26,
        "n_group": 1, "topk_group": 1,
    },
    "kimi_linear": NO_HEAD_DIM | MLA | MOE | {
        "num_local_experts": 5, "linear_head_dim": 12, "linear_num_heads": 3, "first_k_dense_replace": 2,
        "layer_types": HYBRID,
        "n_shared_experts": 2,
    },
    "qwen3_next": BASE | DELTA | MOE | {"shared_expert_intermediate_size": 52, "layer_types": HYBRID,
     "mlp_only_layers": [1]},
    "qwen3_5_text": BASE | DELTA | {"num_hidden_layers": 5, "full_attention_interval": 2},
    "qwen3_5_moe_text": BASE | DELTA | MOE | {"shared_expert_intermediate_size": 52,
     "full_attention_interval": 3},
    "jamba": NO_HEAD_DIM | {
        "num_hidden_layers": 5, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 5,
        "num_experts_per_tok": 2,
        "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 10, "mamba_dt_rank": "auto",
    },
    "bamba": NO_HEAD_DIM | MAMBA2 | {"attn_layer_indices": [2]},
    "falcon_h1": BASE | MAMBA2 | {"mamba_d_ssm": 104, "mamba_d_head": 13},
    "granitemoehybrid": NO_HEAD_DIM | MAMBA2 | {
        "shared_intermediate_size": 52, "num_local_experts": 5, "num_experts_per_tok": 3,
        "layer_types": HYBRID, "mamba_d_head": "auto",
    },
    "nemotron_h": BASE | {
        "hybrid_override_pattern": "ME*-M", "num_hidden_layers": 5, "ssm_state_size": 16,
        "mamba_num_heads": 8, "mamba_head_dim": 14,
        "n_groups": 2, "moe_latent_size": 24, "n_routed_experts": 5, "moe_intermediate_size": 36,
        "moe_shared_expert_intermediate_size": 52,
    },
    "mamba": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 6, "expand": 3,
     "conv_kernel": 5, "time_step_rank": "auto"},
    "falcon_mamba": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 6,
     "intermediate_size": 96, "expand": 3, "conv_kernel": 4, "time_step_rank": 7},
    "mamba2": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 6, "expand": 3,
     "conv_kernel": 5, "num_heads": 8, "head_dim": 12, "n_groups": 2, "chunk_size": 16},
    "lfm2": NO_HEAD_DIM | {"layer_types": CONV, "block_multiple_of": 32},
    "lfm2_moe": NO_HEAD_DIM | MOE | {"layer_types": CONV, "num_dense_layers": 1},
}  # fmt: skip
SAME_AS = {"kimi_k2": "deepseek_v3", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
RESOLVED = {"layer_types", "layers_block_type", "mlp_layer_types"}
"""Fields that Transformers computes for each layer from the shorter forms in older configs."""


def test_every_architecture_is_compared():
    assert set(SMALL) | set(SAME_AS) == set(ARCHITECTURES)
    assert all(ARCHITECTURES[name] is ARCHITECTURES[same] for name, same in SAME_AS.items())


def active_weights(model, total, active):
    """Weights that one token meets in projections and convolutions; of experts, the active ones count."""
    count = 0
    for name, weight in model.named_parameters():
        leaf = name.rpartition(".")[2]
        if (
            weight.dim() < 2
            or "embed" in name
            or "lm_head" in name
            or leaf in ("A_log", "gate_up_proj_bias", "down_proj_bias")
        ):
            continue
        count += weight.numel() * active // total if ".experts." in name else weight.numel()
    return count


@pytest.mark.parametrize("model_type", SMALL)
def test_the_layers_are_those_that_transformers_builds(model_type):
    config = CONFIG_MAPPING[model_type](**SMALL[model_type])
    model = AutoModelForCausalLM.from_config(config).eval()
    written = json.loads(config.to_json_string(use_diff=False))
    cost, _ = cost_of(written)
    total = next(
        (written[n] for n in ("num_experts", "num_local_experts", "n_routed_experts") if written.get(n)), 1
    )
    active = written.get("num_experts_per_tok") or written.get("num_experts_per_token") or 1
    assert cost.weights == active_weights(model, total, active)
    assert cost_of({"text_config": written})[0] == cost
    as_given = {k: v for k, v in written.items() if k not in RESOLVED} | SMALL[model_type]
    assert model_type == "gpt_oss" or cost_of(as_given)[0] == cost

    cache, tokens = DynamicCache(config=config), 7
    taken = "cache_params" if model_type.endswith(("mamba", "mamba2")) else "past_key_values"
    with torch.no_grad():
        model(torch.arange(tokens)[None], **{taken: cache}, use_cache=True)
    kv = state = conv = window = 0
    for layer in cache.layers:
        held = sum(
            t.numel() for t in (getattr(layer, "keys", None), getattr(layer, "values", None)) if t is not None
        )
        if getattr(layer, "is_sliding", False):
            window += held // tokens * (layer.sliding_window - 1)
        else:
            kv += held
        for recurrent in getattr(layer, "recurrent_states", {}).values():
            state += 0 if recurrent is None else recurrent.numel()
        for past in getattr(layer, "conv_states", {}).values():
            # Transformers keeps as many columns as the kernel is wide, of which the next token needs all but
            # the oldest.
            conv += 0 if past is None else past.numel() // past.shape[-1] * (past.shape[-1] - 1)
    assert (cost.state, cost.conv, cost.window) == (state, conv, window)
    if "kv_lora_rank" not in written:  # Transformers keeps what the latent expands to
        assert cost.kv * tokens == kv


# Arithmetic


def test_recurrences_work_in_proportion_to_their_state():
    """Decay, update and read-out of each element; a delta rule reads first, Mamba has a decay per element."""
    for name, per_element in (
        ("kimi-linear-48b-a3b", 7),
        ("jamba-1.5-mini", 7),
        ("nemotron-h-8b", 5),
        ("lfm2-8b-a1b", 0),
        ("deepseek-v3", 0),
    ):
        cost, _ = cost_of(public(name))
        assert cost.work == per_element * cost.state


numbers = st.integers(0, 1 << 20)


@given(st.lists(numbers, min_size=3, max_size=3).map(sorted))
def test_prefilling_in_two_parts_costs_what_it_costs_at_once(depths):
    a, b, c = depths
    profile = ModelProfile("m", 1, 1, 3.5e9, 196_608.0, ((4096, 98_304.0), (1 << 18, 1024.0)))
    assert profile.flops(a, b) + profile.flops(b, c) == pytest.approx(profile.flops(a, c), rel=1e-12)


def test_flops_of_many_is_the_sum_of_their_tokens():
    profile = replace(profile_named("jamba-1.5-mini"), window_flops=((1000, 3e6),))
    starts, ends = np.array([[0], [100], [4096]]), np.array([4096, 5000])
    total = profile.flops(starts, ends)
    assert (total.shape, total.dtype) == ((3, 2), np.float64)
    for i, start in enumerate(starts[:, 0]):
        for j, end in enumerate(ends):
            tokens = np.arange(start, end)
            assert total[i, j] == pytest.approx(profile.flops(tokens, tokens + 1).sum(), rel=1e-12)
    assert isinstance(profile.flops(3, 5), float)
    # Plain numbers count as the same float64, also where neighbours cannot be told apart.
    for start, end in ((0, 0), (3, 5), (4095, 4097), (10**6, 10**7), (2**53, 2**53 + 1), (2**62, 2**62 + 1)):
        assert profile.flops(start, end) == profile.flops(np.array([start]), np.array([end]))[0]
    each = profile.flops_per_context_token + 3e6
    assert profile.flops(0, 2) == 2 * profile.flops_per_token + 2 * each
    assert profile.flops(np.int32(100_000), np.int32(100_001)) > 0


@pytest.mark.parametrize(
    "field", ["kv_bytes_per_token", "state_bytes", "flops_per_token", "flops_per_context_token"]
)
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "7", None, True, -(10**400)])
def test_a_number_of_a_profile_is_finite_and_not_negative(field, value):
    good = {
        "name": "m", "kv_bytes_per_token": 1, "state_bytes": 0, "flops_per_token": 1,
        "flops_per_context_token": 0.0,
    }  # fmt: skip
    assert ModelProfile(**good)
    with pytest.raises(ConfigError, match=field):
        ModelProfile(**good | {field: value})


# Refusals


LLAMA, QWEN = "llama-3.1-8b", "qwen3-next-80b-a3b"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (LLAMA, {"model_type": "rwkv"}, "model_type 'rwkv' are not known; known are .*qwen3_next"),
        (LLAMA, {"model_type": None}, "model_type is missing"),
        (LLAMA, {"num_hidden_layers": None}, "num_hidden_layers is missing"),
        (LLAMA, {"hidden_size": 1e3}, "hidden_size is 1000.0; a whole number"),
        (LLAMA, {"num_hidden_layers": "32"}, "num_hidden_layers is '32'; a whole number"),
        (LLAMA, {"hidden_size": -4096}, "hidden_size is -4096; it must be from 1"),
        (LLAMA, {"hidden_size": 10**5000}, "hidden_size is a number with thousands of digits"),
        (LLAMA, {"hidden_size": True}, "hidden_size is True"),
        (LLAMA, {"hidden_size": 4097}, "hidden_size, 4097, cannot be divided by num_attention_heads, 32"),
        (LLAMA, {"num_key_value_heads": 5}, "32 attention heads cannot share 5"),
        (LLAMA, {"num_key_value_heads": 64}, "num_key_value_heads is 64; it must be from 1 to 32"),
        (LLAMA, {"dtype": "int3"}, "dtype 'int3' is not known"),
        (
            LLAMA,
            {"dtype": "bfloat16", "torch_dtype": "float32"},
            "dtype is 'bfloat16' but torch_dtype is 'float32'",
        ),
        (LLAMA, {"layer_types": ["full_attention"] * 31}, "names 31 layers but num_hidden_layers is 32"),
        (
            LLAMA,
            {"layer_types": ["linear_attention"] * 32},
            "layer 0 is recurrent, which this architecture does not have",
        ),
        (LLAMA, {"layer_types": ["magic"] * 32}, "holds 'magic', a kind of layer that is not known"),
        (LLAMA, {"layer_types": ["sliding_attention"] * 32}, "sliding_window is missing"),
        (LLAMA, {"text_config": 3}, "text_config is 3; an object"),
        ("qwen3-8b", {"use_sliding_window": True, "sliding_window": 4096}, "layer_types is missing"),
        (QWEN, {"full_attention_interval": None}, "full_attention_interval is missing"),
        (QWEN, {"num_experts_per_tok": 513}, "num_experts_per_tok is 513; it must be from 1 to 512"),
        (QWEN, {"num_local_experts": 4}, "num_experts is 512 but num_local_experts is 4"),
        ("jamba-1.5-mini", {"attn_layer_offset": 8}, "attn_layer_offset is 8; it must be from 0 to 7"),
        ("nemotron-h-8b", {"hybrid_override_pattern": "M-X"}, "holds 'X', a kind of layer"),
        ("nemotron-h-8b", {"hybrid_override_pattern": ""}, "is empty"),
        ("nemotron-h-8b", {"intermediate_size": [1, 2]}, "intermediate_size is \\[1, 2\\]"),
        (
            "falcon-h1-7b",
            {"mamba_d_head": 64},
            "mamba_d_head is 64, but 24 heads of a layer 3072 wide have 128",
        ),
        ("granite-4.0-h-small", {"layer_types": None}, "layer_types is missing"),
        ("kimi-linear-48b-a3b", {"routed_expert_hidden_size": 32}, "routed_expert_hidden_size is set"),
        ("kimi-linear-48b-a3b", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must name each layer"),
        ("lfm2-1.2b", {"block_ffn_dim_multiplier": 0}, "block_ffn_dim_multiplier is 0; a number above 0"),
        ("lfm2-1.2b", {"full_attn_idxs": [16]}, "full_attn_idxs holds 16; it must be from 0 to 15"),
    ],
)
def test_what_cannot_be_derived_is_refused(name, change, message):
    with pytest.raises(ConfigError, match=message) as e:
        profile_of(CONFIGS[name] | change, name)
    assert str(e.value).startswith(f"config of model {name}")
    assert "\n" not in str(e.value)


def test_kimi_layers_are_named_once_and_its_gates_are_those_known():
    config = copy.deepcopy(CONFIGS["kimi-linear-48b-a3b"])
    config["linear_attn_config"]["kda_layers"][0] = 4
    with pytest.raises(
        ConfigError,
        match="linear_attn_config: full_attn_layers and kda_layers must together name each of the 27 layers",
    ):
        profile_of(config)
    config["linear_attn_config"] = {"use_full_rank_gate": True}
    with pytest.raises(ConfigError, match="use_full_rank_gate is set"):
        profile_of(config)


FIELDS = sorted(
    {key for config in CONFIGS.values() for key in config | config.get("text_config", {})}
    | {"layer_types", "sliding_window"}
)
hostile = st.recursive(
    st.none() | st.booleans() | st.integers(-3,
     9) | st.integers() | st.sampled_from([10**4000, 1 << 24, "auto", "M*E-", "mamba"])
    | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=3),
     inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


def profile_or_refusal(config):
    problem = None
    try:
        profile = profile_of(config)
    except ConfigError as e:
        problem = str(e)
    if problem is None:
        assert math.isfinite(profile.flops(0, 1 << 30))
    else:
        assert 10 < len(problem) < 800
        assert "\n" not in problem


@settings(max_examples=example_count(400), suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(PROFILES),
    st.dictionaries(st.sampled_from(FIELDS), hostile, min_size=1, max_size=3),
    st.booleans(),
)
def test_a_changed_config_gives_a_profile_or_one_clear_error(name, change, nested):
    config = copy.deepcopy(CONFIGS[name])
    target = config.get("text_config", config)
    (target.get("linear_attn_config", target) if nested else target).update(change)
    profile_or_refusal(config)


# Files


def test_a_name_that_is_neither_known_nor_a_file(tmp_path):
    for name in ("qwen9", str(tmp_path), str(tmp_path / "no" / "config.json"), "a\0b", ""):
        with pytest.raises(ConfigError, match=r"no file .* one of .*qwen3-next-80b-a3b"):
            profile_named(name)
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        profile_named("x" * 5000)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 200_000, "is not JSON"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b"[]", "config of model tiny is \\[\\]; an object"),
        (b"null", "config of model tiny is None; an object"),
        (b"{}" + b" " * MAX_CONFIG_BYTES, "is larger than 1048576 bytes"),
        (b'{"model_type": "llama", "hidden_size": NaN}', "num_hidden_layers is missing"),
    ],
)
def test_a_file_that_holds_no_config(tmp_path, content, message):
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as e:
        profile_named(str(path))
    assert "\n" not in str(e.value)
