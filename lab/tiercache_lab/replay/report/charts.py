"""Charts of the report: Vega-Lite specifications, which vl-convert renders to static SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import vl_convert
from markupsafe import Markup

from tiercache_lab.replay.figures import counted, finite, readable, unit_of
from tiercache_lab.replay.report.comparison import Chapter, Series, Size
from tiercache_lab.replay.report.palette import colour, dashes, shape
from tiercache_lab.replay.results import Result, Sample

_WIDTH: Final = 300
_HEIGHT: Final = 190
_ROW: Final = 20
"""Height of one bar and of the gap to the next bar, in units of the drawing."""
_POINTS: Final = 60
"""Maximum number of points of a line over time; more points would not be visible."""
_WARM_UP: Final = 0.2
"""Fraction of the requests, counted from the first, that does not decide where an axis starts."""
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
_PERCENT: Final = {"format": "~%", "title": None, "tickCount": 5}

Value = Callable[[Result], float | None]


@dataclass(frozen=True, slots=True)
class Chart:
    """One finished drawing with its title."""

    title: str
    note: str
    """Sentences on how to read the drawing."""
    svg: Markup


def rate_by_capacity(chapter: Chapter, title: str, note: str, value: Value) -> Chart | None:
    """Draw a rate of every policy and bound over capacity.

    If there is only one capacity, the drawing has bars instead of lines. Return None if there is no figure.
    """
    return _by_capacity(chapter, title, note, value, _PERCENT)


def time_by_capacity(chapter: Chapter, title: str, note: str, value: Value) -> Chart | None:
    """Draw a time in milliseconds, as `rate_by_capacity` draws a rate."""
    return _by_capacity(chapter, title, note, value, {"title": "ms", "tickCount": 5})


def throughput_by_capacity(chapter: Chapter, title: str, note: str, value: Value) -> Chart | None:
    """Draw requests per second, as `rate_by_capacity` draws a rate."""
    return _by_capacity(chapter, title, note, value, {"title": "requests per second", "tickCount": 5})


def rate_over_requests(
    chapter: Chapter, capacity: Size, title: str, note: str, value: Callable[[Sample], float]
) -> Chart | None:
    """Draw a rate over the requests, with one line for each run at one capacity.

    The first requests have low rates, because the cache is still empty. Points lower than every point after
    the first 20 % of the requests are left out. Return None if there are no samples.
    """
    runs = [(one, thinned(run.over_time, value)) for one, run in chapter.runs(capacity) if run.over_time]
    found = [(one, requests, rate) for one, samples in runs for requests, rate in samples]
    if not found:
        return None
    last = max(requests for _, requests, _ in found)
    low = min((rate for _, requests, rate in found if requests > last * _WARM_UP), default=0.0)
    rows = [
        {"name": _label(one), "requests": requests, "value": rate}
        for one, requests, rate in found
        if rate >= low
    ]
    left_out = " The first requests lie below the axis." if len(rows) < len(found) else ""
    encoding = {
        "x": {
            "field": "requests", "type": "quantitative",
            "axis": {"title": "requests", "format": "~s", "tickCount": 5},
        },
        "y": _quantity(_PERCENT),
        **_appearance([one for one, _ in runs], "color", "strokeDash"),
    }  # fmt: skip
    body = {"mark": {"type": "line", "strokeWidth": 1.6}, "encoding": encoding, "height": _HEIGHT}
    return drawn(title, note + left_out, f"{counted(len(runs), 'line')}", rows, body)


def stacked(
    title: str,
    note: str,
    colours: str,
    parts: Sequence[tuple[Series, Mapping[str, float]]],
    *,
    in_bytes: bool = False,
) -> Chart | None:
    """Draw one bar per policy or bound, stacked from named parts.

    `colours` is one of the letters that `palette.colour` takes as its `kind`. Parts are bytes if `in_bytes`,
    else fractions.
    Return None if all parts are zero.
    """
    names = list(dict.fromkeys(readable(name) for _, values in parts for name in values))
    largest = max((sum(values.values()) for _, values in parts), default=0.0)
    if not largest:
        return None
    unit, factor = unit_of(largest) if in_bytes else ("", 1)
    axis = {"title": unit, "tickCount": 5} if in_bytes else _PERCENT
    rows = [
        {
            "name": _label(one), "part": readable(name), "order": names.index(readable(name)),
            "value": value / factor,
        }
        for one, values in parts
        for name, value in values.items()
    ]  # fmt: skip
    encoding = {
        "y": _names([one for one, _ in parts]),
        "x": _quantity(axis, zero=True),
        "order": {"field": "order"},
        "color": {
            "field": "part", "type": "nominal", "legend": _LEGEND,
            "scale": {"domain": names, "range": [colour(colours, index) for index in range(len(names))]},
        },
    }  # fmt: skip
    body = {"mark": {"type": "bar"}, "encoding": encoding, "height": {"step": _ROW}}
    return drawn(title, note, f"{counted(len(parts), 'bar')}", rows, body)


def thinned(samples: Sequence[Sample], value: Callable[[Sample], float]) -> list[tuple[int, float]]:
    """Return at most 60 points of a line; a point is a number of requests from the start, and a value.

    Each value is the mean over neighbouring windows, weighted by the numbers of requests in them. Values that
    are not finite are ignored.
    """
    every = max(1, math.ceil(len(samples) / _POINTS))
    starts = [0, *(sample.requests for sample in samples[:-1])]
    found: list[tuple[int, float]] = []
    for first in range(0, len(samples), every):
        weighed: list[tuple[float, int]] = []
        for sample, start in zip(samples[first : first + every], starts[first:], strict=False):
            known = finite(value(sample))
            if known is not None:
                weighed.append((known, max(1, sample.requests - start)))
        if weighed:
            mean = sum(known * weight for known, weight in weighed) / sum(weight for _, weight in weighed)
            found.append((samples[min(first + every, len(samples)) - 1].requests, mean))
    return found


def _by_capacity(
    chapter: Chapter, title: str, note: str, value: Value, axis: Mapping[str, Any]
) -> Chart | None:
    found: list[tuple[Series, Size, float]] = []
    for capacity in chapter.sizes:
        for one, run in chapter.runs(capacity):
            known = finite(value(run))
            if known is not None:
                found.append((one, capacity, known))
    if not found:
        return None
    series = [one for one in chapter.series if any(one is drawn for drawn, _, _ in found)]
    rows = [
        {"name": _label(one), "capacity": str(capacity), "value": known} for one, capacity, known in found
    ]
    if len(chapter.sizes) == 1:
        encoding = {
            "y": _names(series),
            "x": _quantity(axis, zero=True),
            **_appearance(series, "color", legend=None),
        }
        bars = {"mark": {"type": "bar"}, "encoding": encoding, "height": {"step": _ROW}}
        return drawn(title, f"{note} At {chapter.sizes[0]}.", f"{counted(len(rows), 'bar')}", rows, bars)
    capacities = [str(one) for one in chapter.sizes]
    x = {
        "field": "capacity",
        "type": "ordinal",
        "sort": capacities,
        "axis": {"title": "capacity", "labelAngle": 0},
    }
    layers = [
        {
            "mark": {"type": "line", "strokeWidth": 1.8},
            "encoding": _appearance(series, "color", "strokeDash"),
        },
        {
            "mark": {"type": "point", "filled": True, "size": 55, "opacity": 1},
            "encoding": _appearance(series, "color", "shape"),
        },
    ]
    body = {"layer": layers, "encoding": {"x": x, "y": _quantity(axis)}, "height": _HEIGHT}
    said = f"{counted(len(series), 'line')} over {counted(len(capacities), 'capacity', 'capacities')}"
    return drawn(title, note, said, rows, body)


def drawn(
    title: str, note: str, said: str, rows: Sequence[Mapping[str, Any]], body: Mapping[str, Any]
) -> Chart:
    """Draw a Vega-Lite specification, whose `body` may replace the usual width.

    `rows` are its data, and `said` describes the drawing to readers who do not see it.
    """
    # Names of policies and sources appear only as data and in the domains of scales. Vega would interpret
    # names that appear as fields or expressions.
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": _WIDTH,
        "background": None,
        "data": {"values": list(rows)},
        "config": _CONFIG,
        **body,
    }
    drawn: str = vl_convert.vegalite_to_svg(spec)
    start, rest = drawn.split(">", 1)
    described = f"{said}; the figures are in the table below."
    told = f"<title>{html.escape(title)}</title><desc>{html.escape(described)}</desc>"
    # Vega escapes all texts in the drawing.
    return Chart(title, note, Markup(f'{start} role="img">{told}{rest}'))  # noqa: S704


def _quantity(axis: Mapping[str, Any], *, zero: bool = False) -> dict[str, Any]:
    return {"field": "value", "type": "quantitative", "axis": axis, "scale": {"zero": zero, "nice": True}}


def _names(series: Sequence[Series]) -> dict[str, Any]:
    return {
        "field": "name", "type": "nominal", "sort": [_label(one) for one in series],
        "axis": {"title": None, "labelColor": "var(--ink)"},
    }  # fmt: skip


def _appearance(
    series: Sequence[Series], *channels: str, legend: Mapping[str, Any] | None = _LEGEND
) -> dict[str, Any]:
    """Return the encodings that tell policies and bounds apart, one for each of `channels`.

    The channels are `color`, `strokeDash` and `shape`.
    """
    ranges: dict[str, list[Any]] = {
        "color": [colour("b" if one.is_bound else "p", one.style) for one in series],
        "strokeDash": [dashes(one.style, is_bound=one.is_bound) for one in series],
        "shape": [shape(one.style) for one in series],
    }
    domain = [_label(one) for one in series]
    return {
        channel: {
            "field": "name",
            "type": "nominal",
            "legend": legend,
            "scale": {"domain": domain, "range": ranges[channel]},
        }
        for channel in channels
    }


def _label(one: Series) -> str:
    return readable(f"{one.name}*" if one.is_bound else one.name)
