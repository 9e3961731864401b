"""Lengths of a model in tokens: its positions, and lengths beyond which it may compute differently."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Final

from tiercache.errors import UnsupportedModelError

_POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
"""Names under which configurations give the number of positions, in order of precedence."""
_LENGTH: Final = re.compile(
    r"position|window|length|context|keep|span|distance|stride|seq_len|chunk|block_size|local|bucket|"
    r"floor_scale|switch|threshold|n_ctx"
)
"""Pattern of the names of settings whose values may be lengths beyond which a model computes differently."""
_NO_LENGTH: Final = re.compile(
    r"^_|feed_forward|max_length|min_length|vocab|image|vision|audio|video|speech|vq_|patch|encoder|mamba|"
    r"kernel|dim|num_|layers|pattern|"
    r"source|mask_|blocks"
)
"""Pattern of the names of settings to leave out, although `_LENGTH` matches them.

Their values are numbers of layers, for example, or belong to other modalities.
"""
_BLOCKS: Final = 16
"""Number of blocks up to which block-sparse attention may still be dense.

In a sequence of more blocks, every known model with such attention skips some of them.
"""


class TailMode(StrEnum):
    """The way in which tokens are fed once the cache is not empty."""

    CHUNK = "chunk"
    """Any number of tokens per forward."""
    TOKEN = "token"  # noqa: S105  (a mode of feeding)
    """One token per forward, for models that drop their recurrent state when they are given more."""


def positions_of(config: Any) -> int | None:
    """Return how many positions a model has; None if its configuration does not say.

    If its rotary embeddings are scaled linearly, the number in the configuration is multiplied by the factor
    of that scaling.
    """
    text = config.get_text_config(decoder=True)
    named = (getattr(text, name, None) for name in _POSITIONS)
    positions = next(filter(_is_length, named), None)
    if positions is None:
        return None
    factors = [rope.get("factor") or 1.0 for rope in ropes_of(config) if rope.get("rope_type") == "linear"]
    return int(positions * max([1.0, *factors]))


def ropes_of(config: Any) -> list[Mapping[str, Any]]:
    """Return the parameters of every rotary embedding that the configuration describes."""
    return [mapping for _, mapping in _mappings("", config.to_dict()) if "rope_type" in mapping]


def refuse_dynamic_rope(model: Any) -> None:
    """Raise UnsupportedModelError for rotary embeddings that depend on the longest sequence seen so far."""
    for rope in ropes_of(model.config):
        if "dynamic" in str(rope["rope_type"]):
            raise UnsupportedModelError(
                f"{type(model).__name__} has rotary embeddings of type {rope['rope_type']}, whose frequencies"
                " follow the longest sequence that the model has seen, so cached keys would depend on other"
                " requests; use yarn or linear scaling"
            )


def named_lengths(config: Any) -> dict[str, int]:
    """Return the lengths in tokens beyond which the model may compute differently.

    The result maps names of settings in the configuration to lengths: windows, chunks, `_BLOCKS` blocks of
    sparse attention, or the original number of positions of a stretched rotary embedding. The number of
    positions itself is left out, because a sequence with more tokens is never served.
    """
    text = config.get_text_config(decoder=True)
    found: dict[str, int] = {}
    for path, mapping in _mappings("", text.to_dict()):
        for key, value in mapping.items():
            name = str(key)
            if name in _POSITIONS or not _LENGTH.search(name) or _NO_LENGTH.search(name):
                continue
            for length in value if isinstance(value, list | tuple) else (value,):
                if _is_length(length):
                    many = length * (_BLOCKS if "block_size" in name else 1)
                    found[f"{path}{name}"] = max(many, found.get(f"{path}{name}", 0))
    return found


def _mappings(path: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a mapping and the mappings inside it, each with its path.

    The configurations of other models (`..._config`) are left out.
    """
    if isinstance(value, Mapping):
        yield path, value
        for name, item in value.items():
            if not str(name).endswith("_config") or str(name) == "text_config":
                yield from _mappings(f"{path}{name}.", item)


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31
