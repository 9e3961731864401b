"""Verdicts: the best policies at a capacity, their margins, and their distances from the bounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from tiercache_lab.replay.figures import counted, milliseconds, percent, points, size
from tiercache_lab.replay.report.comparison import Chapter, Comparison, Measure, Series, Size

LEVEL: Final = 0.0005
"""Difference of two rates, as a fraction, below which the two policies count as level."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Difference of two rates."""

    name: str
    """Name of a policy, a bound or a capacity."""
    by: float
    """For a policy or bound, the rate minus the best rate. For a capacity, see `PolicyVerdict.more`."""


@dataclass(frozen=True, slots=True)
class PolicyVerdict:
    """Verdict on the policies over one source at one capacity."""

    capacity: Size
    best: tuple[str, ...]
    """Best policy, or several policies that are level."""
    value: float
    """Rate of the best policy."""
    others: tuple[Gap, ...]
    """The other policies, best first."""
    bounds: tuple[Gap, ...]
    more: Gap | None
    """Gain over the next smaller capacity that has a verdict; None if there is no such capacity.

    `name` is the smaller capacity. `by` is the best rate at `capacity` minus the best rate at the smaller
    capacity.
    """


@dataclass(frozen=True, slots=True)
class Statement:
    """Verdict in words: "At 10 %: hvd saves 78.1 % of prefill FLOPs", and further sentences."""

    where: str
    """Capacity for which the verdict holds."""
    best: tuple[str, ...]
    """Names of the best policies, the subject of `does`."""
    does: str
    """Rest of the sentence, from the verb on."""
    sentences: tuple[str, ...] = ()


def verdicts(chapter: Chapter, measure: Measure) -> list[PolicyVerdict]:
    """Return one verdict for each capacity at which any policy has a figure."""
    found: list[PolicyVerdict] = []
    for capacity in chapter.sizes:
        rates = _rates(chapter.policies, capacity, measure)
        if not rates:
            continue
        value = max(rates.values())
        behind = [Gap(name, rate - value) for name, rate in rates.items() if value - rate >= LEVEL]
        bounds = _rates(chapter.bounds, capacity, measure)
        found.append(
            PolicyVerdict(
                capacity,
                best=tuple(name for name, rate in rates.items() if value - rate < LEVEL),
                value=value,
                others=tuple(sorted(behind, key=lambda gap: -gap.by)),
                bounds=tuple(Gap(name, rate - value) for name, rate in bounds.items()),
                more=Gap(str(found[-1].capacity), value - found[-1].value) if found else None,
            )
        )
    return found


def statements(chapter: Chapter, measure: Measure) -> list[Statement]:
    """Return the verdicts of a source in words, in the order of capacities."""
    return [_statement(chapter, one, measure) for one in verdicts(chapter, measure)]


def overall(comparison: Comparison, capacity: Size) -> Statement | None:
    """Return a statement on the policies that are best on average over the sources with this capacity.

    Return None if no policy has a figure for each of these sources.
    """
    measure = comparison.measure
    chapters = [chapter for chapter in comparison.chapters if capacity in chapter.sizes]
    averages = means(chapters, comparison.policies, capacity, measure)
    if not averages:
        return None
    top = max(averages.values())
    best = tuple(name for name, mean in averages.items() if top - mean < LEVEL)
    decided = [one for chapter in chapters for one in verdicts(chapter, measure) if one.capacity == capacity]
    won = sum(any(name in best for name in one.best) for one in decided)
    said = [f"ahead or level in {won} of {counted(len(decided), 'source')}"]
    rest = {name: mean for name, mean in averages.items() if name not in best}
    if rest:
        second = max(rest, key=lambda name: rest[name])
        said.append(f"{points(top - rest[second])} over {second}")
    bounds = means(chapters, comparison.bounds, capacity, measure)
    if bounds:
        said.append(_from_bounds([Gap(name, mean - top) for name, mean in bounds.items()]))
    verb = ("saves", "save") if measure is Measure.FLOPS else ("hits", "hit")
    does = f"{verb[len(best) > 1]} most on average, {percent(top)}: {', '.join(said)}."
    return Statement(f"At {capacity}", best, does)


def means(
    chapters: Iterable[Chapter], names: Iterable[str], capacity: Size, measure: Measure
) -> Mapping[str, float]:
    """Return the mean rate of each of `names` over all chapters.

    A name is left out if it has no figure for one of the chapters, so that all means are over the same
    sources.
    """
    rates: dict[str, list[float]] = {name: [] for name in names}
    count = 0
    for chapter in chapters:
        count += 1
        for one in chapter.series:
            value = measure.of(one.at(capacity))
            if value is not None and one.name in rates:
                rates[one.name].append(value)
    return {name: fmean(found) for name, found in rates.items() if len(found) == count > 0}


def _statement(chapter: Chapter, one: PolicyVerdict, measure: Measure) -> Statement:
    known = chapter.capacity_bytes(one.capacity)
    several = len(one.best) > 1
    does = f"{'save' if several else 'saves'} {percent(one.value)} of prefill FLOPs"
    if measure is Measure.TOKENS:
        does = f"{'hit' if several else 'hits'} {percent(one.value)} of tokens"
    exact = f" ({size(known)})" if one.capacity.relative and known is not None else ""
    return Statement(f"At {one.capacity}{exact}", one.best, does, tuple(_sentences(chapter, one, measure)))


def _sentences(chapter: Chapter, one: PolicyVerdict, measure: Measure) -> list[str]:
    said: list[str] = []
    if one.others:
        ends = [one.others[0], *one.others[1:][-1:]]
        said.append(f"{', '.join(f'{points(gap.by)} over {gap.name}' for gap in ends)}.")
    elif len(one.best) == 1:
        said.append("The only policy here.")
    if one.bounds:
        said.append(f"{_from_bounds(one.bounds)}.")
    if one.more is not None:
        said.append(
            f"{points(one.more.by)} {'over' if one.more.by >= 0 else 'below'} the best at {one.more.name}."
        )
    said += _other_winner(chapter, one, measure)
    if len(chapter.series) == 1 and (run := chapter.series[0].at(one.capacity)) is not None:
        said.append(
            f"Hit rate {percent(run.token_hit_rate)}; modelled TTFT {milliseconds(run.ttft_ms_mean)} in"
            f" the mean, {milliseconds(run.ttft_ms_p95)} at the 95th percentile; peak {size(run.peak_bytes)}"
            f" of {size(run.capacity_bytes)}."
        )
    return said


def _other_winner(chapter: Chapter, one: PolicyVerdict, measure: Measure) -> list[str]:
    """Name the policy that hits the most tokens, if another policy saves the most FLOPs."""
    hits = _rates(chapter.policies, one.capacity, Measure.TOKENS)
    if measure is not Measure.FLOPS or not hits:
        return []
    top = max(hits, key=lambda name: hits[name])
    if any(hits[top] - hits.get(name, 0.0) < LEVEL for name in one.best):
        return []
    return [f"Highest hit rate: {top}, {percent(hits[top])}."]


def _from_bounds(bounds: Iterable[Gap]) -> str:
    """Return the distances from the bounds as a part of a sentence.

    Bounds that are level with the best policy come first, then bounds below the best policy, then bounds
    above it. Within each group the closest bound comes first.
    """
    near = sorted(bounds, key=lambda gap: abs(gap.by))
    level = [f"level with {gap.name}" for gap in near if abs(gap.by) < LEVEL]
    above = [f"{points(gap.by)} above {gap.name}" for gap in near if gap.by <= -LEVEL]
    below = [f"{points(gap.by)} below {gap.name}" for gap in near if gap.by >= LEVEL]
    return ", ".join([*level, *above, *below])


def _rates(series: Iterable[Series], capacity: Size, measure: Measure) -> dict[str, float]:
    found = ((one.name, measure.of(one.at(capacity))) for one in series)
    return {name: value for name, value in found if value is not None}
