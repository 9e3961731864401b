"""Kinds of a model's layers. For each form of config, a function returns the kinds as a list, layer by layer.

The functions raise ConfigError for fields that are missing, malformed or contradictory.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Final

from tiercache.models.fields import MAX_LAYERS, Fields


class LayerKind(enum.Enum):
    """Kind of a layer, by the way in which it mixes tokens. MLP and MOE layers do not mix tokens."""

    FULL = "full attention"
    SLIDING = "sliding-window attention"
    RECURRENT = "recurrent"
    CONV = "short convolution"
    PARALLEL = "attention beside a recurrence"
    MLP = "feed-forward only"
    MOE = "experts only"


NAMES: Final = {
    "full_attention": LayerKind.FULL, "attention": LayerKind.FULL, "sliding_attention": LayerKind.SLIDING,
    "linear_attention": LayerKind.RECURRENT, "mamba": LayerKind.RECURRENT, "conv": LayerKind.CONV,
    "hybrid": LayerKind.PARALLEL, "mlp": LayerKind.MLP, "moe": LayerKind.MOE,
}  # fmt: skip
"""Kinds by the names that configs use in the lists `layer_types` and `layers_block_type`."""

LETTERS: Final = {"M": LayerKind.RECURRENT, "*": LayerKind.FULL, "-": LayerKind.MLP, "E": LayerKind.MOE}
"""Kinds by the letters of `hybrid_override_pattern`."""


def layers_of(fields: Fields) -> int:
    """Return the number of layers."""
    return fields.count("num_hidden_layers", most=MAX_LAYERS)


def listed(fields: Fields) -> list[LayerKind] | None:
    """Return the kinds that the config lists layer by layer; None if it has no such list."""
    name = next((n for n in ("layer_types", "layers_block_type") if fields.has(n)), None)
    if name is None:
        return None
    return _as_long_as_the_model(
        fields, name, [_kind(fields, name, text, NAMES) for text in fields.texts(name)]
    )


def attention_only(fields: Fields, *, window_alone: bool = False) -> list[LayerKind]:
    """Return the config's list of kinds, or else full attention in all layers.

    This is for models without recurrences.

    A config may have a `sliding_window` and no list. With `window_alone`, all layers then have the window,
    unless `use_sliding_window` is false. Without `window_alone`, no layer has the window; but if
    `use_sliding_window` is true, the missing list is an error.
    """
    if (kinds := listed(fields)) is not None:
        return kinds
    if not fields.has("sliding_window") or not fields.flag("use_sliding_window", default=window_alone):
        return [LayerKind.FULL] * layers_of(fields)
    if not window_alone:
        raise fields.error(
            "layer_types is missing, and with use_sliding_window it must say which layers have the window"
        )
    return [LayerKind.SLIDING] * layers_of(fields)


def only_listed(fields: Fields) -> list[LayerKind]:
    """Return the config's list of kinds, which is required."""
    kinds = listed(fields)
    if kinds is None:
        raise fields.error("layer_types is missing, and without it the model's cost cannot be derived")
    return kinds


def every_nth(fields: Fields) -> list[LayerKind]:
    """Return the config's list of kinds, or else one with full attention at regular intervals.

    Each `full_attention_interval`-th layer has full attention, and the others are recurrent.
    """
    if (kinds := listed(fields)) is not None:
        return kinds
    interval = fields.count("full_attention_interval")
    return _full_where(fields, lambda n: (n + 1) % interval == 0)


def periodic(fields: Fields) -> list[LayerKind]:
    """Return the config's list of kinds, or else one with full attention at an offset in each period.

    Layer n has full attention if n modulo `attn_layer_period` is `attn_layer_offset`. The other layers are
    recurrent.
    """
    if (kinds := listed(fields)) is not None:
        return kinds
    period = fields.count("attn_layer_period")
    offset = fields.count("attn_layer_offset", least=0, most=period - 1)
    return _full_where(fields, lambda n: n % period == offset)


def indexed(fields: Fields, name: str, otherwise: LayerKind) -> list[LayerKind]:
    """Return the config's list of kinds, or else one with full attention at given indices.

    The field `name` has the indices, from 0. The other layers are of the kind `otherwise`.
    """
    if (kinds := listed(fields)) is not None:
        return kinds
    full = set(fields.counts(name, most=layers_of(fields) - 1))
    return _full_where(fields, lambda n: n in full, otherwise)


def lettered(fields: Fields) -> list[LayerKind]:
    """Return the config's list of kinds, or else the kinds by the letters of `hybrid_override_pattern`.

    The config need not have `num_hidden_layers`.
    """
    if (kinds := listed(fields)) is not None:
        return kinds
    name = "hybrid_override_pattern"
    return _as_long_as_the_model(
        fields, name, [_kind(fields, name, letter, LETTERS) for letter in fields.text(name)]
    )


def partitioned(fields: Fields) -> list[LayerKind]:
    """Return the config's list of kinds, or else the kinds by two lists of layer numbers.

    The lists are `full_attn_layers` and `kda_layers` in `linear_attn_config`. They count layers from 1.
    """
    if (kinds := listed(fields)) is not None:
        return kinds
    total = layers_of(fields)
    lists = fields.inner("linear_attn_config")
    full, linear = (lists.counts(name, least=1, most=total) for name in ("full_attn_layers", "kda_layers"))
    if sorted(full + linear) != list(range(1, total + 1)):
        raise lists.error(
            f"full_attn_layers and kda_layers must together name each of the {total} layers once"
        )
    return _full_where(fields, lambda n: n + 1 in full)


def _full_where(
    fields: Fields, is_full: Callable[[int], bool], otherwise: LayerKind = LayerKind.RECURRENT
) -> list[LayerKind]:
    return [LayerKind.FULL if is_full(n) else otherwise for n in range(layers_of(fields))]


def _kind(fields: Fields, name: str, text: str, known: dict[str, LayerKind]) -> LayerKind:
    if text not in known:
        raise fields.error(
            f"{name} holds {text[:40]!r}, a kind of layer that is not known; known are {_list(known)}"
        )
    return known[text]


def _as_long_as_the_model(fields: Fields, name: str, kinds: list[LayerKind]) -> list[LayerKind]:
    if not kinds:
        raise fields.error(f"{name} is empty; it must name every layer")
    if fields.has("num_hidden_layers") and len(kinds) != layers_of(fields):
        raise fields.error(
            f"{name} names {len(kinds)} layers but num_hidden_layers is {layers_of(fields)}; they must be the"
            " same"
        )
    return kinds


def _list(known: Iterable[str]) -> str:
    return ", ".join(sorted(known))
