"""Colours, markers and dashes of the report.

They are chosen so that readers with any colour vision can distinguish the policies, in print, and in light
and dark mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

GROUNDS: Final = {
    "page": ("#f7f7f5", "#131417"),
    "card": ("#ffffff", "#1b1d21"),
    "ink": ("#1c1e22", "#e9eaec"),
    "soft": ("#5a6069", "#a4a9b2"),
    "rule": ("#dddfe2", "#363a41"),
    "link": ("#1d56a8", "#7db4ff"),
}
"""Colours of backgrounds, rules and text, as (light, dark) pairs."""
POLICIES: Final = (
    ("#425db8", "#40b3fa"),
    ("#b72d08", "#f7640a"),
    ("#138f76", "#42a27a"),
    ("#901d74", "#cc55c3"),
    ("#b87d0a", "#e0d43c"),
    ("#2490da", "#a2eefc"),
    ("#1b1ba6", "#7d70f7"),
    ("#6f221c", "#e5b0a9"),
)
"""Colours of policies, as (light, dark) pairs.

A search chose these colours such that the two most similar of them are as different as possible. It measured
differences as distances in OKLab, for normal vision and for three kinds of colour blindness.
"""
BOUNDS: Final = (("#5f646c", "#b4b9c1"), ("#7d828a", "#8b9099"), ("#3c4047", "#dcdfe3"))
"""Colours of bounds, as (light, dark) pairs."""
TIERS: Final = (
    ("#083c47", "#d3f1ec"),
    ("#205255", "#84cdc8"),
    ("#29676b", "#47aea8"),
    ("#328085", "#3a8d88"),
    ("#3c999f", "#2f7470"),
)
"""Colours of tiers from near to far, in steps of lightness."""
KINDS: Final = (
    ("#2b3fb0", "#6a78ea"),
    ("#8a6717", "#c08a24"),
    ("#3e9a66", "#8cee91"),
    ("#861d60", "#d2308f"),
    ("#7b89bd", "#a2aee4"),
    ("#b0482b", "#ea8a6a"),
)
"""Colours of kinds of checkpoints."""
TINTS: Final = (
    ("#9fc9f5", "#1d5590"),
    ("#c3dcf7", "#1c4470"),
    ("#dcebfa", "#1d344f"),
    ("#edf3fa", "#1e2835"),
    ("#ffffff", "#1b1d21"),
)
"""Backgrounds of figures in tables, as (light, dark) pairs, in the order of `tables.TINTS`."""
# CSS variables are named by these letters and an index: --p0, --p1, ...
_SERIES: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "p": POLICIES, "b": BOUNDS, "t": TIERS, "k": KINDS, "q": TINTS
}  # fmt: skip
_SHAPES: Final = (
    "circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "triangle-left", "triangle-right"
)  # fmt: skip
_DASHES: Final = ((7, 4), (2, 3), (9, 3, 2, 3))
"""Lengths of dashes and gaps in turn, in units of the drawing."""


def colour(kind: str, index: int) -> str:
    """Return the CSS variable of a colour.

    `kind` is p (policies), b (bounds), t (tiers) or k (kinds of checkpoints). An index beyond the last colour
    of a kind begins again with the first.
    """
    return f"var(--{kind}{index % len(_SERIES[kind])})"


def shape(index: int) -> str:
    """Return the marker of a policy or bound; two policies with the same colour have different markers."""
    # There are as many markers as colours. Each further round over the colours starts one marker later.
    return _SHAPES[(index + index // len(_SHAPES)) % len(_SHAPES)]


def dashes(index: int, *, is_bound: bool) -> tuple[int, ...]:
    """Return the lengths of a line's dashes and gaps; a policy gets a solid line."""
    return _DASHES[index % len(_DASHES)] if is_bound else (1, 0)


def style_rules() -> str:
    """Return the CSS rules that define all colours.

    The dark colours apply on screens in dark mode, the light ones on other screens and on paper.
    """
    tints = [f".q{index}{{background:var(--q{index})}}" for index in range(len(TINTS))]
    dark = f"@media screen and (prefers-color-scheme:dark){{:root{{color-scheme:dark;{_variables(1)}}}}}"
    return "\n".join([f":root{{color-scheme:light;{_variables(0)}}}", dark, *tints])


def _variables(mode: int) -> str:
    named = [f"--{name}:{pair[mode]}" for name, pair in GROUNDS.items()]
    numbered = [
        f"--{kind}{index}:{pair[mode]}" for kind, pairs in _SERIES.items() for index, pair in enumerate(pairs)
    ]
    return ";".join([*named, *numbered])
