"""Plots of lines: rates over capacity, over time, by round. Each line has its name at its right end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tiercache.replay.report.markup import Html, coordinate, element, join
from tiercache.replay.report.scale import Axis, spread
from tiercache.replay.report.words import shortened

WIDTH: Final = 360.0
"""Width of all plots in units. They are shown at about this size, on a phone as well, so that text stays legible."""
LETTER: Final = 6.7
"""Units that a letter takes in a wide font."""
LONGEST: Final = 14
"""Largest number of letters of a name beside a plot."""
_TOP: Final = 10.0
_BOTTOM: Final = 212.0
_HEIGHT: Final = 246.0
_GAP: Final = 13.0


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a line.

    `x`: fraction of the plot's width. `y`: None where there is no figure, which leaves a gap in the line. `tip`: text of its tooltip.
    """

    x: float
    y: float | None
    tip: str


@dataclass(frozen=True, slots=True)
class Line:
    """One line.

    `style`: CSS class of its colour and dashes, and id of its marker. `marked`: indexes of the points that get a marker. Without `tip` each
    marked point can be focused and shows its own tip; with `tip` only the whole line can be focused, and shows `tip`.
    """

    name: str
    style: str
    points: Sequence[Point]
    marked: range
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """A place on the horizontal axis (`x`: fraction of the plot's width), with up to two lines of text."""

    x: float
    upper: str
    lower: str = ""


def plot(title: str, said: str, lines: Sequence[Line], axis: Axis, ticks: Sequence[Tick]) -> Html:
    """Return the plot as SVG. `title` and `said` are its accessible name and description."""
    drawn = [line for line in lines if any(point.y is not None for point in line.points)]
    left = 8 + LETTER * max([len(axis.tick(tick)) for tick in axis.ticks] or [1])
    right = WIDTH - 22 - LETTER * max([min(len(line.name), LONGEST) for line in drawn] or [1])
    ends = [_end(line) for line in drawn]
    labels = spread([axis.place(end.y or 0, _BOTTOM, _TOP) for end in ends], _GAP, _TOP, _BOTTOM)
    return element(
        "svg",
        element("title", title),
        element("desc", said),
        *_grid(axis, left, right),
        *_marks(ticks, left, right),
        *(_line(line, axis, left, right, label) for line, label in zip(drawn, labels, strict=True)),
        viewBox=f"0 0 {WIDTH:.0f} {_HEIGHT:.0f}",
        class_="plot",
        role="group",
    )


def _grid(axis: Axis, left: float, right: float) -> Iterator[Html]:
    for tick in axis.ticks:
        y = axis.place(tick, _BOTTOM, _TOP)
        yield element("line", x1=left, x2=right, y1=y, y2=y, class_="grid")
        yield element("text", axis.tick(tick), x=left - 6, y=y + 4, class_="tick end")


def _marks(ticks: Sequence[Tick], left: float, right: float) -> Iterator[Html]:
    for tick in ticks:
        x = left + tick.x * (right - left)
        yield element("line", x1=x, x2=x, y1=_BOTTOM, y2=_BOTTOM + 4, class_="grid")
        yield element("text", tick.upper, x=x, y=_BOTTOM + 16, class_="tick middle")
        if tick.lower:
            yield element("text", tick.lower, x=x, y=_BOTTOM + 29, class_="tick middle faint")


def _line(line: Line, axis: Axis, left: float, right: float, label: float) -> Html:
    places = [(point, left + point.x * (right - left), _height(point, axis)) for point in line.points]
    end = _end(line)
    x, y = left + end.x * (right - left), axis.place(end.y or 0, _BOTTOM, _TOP)
    marks = [
        element("use", href=f"#{line.style}", x=x, y=y, class_="mark") if line.tip else _spot(point.tip, line.style, x, y)
        for point, x, y in (places[index] for index in line.marked if index < len(places))
        if y is not None
    ]
    return element(
        "g",
        element("title", line.tip) if line.tip else None,
        element("path", d=_path([(x, y) for _, x, y in places]), class_="line"),
        element(
            "path", d=f"M{coordinate(x)} {coordinate(y)}H{coordinate(right)}L{coordinate(right + 10)} {coordinate(label)}", class_="lead"
        ),
        *marks,
        element("text", shortened(line.name, LONGEST), x=right + 14, y=label + 4, class_="name"),
        class_=f"series {line.style}" + (" spot" if line.tip else ""),
        tabindex="0" if line.tip else None,
        role="img" if line.tip else None,
    )


def _spot(tip: str, style: str, x: float, y: float) -> Html:
    parts = join(
        element("title", tip), element("circle", cx=x, cy=y, r=9, class_="hit"), element("use", href=f"#{style}", x=x, y=y, class_="mark")
    )
    return element("g", parts, class_="spot", tabindex="0", role="img")


def _path(places: Sequence[tuple[float, float | None]]) -> str:
    said, pen = "", "M"
    for x, y in places:
        if y is None:
            pen = "M"
            continue
        said += f"{pen}{coordinate(x)} {coordinate(y)}"
        pen = "L"
    return said


def _height(point: Point, axis: Axis) -> float | None:
    return None if point.y is None else axis.place(point.y, _BOTTOM, _TOP)


def _end(line: Line) -> Point:
    return [point for point in line.points if point.y is not None][-1]
