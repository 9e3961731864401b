"""Sections on tiers and kept checkpoints: what each tier served, moved and held, and what each policy kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from tiercache.replay.report import bars
from tiercache.replay.report.capacity import style_of
from tiercache.replay.report.markup import Html, element
from tiercache.replay.report.parts import Cell, figure, figures_as_table, legend, row, table
from tiercache.replay.report.scale import amounts, counts, rates
from tiercache.replay.report.study import Chapter, Series, Size
from tiercache.replay.report.words import count, counted, finite, percent, size
from tiercache.replay.results import Kept, Result, TierUse

_COLOURS: Final = 5
"""Number of colours for tiers, and for kinds of checkpoints; further ones repeat them."""
_STEPS: Final = 3
"""Approximate number of steps of an axis."""
_Runs = Sequence[tuple[Series, Result]]


def tiers(chapter: Chapter, capacity: Size) -> Html | None:
    """Return the plots of tokens served, bytes moved and peaks by tier, at one capacity; None without figures."""
    runs = [(one, run) for one, run in chapter.runs(capacity) if run.tiers]
    if not runs:
        return None
    names = list(dict.fromkeys(name for _, run in runs for name in run.tiers))
    keys = legend((f"t{index % _COLOURS}", name) for index, name in enumerate(names))
    return element(
        "div",
        keys,
        row(_served(runs, names), _moved(runs, names), _peaks(runs, names)),
        figures_as_table(_tier_table(chapter, runs)),
    )


def kept(chapter: Chapter, capacity: Size) -> Html | None:
    """Return the plots of what was in the cache when the run ended, by kind of checkpoint; None without figures."""
    runs = [(one, run) for one, run in chapter.runs(capacity) if run.kept]
    if not runs:
        return None
    kinds = list(dict.fromkeys(part.kind for _, run in runs for part in run.kept))
    keys = legend((f"k{index % _COLOURS}", kind) for index, kind in enumerate(kinds))
    figures = [
        _stack("States kept", "How many, by the kind of checkpoint they were made at.", runs, kinds, lambda part: part.states, count),
        _stack("Bytes of states", "By kind of checkpoint.", runs, kinds, lambda part: part.state_bytes, size),
        _stack("Bytes of KV pages", "By the kind of checkpoint that they lead to.", runs, kinds, lambda part: part.page_bytes, size),
    ]
    return element("div", keys, row(*figures), figures_as_table(_kept_table(chapter, runs)))


def _served(runs: _Runs, names: Sequence[str]) -> Html | None:
    rows: list[bars.Row] = []
    for one, run in runs:
        tokens, rate = sum(use.tokens for use in run.tiers.values()), finite(run.token_hit_rate)
        if rate is None:
            continue
        shares = {name: rate * use.tokens / tokens if tokens else 0.0 for name, use in run.tiers.items()}
        tips = {
            name: f"{one.name}, {name}: {percent(shares[name])} of prompt tokens, {count(use.tokens)}" for name, use in run.tiers.items()
        }
        rows.append(bars.Row(one.name, style_of(one), [bars.Bar(_segments(names, shares, tips), percent(rate))]))
    if not rows:
        return None
    title = "Tokens served by tier"
    drawing = bars.plot(title, f"{counted(len(rows), 'bar')}, stacked by tier.", rows, rates([1.0], zero=True, steps=_STEPS))
    return figure(title, "Share of all prompt tokens, by the slowest tier they came from; the rest is computed.", drawing)


def _moved(runs: _Runs, names: Sequence[str]) -> Html:
    rows: list[bars.Row] = []
    most = 0.0
    for one, run in runs:
        pair: list[bars.Bar] = []
        for verb, field in (("read", _read), ("written", _written)):
            values = {name: field(use) for name, use in run.tiers.items()}
            tips = {name: f"{one.name}, {name}: {size(value)} {verb}" for name, value in values.items()}
            total = sum(values.values())
            most = max(most, total)
            pair.append(bars.Bar(_segments(names, values, tips), size(total)))
        rows.append(bars.Row(one.name, style_of(one), pair))
    title = "Bytes moved"
    drawing = bars.plot(title, f"{counted(len(rows), 'pair')} of bars, stacked by tier.", rows, amounts([most], _STEPS))
    return figure(title, "Upper bar: read. Lower bar: written.", drawing)


def _peaks(runs: _Runs, names: Sequence[str]) -> Html | None:
    rows: list[bars.Row] = []
    highest = 1.0
    for one, run in runs:
        found: list[bars.Bar] = []
        for index, name in enumerate(names):
            use = run.tiers.get(name)
            share = finite(use.peak / use.capacity) if use is not None and use.capacity > 0 else None
            if use is not None and share is not None:
                highest = max(highest, share)
                tip = f"{one.name}, {name}: {size(use.peak)} of {size(use.capacity)}, {percent(share)}"
                found.append(bars.Bar([bars.Segment(share, f"t{index % _COLOURS}", tip)], percent(share)))
        if found:
            rows.append(bars.Row(one.name, style_of(one), found))
    if not rows:
        return None
    title = "Peak against capacity"
    drawing = bars.plot(
        title, f"{counted(len(rows), 'group')} of bars, one per tier.", rows, rates([0.0, highest], zero=True, steps=_STEPS), full=1.0
    )
    return figure(title, "Of each tier; the line is full.", drawing)


def _stack(
    title: str, note: str, runs: _Runs, kinds: Sequence[str], field: Callable[[Kept], int], say: Callable[[float | None], str]
) -> Html | None:
    rows: list[bars.Row] = []
    most = 0.0
    for one, run in runs:
        values: dict[str, float] = {}
        for part in run.kept:
            values[part.kind] = values.get(part.kind, 0) + field(part)
        tips = {kind: f"{one.name}, {kind}: {say(value)}" for kind, value in values.items()}
        total = sum(values.values())
        most = max(most, total)
        rows.append(bars.Row(one.name, style_of(one), [bars.Bar(_segments(kinds, values, tips, "k"), say(total))]))
    if not most:
        return None
    axis = counts([most], count, _STEPS) if say is count else amounts([most], _STEPS)
    return figure(title, note, bars.plot(title, f"{counted(len(rows), 'bar')}, stacked by kind.", rows, axis))


def _segments(names: Iterable[str], values: dict[str, float], tips: dict[str, str], style: str = "t") -> list[bars.Segment]:
    return [bars.Segment(values[name], f"{style}{index % _COLOURS}", tips[name]) for index, name in enumerate(names) if name in values]


def _tier_table(chapter: Chapter, runs: _Runs) -> Html:
    head = ["Policy", "Tier", "Tokens", "Evicted", "Read", "Written", "Peak", "Capacity"]
    rows = [
        [one.name, name, *map(count, (use.tokens, use.evicted)), *map(size, (use.read_bytes, use.written_bytes, use.peak, use.capacity))]
        for one, run in runs
        for name, use in run.tiers.items()
    ]
    return table(f"{chapter.name}: tiers", head, rows, texts=2)


def _kept_table(chapter: Chapter, runs: _Runs) -> Html:
    rows: list[list[str | Cell]] = [
        [one.name, part.kind, Cell(count(part.states)), Cell(size(part.state_bytes)), Cell(size(part.page_bytes))]
        for one, run in runs
        for part in run.kept
    ]
    return table(f"{chapter.name}: kept at the end", ["Policy", "Checkpoint", "States", "Bytes of states", "Bytes of pages"], rows, texts=2)


def _read(use: TierUse) -> float:
    return use.read_bytes


def _written(use: TierUse) -> float:
    return use.written_bytes
