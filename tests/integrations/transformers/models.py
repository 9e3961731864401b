"""Small real configurations of many families, with random seeded weights under which logits react strongly to
the cache.

`build(name)` gives a float32 model in eval mode.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tiercache.core import PoolName
from tiercache.integrations.transformers import ModelRunner, ProbeReport, load
from tiercache_lab.demo.small import strengthen

PAGE: Final = 16

WINDOW: Final = 41
"""Length of the windows in tokens; they are full within a page."""

BASE: Final = {
    "vocab_size": 256, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
DENSE: Final = BASE | {"num_hidden_layers": 3, "intermediate_size": 128}
HYBRID: Final = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
CONV: Final = ["conv", "full_attention", "conv", "full_attention"]
FOUR: Final = BASE | {"num_hidden_layers": 4, "intermediate_size": 128}
DELTA: Final = {
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
MAMBA2: Final = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16,
}  # fmt: skip
MLA: Final = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One family: its `model_type`, a small configuration, and what is expected of it.

    `mode` is the expected tail mode, or None if the model is refused, in which case the sentence starts with
    `refused`. `states` are the state pools that it needs. A family without `pages` is tested with those in
    `alone`.
    """

    model_type: str
    config: dict[str, Any] = field(repr=False)
    mode: str | None = "chunk"
    refused: str = ""
    states: tuple[PoolName, ...] = (PoolName.MAMBA,)
    pages: bool = True


FAMILIES: Final[dict[str, Family]] = {
    "qwen3_next": Family(
        "qwen3_next",
        FOUR | DELTA | {
            "num_hidden_layers": 5, "layer_types": ["linear_attention", *HYBRID], "head_dim": 16,
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "jamba": Family(
        "jamba",
        FOUR | {
            "num_hidden_layers": 5, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8,
        },
        mode="token",
    ),
    "bamba": Family("bamba", FOUR | MAMBA2 | {"attn_layer_indices": [1, 3]}),
    "falcon_h1": Family("falcon_h1",
     DENSE | MAMBA2 | {"mamba_d_ssm": 128, "head_dim": 16, "attention_out_multiplier": 8.0}),
    "llama": Family("llama", DENSE, states=()),
    "qwen3": Family("qwen3", DENSE | {"head_dim": 16}, states=()),
    "qwen3_5": Family("qwen3_5_text", FOUR | DELTA | {"layer_types": HYBRID, "head_dim": 16}),
    "nemotron_h": Family(
        "nemotron_h",
        BASE | {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp",
             "full_attention"],
            "head_dim": 16, "intermediate_size": 128, "ssm_state_size": 16, "mamba_num_heads": 8,
            "mamba_head_dim": 16, "n_groups": 1,
            "chunk_size": 16, "n_routed_experts": 4, "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        FOUR | MAMBA2 | {"shared_intermediate_size": 64, "num_local_experts": 4, "layer_types": HYBRID}
    ),
    "lfm2": Family("lfm2", FOUR | {"layer_types": CONV}),
    "lfm2_moe": Family(
        "lfm2_moe",
        FOUR | {"layer_types": CONV, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
         "num_dense_layers": 1},
    ),
    "lfm3": Family("lfm3", FOUR | {"layer_types": CONV, "head_dim": 16}),
    "zamba2": Family(
        "zamba2",
        FOUR | {
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "mamba_d_state": 16, "n_mamba_heads": 8, "chunk_size": 16,
        },
    ),
    "zamba": Family(
        "zamba",
        FOUR | {
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "mamba_d_state": 8, "n_mamba_heads": 2, "mamba_dt_rank": 8,
        },
        mode="token",
    ),
    "kimi_linear": Family(
        "kimi_linear",
        FOUR | MLA | {
            "moe_intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
            "linear_head_dim": 16, "linear_num_heads": 4,
            "layer_types": HYBRID, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
    ),
    "bailing_hybrid": Family(
        "bailing_hybrid",
        FOUR | MLA | {
            "head_dim": 16, "moe_intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
            "n_group": 1, "topk_group": 1,
            "layer_types": HYBRID,
        },
    ),
    "olmo_hybrid": Family("olmo_hybrid", FOUR | DELTA | {"layer_types": HYBRID}),
    "zaya": Family("zaya",
     FOUR | {"moe_intermediate_size": 64, "num_experts": 4, "head_dim": 16, "router_hidden_size": 32}),
    "deepseek_v3": Family(
        "deepseek_v3",
        DENSE | MLA | {
            "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": 32,
            "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        states=(),
    ),
    "deepseek_v32": Family(
        "deepseek_v32",
        DENSE | MLA | {
            "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": 32,
            "n_group": 1, "topk_group": 1,
            # With few heads, many scores of the indexer are 0, and which of them it selects is left open.
            "first_k_dense_replace": 1, "head_dim": 8, "index_topk": WINDOW, "index_head_dim": 16,
            "index_n_heads": 32,
        },
        states=(),
    ),
    "gemma3": Family(
        "gemma3_text",
        DENSE | {"head_dim": 16, "sliding_window": WINDOW,
         "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        states=(PoolName.SWA,),
    ),
    "gpt_oss": Family(
        "gpt_oss",
        FOUR | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW,
         "max_position_embeddings": 2048},
        states=(PoolName.SWA,),
    ),
    "llama4": Family(
        "llama4_text",
        FOUR | {"head_dim": 16, "intermediate_size_mlp": 128, "num_local_experts": 4,
         "attention_chunk_size": WINDOW, "max_position_embeddings": 2048,
         "layer_types": ["chunked_attention", "full_attention"] * 2},
        states=(PoolName.SWA,),
    ),
    "inkling": Family(
        "inkling_text",
        FOUR | {
            "head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
            "sliding_window_size": WINDOW, "d_rel": 16, "moe_intermediate_size": 32, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "n_shared_experts": 1, "max_position_embeddings": 2048,
            "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        },
        states=(PoolName.MAMBA, PoolName.SWA),
    ),
    "bloom": Family(
        "bloom", {"vocab_size": 256, "hidden_size": 64, "n_layer": 2, "n_head": 4}, states=()
    ),
    "minimax": Family(
        "minimax",
        FOUR | {"head_dim": 16, "num_local_experts": 4, "block_size": 16, "layer_types": HYBRID},
        mode=None,
        refused="MiniMaxForCausalLM cannot run over a DynamicCache",
    ),
    "mistral": Family("mistral", DENSE | {"sliding_window": WINDOW}, states=(PoolName.SWA,), pages=False),
    "recurrent_gemma": Family(
        "recurrent_gemma",
        DENSE | {"lru_width": 64, "attention_window_size": 32},
        mode=None,
        refused="RecurrentGemmaForCausalLM does not return the cache",
    ),
}  # fmt: skip

SERVED: Final = [name for name, family in FAMILIES.items() if family.mode and family.pages]
USUAL: Final = ("qwen3_next", "bamba", "falcon_h1", "llama", "jamba", "gemma3")
"""One family for each way in which caches are built and fed.

The others are `slow`, as is the sweep over every type of transformers.
"""
EACH: Final = [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in SERVED]
REFUSED: Final = [name for name, family in FAMILIES.items() if family.mode is None]


def build(name: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """The family's small model, float32, eval mode, equal for equal seeds; `overrides` change its config."""
    family = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[family.model_type](**(family.config | overrides))
        )
    strengthen(model.eval(), seed)
    for weight_name, weight in model.named_parameters():
        # Zaya's scale of the keys; at its initial 0 all attention is uniform
        if weight_name.endswith(".temp"):
            weight.data.fill_(1.0)
    return model


@functools.cache
def loaded(name: str) -> tuple[ModelRunner, ProbeReport]:
    """The family's model with pages of `PAGE` tokens, probed once per test run; tests must not change it."""
    return load(build(name), PAGE)


def prompt(tokens: int, seed: int, vocab: int = 256) -> npt.NDArray[np.int64]:
    """Random token ids, shape [tokens]."""
    return np.random.default_rng(seed).integers(0, vocab, tokens)
