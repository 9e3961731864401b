"""Lengths in a model's configuration: the number of positions, and lengths beyond which the model may compute differently."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tiercache.errors import UnsupportedModelError

_POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
"""Names of attributes for the number of positions; the first that a configuration has counts."""
_LENGTH: Final = re.compile(
    r"position|window|length|context|keep|span|distance|stride|seq_len|chunk|block_size|local|bucket|floor_scale|switch|threshold|n_ctx"
)
"""Parts of names whose values may be such lengths."""
_NO_LENGTH: Final = re.compile(
    r"^_|feed_forward|max_length|min_length|vocab|image|vision|audio|video|speech|vq_|patch|encoder|mamba|kernel|dim|num_|layers|pattern|"
    r"source|mask_|blocks"
)
"""Parts of names whose values are none, although `_LENGTH` matches; e.g. of other modalities, or numbers of layers."""
_BLOCKS: Final = 16
"""Blocks of a sequence that block-sparse attention may all see; no known model sees all of a sequence with more blocks."""


def positions_of(config: Any) -> int | None:
    """Return how many positions a model has; None if its configuration does not say.

    Linear scaling of rotary embeddings multiplies the number by its factor.
    """
    text = config.get_text_config(decoder=True)
    reach = next((value for name in _POSITIONS if _is_length(value := getattr(text, name, None))), None)
    if reach is None:
        return None
    stretched = [rope["factor"] for rope in ropes_of(config) if rope.get("rope_type") == "linear" and rope.get("factor")]
    return int(reach * max([1.0, *stretched]))


def ropes_of(config: Any) -> list[Mapping[str, Any]]:
    """Return the parameters of every rotary embedding that the configuration describes."""
    return [mapping for _, mapping in _mappings("", config.to_dict()) if "rope_type" in mapping]


def refuse_dynamic_rope(model: Any) -> None:
    """Raise UnsupportedModelError for rotary embeddings whose frequencies depend on the longest sequence seen so far."""
    for rope in ropes_of(model.config):
        if "dynamic" in str(rope["rope_type"]):
            raise UnsupportedModelError(
                f"{type(model).__name__} has rotary embeddings of type {rope['rope_type']}, whose frequencies follow the longest sequence "
                "that the model has seen, so cached keys would depend on other requests; use yarn or linear scaling"
            )


def named_lengths(config: Any) -> dict[str, int]:
    """Return the lengths in tokens from which the model may compute differently, by the names that the configuration gives them.

    These are windows, chunks, blocks (`_BLOCKS` of them), and the positions before a stretch. The number of positions itself is left out,
    because nothing is served beyond it.
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
    """Yield a mapping and the mappings in it, each with its path; leave out the configurations of other models."""
    if isinstance(value, Mapping):
        yield path, value
        for name, item in value.items():
            if not str(name).endswith("_config") or str(name) == "text_config":
                yield from _mappings(f"{path}{name}.", item)


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31
