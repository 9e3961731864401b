"""Section on capacity: rates and modelled times to first token over capacity, by policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

from tiercache.replay.report import bars, lines
from tiercache.replay.report.markup import Html, join
from tiercache.replay.report.parts import Cell, figure, figures_as_table, row, table
from tiercache.replay.report.scale import rates, times
from tiercache.replay.report.study import Chapter, Measure, Series, Size
from tiercache.replay.report.verdict import cards
from tiercache.replay.report.words import counted, finite, milliseconds, percent, short_percent, size

_EDGE: Final = 0.06
"""Fraction of the width that is left free before the first and after the last capacity."""
_CLOSEST: Final = 0.16
"""Smallest distance of capacities on the logarithmic axis, as a fraction of the width; below it they are evenly spaced."""
_ROOM: Final = 200.0
"""Approximate width of a plot's area in units, for deciding which tick texts fit."""
_BESIDE: Final = 3
"""Largest number of verdicts that stand beside the plots."""
_HITS: Final = "Token hit rate"
_SAVED: Final = "Saved prefill FLOPs"


def style_of(one: Series) -> str:
    """Return the CSS class of the series' colour, which is also the id of its marker."""
    return f"{'b' if one.is_bound else 'p'}{one.style}"


def rates_by_capacity(chapter: Chapter, measure: Measure) -> Html:
    """Return the verdicts, and the plots of both rates over capacity."""
    if len(chapter.series) == len(chapter.sizes) == 1:
        return row(cards(chapter, measure))
    draw = _bars if len(chapter.sizes) == 1 else _lines
    shown = [(_SAVED, Measure.FLOPS, "of all prefill"), (_HITS, Measure.TOKENS, "of all prompt tokens")]
    figures, said = [draw(chapter, *one) for one in shown], cards(chapter, measure)
    # A few verdicts stand beside the plots, many above them.
    first = [row(said, *figures)] if len(chapter.sizes) <= _BESIDE else [said, row(*figures)]
    return join(*first, figures_as_table(_table(chapter)))


def times_by_capacity(chapter: Chapter) -> Html | None:
    """Return the plots of modelled times to first token, one per capacity, all on one scale; None without figures."""
    known = [
        value
        for one in chapter.sizes
        for _, run in chapter.runs(one)
        for value in map(finite, (run.ttft_ms_mean, run.ttft_ms_p95))
        if value is not None
    ]
    if not known:
        return None
    axis = times(known, steps=3)
    figures: list[Html] = []
    for capacity in chapter.sizes:
        rows = [
            bars.Row(one.name, style_of(one), [span])
            for one, run in chapter.runs(capacity)
            if (span := _span(one.name, run.ttft_ms_mean, run.ttft_ms_p95))
        ]
        if rows:
            title = f"Time to first token at {capacity}"
            figures.append(
                figure(title, "Mean (marker) to 95th percentile (stroke).", bars.plot(title, f"{counted(len(rows), 'row')}.", rows, axis))
            )
    return row(*figures)


def _span(name: str, mean: float, p95: float) -> bars.Span | None:
    low, high = finite(mean), finite(p95)
    if low is None:
        return None
    said = f"{milliseconds(low).split(chr(0x202F))[0]} \u2192 {milliseconds(high)}"
    return bars.Span(low, low if high is None else high, f"{name}: mean {milliseconds(low)}, 95th percentile {milliseconds(high)}", said)


def _lines(chapter: Chapter, title: str, measure: Measure, whole: str) -> Html | None:
    places, evenly = _places(chapter.sizes)
    drawn = [
        lines.Line(one.name, style_of(one), _points(one, chapter.sizes, places, measure), range(len(places))) for one in chapter.series
    ]
    known = [point.y for line in drawn for point in line.points if point.y is not None]
    if not known:
        return None
    axis = rates(known)
    start = f" Axis starts at {short_percent(axis.low)}." if axis.low > 0 else ""
    relative = "a share of the infinite cache's footprint" if chapter.sizes[0].relative else "bytes of all tiers"
    note = f"Share {whole}, over capacity: {relative}, {'evenly spaced' if evenly else 'logarithmic'}.{start}"
    many = f"{counted(len(chapter.policies), 'policy', 'policies')} and {counted(len(chapter.bounds), 'bound')}"
    said = f"{many} at {counted(len(places), 'capacity', 'capacities')}."
    return figure(title, note, lines.plot(title, said, drawn, axis, _ticks(chapter, places)))


def _points(one: Series, sizes: Sequence[Size], places: Sequence[float], measure: Measure) -> list[lines.Point]:
    made: list[lines.Point] = []
    for capacity, x in zip(sizes, places, strict=True):
        value = measure.of(one.at(capacity))
        where = "at any capacity" if one.flat else f"at {capacity}"
        made.append(lines.Point(x, value, f"{one.name} {where}: {percent(value)}"))
    return made


def _places(sizes: Sequence[Size]) -> tuple[list[float], bool]:
    span = 1 - 2 * _EDGE
    if all(one.value > 0 for one in sizes):
        logs = [math.log(one.value / sizes[0].value) for one in sizes]
        places = [_EDGE + span * log / logs[-1] for log in logs]
        if min(after - before for before, after in pairwise(places)) >= _CLOSEST:
            return places, False
    return [_EDGE + span * index / (len(sizes) - 1) for index in range(len(sizes))], True


def _ticks(chapter: Chapter, places: Sequence[float]) -> list[lines.Tick]:
    gap = min(after - before for before, after in pairwise(places)) * _ROOM
    every = math.ceil(max(len(str(one)) for one in chapter.sizes) * lines.LETTER / gap)
    below = [size(chapter.capacity_bytes(one)) if one.relative else "" for one in chapter.sizes]
    roomy = max(map(len, below)) * lines.LETTER * 0.9 <= gap
    shown = list(zip(places, chapter.sizes, below, strict=True))[::-1][::every][::-1]
    return [lines.Tick(x, str(one), lower if roomy else "") for x, one, lower in shown]


def _bars(chapter: Chapter, title: str, measure: Measure, whole: str) -> Html | None:
    capacity = chapter.sizes[0]
    known = [(one, value) for one, run in chapter.runs(capacity) if (value := measure.of(run)) is not None]
    if not known:
        return None
    rows = [
        bars.Row(one.name, style_of(one), [bars.Bar([bars.Segment(value, "own", f"{one.name}: {percent(value)}")], percent(value))])
        for one, value in known
    ]
    drawing = bars.plot(title, f"{counted(len(rows), 'bar')}.", rows, rates([value for _, value in known], zero=True, steps=3))
    return figure(title, f"Share {whole}, at {capacity}.", drawing)


def _table(chapter: Chapter) -> Html:
    columns: list[tuple[str, Callable[[float | None], str]]] = [
        ("flops_saved", percent), ("token_hit_rate", percent), ("ttft_ms_mean", milliseconds), ("ttft_ms_p95", milliseconds)
    ]  # fmt: skip
    found = [(one, capacity, run) for one in chapter.series for capacity in chapter.sizes if (run := one.at(capacity)) is not None]
    rows: list[list[str | Cell]] = [
        [one.name, str(capacity), *(Cell(say(getattr(run, name)), getattr(run, name)) for name, say in columns)]
        for one, capacity, run in found
    ]
    return table(f"{chapter.name}: by capacity", ["Policy", "Capacity", "Saved FLOPs", "Hit rate", "TTFT mean", "TTFT p95"], rows)
