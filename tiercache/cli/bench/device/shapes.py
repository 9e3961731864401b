"""The geometry of a model's pages and states, from the same public configs as its costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tiercache.geometry import Geometry, kv_geometry, state_geometry
from tiercache.policy.fields import Fields
from tiercache.policy.known import CONFIGS
from tiercache.policy.pattern import Kind, every_nth

MODELS: Final = ("qwen3-next-80b-a3b", "qwen3.5-9b", "qwen3.5-35b-a3b")
"""Names in `tiercache.policy.known` of models with attention in every fourth layer and a gated delta net in the others."""
PAGE_SIZE: Final = 64
"""Tokens of a page."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """The geometries of one model."""

    name: str
    pages: Geometry
    states: Geometry

    @property
    def layers(self) -> int:
        """Number of layers of the whole model."""
        return max(self.pages.layers[-1], self.states.layers[-1]) + 1


def shapes_of(name: str) -> Shapes:
    """Return the geometry of pages of 64 tokens and of states, for one of `MODELS`.

    A page has K and V `[64, heads, dim]` in bfloat16. A state has, per recurrent layer, the tensors that engines keep: the past inputs of
    the convolution over q, k and v, `[channels, kernel - 1]` in bfloat16, and the recurrence `[value heads, key dim, value dim]` in
    float32.
    """
    config = CONFIGS[name]
    fields = Fields(config.get("text_config", config), name)
    kinds = every_nth(fields)
    full = [n for n, kind in enumerate(kinds) if kind is Kind.FULL]
    key_heads, heads, key_dim, dim, kernel = (
        fields.count(f"linear_{part}") for part in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    )
    channels = 2 * key_heads * key_dim + heads * dim
    parts = (("conv", (channels, kernel - 1), "bfloat16"), ("ssm", (heads, key_dim, dim), "float32"))
    states = [(n, *part) for n, kind in enumerate(kinds) if kind is Kind.RECURRENT for part in parts]
    return Shapes(
        name,
        kv_geometry(full, fields.count("num_key_value_heads"), fields.count("head_dim"), "bfloat16", PAGE_SIZE),
        state_geometry(states, PAGE_SIZE),
    )
