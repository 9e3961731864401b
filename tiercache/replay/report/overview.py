"""Section over all sources: the policies that are best on average, and every policy's rate beside the best one's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean
from typing import Final

from tiercache.replay.report.markup import Html, element, join
from tiercache.replay.report.parts import Cell, legend, table, unfold
from tiercache.replay.report.study import Chapter, Measure, Size, Study
from tiercache.replay.report.verdict import LEVEL, Gap, from_bounds, sentence, verdicts
from tiercache.replay.report.words import DASH, counted, percent, points

_STEPS: Final = (LEVEL, 0.01, 0.03, 0.10)
"""Upper limits of the tints, as differences from the best policy's rate in a row."""
_TINTS: Final = ("level with the best", "within 1 pp", "within 3 pp", "within 10 pp", "further behind")


def overview(study: Study) -> Html | None:
    """Return the section; None if no capacity is shared by several sources, or there is no policy."""
    shared = [one for one in study.sizes if sum(one in chapter.sizes for chapter in study.chapters) > 1]
    if not shared or not study.policies:
        return None
    other = Measure.TOKENS if study.measure is Measure.FLOPS else None
    return element(
        "section",
        element("h2", "Overview"),
        element("ul", *(line for capacity in reversed(shared) for line in _line(study, capacity)), class_="lines"),
        element("h3", f"{study.measure.words[0].upper()}{study.measure.words[1:]}, by source and policy"),
        legend((f"q{index}", name) for index, name in enumerate(_TINTS)),
        *(_table(study, capacity, study.measure) for capacity in shared),
        unfold("The same for the token hit rate", *(_table(study, capacity, other) for capacity in shared)) if other else None,
        id="overview",
    )


def _line(study: Study, capacity: Size) -> Iterator[Html]:
    chapters = [chapter for chapter in study.chapters if capacity in chapter.sizes]
    means = _means(chapters, study.policies, capacity, study.measure)
    if not means:
        return
    top = max(means.values())
    best = [name for name, mean in means.items() if top - mean < LEVEL]
    won = [one.best for chapter in chapters for one in verdicts(chapter, study.measure) if one.capacity == capacity]
    first = sum(any(name in best for name in names) for names in won)
    rest = {name: mean for name, mean in means.items() if name not in best}
    said = [f"ahead or level in {first} of {counted(len(won), 'source')}"]
    if rest:
        second = max(rest, key=lambda name: rest[name])
        said.append(f"{points(top - rest[second])} over {second}")
    bounds = _means(chapters, study.bounds, capacity, study.measure)
    if bounds:
        said.append(from_bounds([Gap(name, mean - top) for name, mean in bounds.items()]))
    does = "saves most" if study.measure is Measure.FLOPS else "hits most"
    mean = f" {does if len(best) == 1 else does.replace('s ', ' ', 1)} on average, {percent(top)}: {', '.join(said)}."
    yield element("li", element("span", f"At {capacity}", class_="where"), " ", sentence(best), mean)


def _means(chapters: Iterable[Chapter], names: Iterable[str], capacity: Size, measure: Measure) -> Mapping[str, float]:
    """Return the mean rates of those of `names` that have a figure for every chapter, so that all means are over the same sources."""
    rates: dict[str, list[float]] = {name: [] for name in names}
    many = 0
    for chapter in chapters:
        many += 1
        for one in chapter.series:
            value = measure.of(one.at(capacity))
            if value is not None and one.name in rates:
                rates[one.name].append(value)
    return {name: fmean(found) for name, found in rates.items() if len(found) == many > 0}


def _table(study: Study, capacity: Size, measure: Measure) -> Html:
    chapters = [chapter for chapter in study.chapters if capacity in chapter.sizes]
    rows = [_row(study, chapter, capacity, measure) for chapter in chapters]
    policies = _means(chapters, study.policies, capacity, measure)
    means = {**policies, **_means(chapters, study.bounds, capacity, measure)}
    rows.append([Cell("Mean", style="mean"), *_cells(study, means, max(policies.values(), default=None), "mean")])
    head = ["Source", *study.policies, *study.bounds]
    return table(f"{measure.words[0].upper()}{measure.words[1:]} at {capacity}", head, rows, style="heat sortable")


def _row(study: Study, chapter: Chapter, capacity: Size, measure: Measure) -> list[str | Cell]:
    rates = {one.name: value for one in chapter.series if (value := measure.of(one.at(capacity))) is not None}
    top = max((rates[one.name] for one in chapter.policies if one.name in rates), default=None)
    return [Cell(chapter.name, link=chapter.anchor), *_cells(study, rates, top, "")]


def _cells(study: Study, rates: Mapping[str, float], top: float | None, style: str) -> Iterator[Cell]:
    for name in study.policies:
        value = rates.get(name)
        if value is None or top is None:
            yield Cell(DASH, style=style)
            continue
        tint = sum(top - value >= step for step in _STEPS)
        hint = f"{name}: best" if tint == 0 else f"{name}: {points(top - value)} behind the best"
        yield Cell(percent(value), value, f"{style} q{tint}" + (" top" if tint == 0 else ""), hint)
    for name in study.bounds:
        yield Cell(percent(rates.get(name)), rates.get(name), f"{style} bound")


def contents(study: Study) -> Html | None:
    """Return links to the chapters; None if there is only one."""
    if len(study.chapters) == 1:
        return None
    links = [element("a", chapter.name, href=f"#{chapter.anchor}") for chapter in study.chapters]
    more = [element("a", "All runs", href="#runs")]
    return element("nav", join(*links, *more), aria_label="Contents")
