"""Cost of a model from its Hugging Face config: the sum over the layers of each known `model_type`.

An architecture is one function from the fields to the costs of its layers. A config that is not understood is refused: a missing field has
no default unless the architecture itself has one. Embeddings and the output head are left out: prefill needs the head for one token only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from tiercache.errors import ConfigError
from tiercache.policy import blocks, pattern
from tiercache.policy.blocks import FeedForward, Mixer
from tiercache.policy.fields import Fields, shown
from tiercache.policy.layers import Cost
from tiercache.policy.pattern import Kind

WIDTHS: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of an element of KV, by the config's dtype."""


def cost_of(config: Mapping[str, Any], label: str = "model config") -> tuple[Cost, int]:
    """Return the cost of all layers together, and the bytes of an element of KV; raise ConfigError if they cannot be derived.

    Where the config has a `text_config` inside, that one describes the model. `label` names the config in error messages.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"{label} is {shown(config)}; an object of field names and values is needed")
    outer = Fields(config, label)
    fields = outer.inner("text_config") if outer.has("text_config") else outer
    model_type = (fields if fields.has("model_type") else outer).text("model_type")
    if model_type not in ARCHITECTURES:
        raise fields.error(f"the layers of model_type {model_type[:40]!r} are not known; known are {', '.join(sorted(ARCHITECTURES))}")
    total = sum(ARCHITECTURES[model_type](fields), Cost())
    dtype = (fields if fields.has("dtype") or fields.has("torch_dtype") else outer).text("dtype", "torch_dtype", default="bfloat16")
    width = WIDTHS.get(dtype.removeprefix("torch."))
    if width is None:
        raise fields.error(f"dtype {dtype[:40]!r} is not known; known are {', '.join(WIDTHS)}")
    return total, width


def _stack(fields: Fields, kinds: Sequence[Kind], mixers: Mapping[Kind, Mixer], feed_forward: FeedForward | None = None) -> Iterator[Cost]:
    """Yield the cost of each layer: its mixer, and its feed-forward part where that is not a layer of its own."""
    for n, kind in enumerate(kinds):
        if kind not in mixers:
            raise fields.error(f"layer {n} is {kind.value}, which this architecture does not have")
        yield mixers[kind](fields) + (feed_forward(fields, n) if feed_forward else Cost())


def _dense(fields: Fields, *, window_alone: bool = False) -> Iterator[Cost]:
    return _stack(fields, pattern.attention_only(fields, window_alone=window_alone), blocks.ATTENTION, blocks.mlp)


def _mixtral(fields: Fields) -> Iterator[Cost]:
    return _stack(fields, pattern.attention_only(fields, window_alone=True), blocks.ATTENTION, blocks.mixtral_experts)


def _gpt_oss(fields: Fields) -> Iterator[Cost]:
    return _stack(fields, pattern.only_listed(fields), blocks.ATTENTION, blocks.mixtral_experts)


def _qwen_moe_model(fields: Fields, *, shared: bool) -> Iterator[Cost]:
    return _stack(fields, pattern.attention_only(fields), blocks.ATTENTION, partial(blocks.qwen_moe, shared=shared))


def _deepseek(fields: Fields) -> Iterator[Cost]:
    return _stack(fields, pattern.attention_only(fields), {Kind.FULL: blocks.latent_attention}, blocks.deepseek_moe)


def _qwen_hybrid(fields: Fields, *, sparse: bool) -> Iterator[Cost]:
    mixers = {Kind.FULL: blocks.gated_attention, Kind.RECURRENT: blocks.gated_delta}
    return _stack(fields, pattern.every_nth(fields), mixers, partial(blocks.qwen_moe, shared=True) if sparse else blocks.mlp)


def _kimi_linear(fields: Fields) -> Iterator[Cost]:
    # Later models of this type change their layers where these switches are set.
    unknown = fields.set_ones(["mla_use_output_gate", "routed_expert_hidden_size", "attn_res_block_size"])
    if fields.has("linear_attn_config"):
        unknown += fields.inner("linear_attn_config").set_ones(["use_full_rank_gate"])
    if unknown:
        raise fields.error(f"{unknown[0]} is set, and what it does to the layers is not known")
    return _stack(
        fields, pattern.partitioned(fields), {Kind.FULL: blocks.latent_attention, Kind.RECURRENT: blocks.kimi_delta}, blocks.deepseek_moe
    )


def _jamba(fields: Fields) -> Iterator[Cost]:
    return _stack(fields, pattern.periodic(fields), {Kind.FULL: blocks.attention, Kind.RECURRENT: blocks.mamba1}, blocks.jamba_moe)


def _bamba(fields: Fields) -> Iterator[Cost]:
    kinds = pattern.indexed(fields, "attn_layer_indices", Kind.RECURRENT)
    return _stack(fields, kinds, {Kind.FULL: blocks.attention, Kind.RECURRENT: blocks.mamba2}, blocks.mlp)


def _granite_hybrid(fields: Fields) -> Iterator[Cost]:
    return _stack(fields, pattern.only_listed(fields), {Kind.FULL: blocks.attention, Kind.RECURRENT: blocks.mamba2}, blocks.granite_moe)


def _falcon_h1(fields: Fields) -> Iterator[Cost]:
    kinds = pattern.listed(fields) or [Kind.PARALLEL] * pattern.layers_of(fields)
    return _stack(fields, kinds, {Kind.PARALLEL: lambda f: blocks.attention(f) + blocks.mamba2(f)}, blocks.mlp)


def _nemotron_h(fields: Fields) -> Iterator[Cost]:
    mixers = {
        Kind.FULL: blocks.attention,
        Kind.RECURRENT: blocks.nemotron_mamba2,
        Kind.MLP: blocks.nemotron_mlp,
        Kind.MOE: blocks.nemotron_experts,
    }
    return _stack(fields, pattern.lettered(fields), mixers)


def _lfm2(fields: Fields, *, feed_forward: FeedForward) -> Iterator[Cost]:
    kinds = pattern.indexed(fields, "full_attn_idxs", Kind.CONV)
    return _stack(fields, kinds, {Kind.FULL: blocks.attention, Kind.CONV: blocks.short_conv}, feed_forward)


ARCHITECTURES: Final[Mapping[str, Callable[[Fields], Iterator[Cost]]]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), _dense),
    **dict.fromkeys(("mistral", "phi3"), partial(_dense, window_alone=True)),
    "mixtral": _mixtral, "gpt_oss": _gpt_oss,
    "qwen2_moe": partial(_qwen_moe_model, shared=True), "qwen3_moe": partial(_qwen_moe_model, shared=False),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _deepseek),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"), partial(_qwen_hybrid, sparse=True)),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), partial(_qwen_hybrid, sparse=False)),
    "kimi_linear": _kimi_linear, "jamba": _jamba, "bamba": _bamba, "granitemoehybrid": _granite_hybrid, "falcon_h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "lfm2": partial(_lfm2, feed_forward=blocks.lfm2_mlp), "lfm2_moe": partial(_lfm2, feed_forward=blocks.lfm2_moe),
}  # fmt: skip
"""Functions that yield the costs of a model's layers, by `model_type`."""
