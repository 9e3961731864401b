"""Colours, markers and dashes that can be told apart with any colour vision, and in print, in light and in dark mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tiercache.replay.report.markup import Html, element

GROUNDS: Final = {
    "page": ("#f7f7f5", "#131417"),
    "card": ("#ffffff", "#1b1d21"),
    "ink": ("#1c1e22", "#e9eaec"),
    "soft": ("#5a6069", "#a4a9b2"),
    "rule": ("#dddfe2", "#363a41"),
    "faint": ("#eceded", "#282b31"),
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

They were searched for the largest smallest distance (OKLab) under normal vision and three kinds of colour blindness.
"""
BOUNDS: Final = (("#5f646c", "#b4b9c1"), ("#7d828a", "#8b9099"), ("#3c4047", "#dcdfe3"))
TIERS: Final = (("#083c47", "#d3f1ec"), ("#1d6f7b", "#7fcfc8"), ("#469897", "#3f9a97"), ("#84bdb7", "#2b6f6f"), ("#b5d7d2", "#1f4f50"))
"""Colours of tiers from near to far, in steps of lightness; the first three, one per existing tier, are clearly distinct on their own."""
KINDS: Final = (("#2b3fb0", "#6a78ea"), ("#8a6717", "#c08a24"), ("#3e9a66", "#8cee91"), ("#861d60", "#d2308f"), ("#7b89bd", "#a2aee4"))
TINTS: Final = (("#9fc9f5", "#1d5590"), ("#c3dcf7", "#1c4470"), ("#dcebfa", "#1d344f"), ("#edf3fa", "#1e2835"), ("#ffffff", "#1b1d21"))
"""Backgrounds of figures in tables, as (light, dark) pairs, from the best figure on."""
_DASHES: Final = ("7 4", "2 3", "9 3 2 3")
_MARKERS: Final = (
    "M-4 0A4 4 0 1 0 4 0A4 4 0 1 0-4 0Z",
    "M-3.6-3.6H3.6V3.6H-3.6Z",
    "M0-5.2L5.2 0 0 5.2-5.2 0Z",
    "M0-4.9L4.7 3.7H-4.7Z",
    "M0 4.9L-4.7-3.7H4.7Z",
    "M-1.6-4.8H1.6V-1.6H4.8V1.6H1.6V4.8H-1.6V1.6H-4.8V-1.6H-1.6Z",
    "M-4.8-4.2L0-1.4 4.8-4.2 2.2 0 4.8 4.2 0 1.4-4.8 4.2-2.2 0Z",
    "M-2.2-4.6H2.2L4.8 0 2.2 4.6H-2.2L-4.8 0Z",
)


def variables(policies: int, bounds: int) -> str:
    """Return the style sheet's colours, and the classes `p0`, ... of policies and `b0`, ... of bounds."""
    rules = [f":root{{color-scheme:light;{_block(0)}}}"]
    dark = f"color-scheme:dark;{_block(1)}"
    # Printed pages always use the light colours.
    rules.append(f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}")
    rules.append(f"@media screen{{:root[data-theme=dark]{{{dark}}}}}")
    rules += [f".p{style}{{--c:var(--p{style % len(POLICIES)})}}" for style in range(policies)]
    rules += [f".b{style}{{--c:var(--b{style % len(BOUNDS)});--dash:{_DASHES[style % len(_DASHES)]}}}" for style in range(bounds)]
    rules += [
        f".{kind}{index}{{--s:var(--{kind}{index})}}" for kind, found in _SERIES.items() for index in range(len(found)) if kind in "tkq"
    ]
    return "\n".join(rules)


def markers(policies: int, bounds: int) -> Html:
    """Return one marker per policy and bound, to be used by its id; policies beyond the colours get other pairs of colour and marker."""
    shapes = len(_MARKERS)
    made = [element("path", id=f"p{style}", d=_MARKERS[(style + style // shapes) % shapes]) for style in range(policies)]
    made += [element("path", id=f"b{style}", d=_MARKERS[style % shapes], class_="open") for style in range(bounds)]
    return element("svg", element("defs", *made), width=0, height=0, aria_hidden="true", class_="markers")


_SERIES: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {"p": POLICIES, "b": BOUNDS, "t": TIERS, "k": KINDS, "q": TINTS}


def _block(mode: int) -> str:
    named = [f"--{name}:{pair[mode]}" for name, pair in GROUNDS.items()]
    numbered = [f"--{kind}{index}:{pair[mode]}" for kind, found in _SERIES.items() for index, pair in enumerate(found)]
    return ";".join([*named, *numbered])
