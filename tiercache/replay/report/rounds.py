"""Section on rounds: hit rates by round, and figures that were published for the same traffic."""

from __future__ import annotations

from collections.abc import Sequence

from tiercache.replay.report import lines
from tiercache.replay.report.capacity import style_of
from tiercache.replay.report.markup import Html, Part, element
from tiercache.replay.report.parts import figure, figures_as_table, row, table
from tiercache.replay.report.scale import rates
from tiercache.replay.report.study import Chapter, Series, Size
from tiercache.replay.report.words import DASH, counted, finite, number, percent, short_percent
from tiercache.replay.results import Result


def by_round(chapter: Chapter, capacity: Size) -> Html | None:
    """Return the plot of hit rates of the n-th requests of all sessions, with published figures; None if there is neither."""
    runs = [(one, run.by_round) for one, run in chapter.runs(capacity) if any(finite(rate) is not None for rate in run.by_round)]
    published = _published(chapter)
    if not runs:
        return row(_beside(chapter, capacity, published)) if published else None
    rounds = max(len(found) for _, found in runs)
    drawn = [_round_line(one, found, rounds) for one, found in runs]
    axis = rates([point.y for line in drawn for point in line.points if point.y is not None])
    every = -(-rounds // 10)
    ticks = [lines.Tick(_fraction(index, rounds), str(index + 1)) for index in range(0, rounds, every)]
    start = f" Axis starts at {short_percent(axis.low)}." if axis.low > 0 else ""
    title = "Token hit rate by round"
    drawing = lines.plot(title, f"{counted(len(runs), 'line')} over {counted(rounds, 'round')}.", drawn, axis, ticks)
    shown: list[Part] = [figure(title, f"Of the n-th requests of all sessions, at {capacity}.{start}", drawing)]
    if published:
        shown.append(_beside(chapter, capacity, published))
    rows = [[str(index + 1), *(percent(found[index]) if index < len(found) else DASH for _, found in runs)] for index in range(rounds)]
    as_table = table(f"{chapter.name}: token hit rate by round, at {capacity}", ["Round", *(one.name for one, _ in runs)], rows)
    return element("div", row(*shown), figures_as_table(as_table))


def _round_line(one: Series, found: Sequence[float], rounds: int) -> lines.Line:
    points = [
        lines.Point(_fraction(index, rounds), finite(rate), f"{one.name}, round {index + 1}: {percent(rate)}")
        for index, rate in enumerate(found)
    ]
    return lines.Line(one.name, style_of(one), points, range(len(points)))


def _fraction(index: int, rounds: int) -> float:
    return 0.03 + 0.94 * index / max(1, rounds - 1)


def _published(chapter: Chapter) -> list[tuple[str, float]]:
    runs: list[Result] = [run for one in chapter.series for run in (*one.runs.values(), *([one.flat] if one.flat else []))]
    return list(dict.fromkeys((name, value) for run in runs for name, value in run.published.items()))


def _beside(chapter: Chapter, capacity: Size, published: Sequence[tuple[str, float]]) -> Html:
    ours = [(one.name, run.token_hit_rate, style_of(one)) for one, run in chapter.runs(capacity)]
    theirs = [(name, value, "published") for name, value in published]
    body = [
        element(
            "tr",
            element("th", name, scope="row", class_="text"),
            element("td", _written(value, style)),
            element("td", _strip(value, style)),
        )
        for name, value, style in [*theirs, *ours]
    ]
    made = element("table", element("tbody", *body), class_="beside")
    return figure("Published figures, and ours", f"Token hit rate of the whole run, ours at {capacity}; published ones are hollow.", made)


def _written(value: float, style: str) -> str:
    known = finite(value)
    # A published figure need not be a rate.
    return number(value) if style == "published" and known is not None and not 0 <= known <= 1 else percent(value)


def _strip(value: float, style: str) -> Html | None:
    known = finite(value)
    if known is None or not 0 <= known <= 1:
        return None
    box = element("rect", x=0.5, y=2, width=max(1, 99 * known), height=9, class_="segment own" if style != "published" else "hollow")
    return element("svg", element("g", box, class_=style), viewBox="0 0 100 13", class_="strip", aria_hidden="true")
