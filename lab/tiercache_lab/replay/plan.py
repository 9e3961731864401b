"""A plan of sizes: how much host memory and disk save how much on a source.

The host alone is run at halves, quarters, ... of what the infinite cache holds; then disks below the host
that the curve of savings recommends, from large to small.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from tiercache_lab.replay import figures
from tiercache_lab.replay.base import StorageTier, Tiers
from tiercache_lab.replay.figures import percent, unit_of
from tiercache_lab.replay.results import Result
from tiercache_lab.replay.study import Question, Stage, Study
from tiercache_lab.replay.tables import Grid, Line, Style

HOST_RUNS: Final = 10
"""Maximum number of runs with the host alone."""
DISK_RUNS: Final = 4
"""Maximum number of runs with a disk below the host."""
STAGES: Final = 2 + HOST_RUNS + DISK_RUNS
"""Maximum number of stages of a plan: the source is read, and the infinite cache runs before the others."""
LITTLE: Final = 0.01
"""Gain, as a fraction of the prefill, that counts as nothing: one point."""
NOTHING: Final = 0.001
"""Saved fraction of the prefill below which a cache saves nothing that is worth telling."""
DISK: Final = "disk"
_ENOUGH: Final = 0.9
_STRAIGHT: Final = 0.05
"""Least distance of a knee from the chord, on axes of length 1; below it, the curve counts as straight."""
_SMALL: Final = 0.06
"""Share of the most that can be saved; no size is halved that saves less."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Saved fraction of the prefill by size in bytes.

    `measured` has at least one size, and its largest is that of a cache without a limit. A size may save less
    than a smaller one; then the smaller one's figure counts for it, because a cache need not use all its
    bytes.
    """

    measured: Mapping[int, float]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Measured sizes, ascending."""
        return tuple(sorted(self.measured))

    @property
    def top(self) -> float:
        """Highest saved fraction."""
        return max(self.measured.values())

    def at(self, size: float) -> float:
        """Return the saved fraction at any size.

        Between two measured sizes it rises with the logarithm of the size, and below the smallest one in
        proportion to the size.
        """
        sizes, values = self.sizes, self._rising()
        place = bisect_left(sizes, size)
        if place == len(sizes):
            return values[-1]
        if place == 0:
            return values[0] * size / sizes[0]
        share = math.log(size / sizes[place - 1]) / math.log(sizes[place] / sizes[place - 1])
        return values[place - 1] + share * (values[place] - values[place - 1])

    def knee(self) -> int | None:
        """Return the measured size that lies farthest above the straight line from nothing to the largest.

        Both axes are scaled to length 1. This is the knee of Satopaa and others, "Finding a 'Kneedle' in a
        Haystack" (2011), for a concave curve without smoothing. None if nothing is saved, or if the curve is
        nearly straight, so that no size is better than another.
        """
        if self.top <= 0:
            return None
        distances = [
            (value / self.top - size / self.sizes[-1], -size)
            for size, value in zip(self.sizes, self._rising(), strict=True)
        ]
        distance, size = max(distances)
        return -size if distance >= _STRAIGHT else None

    def enough(self, share: float) -> int:
        """Return the smallest measured size that saves at least `share` of what the best size saves."""
        # The tolerance is for the rounding of the product: with a share of 1, the top itself must suffice.
        wanted = share * self.top - 1e-12
        return next(size for size, value in zip(self.sizes, self._rising(), strict=True) if value >= wanted)

    def doubling(self, size: float) -> float:
        """Return what twice this size saves more, as a fraction of the prefill."""
        return self.at(2 * size) - self.at(size)

    def _rising(self) -> list[float]:
        """Return, for each measured size, the highest saved fraction of this and all smaller sizes."""
        found, highest = [], -math.inf
        for size in self.sizes:
            highest = max(highest, self.measured[size])
            found.append(highest)
        return found


@dataclass(frozen=True, slots=True)
class SizePlan:
    """Runs of a plan, as far as they are made."""

    unlimited: Result
    hosts: tuple[Result, ...]
    disks: tuple[Result, ...]
    """Runs with a disk below the host that the plan recommends."""
    seconds: float
    """Arrival of the last request, in seconds since the start; 0 if the source has no times."""

    @property
    def footprint(self) -> int:
        """Bytes that the infinite cache holds."""
        return self.unlimited.capacity_bytes

    @property
    def curve(self) -> Curve:
        """Savings of the host alone; the infinite cache is the largest host."""
        return Curve({host_of(one): one.flops_saved for one in (*self.hosts, self.unlimited)})

    @property
    def host(self) -> int:
        """Bytes of the host that the plan recommends: the knee, or what saves 90 % if there is no knee."""
        return self.curve.knee() or self.curve.enough(_ENOUGH)

    @property
    def needs_disk(self) -> bool:
        """Whether the recommended host leaves a point or more to save."""
        curve = self.curve
        return curve.top > 0 and curve.top - curve.at(self.host) >= LITTLE

    @property
    def disk(self) -> Result | None:
        """Run with the disk that the plan recommends below this host; None if no disk is worth its bytes.

        It is the smallest disk that brings 90 % of what the largest one brings, if that is a point or more.
        """
        alone = self.curve.at(self.host)
        gain = max((one.flops_saved for one in self.disks), default=alone) - alone
        if gain < LITTLE:
            return None
        return min((one for one in self.disks if one.flops_saved - alone >= _ENOUGH * gain), key=disk_of)

    @property
    def runs(self) -> list[Result]:
        """All runs: hosts by size, then disks by size, then no limit."""
        return [*sorted(self.hosts, key=host_of), *sorted(self.disks, key=disk_of), self.unlimited]

    def written_per_day(self, result: Result) -> float | None:
        """Return the bytes written to the disk per day; None without a disk or without times."""
        use = result.tiers.get(DISK)
        return use.written_bytes * 86_400 / self.seconds if use and self.seconds else None


class Search:
    """Runs of a plan, one after the other. Thread safety: one thread."""

    def __init__(
        self, question: Question, stage: Callable[[Stage], Callable[[], object]] = lambda _: lambda: None
    ) -> None:
        self._question = question
        self._study = Study(question, stage)
        self.plan: SizePlan | None = None
        """Plan as far as it is known; None before the infinite cache has run."""

    def results(self) -> Iterator[Result]:
        """Yield each result as soon as it is known; the first is that of the infinite cache."""
        free = self._study.infinite()
        self.plan = plan = SizePlan(free, (), (), self._study.need.last)
        yield free
        size = rounded(plan.footprint // 2)
        while len(plan.hosts) < HOST_RUNS and 0 < size < plan.curve.sizes[0] and plan.curve.top > 0:
            found = self._run(Tiers(size), size / plan.footprint)
            self.plan = plan = replace(plan, hosts=(*plan.hosts, found))
            yield found
            if found.flops_saved < _SMALL * plan.curve.top:
                break
            size = rounded(size // 2)
        host, disk = plan.host, rounded(plan.footprint)
        while plan.needs_disk and len(plan.disks) < DISK_RUNS and disk >= host // 2:
            found = self._run(Tiers(host, storage=(StorageTier(DISK, disk),)), None)
            self.plan = plan = replace(plan, disks=(*plan.disks, found))
            yield found
            alone = plan.curve.at(host)
            gain = max(one.flops_saved for one in plan.disks) - alone
            if gain < LITTLE or found.flops_saved - alone < gain / 2:
                return
            disk = rounded(disk // 2)

    def _run(self, tiers: Tiers, capacity: float | None) -> Result:
        policy = self._question.policies[0]
        return self._study.run(tiers, policy, policy, capacity)


def host_of(result: Result) -> int:
    """Return the bytes of the host."""
    return result.tiers["host"].capacity


def disk_of(result: Result) -> int:
    """Return the bytes of the disk; 0 without one."""
    use = result.tiers.get(DISK)
    return use.capacity if use else 0


def rounded(nbytes: int) -> int:
    """Return a size of two digits in its unit: 22.7 GiB becomes 23 GiB."""
    _, unit = unit_of(nbytes)
    step = unit if nbytes >= 10 * unit else unit / 10
    if nbytes >= 100 * unit:
        step = 10 * unit
    return max(1, int(round(nbytes / step) * step))


def facts(plan: SizePlan) -> dict[str, Any]:
    """Return the answer as plain JSON values. Fractions are of the prefill's FLOPs; sizes are in bytes."""
    curve, disk = plan.curve, plan.disk
    saves = curve.top >= NOTHING
    return {
        "unlimited_bytes": plan.footprint,
        "unlimited_saved": plan.unlimited.flops_saved,
        "knee_bytes": curve.knee() if saves else None,
        "host_bytes": plan.host if saves else 0,
        "host_saved": curve.at(plan.host) if saves else 0.0,
        "enough_bytes": curve.enough(_ENOUGH) if saves else 0,
        "doubling": curve.doubling(plan.host) if saves else 0.0,
        "disk_bytes": disk_of(disk) if disk else 0,
        "disk_saved": disk.flops_saved if disk else None,
        "disk_written_per_day": plan.written_per_day(disk) if disk else None,
        "sentences": list(sentences(plan)),
    }


def sentences(plan: SizePlan) -> Iterator[str]:
    """Yield the answer: how much host memory and disk save how much."""
    curve = plan.curve
    if curve.top < NOTHING:
        yield "Nothing is saved, whatever the size: the prompts repeat too little of what came before."
        return
    if not plan.hosts:
        yield (
            f"A cache without a limit holds {size(plan.footprint)} and saves {percent(curve.top)} of the"
            " prefill; no smaller size has been run."
        )
        return
    host = plan.host
    alone = curve.at(host)
    yield (
        f"{size(host)} of host memory save {percent(alone)} of the prefill, {percent(alone / curve.top)} of"
        f" what an unlimited cache of {size(plan.footprint)} saves."
    )
    if curve.knee() is None:
        yield "The curve has no knee: all along it, more memory saves more in proportion."
    if (disk := plan.disk) is not None:
        wear = plan.written_per_day(disk)
        wears = f"; {size(wear)} a day are written to it" if wear else ""
        yield f"{size(disk_of(disk))} of disk below it raise this to {percent(disk.flops_saved)}{wears}."
    elif plan.disks or not plan.needs_disk:
        yield "A disk below it, of any size, saves less than 1 point more."
    twice = curve.doubling(host)
    yield (
        f"Twice the host memory would save {twice * 100:.1f} points more."
        if twice >= LITTLE
        else "More host memory brings less than 1 point per doubling."
    )
    enough = curve.enough(_ENOUGH)
    if enough != host:
        yield f"{percent(_ENOUGH)} of what an unlimited cache saves need {size(enough)} of host memory."


def size(nbytes: float) -> str:
    """Write a number of bytes without needless decimals, because most sizes of a plan have two digits."""
    text, _, unit = figures.size(nbytes).partition(" ")
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"


def grid(plan: SizePlan) -> Grid:
    """Return the table of all runs, with those emphasised that the answer names."""
    lines = []
    for run in plan.runs:
        named = run is plan.disk or (run in plan.hosts and host_of(run) == plan.host)
        style = Style.BOUND if run is plan.unlimited else Style.BEST if named else Style.PLAIN
        lines.append(Line(_cells(plan, run), style))
    return Grid("All runs", [("", lines)])


def _cells(plan: SizePlan, run: Result) -> dict[str, str]:
    top = plan.curve.top
    return {
        "host": size(host_of(run)),
        "disk": size(disk_of(run)) if disk_of(run) else "",
        "saved": percent(run.flops_saved),
        "of unlimited": percent(run.flops_saved / top) if top >= NOTHING else "",
        "hit rate": percent(run.token_hit_rate),
        "TTFT": figures.milliseconds(run.ttft_ms_mean),
        "p95": figures.milliseconds(run.ttft_ms_p95),
        "written a day": size(written) if (written := plan.written_per_day(run)) is not None else "",
    }


EXPLANATIONS: Final[Sequence[str]] = (
    "saved: share of the prefill; of unlimited: of what a cache without a limit saves. TTFT: calculated time"
    " to the first token, mean; p95: its 95th percentile. written a day: by the times of the source. The last"
    " row is a cache without a limit.",
    "The host that the answer names is the knee of the curve: the size whose savings lie farthest above the"
    " straight line from no cache to a cache without a limit. The disk is the smallest below this host that"
    " brings 90 % of what the largest one brings.",
)
"""Sentences on the columns of the table."""
