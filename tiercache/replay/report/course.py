"""Section on the course of runs: rates and bytes held over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tiercache.replay.report import lines
from tiercache.replay.report.capacity import style_of
from tiercache.replay.report.markup import Html, element
from tiercache.replay.report.parts import figure, figures_as_table, row, table
from tiercache.replay.report.scale import Axis, amounts, counts, rates
from tiercache.replay.report.study import Chapter, Series, Size
from tiercache.replay.report.words import DASH, count, counted, finite, percent, size
from tiercache.replay.results import Sample

_POINTS: Final = 60
"""Largest number of points of a line; more would not be visible."""
_WARM_UP: Final = 0.2
"""Fraction of the requests, from the first, that does not decide where an axis starts."""
_MARKS: Final = 8
"""Largest number of rows of a line's table."""
_Runs = Sequence[tuple[Series, Sequence[Sample]]]


@dataclass(frozen=True, slots=True)
class _View:
    """One plot: a field of the samples, its title and note, its axis, and the function that writes its figures."""

    title: str
    note: str
    field: Callable[[Sample], float]
    scale: Callable[[list[float]], Axis]
    say: Callable[[float | None], str]


_VIEWS: Final = (
    _View("Saved prefill FLOPs", "Share within each window", lambda sample: sample.flops_saved, rates, percent),
    _View("Token hit rate", "Share within each window", lambda sample: sample.token_hit_rate, rates, percent),
    _View("Bytes held", "At the end of each window", lambda sample: sample.bytes_held, amounts, size),
)


def over_time(chapter: Chapter, capacity: Size) -> Html | None:
    """Return the plots of both rates and the bytes held, over the requests of the runs at one capacity; None without samples."""
    runs = [(one, _thinned(run.over_time)) for one, run in chapter.runs(capacity) if run.over_time]
    if not runs:
        return None
    several = max(len(run.over_time) for _, run in chapter.runs(capacity)) > _POINTS
    return element(
        "div",
        row(*(_plot(view, runs, several) for view in _VIEWS)),
        figures_as_table(*(_table(chapter, view, runs) for view in _VIEWS)),
    )


def _plot(view: _View, runs: _Runs, several: bool) -> Html | None:
    # A bound that was run at its own capacity, such as the infinite cache, holds so much that all others would lie on the axis.
    runs = [(one, samples) for one, samples in runs if view.scale is rates or one.flat is None]
    found = [(sample.requests, value) for _, samples in runs for sample in samples if (value := finite(view.field(sample))) is not None]
    if not found:
        return None
    last = _last(runs)
    # The first requests find an empty cache. If they decided the axis, the lines of the policies would overlap.
    settled = [value for requests, value in found if requests > last * _WARM_UP]
    axis = view.scale(settled or [value for _, value in found])
    drawn = [_line(view, one, samples, axis, last) for one, samples in runs]
    below = counts([float(last)], count)
    ticks = [lines.Tick(tick / last, below.tick(tick)) for tick in below.ticks]
    note = f"{view.note}, over requests."
    if several:
        note += " A point stands for several windows."
    if axis.low > 0:
        hidden = "; the first requests lie below it" if min(value for _, value in found) < axis.low else ""
        note += f" Axis starts at {axis.tick(axis.low)}{hidden}."
    said = f"{counted(len(drawn), 'line')} over {counted(last, 'request')}."
    return figure(view.title, note, lines.plot(view.title, said, drawn, axis, ticks))


def _line(view: _View, one: Series, samples: Sequence[Sample], axis: Axis, last: int) -> lines.Line:
    points = [lines.Point(sample.requests / last, _within(axis, view.field(sample)), "") for sample in samples]
    # Markers of different lines are at different places, so that they tell the lines apart without colour.
    marked = range((5 * one.style + 3 * one.is_bound) % 11, len(samples), 12)
    tip = f"{one.name}: {view.say(view.field(samples[0]))} at first, {view.say(view.field(samples[-1]))} at the end"
    return lines.Line(one.name, style_of(one), points, marked, tip)


def _within(axis: Axis, value: float) -> float | None:
    known = finite(value)
    return known if known is not None and axis.low <= known <= axis.high else None


def _table(chapter: Chapter, view: _View, runs: _Runs) -> Html:
    last = _last(runs)
    marks = sorted({round(last * (index + 1) / _MARKS) for index in range(_MARKS)})
    rows = [[count(mark), *(_at(view, samples, mark) for _, samples in runs)] for mark in marks]
    return table(f"{chapter.name}: {view.title} over time", ["Requests", *(one.name for one, _ in runs)], rows)


def _at(view: _View, samples: Sequence[Sample], mark: int) -> str:
    before = [sample for sample in samples if sample.requests <= mark]
    return view.say(view.field(before[-1])) if before else DASH


def _last(runs: _Runs) -> int:
    return max(1, *(samples[-1].requests for _, samples in runs))


def _thinned(samples: Sequence[Sample]) -> list[Sample]:
    """Return at most `_POINTS` samples: means over neighbours, weighted by their requests; values that are not finite are ignored."""
    every = -(-len(samples) // _POINTS)
    starts = [0, *(sample.requests for sample in samples[:-1])]
    made: list[Sample] = []
    for first in range(0, len(samples), every):
        some = samples[first : first + every]
        weights = [max(1, sample.requests - start) for sample, start in zip(some, starts[first:], strict=False)]
        hits = _mean([sample.token_hit_rate for sample in some], weights)
        saved = _mean([sample.flops_saved for sample in some], weights)
        made.append(Sample(some[-1].requests, hits, saved, some[-1].bytes_held))
    return made


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if finite(value) is not None]
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else math.nan
