"""Verdict of a chapter: which policy is best at a capacity, by how much, and how far from the bounds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tiercache.replay.report.markup import Html, element, join
from tiercache.replay.report.study import Chapter, Measure, Series, Size
from tiercache.replay.report.words import listed, milliseconds, percent, points, size

LEVEL: Final = 0.0005
"""Difference of rates, as a fraction, below which policies count as level."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Difference between another policy or bound and the best policy: its rate minus the best one's."""

    name: str
    by: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict at one capacity.

    `best`: the best policy, or several that are level; `others`: the other policies, best first; `more`: name of the next smaller capacity
    that has a verdict, and how much higher the best rate is than there.
    """

    capacity: Size
    best: tuple[str, ...]
    value: float
    others: tuple[Gap, ...]
    bounds: tuple[Gap, ...]
    more: Gap | None


def verdicts(chapter: Chapter, measure: Measure) -> list[Verdict]:
    """Return one verdict per capacity at which a policy has a figure."""
    found: list[Verdict] = []
    for capacity in chapter.sizes:
        rates = _rates(chapter.policies, capacity, measure)
        if not rates:
            continue
        value = max(rates.values())
        others = sorted((Gap(name, rate - value) for name, rate in rates.items() if value - rate >= LEVEL), key=lambda gap: -gap.by)
        found.append(
            Verdict(
                capacity,
                tuple(name for name, rate in rates.items() if value - rate < LEVEL),
                value,
                tuple(others),
                tuple(Gap(name, rate - value) for name, rate in _rates(chapter.bounds, capacity, measure).items()),
                Gap(str(found[-1].capacity), value - found[-1].value) if found else None,
            )
        )
    return found


def cards(chapter: Chapter, measure: Measure) -> Html:
    """Return the verdicts in words, to stand beside the plots."""
    shown = [_card(chapter, one, measure) for one in verdicts(chapter, measure)]
    if not shown:
        return element("p", f"No policy has a figure for {measure.words}.", class_="verdicts note")
    return element("ol", *shown, class_="verdicts")


def _card(chapter: Chapter, one: Verdict, measure: Measure) -> Html:
    known = chapter.capacity_bytes(one.capacity)
    where = [f"At {one.capacity}", element("span", size(known), class_="note") if one.capacity.relative and known is not None else None]
    saves = "saves" if len(one.best) == 1 else "save"
    does = f"{saves} {percent(one.value)} of prefill FLOPs"
    if measure is Measure.TOKENS:
        does = f"{'hits' if len(one.best) == 1 else 'hit'} {percent(one.value)} of tokens"
    return element(
        "li",
        element("p", *where, class_="where"),
        element("p", element("b", listed(list(one.best))), f" {does}", class_="best"),
        *(element("p", sentence) for sentence in _sentences(chapter, one, measure)),
    )


def _sentences(chapter: Chapter, one: Verdict, measure: Measure) -> list[str]:
    said: list[str] = []
    if one.others:
        said.append(f"{', '.join(f'{points(gap.by)} over {gap.name}' for gap in [one.others[0], *one.others[1:][-1:]])}.")
    elif len(one.best) == 1:
        said.append("The only policy here.")
    if one.bounds:
        said.append(f"{from_bounds(one.bounds)}.")
    if one.more is not None:
        said.append(f"{points(one.more.by)} {'over' if one.more.by >= 0 else 'below'} the best at {one.more.name}.")
    hits = _rates(chapter.policies, one.capacity, Measure.TOKENS)
    top = max(hits, key=lambda name: hits[name], default=None)
    if measure is Measure.FLOPS and top is not None and all(hits[top] - hits.get(name, 0.0) >= LEVEL for name in one.best):
        said.append(f"Highest token hit rate: {top}, {percent(hits[top])}.")
    if len(chapter.series) == 1:
        run = chapter.series[0].at(one.capacity)
        if run is not None:
            said.append(
                f"Token hit rate {percent(run.token_hit_rate)}; modelled TTFT {milliseconds(run.ttft_ms_mean)} in the mean,"
                f" {milliseconds(run.ttft_ms_p95)} at the 95th percentile; peak {size(run.peak_bytes)} of {size(run.capacity_bytes)}."
            )
    return said


def from_bounds(bounds: Iterable[Gap]) -> str:
    """Return the distances from the bounds as a part of a sentence.

    Bounds that are level come first, then those the best policy is above, then those it is below; each group has the closest first.
    """
    near = sorted(bounds, key=lambda gap: abs(gap.by))
    level = [f"level with {gap.name}" for gap in near if abs(gap.by) < LEVEL]
    above = [f"{points(gap.by)} above {gap.name}" for gap in near if gap.by <= -LEVEL]
    return ", ".join([*level, *above, *(f"{points(gap.by)} below {gap.name}" for gap in near if gap.by >= LEVEL)])


def _rates(series: Iterable[Series], capacity: Size, measure: Measure) -> dict[str, float]:
    found = ((one.name, measure.of(one.at(capacity))) for one in series)
    return {name: value for name, value in found if value is not None}


def sentence(names: list[str]) -> Html:
    """Return names in bold, as a part of a sentence."""
    parts: list[str | Html] = []
    for index, name in enumerate(names):
        parts += ["" if not index else " and " if index == len(names) - 1 else ", ", element("b", name)]
    return join(*parts)
