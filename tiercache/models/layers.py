"""Costs of one layer from the fields of a config.

Each architecture has its own names for the sizes. The functions raise ConfigError for fields that are
missing, malformed or contradictory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from tiercache.models import costs
from tiercache.models.costs import Cost
from tiercache.models.fields import MAX_LAYERS, Fields
from tiercache.models.layer_kinds import LayerKind, layers_of

Mixer = Callable[[Fields], Cost]
"""Function from a config's fields to the cost of a layer's mixer (attention or recurrence)."""
FeedForward = Callable[[Fields, int], Cost]
"""Function from a config's fields and a layer's number to the cost of the layer's feed-forward part.

The number, from 0, decides whether the layer has experts.
"""


def attention(fields: Fields, *, gated: bool = False, sliding: bool = False) -> Cost:
    """Return the cost of attention, grouped or not.

    If the config does not give the width of a head, it is `hidden_size` / number of heads.
    """
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", most=heads, default=heads)
    if heads % kv_heads:
        raise fields.error(f"{heads} attention heads cannot share {kv_heads} KV heads evenly")
    if fields.has("head_dim") or fields.has("attention_head_dim"):
        head_dim = fields.count("head_dim", "attention_head_dim")
    else:
        head_dim = _share(fields, "hidden_size", hidden, "num_attention_heads", heads)
    window = fields.count("sliding_window") if sliding else None
    return costs.attention(hidden, heads, kv_heads, head_dim, gated=gated, window=window)


def gated_attention(fields: Fields) -> Cost:
    """Return the cost of attention with a gate on its output, or without a gate if the config says so."""
    return attention(fields, gated=fields.flag("attn_output_gate", default=True))


def latent_attention(fields: Fields) -> Cost:
    """Return the cost of multi-head latent attention, from the fields that DeepSeek's configs use."""
    q_rank = fields.count("q_lora_rank") if fields.has("q_lora_rank") else None
    ranks = [
        fields.count(name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    ]
    return costs.latent_attention(
        fields.count("hidden_size"), fields.count("num_attention_heads"), q_rank, *ranks
    )


ATTENTION: Final[Mapping[LayerKind, Mixer]] = {
    LayerKind.FULL: attention,
    LayerKind.SLIDING: partial(attention, sliding=True),
}
"""Costs of the two kinds of layers that have attention alone."""


def gated_delta(fields: Fields) -> Cost:
    """Return the cost of a gated delta net, from the fields that Qwen's configs use."""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    return costs.gated_delta(fields.count("hidden_size"), *(fields.count(f"linear_{name}") for name in names))


def kimi_delta(fields: Fields) -> Cost:
    """Return the cost of Kimi delta attention.

    The fields are in Kimi's nested `linear_attn_config`, or flat as in Transformers.
    """
    hidden = fields.count("hidden_size")
    if fields.has("linear_attn_config"):
        inner = fields.inner("linear_attn_config")
        return costs.kimi_delta(
            hidden, *(inner.count(name) for name in ("num_heads", "head_dim", "short_conv_kernel_size"))
        )
    return costs.kimi_delta(
        hidden, *(fields.count(f"linear_{name}") for name in ("num_heads", "head_dim", "conv_kernel_dim"))
    )


def mamba1(fields: Fields) -> Cost:
    """Return the cost of a Mamba mixer, from the fields that Jamba's configs use."""
    hidden = fields.count("hidden_size")
    # "auto" stands for hidden size / 16, rounded up.
    rank = -(-hidden // 16) if fields.is_text("mamba_dt_rank", "auto") else fields.count("mamba_dt_rank")
    inner = fields.count("mamba_expand") * hidden
    return costs.mamba1(hidden, inner, fields.count("mamba_d_state"), rank, fields.count("mamba_d_conv"))


def mamba2(fields: Fields) -> Cost:
    """Return the cost of a Mamba-2 mixer, from the fields that Bamba's and later configs use."""
    hidden, heads = fields.count("hidden_size"), fields.count("mamba_n_heads")
    inner = (
        fields.count("mamba_d_ssm") if fields.has("mamba_d_ssm") else fields.count("mamba_expand") * hidden
    )
    head_dim = _share(fields, "the width of a Mamba layer", inner, "mamba_n_heads", heads)
    if not fields.is_text("mamba_d_head", "auto") and fields.count("mamba_d_head") != head_dim:
        raise fields.error(
            f"mamba_d_head is {fields.count('mamba_d_head')}, but {heads} heads of a layer {inner} wide have"
            f" {head_dim}"
        )
    return costs.mamba2(
        hidden,
        heads,
        head_dim,
        *(fields.count(f"mamba_{name}") for name in ("d_state", "n_groups", "d_conv")),
    )


def nemotron_mamba2(fields: Fields) -> Cost:
    """Return the cost of a Mamba-2 mixer, from the fields that Nemotron-H's configs use.

    The mixer's width is the number of heads times the width of a head.
    """
    hidden, heads, head_dim, state = (
        fields.count(name) for name in ("hidden_size", "mamba_num_heads", "mamba_head_dim", "ssm_state_size")
    )
    return costs.mamba2(
        hidden,
        heads,
        head_dim,
        state,
        fields.count("n_groups", "mamba_n_groups"),
        fields.count("conv_kernel", "mamba_d_conv"),
    )


def pure_mamba1(fields: Fields) -> Cost:
    """Return the cost of a Mamba mixer, from the fields that Mamba's and Falcon-Mamba's configs use."""
    hidden = fields.count("hidden_size")
    inner = (
        fields.count("intermediate_size")
        if fields.has("intermediate_size")
        else fields.count("expand") * hidden
    )
    # "auto" stands for hidden size / 16, rounded up.
    rank = -(-hidden // 16) if fields.is_text("time_step_rank", "auto") else fields.count("time_step_rank")
    return costs.mamba1(hidden, inner, fields.count("state_size"), rank, fields.count("conv_kernel"))


def pure_mamba2(fields: Fields) -> Cost:
    """Return the cost of a Mamba-2 mixer, from the fields that Mamba-2's configs use."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_heads")
    inner = fields.count("expand") * hidden
    head_dim = _share(fields, "the width of a Mamba layer", inner, "num_heads", heads)
    if fields.has("head_dim") and fields.count("head_dim") != head_dim:
        raise fields.error(
            f"head_dim is {fields.count('head_dim')}, but {heads} heads of a layer {inner} wide have"
            f" {head_dim}"
        )
    return costs.mamba2(
        hidden, heads, head_dim, *(fields.count(name) for name in ("state_size", "n_groups", "conv_kernel"))
    )


def short_conv(fields: Fields) -> Cost:
    """Return the cost of a gated short convolution, from the fields that LFM2's configs use."""
    return costs.short_conv(fields.count("hidden_size"), fields.count("conv_L_cache"))


def mlp(fields: Fields, _: int = 0, *, width: str = "intermediate_size") -> Cost:
    """Return the cost of a feed-forward layer with gate, up and down matrices.

    `width` is the name of the field with the inner width.
    """
    return costs.mlp(fields.count("hidden_size"), fields.count(width))


def experts(
    fields: Fields, *, width: str = "moe_intermediate_size", shared: int = 0, shared_gate: bool = False
) -> Cost:
    """Return the cost of routed experts, and of shared experts of total width `shared`.

    `width` is the name of the field with the width of an expert.
    """
    total = fields.count("num_experts", "num_local_experts", "n_routed_experts")
    active = fields.count("num_experts_per_tok", "num_experts_per_token", "experts_per_token", most=total)
    return costs.experts(
        fields.count("hidden_size"),
        total,
        active,
        fields.count(width),
        shared=shared,
        shared_gate=shared_gate,
    )


def mixtral_experts(fields: Fields, _: int) -> Cost:
    """Return the cost of experts of width `intermediate_size`, for models with experts in every layer."""
    return experts(fields, width="intermediate_size")


def qwen_moe(fields: Fields, n: int, *, shared: bool) -> Cost:
    """Return the cost of experts or of a dense layer.

    The optional fields `mlp_only_layers` and `decoder_sparse_step` say whether layer `n` is dense.
    """
    dense = set(fields.counts("mlp_only_layers")) if fields.has("mlp_only_layers") else set()
    if n in dense or (n + 1) % fields.count("decoder_sparse_step", default=1):
        return mlp(fields)
    return experts(
        fields, shared=fields.count("shared_expert_intermediate_size") if shared else 0, shared_gate=shared
    )


def deepseek_moe(fields: Fields, n: int) -> Cost:
    """Return the cost of experts or of a dense layer.

    The field `mlp_layer_types`, or else `first_k_dense_replace` and `moe_layer_freq`, say whether layer `n`
    is dense.
    """
    if fields.has("mlp_layer_types"):
        kinds = fields.texts("mlp_layer_types")
        if len(kinds) != layers_of(fields) or not set(kinds) <= {"dense", "sparse"}:
            raise fields.error("mlp_layer_types must name each layer dense or sparse")
        sparse = kinds[n] == "sparse"
    else:
        freq = fields.count("moe_layer_freq", default=1)
        sparse = n >= fields.count("first_k_dense_replace", least=0, most=MAX_LAYERS) and n % freq == 0
    if not sparse:
        return mlp(fields)
    return experts(
        fields,
        shared=fields.count("n_shared_experts", "num_shared_experts", least=0)
        * fields.count("moe_intermediate_size"),
    )


def jamba_moe(fields: Fields, n: int) -> Cost:
    """Return the cost of experts or of a dense layer.

    `expert_layer_period` and `expert_layer_offset` say whether layer `n` has experts. If the model has a
    single expert, every layer is dense.
    """
    period = fields.count("expert_layer_period")
    sparse = n % period == fields.count("expert_layer_offset", least=0, most=period - 1)
    return (
        mixtral_experts(fields, n)
        if sparse and fields.count("num_experts", "num_local_experts") > 1
        else mlp(fields)
    )


def granite_moe(fields: Fields, n: int) -> Cost:
    """Return the cost of the shared part, which every layer has, and of the experts if the model has any."""
    shared = mlp(fields, width="shared_intermediate_size")
    return shared + (mixtral_experts(fields, n) if fields.count("num_local_experts", least=0) else Cost())


def nemotron_mlp(fields: Fields) -> Cost:
    """Return the cost of a feed-forward layer with an up and a down matrix, and no gate.

    The activation is a squared ReLU.
    """
    return costs.mlp(fields.count("hidden_size"), fields.count("intermediate_size"), matrices=2)


def nemotron_experts(fields: Fields) -> Cost:
    """Return the cost of experts that are built like `nemotron_mlp`.

    If the config has a `moe_latent_size`, the routed experts work in a latent space of that width.
    """
    total = fields.count("n_routed_experts", "num_local_experts")
    return costs.experts(
        fields.count("hidden_size"), total, fields.count("num_experts_per_tok", most=total),
        fields.count("moe_intermediate_size"),
        shared=fields.count("moe_shared_expert_intermediate_size"), matrices=2,
        latent=fields.count("moe_latent_size") if fields.has("moe_latent_size") else None,
    )  # fmt: skip


def lfm2_mlp(fields: Fields, _: int) -> Cost:
    """Return the cost of a feed-forward layer of LFM2.

    With `block_auto_adjust_ff_dim`, the width is two thirds of the width in the config, times
    `block_ffn_dim_multiplier`, rounded up to a multiple of `block_multiple_of`.
    """
    inner = fields.count("block_ff_dim") if fields.has("block_ff_dim") else fields.count("intermediate_size")
    if fields.flag("block_auto_adjust_ff_dim"):
        multiple = fields.count("block_multiple_of")
        inner = -(-int(fields.number("block_ffn_dim_multiplier") * (2 * inner // 3)) // multiple) * multiple
    return costs.mlp(fields.count("hidden_size"), inner)


def lfm2_moe(fields: Fields, n: int) -> Cost:
    """Return the cost of experts, or of a dense layer among the first `num_dense_layers`."""
    return mlp(fields) if n < fields.count("num_dense_layers", least=0, most=MAX_LAYERS) else experts(fields)


def _share(fields: Fields, whole: str, size: int, parts: str, count: int) -> int:
    if size % count:
        raise fields.error(f"{whole}, {size}, cannot be divided by {parts}, {count}")
    return size // count
