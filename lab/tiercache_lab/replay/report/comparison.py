"""Results arranged for comparison: chapters by source, series by policy, runs by capacity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from tiercache.errors import InputError
from tiercache_lab.replay.figures import finite, short_percent, size
from tiercache_lab.replay.results import Result


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """Capacity that runs have in common."""

    relative: bool
    value: float
    """Fraction of the bytes of the infinite cache if `relative`, else bytes."""

    def __str__(self) -> str:
        return short_percent(self.value) if self.relative else size(self.value)


class Measure(Enum):
    """Field of `Result` that decides which policy is best."""

    FLOPS = "flops_saved"
    TOKENS = "token_hit_rate"

    def of(self, run: Result | None) -> float | None:
        """Return the value of a run; None if there is no run or the value is not finite."""
        return (
            None if run is None else finite(run.flops_saved if self is Measure.FLOPS else run.token_hit_rate)
        )

    @property
    def words(self) -> str:
        """The measure as a noun, for sentences."""
        return "saved prefill FLOPs" if self is Measure.FLOPS else "hit rate"


@dataclass(frozen=True, slots=True)
class Series:
    """Runs of one policy or bound over one source."""

    name: str
    style: int
    """Index of the colour, the marker and the dashes. A policy has the same index in all chapters."""
    is_bound: bool
    runs: Mapping[Size, Result]
    flat: Result | None = None
    """Run of the infinite cache or of none, if no policy was run at its capacity; shown at every capacity.

    None for all other series.
    """

    def at(self, capacity: Size) -> Result | None:
        """Return the run that was made at this capacity, else `flat`."""
        return self.runs.get(capacity, self.flat)


@dataclass(frozen=True, slots=True)
class Chapter:
    """All series of one source."""

    name: str
    """Name of the source."""
    anchor: str
    """Id of the chapter's element in the HTML document."""
    series: tuple[Series, ...]
    sizes: tuple[Size, ...]
    """Capacities at which policies were run, ascending."""
    chosen: Size
    """Capacity that is shown in detail."""

    @property
    def policies(self) -> tuple[Series, ...]:
        """Series that are policies."""
        return tuple(one for one in self.series if not one.is_bound)

    @property
    def bounds(self) -> tuple[Series, ...]:
        """Series that are bounds."""
        return tuple(one for one in self.series if one.is_bound)

    def runs(self, capacity: Size) -> list[tuple[Series, Result]]:
        """Return each series that has a run for this capacity, together with the run."""
        found = ((one, one.at(capacity)) for one in self.series)
        return [(one, run) for one, run in found if run is not None]

    def capacity_bytes(self, capacity: Size) -> int | None:
        """Return the bytes of a capacity in this chapter; None if no run was made at this capacity."""
        return next((one.runs[capacity].capacity_bytes for one in self.series if capacity in one.runs), None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All results of a report, arranged."""

    results: tuple[Result, ...]
    chapters: tuple[Chapter, ...]
    sizes: tuple[Size, ...]
    """Capacities of all chapters, ascending."""
    policies: tuple[str, ...]
    """Names of the policies, in the order of their first results."""
    bounds: tuple[str, ...]
    """Names of the bounds, in the order of their first results."""
    measure: Measure
    replaced: int
    """Number of results that are in no series.

    Most of them have the same source, policy and capacity as a later result.
    """


def arrange(results: Sequence[Result]) -> Comparison:
    """Arrange results by source, policy and capacity.

    Raises InputError if there are no results.
    """
    if not results:
        raise InputError("a report needs at least one result, and there is none; replay something first")
    names = list(dict.fromkeys((run.policy, run.is_bound) for run in results))
    policies = tuple(name for name, bound in names if not bound)
    bounds = tuple(name for name, bound in names if bound)
    styles = {(name, bound): (bounds if bound else policies).index(name) for name, bound in names}
    sources = list(dict.fromkeys(run.source for run in results))
    chapters = tuple(
        _chapter(name, f"source-{number}", [run for run in results if run.source == name], styles)
        for number, name in enumerate(sources, 1)
    )
    kept = sum(len(one.runs) + (one.flat is not None) for chapter in chapters for one in chapter.series)
    decided = any(Measure.FLOPS.of(run) is not None for run in results if not run.is_bound or not policies)
    return Comparison(
        results=tuple(results),
        chapters=chapters,
        sizes=tuple(sorted({one for chapter in chapters for one in chapter.sizes})),
        policies=policies,
        bounds=bounds,
        measure=Measure.FLOPS if decided else Measure.TOKENS,
        replaced=len(results) - kept,
    )


def _chapter(
    name: str, anchor: str, runs: Sequence[Result], styles: Mapping[tuple[str, bool], int]
) -> Chapter:
    rows: dict[tuple[str, bool], dict[Size, Result]] = {}
    for run in runs:
        rows.setdefault((run.policy, run.is_bound), {})[_size(run)] = run
    # The capacities of a chapter are those of the policies. Bounds decide only where no policy was run.
    common = [one for (_, bound), found in rows.items() if not bound for one in found]
    common = common or [one for found in rows.values() for one in found]
    sizes = tuple(sorted(set(common)))
    series = [_series(key, found, styles[key], sizes) for key, found in rows.items()]
    series.sort(key=lambda one: (one.is_bound, one.style))
    # Shown in detail: the capacity with the most series; among several, the middle one.
    many = Counter(common)
    most = [one for one in sizes if many[one] == max(many.values())]
    return Chapter(name, anchor, tuple(series), sizes, chosen=most[(len(most) - 1) // 2])


def _series(key: tuple[str, bool], found: Mapping[Size, Result], style: int, sizes: Sequence[Size]) -> Series:
    policy, bound = key
    shared = {one: run for one, run in found.items() if one in sizes}
    # A series without a run at the policies' capacities is the infinite cache, with one run at 100 %, or the
    # run without a cache. If it has several runs, the run at the largest capacity is shown.
    return Series(policy, style, bound, shared, None if shared else found[max(found)])


def _size(run: Result) -> Size:
    fraction = finite(run.capacity)
    return Size(True, fraction) if fraction is not None else Size(False, finite(run.capacity_bytes) or 0.0)
