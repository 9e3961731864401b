"""Memory and computation of one layer, from the fields of a config.

Each architecture has its own names for the sizes. The functions raise ConfigError for fields that are
missing, malformed or contradictory.

Biases, norms, activations and rotary embeddings are left out, because they are under a percent of the cost.
Recurrences are counted in their sequential form, per element of the state. Chunked kernels do more arithmetic
in fewer steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tiercache.models.fields import MAX_LAYERS, Fields

DELTA_RULE: Final = 7
"""FLOPs per token and element of a delta rule's state.

Decay takes 1, prediction 2, the outer product 2, and the read-out 2.
"""
MAMBA_2: Final = 5
"""FLOPs per token and element of a Mamba-2 state: decay takes 1, the outer product 2, and the read-out 2."""
MAMBA_1: Final = 7
"""FLOPs per token and element of a Mamba state.

Besides the 5 FLOPs of Mamba-2, the decay of each element takes a product and an exponential.
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """Memory and computation of a layer, or of a sum of layers."""

    kv: int = 0
    """Elements of KV per token."""
    state: int = 0
    """Elements of recurrent state per sequence, kept in float32."""
    conv: int = 0
    """Elements of past convolution inputs per sequence, kept in the model's dtype."""
    weights: int = 0
    """Number of weights that each token uses, at two FLOPs per weight."""
    work: int = 0
    """Further FLOPs per token."""
    context: int = 0
    """FLOPs of attention per pair of a token and an earlier token."""
    window: int = 0
    """Elements of KV in sliding windows per sequence, kept in the model's dtype."""
    windows: tuple[tuple[int, int], ...] = ()
    """Window in tokens, and FLOPs per pair of a token and an earlier token in it, of each layer with one."""

    def __add__(self, other: Cost) -> Cost:
        names = [field.name for field in dataclasses.fields(Cost)]
        return Cost(*(getattr(self, name) + getattr(other, name) for name in names))


Mixer = Callable[[Fields], Cost]
"""Function from a config's fields to the cost of a layer's mixer (attention or recurrence)."""
FeedForward = Callable[[Fields, int], Cost]
"""Function from a config's fields and a layer's number to the cost of the layer's feed-forward part.

The number, from 0, decides whether the layer has experts.
"""


# --- attention
# ----------------------------------------------------------------------------------------------------------


def attention(fields: Fields, *, gated: bool = False, sliding: bool = False) -> Cost:
    """Return the cost of attention, grouped or not. With `gated`, there is a gate as wide as the queries.

    If the config does not give the width of a head, it is `hidden_size` / number of heads.

    With a sliding window of W tokens, a token attends to at most as many, and the KV of the last W - 1 tokens
    is kept at each depth, like a recurrent state, instead of that of every token.
    """
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", most=heads, default=heads)
    if heads % kv_heads:
        raise fields.error(f"{heads} attention heads cannot share {kv_heads} KV heads evenly")
    if fields.has("head_dim") or fields.has("attention_head_dim"):
        head_dim = fields.count("head_dim", "attention_head_dim")
    else:
        head_dim = _share(fields, "hidden_size", hidden, "num_attention_heads", heads)
    # Heads have projections for queries, outputs and, if gated, gates; KV heads for keys and values.
    weights = hidden * head_dim * (heads * (3 if gated else 2) + 2 * kv_heads)
    pair = 4 * heads * head_dim  # 2 for the product of query and key, 2 for the weighted value
    kv = 2 * kv_heads * head_dim
    if not sliding:
        return Cost(kv=kv, weights=weights, context=pair)
    window = fields.count("sliding_window")
    return Cost(weights=weights, window=kv * (window - 1), windows=((window, pair),))


def gated_attention(fields: Fields) -> Cost:
    """Return the cost of attention with a gate on its output, or without a gate if the config says so."""
    return attention(fields, gated=fields.flag("attn_output_gate", default=True))


def latent_attention(fields: Fields) -> Cost:
    """Return the cost of multi-head latent attention, from the fields that DeepSeek's configs use.

    For each token, the cache keeps the latent (keys and values in compressed form) and the rope part of the
    key. Prefill expands them to keys and values. If a prefix was restored, each chunk of the prefill expands
    the whole prefix again. That work is not counted.
    """
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_rank, nope, rope, value = (
        fields.count(name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    query = hidden * heads * (nope + rope)
    if fields.has("q_lora_rank"):
        query = fields.count("q_lora_rank") * (hidden + heads * (nope + rope))
    weights = query + hidden * (kv_rank + rope) + kv_rank * heads * (nope + value) + heads * value * hidden
    return Cost(kv=kv_rank + rope, weights=weights, context=2 * heads * (nope + rope + value))


# --- recurrences and convolutions
# ----------------------------------------------------------------------------------------------------------


def gated_delta(fields: Fields) -> Cost:
    """Return the cost of a gated delta net, from the fields that Qwen's configs use.

    It has projections to q, k, v, output gate, write strength and decay. The convolution runs over q, k and
    v.
    """
    hidden = fields.count("hidden_size")
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    key_heads, value_heads, key_dim, value_dim, kernel = (fields.count(f"linear_{name}") for name in names)
    keys, values = key_heads * key_dim, value_heads * value_dim
    channels = 2 * keys + values
    weights = hidden * (channels + values + 2 * value_heads) + values * hidden + channels * kernel
    state = value_heads * key_dim * value_dim
    return Cost(state=state, conv=channels * (kernel - 1), weights=weights, work=DELTA_RULE * state)


def kimi_delta(fields: Fields) -> Cost:
    """Return the cost of Kimi delta attention.

    The fields are in Kimi's nested `linear_attn_config`, or flat as in Transformers. The projections to decay
    and output gate have rank `head_dim`. Each key channel has its own decay.
    """
    hidden = fields.count("hidden_size")
    if fields.has("linear_attn_config"):
        nested = fields.inner("linear_attn_config")
        counts = (nested.count(name) for name in ("num_heads", "head_dim", "short_conv_kernel_size"))
    else:
        counts = (fields.count(f"linear_{name}") for name in ("num_heads", "head_dim", "conv_kernel_dim"))
    heads, head_dim, kernel = counts
    inner = heads * head_dim
    low_rank = head_dim * (hidden + inner)
    weights = 4 * hidden * inner + 2 * low_rank + hidden * heads + 3 * inner * kernel
    state = inner * head_dim
    return Cost(state=state, conv=3 * inner * (kernel - 1), weights=weights, work=DELTA_RULE * state)


def mamba1(fields: Fields) -> Cost:
    """Return the cost of a Mamba mixer, from the fields that Jamba's configs use."""
    inner = fields.count("mamba_expand") * fields.count("hidden_size")
    return _mamba1(fields, inner, "mamba_dt_rank", "mamba_d_state", "mamba_d_conv")


def pure_mamba1(fields: Fields) -> Cost:
    """Return the cost of a Mamba mixer, from the fields that Mamba's and Falcon-Mamba's configs use."""
    if fields.has("intermediate_size"):
        inner = fields.count("intermediate_size")
    else:
        inner = fields.count("expand") * fields.count("hidden_size")
    return _mamba1(fields, inner, "time_step_rank", "state_size", "conv_kernel")


def _mamba1(fields: Fields, inner: int, rank_name: str, state_name: str, kernel_name: str) -> Cost:
    """Return the cost of a Mamba mixer of width `inner`, from the fields with these names."""
    hidden = fields.count("hidden_size")
    # "auto" stands for hidden size / 16, rounded up.
    rank = -(-hidden // 16) if fields.is_text(rank_name, "auto") else fields.count(rank_name)
    state, kernel = fields.count(state_name), fields.count(kernel_name)
    weights = 3 * hidden * inner + inner * (rank + 2 * state) + rank * inner + inner * kernel
    return Cost(state=inner * state, conv=inner * (kernel - 1), weights=weights, work=MAMBA_1 * inner * state)


def mamba2(fields: Fields) -> Cost:
    """Return the cost of a Mamba-2 mixer, from the fields that Bamba's and later configs use."""
    if fields.has("mamba_d_ssm"):
        inner = fields.count("mamba_d_ssm")
    else:
        inner = fields.count("mamba_expand") * fields.count("hidden_size")
    state, groups, kernel = (fields.count(f"mamba_{name}") for name in ("d_state", "n_groups", "d_conv"))
    return _mamba2(fields, "mamba_n_heads", "mamba_d_head", state, groups, kernel, inner)


def pure_mamba2(fields: Fields) -> Cost:
    """Return the cost of a Mamba-2 mixer, from the fields that Mamba-2's configs use."""
    inner = fields.count("expand") * fields.count("hidden_size")
    state, groups, kernel = (fields.count(name) for name in ("state_size", "n_groups", "conv_kernel"))
    return _mamba2(fields, "num_heads", "head_dim", state, groups, kernel, inner)


def nemotron_mamba2(fields: Fields) -> Cost:
    """Return the cost of a Mamba-2 mixer, from the fields that Nemotron-H's configs use."""
    sizes = (("ssm_state_size",), ("n_groups", "mamba_n_groups"), ("conv_kernel", "mamba_d_conv"))
    return _mamba2(fields, "mamba_num_heads", "mamba_head_dim", *(fields.count(*names) for names in sizes))


def _mamba2(
    fields: Fields, heads_name: str, width_name: str, state: int, groups: int, kernel: int,
    inner: int | None = None,
) -> Cost:  # fmt: skip
    """Return the cost of a Mamba-2 mixer; its convolution runs over x, B and C.

    `inner`: width of the mixer, which the heads divide evenly; by default the number of heads times the width
    of a head. Where it is known, a config may leave out the width of a head, or say "auto".
    """
    hidden, heads = fields.count("hidden_size"), fields.count(heads_name)
    if inner is None:
        inner = heads * fields.count(width_name)
    else:
        width = _share(fields, "the width of a Mamba layer", inner, heads_name, heads)
        is_given = fields.has(width_name) and not fields.is_text(width_name, "auto")
        if is_given and fields.count(width_name) != width:
            raise fields.error(
                f"{width_name} is {fields.count(width_name)}, but {heads} heads of a layer {inner} wide have"
                f" {width}"
            )
    channels = inner + 2 * groups * state
    weights = hidden * (inner + channels + heads) + inner * hidden + channels * kernel
    return Cost(
        state=inner * state, conv=channels * (kernel - 1), weights=weights, work=MAMBA_2 * inner * state
    )


def short_conv(fields: Fields) -> Cost:
    """Return the cost of LFM2's gated short convolution. Its only state is its past inputs."""
    hidden, kernel = fields.count("hidden_size"), fields.count("conv_L_cache")
    return Cost(conv=hidden * (kernel - 1), weights=4 * hidden * hidden + hidden * kernel)


# --- feed-forward parts
# ----------------------------------------------------------------------------------------------------------


def mlp(fields: Fields, _: int = 0, *, width: str = "intermediate_size", matrices: int = 3) -> Cost:
    """Return the cost of a feed-forward layer of 3 matrices (gate, up, down) or 2 (up, down).

    `width` is the name of the field with the inner width.
    """
    return Cost(weights=matrices * fields.count("hidden_size") * fields.count(width))


def experts(
    fields: Fields, *, width: str = "moe_intermediate_size", shared: int = 0, shared_gate: bool = False,
    matrices: int = 3, latent: int | None = None,
) -> Cost:  # fmt: skip
    """Return the cost of a router, routed experts, and shared experts of total width `shared`.

    `width` is the name of the field with the width of an expert. With `latent`, the routed experts work in a
    space of that width. One projection leads into this space, and another leads back.
    """
    hidden = fields.count("hidden_size")
    total = fields.count("num_experts", "num_local_experts", "n_routed_experts")
    active = fields.count("num_experts_per_tok", "num_experts_per_token", "experts_per_token", most=total)
    routed = hidden * total + matrices * (latent or hidden) * fields.count(width) * active
    projections = 2 * hidden * latent if latent else 0
    return Cost(weights=routed + projections + matrices * hidden * shared + (hidden if shared_gate else 0))


def mixtral_experts(fields: Fields, _: int) -> Cost:
    """Return the cost of experts of width `intermediate_size`, for models with experts in every layer."""
    return experts(fields, width="intermediate_size")


def qwen_moe(fields: Fields, n: int, *, shared: bool = True) -> Cost:
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
    shared = fields.count("n_shared_experts", "num_shared_experts", least=0)
    return experts(fields, shared=shared * fields.count("moe_intermediate_size"))


def jamba_moe(fields: Fields, n: int) -> Cost:
    """Return the cost of experts or of a dense layer.

    `expert_layer_period` and `expert_layer_offset` say whether layer `n` has experts. If the model has a
    single expert, every layer is dense.
    """
    period = fields.count("expert_layer_period")
    sparse = n % period == fields.count("expert_layer_offset", least=0, most=period - 1)
    if sparse and fields.count("num_experts", "num_local_experts") > 1:
        return mixtral_experts(fields, n)
    return mlp(fields)


def granite_moe(fields: Fields, n: int) -> Cost:
    """Return the cost of the shared part, which every layer has, and of the experts if the model has any."""
    shared = mlp(fields, width="shared_intermediate_size")
    return shared + (mixtral_experts(fields, n) if fields.count("num_local_experts", least=0) else Cost())


def nemotron_experts(fields: Fields) -> Cost:
    """Return the cost of experts whose activation is a squared ReLU, so without a gate.

    If the config has a `moe_latent_size`, the routed experts work in a latent space of that width.
    """
    return experts(
        fields, shared=fields.count("moe_shared_expert_intermediate_size"), matrices=2,
        latent=fields.count("moe_latent_size") if fields.has("moe_latent_size") else None,
    )  # fmt: skip


def lfm2_mlp(fields: Fields, _: int) -> Cost:
    """Return the cost of a feed-forward layer of LFM2.

    With `block_auto_adjust_ff_dim`, the width is two thirds of the width in the config, times
    `block_ffn_dim_multiplier`, rounded up to a multiple of `block_multiple_of`.
    """
    inner = fields.count("block_ff_dim" if fields.has("block_ff_dim") else "intermediate_size")
    if fields.flag("block_auto_adjust_ff_dim"):
        multiple = fields.count("block_multiple_of")
        inner = -(-int(fields.number("block_ffn_dim_multiplier") * (2 * inner // 3)) // multiple) * multiple
    return Cost(weights=3 * fields.count("hidden_size") * inner)


def lfm2_moe(fields: Fields, n: int) -> Cost:
    """Return the cost of experts, or of a dense layer among the first `num_dense_layers`."""
    return mlp(fields) if n < fields.count("num_dense_layers", least=0, most=MAX_LAYERS) else experts(fields)


def layers_of(fields: Fields) -> int:
    """Return the number of layers."""
    return fields.count("num_hidden_layers", most=MAX_LAYERS)


def _share(fields: Fields, whole: str, size: int, parts: str, count: int) -> int:
    if size % count:
        raise fields.error(f"{whole}, {size}, cannot be divided by {parts}, {count}")
    return size // count
