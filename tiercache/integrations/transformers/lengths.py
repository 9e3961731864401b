"""What a configuration says about lengths: where positions end, and from where on a model may compute otherwise than before."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tiercache.errors import UnsupportedModelError

_POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
"""Names of the number of positions; the first that is there counts."""
_LENGTH: Final = re.compile(
    r"position|window|length|context|keep|span|distance|stride|seq_len|chunk|block_size|local|bucket|floor_scale|switch|threshold|n_ctx"
)
_NO_LENGTH: Final = re.compile(
    r"^_|feed_forward|max_length|min_length|vocab|image|vision|audio|video|speech|vq_|patch|encoder|mamba|kernel|dim|num_|layers|pattern|"
    r"source|mask_|blocks"
)
_BLOCKS: Final = 16
"""Attention over blocks sees every block of a sequence of few; more than this many, no model is known to."""


def positions_of(config: Any) -> int | None:
    """How many positions a model has; None where its configuration does not say. Linear scaling of rotary embeddings stretches them."""
    text = config.get_text_config(decoder=True)
    reach = next((value for name in _POSITIONS if _is_length(value := getattr(text, name, None))), None)
    if reach is None:
        return None
    stretched = [rope["factor"] for rope in ropes_of(config) if rope.get("rope_type") == "linear" and rope.get("factor")]
    return int(reach * max([1.0, *stretched]))


def ropes_of(config: Any) -> list[Mapping[str, Any]]:
    """The parameters of every rotary embedding that the configuration describes."""
    return [mapping for _, mapping in _mappings("", config.to_dict()) if "rope_type" in mapping]


def refuse_dynamic_rope(model: Any) -> None:
    """UnsupportedModelError for rotary embeddings that keep what the longest sequence so far made of them."""
    for rope in ropes_of(model.config):
        if "dynamic" in str(rope["rope_type"]):
            raise UnsupportedModelError(
                f"{type(model).__name__} has rotary embeddings of type {rope['rope_type']}, whose frequencies follow the longest sequence "
                "that the model has seen, so cached keys would depend on other requests; use yarn or linear scaling"
            )


def named_lengths(config: Any) -> dict[str, int]:
    """Lengths in tokens at which the model may begin to compute otherwise, by the names that the configuration gives them.

    Windows, chunks, blocks (`_BLOCKS` of them), and the positions before a stretch; not the number of positions itself, beyond which
    nothing is served.
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
    """A mapping and those in it, with the path to each; not the configurations of other models."""
    if isinstance(value, Mapping):
        yield path, value
        for name, item in value.items():
            if not str(name).endswith("_config") or str(name) == "text_config":
                yield from _mappings(f"{path}{name}.", item)


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31
