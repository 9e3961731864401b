"""Model profiles: the bytes that a model caches, and the FLOPs that a hit saves."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt

from tiercache.errors import ConfigError
from tiercache.models.architecture import cost_of
from tiercache.text import shown

MAX_CONFIG_BYTES: Final = 1 << 20
"""Maximum accepted size of a `config.json`, in bytes."""
STATE_WIDTH: Final = 4
"""Bytes per element of recurrent state: engines keep it in float32 for models of any dtype."""

CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48,
        "full_attention_interval": 4,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "intermediate_size": 5120,
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "qwen3.5-9b": {
        "model_type": "qwen3_5", "text_config": {
            "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 4,
            "head_dim": 256, "attn_output_gate": True,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
    },
    "qwen3.5-35b-a3b": {
        "model_type": "qwen3_5_moe", "text_config": {
            "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40,
            "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2,
            "head_dim": 256, "attn_output_gate": True,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4, "num_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    },
    "qwen3-8b": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "use_sliding_window": False,
    },
    "llama-3.1-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3, "moe_layer_freq": 1,
    },
    "jamba-1.5-mini": {
        "model_type": "jamba", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4,
        "num_experts": 16, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1,
        "mamba_expand": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_dt_rank": 256,
    },
    "nemotron-h-8b": {
        "model_type": "nemotron_h", "hidden_size": 4096, "intermediate_size": 21504, "num_hidden_layers": 52,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "num_attention_heads": 32, "num_key_value_heads": 8, "attention_head_dim": 128,
        "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
    },
    "nemotron-3-nano-30b-a3b": {
        "model_type": "nemotron_h", "hidden_size": 2688, "intermediate_size": 1856, "num_hidden_layers": 52,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
        "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
        "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
    },
    "falcon-h1-7b": {
        "model_type": "falcon_h1", "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 44,
        "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128,
        "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256,
        "mamba_n_groups": 1, "mamba_d_conv": 4,
    },
    "granite-4.0-h-small": {
        "model_type": "granitemoehybrid", "hidden_size": 4096, "intermediate_size": 768,
        "shared_intermediate_size": 1536,
        "num_hidden_layers": 40, "layer_types": ["attention" if n % 10 == 5 else "mamba" for n in range(40)],
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 72,
        "num_experts_per_tok": 10,
        "mamba_expand": 2, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128,
        "mamba_n_groups": 1, "mamba_d_conv": 4,
    },
    "kimi-linear-48b-a3b": {
        "model_type": "kimi_linear", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27,
        "num_attention_heads": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": [n for n in range(1, 27) if n % 4],
            "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
        },
        "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "first_k_dense_replace": 1, "moe_layer_freq": 1,
    },
    "mamba2-2.7b": {
        "model_type": "mamba2", "hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80, "head_dim": 64,
        "expand": 2, "state_size": 128, "n_groups": 1, "conv_kernel": 4,
    },
    "falcon-mamba-7b": {
        "model_type": "falcon_mamba", "hidden_size": 4096, "num_hidden_layers": 64, "intermediate_size": 8192,
        "expand": 16, "state_size": 16, "time_step_rank": 256, "conv_kernel": 4,
    },
    "lfm2-1.2b": {
        "model_type": "lfm2", "hidden_size": 2048, "num_hidden_layers": 16,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3, "block_ff_dim": 12288,
        "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
    },
}  # fmt: skip
"""Public configs of well-known models, by name, with the fields that a profile needs.

They give no dtype, and so count as bfloat16.
"""

PROFILES: Final = tuple(sorted(CONFIGS))
"""Names that `profile_named` knows."""


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """Bytes and FLOPs of one model. Raises ConfigError for a number that is negative or not finite."""

    name: str
    kv_bytes_per_token: int
    """Bytes of KV per token, over all attention layers."""
    state_bytes: int
    """Bytes of one complete state, with the KV of full windows; 0 for a model without states and windows."""
    flops_per_token: float
    """FLOPs of prefilling one token, without attention to earlier tokens."""
    flops_per_context_token: float
    """Further FLOPs of prefilling one token, for each earlier token."""
    window_flops: tuple[tuple[int, float], ...] = ()
    """Windows in tokens, and further FLOPs of prefilling one token, for each earlier token in that window."""

    def __post_init__(self) -> None:
        whole, finite = (int, "whole number of bytes"), (int | float, "finite number")
        for field, (kind, wanted) in {
            "kv_bytes_per_token": whole,
            "state_bytes": whole,
            "flops_per_token": finite,
            "flops_per_context_token": finite,
        }.items():
            value = getattr(self, field)
            is_number = isinstance(value, kind) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= sys.float_info.max:
                raise ConfigError(
                    f"{field} of a model profile is {shown(value)}; a {wanted} from 0 is needed"
                )
        for window, flops in self.window_flops:
            if window < 1 or not 0 <= flops <= sys.float_info.max:
                raise ConfigError(
                    f"a window of a model profile is {shown(window)} tokens of {shown(flops)} FLOPs each; at"
                    " least one token and a finite number from 0 are needed"
                )

    @overload
    def flops(self, start: int, end: int) -> float: ...

    @overload
    def flops(self, start: npt.ArrayLike, end: npt.ArrayLike) -> npt.NDArray[np.float64]: ...

    def flops(self, start: npt.ArrayLike, end: npt.ArrayLike) -> float | npt.NDArray[np.float64]:
        """Return the FLOPs of prefilling tokens [start, end) after a cached prefix of `start` tokens.

        `start` and `end` are integers, or arrays of integers whose shapes broadcast, and 0 <= start <= end.
        The result is a float, or a float64 array.
        """
        # Token number t attends to t earlier tokens and to itself. This formula counts the token itself as
        # half a token. The sum of t + 1/2 over [start, end) is (end^2 - start^2) / 2.
        first: Any = start
        last: Any = end
        if {type(start), type(end)} == {int}:  # plain numbers are several times as fast as arrays
            first, last = float(first), float(last)
        else:
            first, last = np.asarray(first, np.float64), np.asarray(last, np.float64)
        total = (
            self.flops_per_token * (last - first)
            + self.flops_per_context_token * (last * last - first * first) / 2
        )
        # In a window of W tokens, token number t attends to min(t, W) earlier tokens.
        for window, flops in self.window_flops:
            filling, filled = np.minimum(first, window), np.minimum(last, window)
            pairs = (filled * filled - filling * filling) / 2 + window * ((last - filled) - (first - filling))
            total = total + flops * pairs
        return total if getattr(total, "ndim", 0) else float(total)


def profile_of(config: Mapping[str, Any], name: str = "") -> ModelProfile:
    """Return the profile of the model that a Hugging Face config describes.

    `config` is the mapping in the model's `config.json`.

    KV has the config's dtype (bfloat16 if the config gives none). A state has three parts: the states of the
    recurrences, the last inputs of each convolution (their number is the kernel's width - 1), and the KV of
    sliding windows (of one token less than the window). The first part is in float32, the others in the
    config's dtype. The FLOPs are two per active weight, plus the FLOPs
    of recurrences and attention. Raises ConfigError for an unknown architecture, and for fields that are
    missing, malformed or contradictory.
    """
    cost, width = cost_of(config, f"config of model {name[:80]}" if name else "model config")
    windows = Counter[int]()
    for window, flops in cost.windows:
        windows[window] += flops
    return ModelProfile(
        name or str(config.get("model_type") or "model")[:80],
        kv_bytes_per_token=cost.kv * width,
        state_bytes=cost.state * STATE_WIDTH + (cost.conv + cost.window) * width,
        flops_per_token=float(2 * cost.weights + cost.work),
        flops_per_context_token=float(cost.context),
        window_flops=tuple((window, float(flops)) for window, flops in sorted(windows.items())),
    )


def profile_named(name_or_path: str) -> ModelProfile:
    """Return the profile of a known model, or of the model whose `config.json` is at a path.

    Raises ConfigError if there is no such model and no such file.
    """
    name = name_or_path.lower()
    if name in CONFIGS:
        return profile_of(CONFIGS[name], name)
    path = Path(name_or_path)
    # The profiles of models/qwen/config.json and of models/qwen.json are both called "qwen".
    return profile_of(_read(path), path.absolute().parent.name if path.stem == "config" else path.stem)


def _read(path: Path) -> Any:
    called = repr(str(path)[-200:])
    content = None
    try:
        # Only a plain file is read: a pipe or a device could block.
        if path.is_file():
            with path.open("rb") as file:
                content = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as e:
        raise ConfigError(f"model config {called} cannot be read: {e.strerror}") from e
    if content is None:
        raise ConfigError(
            f"there is no model profile and no file {called}; give the path of a config.json, or one of"
            f" {', '.join(PROFILES)}"
        )
    if len(content) > MAX_CONFIG_BYTES:
        raise ConfigError(
            f"model config {called} is larger than {MAX_CONFIG_BYTES} bytes; is it a config.json?"
        )
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"model config {called} is not JSON; is it a config.json?") from e
