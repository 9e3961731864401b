"""Kinds of a model's layers, read into one list from the many ways in which configs give them.

The functions raise ConfigError for fields that are missing, malformed or contradictory.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Final

from tiercache.policy.fields import MAX_LAYERS, Fields


class Kind(enum.Enum):
    """Kind of a layer: how it mixes tokens, or that it does not."""

    FULL = "full attention"
    SLIDING = "sliding-window attention"
    RECURRENT = "recurrent"
    CONV = "short convolution"
    PARALLEL = "attention beside a recurrence"
    MLP = "feed-forward only"
    MOE = "experts only"


NAMES: Final = {
    "full_attention": Kind.FULL, "attention": Kind.FULL, "sliding_attention": Kind.SLIDING,
    "linear_attention": Kind.RECURRENT, "mamba": Kind.RECURRENT, "conv": Kind.CONV,
    "hybrid": Kind.PARALLEL, "mlp": Kind.MLP, "moe": Kind.MOE,
}  # fmt: skip
"""Kinds by the entries of `layer_types` and `layers_block_type`, in configs of this and of earlier years."""

LETTERS: Final = {"M": Kind.RECURRENT, "*": Kind.FULL, "-": Kind.MLP, "E": Kind.MOE}
"""Kinds by the letters of `hybrid_override_pattern`."""


def layers_of(fields: Fields) -> int:
    """Return the number of layers."""
    return fields.count("num_hidden_layers", most=MAX_LAYERS)


def listed(fields: Fields) -> list[Kind] | None:
    """Return the kinds that the config lists layer by layer; None if it has no such list."""
    name = next((n for n in ("layer_types", "layers_block_type") if fields.has(n)), None)
    if name is None:
        return None
    return _as_long_as_the_model(fields, name, [_kind(fields, name, text, NAMES) for text in fields.texts(name)])


def attention_only(fields: Fields, *, window_alone: bool = False) -> list[Kind]:
    """Return the kinds of a model without recurrences: the config's list, or else full attention in all layers.

    With `window_alone`, a `sliding_window` without a list holds for every layer, unless `use_sliding_window` is false. Otherwise it counts
    only with `use_sliding_window`, and then a list is required.
    """
    if (kinds := listed(fields)) is not None:
        return kinds
    if not fields.has("sliding_window") or not fields.flag("use_sliding_window", default=window_alone):
        return [Kind.FULL] * layers_of(fields)
    if not window_alone:
        raise fields.error("layer_types is missing, and with use_sliding_window it must say which layers have the window")
    return [Kind.SLIDING] * layers_of(fields)


def only_listed(fields: Fields) -> list[Kind]:
    """Return the config's list of kinds, which is required."""
    kinds = listed(fields)
    if kinds is None:
        raise fields.error("layer_types is missing, and without it the model's cost cannot be derived")
    return kinds


def every_nth(fields: Fields) -> list[Kind]:
    """Return the config's list of kinds, or else recurrent layers with full attention in each `full_attention_interval`-th."""
    if (kinds := listed(fields)) is not None:
        return kinds
    interval = fields.count("full_attention_interval")
    return _full_where(fields, lambda n: (n + 1) % interval == 0)


def periodic(fields: Fields) -> list[Kind]:
    """Return the config's list of kinds, or else recurrent layers with full attention by `attn_layer_period` and `attn_layer_offset`."""
    if (kinds := listed(fields)) is not None:
        return kinds
    period = fields.count("attn_layer_period")
    offset = fields.count("attn_layer_offset", least=0, most=period - 1)
    return _full_where(fields, lambda n: n % period == offset)


def indexed(fields: Fields, name: str, otherwise: Kind) -> list[Kind]:
    """Return the config's list of kinds, or else `otherwise` with full attention at the indices (from 0) in field `name`."""
    if (kinds := listed(fields)) is not None:
        return kinds
    full = set(fields.counts(name, most=layers_of(fields) - 1))
    return _full_where(fields, lambda n: n in full, otherwise)


def lettered(fields: Fields) -> list[Kind]:
    """Return the config's list of kinds, or else the letters of `hybrid_override_pattern`; `num_hidden_layers` may be missing."""
    if (kinds := listed(fields)) is not None:
        return kinds
    name = "hybrid_override_pattern"
    return _as_long_as_the_model(fields, name, [_kind(fields, name, letter, LETTERS) for letter in fields.text(name)])


def partitioned(fields: Fields) -> list[Kind]:
    """Return the config's list of kinds, or else the kinds by the two lists of layers, numbered from 1, in `linear_attn_config`."""
    if (kinds := listed(fields)) is not None:
        return kinds
    total = layers_of(fields)
    lists = fields.inner("linear_attn_config")
    full, linear = (lists.counts(name, least=1, most=total) for name in ("full_attn_layers", "kda_layers"))
    if sorted(full + linear) != list(range(1, total + 1)):
        raise lists.error(f"full_attn_layers and kda_layers must together name each of the {total} layers once")
    return _full_where(fields, lambda n: n + 1 in full)


def _full_where(fields: Fields, is_full: Callable[[int], bool], otherwise: Kind = Kind.RECURRENT) -> list[Kind]:
    return [Kind.FULL if is_full(n) else otherwise for n in range(layers_of(fields))]


def _kind(fields: Fields, name: str, text: str, known: dict[str, Kind]) -> Kind:
    if text not in known:
        raise fields.error(f"{name} holds {text[:40]!r}, a kind of layer that is not known; known are {_list(known)}")
    return known[text]


def _as_long_as_the_model(fields: Fields, name: str, kinds: list[Kind]) -> list[Kind]:
    if not kinds:
        raise fields.error(f"{name} is empty; it must name every layer")
    if fields.has("num_hidden_layers") and len(kinds) != layers_of(fields):
        raise fields.error(f"{name} names {len(kinds)} layers but num_hidden_layers is {layers_of(fields)}; they must be the same")
    return kinds


def _list(known: Iterable[str]) -> str:
    return ", ".join(sorted(known))
