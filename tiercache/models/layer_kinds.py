"""Kinds of a model's layers. For each form of config, a function returns the kinds as a list, layer by layer.

Every function returns the list that the config has (`listed`), if there is one. They raise ConfigError for
fields that are missing, malformed or contradictory.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Final

from tiercache.models.fields import Fields
from tiercache.models.layers import layers_of


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
"""Function from a config's fields to the kinds of its layers."""

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
    """Return the config's list of kinds, which is required."""
    kinds = listed(fields)
    if kinds is None:
        raise fields.error("layer_types is missing, and without it the model's cost cannot be derived")
    return kinds


def all_of(kind: LayerKind) -> Kinds:
    """Return a function for models whose layers are all of one kind."""
    return lambda fields: listed(fields) or [kind] * layers_of(fields)


def attention_only(fields: Fields, *, window_alone: bool = False) -> list[LayerKind]:
    """Return full attention in all layers, for models without recurrences.

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


def every_nth(fields: Fields) -> list[LayerKind]:
    """Return full attention in each `full_attention_interval`-th layer; the others are recurrent."""

    def rule() -> Callable[[int], bool]:
        interval = fields.count("full_attention_interval")
        return lambda n: (n + 1) % interval == 0

    return _full_where(fields, rule)


def periodic(fields: Fields) -> list[LayerKind]:
    """Return full attention in layer n if n modulo `attn_layer_period` is `attn_layer_offset`."""

    def rule() -> Callable[[int], bool]:
        period = fields.count("attn_layer_period")
        offset = fields.count("attn_layer_offset", least=0, most=period - 1)
        return lambda n: n % period == offset

    return _full_where(fields, rule)


def indexed(name: str, otherwise: LayerKind) -> Kinds:
    """Return a function for configs whose field `name` has the indices, from 0, of layers with attention."""

    def kinds(fields: Fields) -> list[LayerKind]:
        return _full_where(
            fields, lambda: set(fields.counts(name, most=layers_of(fields) - 1)).__contains__, otherwise
        )

    return kinds


def partitioned(fields: Fields) -> list[LayerKind]:
    """Return the kinds by `full_attn_layers` and `kda_layers` in `linear_attn_config`, counted from 1."""

    def rule() -> Callable[[int], bool]:
        total, lists = layers_of(fields), fields.inner("linear_attn_config")
        full, linear = (
            lists.counts(name, least=1, most=total) for name in ("full_attn_layers", "kda_layers")
        )
        if sorted(full + linear) != list(range(1, total + 1)):
            raise lists.error(
                f"full_attn_layers and kda_layers must together name each of the {total} layers once"
            )
        return lambda n: n + 1 in full

    return _full_where(fields, rule)


def lettered(fields: Fields) -> list[LayerKind]:
    """Return the kinds by the letters of `hybrid_override_pattern`; `num_hidden_layers` may be missing."""
    name = "hybrid_override_pattern"
    return listed(fields) or _known(fields, name, fields.text(name), LETTERS)


def _full_where(
    fields: Fields, rule: Callable[[], Callable[[int], bool]], otherwise: LayerKind = LayerKind.RECURRENT
) -> list[LayerKind]:
    """Return the config's list, or else full attention where the `rule` says so."""
    if (kinds := listed(fields)) is not None:
        return kinds
    is_full = rule()
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
