"""Cost of a model from its Hugging Face config: the sum of the costs of its layers.

For each architecture, a row of a table says which kinds of layers it has, and what each costs. A missing
field has a default only if the architecture defines one; otherwise the config is refused. Embeddings and the
output head are left out: an embedding is a look-up, and prefill needs the head for one token only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from tiercache.errors import ConfigError
from tiercache.models import layer_kinds, layers
from tiercache.models.fields import Fields, shown
from tiercache.models.layer_kinds import Kinds, LayerKind
from tiercache.models.layers import Cost, FeedForward, Mixer

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
    total = _sum_of_layers(fields, ARCHITECTURES[model_type])
    dtype = (fields if fields.has("dtype") or fields.has("torch_dtype") else outer).text(
        "dtype", "torch_dtype", default="bfloat16"
    )
    width = WIDTHS.get(dtype.removeprefix("torch."))
    if width is None:
        raise fields.error(f"dtype {dtype[:40]!r} is not known; known are {', '.join(WIDTHS)}")
    return total, width


def _sum_of_layers(fields: Fields, architecture: Architecture) -> Cost:
    architecture.check(fields)
    total = Cost()
    for n, kind in enumerate(architecture.kinds(fields)):
        if kind not in architecture.mixers:
            raise fields.error(f"layer {n} is {kind.value}, which this architecture does not have")
        total += architecture.mixers[kind](fields)
        if architecture.feed_forward is not None:
            total += architecture.feed_forward(fields, n)
    return total


def _check_kimi(fields: Fields) -> None:
    # Later models of this type set these fields. The costs of the layers of such models are not known here.
    unknown = fields.switched_on(["mla_use_output_gate", "routed_expert_hidden_size", "attn_res_block_size"])
    if fields.has("linear_attn_config"):
        unknown += fields.inner("linear_attn_config").switched_on(["use_full_rank_gate"])
    if unknown:
        raise fields.error(f"{unknown[0]} is set, and its effect on the layers is not known")


class Architecture(NamedTuple):
    """Layers of the models of one type."""

    kinds: Kinds
    """Function that returns the kind of each layer."""
    mixers: Mapping[LayerKind, Mixer]
    """Costs of the mixers by the kind of the layer."""
    feed_forward: FeedForward | None = None
    """Cost of the feed-forward part that each layer has beside its mixer.

    None: there is none, or it is a layer of its own, and among the `mixers`.
    """
    check: Callable[[Fields], None] = lambda _: None
    """Function that refuses configs whose layers are not known."""


_FULL, _RECURRENT, _CONV, _PARALLEL = (
    LayerKind.FULL, LayerKind.RECURRENT, LayerKind.CONV, LayerKind.PARALLEL,
)  # fmt: skip
_ATTENTION: Final = {_FULL: layers.attention, LayerKind.SLIDING: layers.sliding_attention}
_QWEN: Final = {_FULL: layers.gated_attention, _RECURRENT: layers.gated_delta}
_MAMBA_2: Final = {_FULL: layers.attention, _RECURRENT: layers.mamba2}
_WINDOW_ALONE: Final = partial(layer_kinds.attention_only, window_alone=True)

_DENSE: Final = Architecture(layer_kinds.attention_only, _ATTENTION, layers.mlp)
_WINDOWED: Final = Architecture(_WINDOW_ALONE, _ATTENTION, layers.mlp)
_LISTED: Final = Architecture(layer_kinds.only_listed, _ATTENTION, layers.mlp)
_DEEPSEEK: Final = Architecture(
    layer_kinds.attention_only, {_FULL: layers.latent_attention}, layers.deepseek_moe
)
_QWEN_SPARSE: Final = Architecture(layer_kinds.every_nth, _QWEN, layers.qwen_moe)
_QWEN_DENSE: Final = Architecture(layer_kinds.every_nth, _QWEN, layers.mlp)
_MAMBA: Final = Architecture(layer_kinds.all_of(_RECURRENT), {_RECURRENT: layers.pure_mamba1})
_LFM2: Final = Architecture(
    layer_kinds.indexed("full_attn_idxs", _CONV), {_FULL: layers.attention, _CONV: layers.short_conv},
    layers.lfm2_mlp,
)  # fmt: skip

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), _DENSE),
    **dict.fromkeys(("mistral", "phi3"), _WINDOWED),
    **dict.fromkeys(("gemma2", "gemma3_text", "cohere2", "exaone4", "olmo3"), _LISTED),
    "mixtral": Architecture(_WINDOW_ALONE, _ATTENTION, layers.mixtral_experts),
    "gpt_oss": Architecture(layer_kinds.only_listed, _ATTENTION, layers.mixtral_experts),
    "qwen2_moe": Architecture(layer_kinds.attention_only, _ATTENTION, layers.qwen_moe),
    "qwen3_moe": Architecture(
        layer_kinds.attention_only, _ATTENTION, partial(layers.qwen_moe, shared=False)
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _DEEPSEEK),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"), _QWEN_SPARSE),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), _QWEN_DENSE),
    "kimi_linear": Architecture(
        layer_kinds.partitioned, {_FULL: layers.latent_attention, _RECURRENT: layers.kimi_delta},
        layers.deepseek_moe, _check_kimi,
    ),
    "jamba": Architecture(
        layer_kinds.periodic, {_FULL: layers.attention, _RECURRENT: layers.mamba1}, layers.jamba_moe
    ),
    "bamba": Architecture(layer_kinds.indexed("attn_layer_indices", _RECURRENT), _MAMBA_2, layers.mlp),
    "granitemoehybrid": Architecture(layer_kinds.only_listed, _MAMBA_2, layers.granite_moe),
    "falcon_h1": Architecture(
        layer_kinds.all_of(_PARALLEL), {_PARALLEL: lambda f: layers.attention(f) + layers.mamba2(f)},
        layers.mlp,
    ),
    "nemotron_h": Architecture(
        layer_kinds.lettered,
        {
            _FULL: layers.attention, _RECURRENT: layers.nemotron_mamba2,
            LayerKind.MLP: layers.nemotron_mlp, LayerKind.MOE: layers.nemotron_experts,
        },
    ),
    **dict.fromkeys(("mamba", "falcon_mamba"), _MAMBA),
    "mamba2": Architecture(layer_kinds.all_of(_RECURRENT), {_RECURRENT: layers.pure_mamba2}),
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2._replace(feed_forward=layers.lfm2_moe),
}  # fmt: skip
"""Layers of the models that are known, by `model_type`."""
