"""Cost of a model from its Hugging Face config: the sum of the costs of its layers.

For each architecture, a row of a table says which kinds of layers it has, and what each costs. A missing
field has a default only if the architecture defines one; otherwise the config is refused. Embeddings and the
output head are left out: an embedding is a look-up, and prefill needs the head for one token only.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from tiercache.errors import ConfigError
from tiercache.models import layers
from tiercache.models.fields import Fields
from tiercache.models.layers import Cost, FeedForward, Mixer, layers_of
from tiercache.text import shown

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
    for n, kind in enumerate(listed(fields) or architecture.kinds(fields)):
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


class LayerKind(enum.Enum):
    """Kind of a layer, by the way in which it mixes tokens. MLP and MOE layers do not mix tokens."""

    FULL = "full attention"
    SLIDING = "sliding-window attention"
    RECURRENT = "recurrent"
    CONV = "short convolution"
    PARALLEL = "attention beside a recurrence"
    MLP = "feed-forward only"
    MOE = "experts only"


Kinds = Callable[[Fields], list[LayerKind]]
"""Function from a config's fields to the kinds of its layers.

It raises ConfigError for fields that are missing, malformed or contradictory.
"""

NAMES: Final = {
    "full_attention": LayerKind.FULL, "attention": LayerKind.FULL, "sliding_attention": LayerKind.SLIDING,
    "linear_attention": LayerKind.RECURRENT, "mamba": LayerKind.RECURRENT, "conv": LayerKind.CONV,
    "hybrid": LayerKind.PARALLEL, "mlp": LayerKind.MLP, "moe": LayerKind.MOE,
}  # fmt: skip
"""Kinds by the names that configs use in the lists `layer_types` and `layers_block_type`."""

LETTERS: Final = {"M": LayerKind.RECURRENT, "*": LayerKind.FULL, "-": LayerKind.MLP, "E": LayerKind.MOE}
"""Kinds by the letters of `hybrid_override_pattern`."""


def listed(fields: Fields) -> list[LayerKind] | None:
    """Return the kinds that the config lists layer by layer; None if it has no such list."""
    for name in ("layer_types", "layers_block_type"):
        if fields.has(name):
            return _known(fields, name, fields.texts(name), NAMES)
    return None


def only_listed(fields: Fields) -> list[LayerKind]:
    """Raise ConfigError, for models whose configs must list the kinds."""
    raise fields.error("layer_types is missing, and without it the model's cost cannot be derived")


def all_of(kind: LayerKind) -> Kinds:
    """Return a function for models whose layers are all of one kind."""
    return lambda fields: [kind] * layers_of(fields)


def attention_only(fields: Fields, *, window_alone: bool = False) -> list[LayerKind]:
    """Return full attention in all layers, for models without recurrences.

    A config may have a `sliding_window` and no list. With `window_alone`, all layers then have the window,
    unless `use_sliding_window` is false. Without `window_alone`, no layer has the window; but if
    `use_sliding_window` is true, the missing list is an error.
    """
    if not fields.has("sliding_window") or not fields.flag("use_sliding_window", default=window_alone):
        return [LayerKind.FULL] * layers_of(fields)
    if not window_alone:
        raise fields.error(
            "layer_types is missing, and with use_sliding_window it must say which layers have the window"
        )
    return [LayerKind.SLIDING] * layers_of(fields)


def every_nth(fields: Fields) -> list[LayerKind]:
    """Return full attention in each `full_attention_interval`-th layer; the others are recurrent."""
    interval = fields.count("full_attention_interval")
    return _full_where(fields, lambda n: (n + 1) % interval == 0)


def periodic(fields: Fields) -> list[LayerKind]:
    """Return full attention in layer n if n modulo `attn_layer_period` is `attn_layer_offset`."""
    period = fields.count("attn_layer_period")
    offset = fields.count("attn_layer_offset", least=0, most=period - 1)
    return _full_where(fields, lambda n: n % period == offset)


def indexed(name: str, otherwise: LayerKind) -> Kinds:
    """Return a function for configs whose field `name` has the indices, from 0, of layers with attention."""

    def kinds(fields: Fields) -> list[LayerKind]:
        full = set(fields.counts(name, most=layers_of(fields) - 1))
        return _full_where(fields, full.__contains__, otherwise)

    return kinds


def partitioned(fields: Fields) -> list[LayerKind]:
    """Return the kinds by `full_attn_layers` and `kda_layers` in `linear_attn_config`, counted from 1."""
    total, lists = layers_of(fields), fields.inner("linear_attn_config")
    full, linear = (lists.counts(name, least=1, most=total) for name in ("full_attn_layers", "kda_layers"))
    if sorted(full + linear) != list(range(1, total + 1)):
        raise lists.error(
            f"full_attn_layers and kda_layers must together name each of the {total} layers once"
        )
    return _full_where(fields, lambda n: n + 1 in full)


def lettered(fields: Fields) -> list[LayerKind]:
    """Return the kinds by the letters of `hybrid_override_pattern`; `num_hidden_layers` may be missing."""
    name = "hybrid_override_pattern"
    return _known(fields, name, fields.text(name), LETTERS)


def _full_where(
    fields: Fields, is_full: Callable[[int], bool], otherwise: LayerKind = LayerKind.RECURRENT
) -> list[LayerKind]:
    return [LayerKind.FULL if is_full(n) else otherwise for n in range(layers_of(fields))]


def _known(
    fields: Fields, name: str, texts: list[str] | str, known: Mapping[str, LayerKind]
) -> list[LayerKind]:
    """Return the kinds with these names or letters, of the field `name`, one for each layer."""
    for text in texts:
        if text not in known:
            raise fields.error(
                f"{name} holds {text[:40]!r}, a kind of layer that is not known; known are"
                f" {', '.join(sorted(known))}"
            )
    if not texts:
        raise fields.error(f"{name} is empty; it must name every layer")
    if fields.has("num_hidden_layers") and len(texts) != layers_of(fields):
        raise fields.error(
            f"{name} names {len(texts)} layers but num_hidden_layers is {layers_of(fields)}; they must be the"
            " same"
        )
    return [known[text] for text in texts]


class Architecture(NamedTuple):
    """Layers of the models of one type."""

    kinds: Kinds
    """Function that returns the kind of each layer, for a config that does not list them."""
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
_ATTENTION: Final[Mapping[LayerKind, Mixer]] = {
    _FULL: layers.attention, LayerKind.SLIDING: partial(layers.attention, sliding=True),
}  # fmt: skip
_QWEN: Final = {_FULL: layers.gated_attention, _RECURRENT: layers.gated_delta}
_MAMBA_2: Final = {_FULL: layers.attention, _RECURRENT: layers.mamba2}
_WINDOW_ALONE: Final = partial(attention_only, window_alone=True)

_DENSE: Final = Architecture(attention_only, _ATTENTION, layers.mlp)
_WINDOWED: Final = Architecture(_WINDOW_ALONE, _ATTENTION, layers.mlp)
_LISTED: Final = Architecture(only_listed, _ATTENTION, layers.mlp)
_DEEPSEEK: Final = Architecture(attention_only, {_FULL: layers.latent_attention}, layers.deepseek_moe)
_QWEN_SPARSE: Final = Architecture(every_nth, _QWEN, layers.qwen_moe)
_QWEN_DENSE: Final = Architecture(every_nth, _QWEN, layers.mlp)
_MAMBA: Final = Architecture(all_of(_RECURRENT), {_RECURRENT: layers.pure_mamba1})
_LFM2: Final = Architecture(
    indexed("full_attn_idxs", _CONV), {_FULL: layers.attention, _CONV: layers.short_conv},
    layers.lfm2_mlp,
)  # fmt: skip

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), _DENSE),
    **dict.fromkeys(("mistral", "phi3"), _WINDOWED),
    **dict.fromkeys(("gemma2", "gemma3_text", "cohere2", "exaone4", "olmo3"), _LISTED),
    "mixtral": Architecture(_WINDOW_ALONE, _ATTENTION, layers.mixtral_experts),
    "gpt_oss": Architecture(only_listed, _ATTENTION, layers.mixtral_experts),
    "qwen2_moe": Architecture(attention_only, _ATTENTION, layers.qwen_moe),
    "qwen3_moe": Architecture(
        attention_only, _ATTENTION, partial(layers.qwen_moe, shared=False)
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _DEEPSEEK),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"), _QWEN_SPARSE),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), _QWEN_DENSE),
    "kimi_linear": Architecture(
        partitioned, {_FULL: layers.latent_attention, _RECURRENT: layers.kimi_delta},
        layers.deepseek_moe, _check_kimi,
    ),
    "jamba": Architecture(
        periodic, {_FULL: layers.attention, _RECURRENT: layers.mamba1}, layers.jamba_moe
    ),
    "bamba": Architecture(indexed("attn_layer_indices", _RECURRENT), _MAMBA_2, layers.mlp),
    "granitemoehybrid": Architecture(only_listed, _MAMBA_2, layers.granite_moe),
    "falcon_h1": Architecture(
        all_of(_PARALLEL), {_PARALLEL: lambda f: layers.attention(f) + layers.mamba2(f)},
        layers.mlp,
    ),
    "nemotron_h": Architecture(
        lettered,
        {
            _FULL: layers.attention, _RECURRENT: layers.nemotron_mamba2,
            LayerKind.MLP: partial(layers.mlp, matrices=2), LayerKind.MOE: layers.nemotron_experts,
        },
    ),
    **dict.fromkeys(("mamba", "falcon_mamba"), _MAMBA),
    "mamba2": Architecture(all_of(_RECURRENT), {_RECURRENT: layers.pure_mamba2}),
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2._replace(feed_forward=layers.lfm2_moe),
}  # fmt: skip
"""Layers of the models that are known, by `model_type`."""
