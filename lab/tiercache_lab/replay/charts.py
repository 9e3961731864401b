"""Charts of the report: Vega-Lite specifications, which vl-convert renders to static SVG."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import vl_convert
from markupsafe import Markup

from tiercache.cli.terminal import clean
from tiercache_lab.replay.figures import counted

PERCENT: Final = {"format": "~%", "title": None, "tickCount": 5}
"""Axis of a fraction."""
_WIDTH: Final = 300
_HEIGHT: Final = 190
_LONGEST_LABEL: Final = 84
"""Width at which a label is cut off, in units of the drawing."""
# Vega measures texts with a font of its own. The padding leaves room for a wider font of the reader.
_LEGEND: Final = {
    "orient": "bottom", "columns": 3, "title": None, "labelLimit": _LONGEST_LABEL, "columnPadding": 22
}  # fmt: skip
_CONFIG: Final = {
    "font": "system-ui, sans-serif",
    "aria": False,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--soft)", "titleColor": "var(--soft)", "gridColor": "var(--rule)",
        "domainColor": "var(--rule)", "tickColor": "var(--rule)", "labelFontSize": 11, "titleFontSize": 11,
        "titleFontWeight": "normal", "labelLimit": _LONGEST_LABEL,
    },
    "legend": {"labelColor": "var(--ink)", "labelFontSize": 11, "symbolOpacity": 1},
}  # fmt: skip
_COLOURS: Final = {"policy": 8, "bound": 3}
"""Number of colours of each kind in colours.css."""
_SHAPES: Final = (
    "circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "triangle-left", "triangle-right"
)  # fmt: skip
_DASHES: Final = ((7, 4), (2, 3), (9, 3, 2, 3))
"""Lengths of dashes and gaps in turn, in units of the drawing."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One finished drawing with its title."""

    title: str
    note: str
    """Sentences on how to read the drawing."""
    svg: Markup


@dataclass(frozen=True, slots=True)
class Point:
    """Figure of a policy or bound at one capacity."""

    name: str
    is_bound: bool
    capacity: str
    value: float


def by_capacity(title: str, note: str, points: Sequence[Point], axis: Mapping[str, Any]) -> Chart:
    """Draw a line for each policy and bound over capacity."""
    series = list(dict.fromkeys((point.name, point.is_bound) for point in points))
    capacities = list(dict.fromkeys(point.capacity for point in points))
    rows = [
        {"name": _label(point.name, point.is_bound), "capacity": point.capacity, "value": point.value}
        for point in points
    ]
    x = {
        "field": "capacity", "type": "ordinal", "sort": capacities,
        "axis": {"title": "capacity", "labelAngle": 0},
    }  # fmt: skip
    layers = [
        {"mark": mark, "encoding": _appearance(series, "color", channel)}
        for mark, channel in (
            ({"type": "line", "strokeWidth": 1.8}, "strokeDash"),
            ({"type": "point", "filled": True, "size": 55, "opacity": 1}, "shape"),
        )
    ]
    y = {"field": "value", "type": "quantitative", "axis": axis, "scale": {"zero": False, "nice": True}}
    # Names of policies and sources appear only as data and in the domains of scales. Vega would interpret
    # names that appear as fields or expressions.
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": _WIDTH,
        "height": _HEIGHT,
        "background": None,
        "data": {"values": rows},
        "config": _CONFIG,
        "layer": layers,
        "encoding": {"x": x, "y": y},
    }
    start, rest = vl_convert.vegalite_to_svg(spec).split(">", 1)
    about = f"{counted(len(series), 'line')}; the figures are in the table below."
    inner = f"<title>{html.escape(title)}</title><desc>{html.escape(about)}</desc>"
    # Vega escapes all texts in the drawing.
    return Chart(title, note, Markup(f'{start} role="img">{inner}{rest}'))  # noqa: S704


def _appearance(series: Sequence[tuple[str, bool]], *channels: str) -> dict[str, Any]:
    """Return the encodings `color`, `strokeDash` and `shape`, as far as they are among `channels`."""
    ranges: dict[str, list[Any]] = {"color": [], "strokeDash": [], "shape": []}
    numbers = {True: 0, False: 0}
    for _, is_bound in series:
        number = numbers[is_bound]
        numbers[is_bound] += 1
        kind = "bound" if is_bound else "policy"
        ranges["color"].append(f"var(--{kind}{number % _COLOURS[kind]})")
        ranges["strokeDash"].append(list(_DASHES[number % len(_DASHES)]) if is_bound else [1, 0])
        # There are as many markers as colours. Each further round over the colours starts one marker later.
        ranges["shape"].append(_SHAPES[(number + number // len(_SHAPES)) % len(_SHAPES)])
    domain = [_label(*one) for one in series]
    return {
        channel: {
            "field": "name", "type": "nominal", "legend": _LEGEND,
            "scale": {"domain": domain, "range": ranges[channel]},
        }
        for channel in channels
    }  # fmt: skip


def _label(name: str, is_bound: bool) -> str:
    return clean(f"{name}*" if is_bound else name)
