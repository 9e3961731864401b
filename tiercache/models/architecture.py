"""Cost of a model from its Hugging Face config: the sum of the costs of its layers.

For each architecture, one function turns the config's fields into the costs of the layers. A missing field
has a default only if the architecture defines one; otherwise the config is refused. Embeddings and the output
head are left out: an embedding is a look-up, and prefill needs the head for one token only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from tiercache.errors import ConfigError
from tiercache.models import layer_kinds, layers
from tiercache.models.costs import Cost
from tiercache.models.fields import Fields, shown
from tiercache.models.layer_kinds import LayerKind
from tiercache.models.layers import FeedForward, Mixer

WIDTHS: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of an element of KV, by the config's dtype."""


def cost_of(config: Mapping[str, Any], label: str = "model config") -> tuple[Cost, int]:
    """Return the cost of all layers together, and the bytes of an element of KV.

    If the config contains a `text_config`, that mapping describes the model. `label` names the config in
    error messages. Raises ConfigError if the config does not determine the cost.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"{label} is {shown(config)}; an object of field names and values is needed")
    outer = Fields(config, label)
    fields = outer.inner("text_config") if outer.has("text_config") else outer
    model_type = (fields if fields.has("model_type") else outer).text("model_type")
    if model_type not in ARCHITECTURES:
        raise fields.error(
            f"the layers of model_type {model_type[:40]!r} are not known; known are"
            f" {', '.join(sorted(ARCHITECTURES))}"
        )
    total = sum(ARCHITECTURES[model_type](fields), Cost())
    dtype = (fields if fields.has("dtype") or fields.has("torch_dtype") else outer).text(
        "dtype", "torch_dtype", default="bfloat16"
    )
    width = WIDTHS.get(dtype.removeprefix("torch."))
    if width is None:
        raise fields.error(f"dtype {dtype[:40]!r} is not known; known are {', '.join(WIDTHS)}")
    return total, width


def _stack(
    fields: Fields,
    kinds: Sequence[LayerKind],
    mixers: Mapping[LayerKind, Mixer],
    feed_forward: FeedForward | None = None,
) -> Iterator[Cost]:
    """Yield the cost of each layer: its mixer, and its feed-forward part if `feed_forward` is given.

    In some architectures, a feed-forward part is a layer of its own. `mixers` then has a function for this
    kind of layer as well.
    """
    for n, kind in enumerate(kinds):
        if kind not in mixers:
            raise fields.error(f"layer {n} is {kind.value}, which this architecture does not have")
        yield mixers[kind](fields) + (feed_forward(fields, n) if feed_forward else Cost())


def _dense(fields: Fields, *, window_alone: bool = False) -> Iterator[Cost]:
    # `window_alone`: see `layer_kinds.attention_only`.
    return _stack(
        fields, layer_kinds.attention_only(fields, window_alone=window_alone), layers.ATTENTION, layers.mlp
    )


def _listed_dense(fields: Fields) -> Iterator[Cost]:
    return _stack(fields, layer_kinds.only_listed(fields), layers.ATTENTION, layers.mlp)


def _mixtral(fields: Fields) -> Iterator[Cost]:
    return _stack(
        fields,
        layer_kinds.attention_only(fields, window_alone=True),
        layers.ATTENTION,
        layers.mixtral_experts,
    )


def _gpt_oss(fields: Fields) -> Iterator[Cost]:
    return _stack(fields, layer_kinds.only_listed(fields), layers.ATTENTION, layers.mixtral_experts)


def _qwen_moe_model(fields: Fields, *, shared: bool) -> Iterator[Cost]:
    return _stack(
        fields, layer_kinds.attention_only(fields), layers.ATTENTION, partial(layers.qwen_moe, shared=shared)
    )


def _deepseek(fields: Fields) -> Iterator[Cost]:
    return _stack(
        fields,
        layer_kinds.attention_only(fields),
        {LayerKind.FULL: layers.latent_attention},
        layers.deepseek_moe,
    )


def _qwen_hybrid(fields: Fields, *, sparse: bool) -> Iterator[Cost]:
    mixers = {LayerKind.FULL: layers.gated_attention, LayerKind.RECURRENT: layers.gated_delta}
    return _stack(
        fields,
        layer_kinds.every_nth(fields),
        mixers,
        partial(layers.qwen_moe, shared=True) if sparse else layers.mlp,
    )


def _kimi_linear(fields: Fields) -> Iterator[Cost]:
    # Later models of this type set these fields. The costs of the layers of such models are not known here.
    unknown = fields.switched_on(["mla_use_output_gate", "routed_expert_hidden_size", "attn_res_block_size"])
    if fields.has("linear_attn_config"):
        unknown += fields.inner("linear_attn_config").switched_on(["use_full_rank_gate"])
    if unknown:
        raise fields.error(f"{unknown[0]} is set, and its effect on the layers is not known")
    return _stack(
        fields,
        layer_kinds.partitioned(fields),
        {LayerKind.FULL: layers.latent_attention, LayerKind.RECURRENT: layers.kimi_delta},
        layers.deepseek_moe,
    )


def _jamba(fields: Fields) -> Iterator[Cost]:
    return _stack(
        fields,
        layer_kinds.periodic(fields),
        {LayerKind.FULL: layers.attention, LayerKind.RECURRENT: layers.mamba1},
        layers.jamba_moe,
    )


def _bamba(fields: Fields) -> Iterator[Cost]:
    kinds = layer_kinds.indexed(fields, "attn_layer_indices", LayerKind.RECURRENT)
    return _stack(
        fields, kinds, {LayerKind.FULL: layers.attention, LayerKind.RECURRENT: layers.mamba2}, layers.mlp
    )


def _granite_hybrid(fields: Fields) -> Iterator[Cost]:
    return _stack(
        fields,
        layer_kinds.only_listed(fields),
        {LayerKind.FULL: layers.attention, LayerKind.RECURRENT: layers.mamba2},
        layers.granite_moe,
    )


def _falcon_h1(fields: Fields) -> Iterator[Cost]:
    kinds = layer_kinds.listed(fields) or [LayerKind.PARALLEL] * layer_kinds.layers_of(fields)
    return _stack(
        fields, kinds, {LayerKind.PARALLEL: lambda f: layers.attention(f) + layers.mamba2(f)}, layers.mlp
    )


def _nemotron_h(fields: Fields) -> Iterator[Cost]:
    mixers = {
        LayerKind.FULL: layers.attention,
        LayerKind.RECURRENT: layers.nemotron_mamba2,
        LayerKind.MLP: layers.nemotron_mlp,
        LayerKind.MOE: layers.nemotron_experts,
    }
    return _stack(fields, layer_kinds.lettered(fields), mixers)


def _lfm2(fields: Fields, *, feed_forward: FeedForward) -> Iterator[Cost]:
    kinds = layer_kinds.indexed(fields, "full_attn_idxs", LayerKind.CONV)
    return _stack(
        fields, kinds, {LayerKind.FULL: layers.attention, LayerKind.CONV: layers.short_conv}, feed_forward
    )


def _recurrent(fields: Fields, *, mixer: Mixer) -> Iterator[Cost]:
    kinds = layer_kinds.listed(fields) or [LayerKind.RECURRENT] * layer_kinds.layers_of(fields)
    return _stack(fields, kinds, {LayerKind.RECURRENT: mixer})


ARCHITECTURES: Final[Mapping[str, Callable[[Fields], Iterator[Cost]]]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), _dense),
    **dict.fromkeys(("mistral", "phi3"), partial(_dense, window_alone=True)),
    **dict.fromkeys(("gemma2", "gemma3_text", "cohere2", "exaone4", "olmo3"), _listed_dense),
    "mixtral": _mixtral, "gpt_oss": _gpt_oss,
    "qwen2_moe": partial(_qwen_moe_model, shared=True), "qwen3_moe": partial(_qwen_moe_model, shared=False),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _deepseek),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"), partial(_qwen_hybrid, sparse=True)),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), partial(_qwen_hybrid, sparse=False)),
    "kimi_linear": _kimi_linear, "jamba": _jamba, "bamba": _bamba, "granitemoehybrid": _granite_hybrid,
    "falcon_h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    **dict.fromkeys(("mamba", "falcon_mamba"), partial(_recurrent, mixer=layers.pure_mamba1)),
    "mamba2": partial(_recurrent, mixer=layers.pure_mamba2),
    "lfm2": partial(_lfm2, feed_forward=layers.lfm2_mlp),
    "lfm2_moe": partial(_lfm2, feed_forward=layers.lfm2_moe),
}  # fmt: skip
"""Functions that yield the costs of a model's layers, by `model_type`."""
