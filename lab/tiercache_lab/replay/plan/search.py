"""Runs of a plan: sizes of the host alone, the curve of what they save, and then a disk below the host."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from tiercache_lab.replay.base import StorageTier, Tiers
from tiercache_lab.replay.figures import unit_of
from tiercache_lab.replay.results import Result
from tiercache_lab.replay.study import Question, Stage, Study

HOST_RUNS: Final = 10
"""Maximum number of runs with the host alone."""
DISK_RUNS: Final = 8
"""Maximum number of runs with a disk below the host."""
LITTLE: Final = 0.01
"""Gain, as a fraction of the prefill, that counts as nothing: one point."""
DISK: Final = "disk"
"""Name of the storage tier."""
_SMALLEST: Final = 1 / 2048
"""Smallest size of the host, as a fraction of the infinite cache."""
_ENOUGH: Final = 0.9
_DISK_WEIGHT: Final = 2.0
"""Time of a run with a disk divided by that of a run without one, for the estimate."""
_STRAIGHT: Final = 0.05
"""Least distance of a knee from the chord, on axes of length 1; below it, the curve counts as straight."""
_RISE: Final = 0.06
"""Rise between two neighbouring sizes, as a share of the top, that is worth another run between them."""
_NARROW: Final = 1.35
"""Ratio of two neighbouring sizes below which no size between them is worth a run."""


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
    def largest(self) -> int:
        """Size of the cache without a limit."""
        return max(self.measured)

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
            (value / self.top - size / self.largest, -size)
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

    def next_size(self, smallest: int) -> int | None:
        """Return the size whose run would tell most; None if the curve is known well enough.

        The curve is measured from large to small until a size saves little or is below `smallest`. Then the
        steepest gap between two neighbours is halved, on a logarithmic scale, until every gap is flat or
        narrow.
        """
        sizes, values, worth = self.sizes, self._rising(), _RISE * self.top
        if self.top <= 0:
            return None
        if values[0] > worth and sizes[0] // 4 >= smallest:
            return sizes[0] // 4
        gaps = [
            (values[i + 1] - values[i], math.isqrt(sizes[i] * sizes[i + 1]))
            for i in range(len(sizes) - 1)
            if sizes[i + 1] > _NARROW * sizes[i]
        ]
        rise, size = max(gaps, default=(0.0, 0))
        return size if rise > worth else None

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
    """Run of the infinite cache."""
    hosts: tuple[Result, ...]
    """Runs with the host alone."""
    disks: tuple[Result, ...]
    """Runs with a disk below the host."""
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
    def disk(self) -> Result | None:
        """Run with the disk that the plan recommends below this host; None if no disk is worth its bytes.

        It is the smallest disk that brings 90 % of what the largest one brings, if that is a point or more.
        """
        alone = self.curve.at(self.host)
        there = [one for one in self.disks if host_of(one) == self.host]
        gain = max((one.flops_saved for one in there), default=alone) - alone
        if gain < LITTLE:
            return None
        return min((one for one in there if one.flops_saved - alone >= _ENOUGH * gain), key=disk_of)

    def written_per_day(self, result: Result) -> float | None:
        """Return the bytes written to the disk per day; None without a disk or without times."""
        use = result.tiers.get(DISK)
        return use.written_bytes * 86_400 / self.seconds if use and self.seconds else None


class Search:
    """Search for the sizes that answer the question. `told` is called once with an estimate of its duration.

    Thread safety: one thread.
    """

    def __init__(
        self,
        question: Question,
        stage: Callable[[Stage], Callable[[], object]] = lambda _: lambda: None,
        told: Callable[[float, int], object] = lambda seconds, runs: None,
    ) -> None:
        self._question = question
        self._study = Study(question, stage)
        self._told = told
        self._found: SizePlan | None = None

    @property
    def plan(self) -> SizePlan | None:
        """Plan as far as it is known; None before the infinite cache has run."""
        return self._found

    def results(self) -> Iterator[Result]:
        """Yield each result as soon as it is known; the first is that of the infinite cache."""
        need = self._study.need
        free = self._study.infinite(self._estimate(need.requests))
        self._found = plan = SizePlan(free, (), (), need.last)
        yield free
        smallest = max(1, int(plan.footprint * _SMALLEST))
        while len(plan.hosts) < HOST_RUNS and (size := plan.curve.next_size(smallest)) is not None:
            nbytes = rounded(size)
            if nbytes in plan.curve.measured:
                break
            found = self._run(Tiers(nbytes), nbytes / plan.footprint)
            self._found = plan = replace(plan, hosts=(*plan.hosts, found))
            yield found
        if not worth_a_disk(plan):
            return
        for host in (plan.host, rounded(plan.host // 4)):
            for found in self._below(plan, host):
                self._found = plan = replace(plan, disks=(*plan.disks, found))
                yield found

    def _below(self, plan: SizePlan, host: int) -> Iterator[Result]:
        """Yield runs with smaller and smaller disks below this host, until one brings little."""
        disk, alone, gain = rounded(plan.footprint), plan.curve.at(host), 0.0
        for _ in range(DISK_RUNS // 2):
            found = self._run(Tiers(host, storage=(StorageTier(DISK, disk),)), None)
            yield found
            gain = max(gain, found.flops_saved - alone)
            disk = rounded(disk // 2)
            if gain < LITTLE or found.flops_saved - alone < gain / 2 or disk < host / 2:
                return

    def _run(self, tiers: Tiers, capacity: float | None) -> Result:
        policy = self._question.policies[0]
        return self._study.run(tiers, policy, policy, capacity)

    def _estimate(self, requests: int) -> Callable[[], None]:
        """Return a function to call after each request of the first run, which tells the estimate once."""
        began, trial, done = time.perf_counter(), max(20, requests // 20), 0
        runs = 1 + HOST_RUNS + DISK_RUNS

        def step() -> None:
            nonlocal done
            done += 1
            if done == min(trial, requests):
                each = (time.perf_counter() - began) / done * requests
                self._told(each * (1 + HOST_RUNS + _DISK_WEIGHT * DISK_RUNS), runs)

        return step


def worth_a_disk(plan: SizePlan) -> bool:
    """Return whether the recommended host leaves a point or more to save."""
    curve = plan.curve
    return curve.top > 0 and curve.top - curve.at(plan.host) >= LITTLE


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
