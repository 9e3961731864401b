"""Plots of rows: stacked bars from zero, and spans from a mean to a 95th percentile. Each row has its name at its left."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tiercache.replay.report.lines import LETTER, LONGEST, WIDTH
from tiercache.replay.report.markup import Html, element
from tiercache.replay.report.scale import Axis
from tiercache.replay.report.words import shortened

# Measures of a plot, in its own units.
_TOP: Final = 6.0
_THICK: Final = 13.0
_THIN: Final = 7.0
_APART: Final = 2.0
_BETWEEN: Final = 9.0
_FOOT: Final = 22.0
_TICK_GAP: Final = 10.0


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of a bar. `style`: CSS class of its colour; `tip`: text of its tooltip."""

    value: float
    style: str
    tip: str


@dataclass(frozen=True, slots=True)
class Bar:
    """Segments that are stacked from zero, and the text after them."""

    segments: Sequence[Segment]
    said: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """A marker at `low` with a stroke to `high`."""

    low: float
    high: float
    tip: str
    said: str


@dataclass(frozen=True, slots=True)
class Row:
    """Row of one policy or bound. `style`: CSS class of its colour and id of its marker."""

    name: str
    style: str
    shown: Sequence[Bar | Span]


def plot(title: str, said: str, rows: Sequence[Row], axis: Axis, full: float | None = None) -> Html:
    """Return the plot as SVG.

    `full`: value of a line that marks a full tier; with it, the texts after bars stand in a column at the right.
    """
    left = 12 + LETTER * max([min(len(row.name), LONGEST) for row in rows] or [1])
    behind = max([len(one.said) for row in rows for one in row.shown] or [0])
    right = WIDTH - 8 - LETTER * max(behind, 2)
    bottom = _TOP + sum(_height(row) + _BETWEEN for row in rows)
    return element(
        "svg",
        element("title", title),
        element("desc", said),
        *_grid(axis, left, right, bottom),
        *_rows(rows, axis, left, right, full is not None),
        *_full(axis, full, left, right, bottom),
        viewBox=f"0 0 {WIDTH:.0f} {bottom + _FOOT:.0f}",
        class_="plot",
        role="group",
    )


def _grid(axis: Axis, left: float, right: float, bottom: float) -> Iterator[Html]:
    # Ticks whose texts would touch are thinned out.
    widest = max(len(axis.tick(tick)) for tick in axis.ticks) * LETTER + _TICK_GAP
    every = max(1, math.ceil(widest * (len(axis.ticks) - 1) / (right - left)))
    for tick in axis.ticks[::every]:
        x = axis.place(tick, left, right)
        yield element("line", x1=x, x2=x, y1=_TOP - 2, y2=bottom, class_="grid")
        yield element("text", axis.tick(tick), x=x, y=bottom + 15, class_="tick middle")


def _rows(rows: Sequence[Row], axis: Axis, left: float, right: float, aside: bool) -> Iterator[Html]:
    top = _TOP + _BETWEEN / 2
    for row in rows:
        thick = _thickness(row)
        drawn = [
            part
            for index, one in enumerate(row.shown)
            for part in _one(one, row.style, axis, left, right, top + index * (thick + _APART), thick, aside)
        ]
        middle = top + _height(row) / 2
        name = element("text", shortened(row.name, LONGEST), x=left - 8, y=middle + 4, class_="name end")
        yield element("g", name, *drawn, class_=f"series {row.style}")
        top += _height(row) + _BETWEEN


def _one(one: Bar | Span, style: str, axis: Axis, left: float, right: float, top: float, thick: float, aside: bool) -> Iterator[Html]:
    middle = top + thick / 2
    end = left
    if isinstance(one, Span):
        start, end = axis.place(one.low, left, right), axis.place(one.high, left, right)
        yield element(
            "g",
            element("title", one.tip),
            element("rect", x=start - 6, y=middle - 8, width=end - start + 12, height=16, class_="hit"),
            element("line", x1=start, x2=end, y1=middle, y2=middle, class_="span"),
            element("line", x1=end, x2=end, y1=middle - 5, y2=middle + 5, class_="span"),
            element("use", href=f"#{style}", x=start, y=middle, class_="mark"),
            class_="spot", tabindex="0", role="img",
        )  # fmt: skip
        end = max(end, start)
    else:
        total = 0.0
        for segment in one.segments:
            start, end = axis.place(total, left, right), axis.place(total + segment.value, left, right)
            total += segment.value
            if segment.value > 0:
                # Segments are one unit apart; a segment too narrow for the gap keeps a visible sliver.
                box = element("rect", x=start, y=top, width=max(end - start - 1, 0.6), height=thick, class_=f"segment {segment.style}")
                yield element("g", element("title", segment.tip), box, class_="spot", tabindex="0", role="img")
    if one.said:
        yield element(
            "text",
            one.said,
            x=(right if aside else end) + 6,
            y=middle + (4 if thick == _THICK else 3),
            class_="tick" if thick == _THICK else "tick small",
        )


def _full(axis: Axis, full: float | None, left: float, right: float, bottom: float) -> Iterator[Html]:
    if full is not None and axis.low <= full <= axis.high:
        x = axis.place(full, left, right)
        yield element("line", x1=x, x2=x, y1=_TOP - 2, y2=bottom, class_="full")


def _thickness(row: Row) -> float:
    return _THICK if len(row.shown) <= 1 else _THIN


def _height(row: Row) -> float:
    many = max(1, len(row.shown))
    return many * _thickness(row) + (many - 1) * _APART
