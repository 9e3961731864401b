"""Studies: runs of several policies at several capacities over one source, and bounds on their hit rates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from tiercache.controller import WRITE_CHANCE, WRITE_THROUGH
from tiercache.core import PoolName
from tiercache.errors import ConfigError
from tiercache.index import CheckpointRules
from tiercache.policy import Costs, ModelProfile, Policy, policy_named
from tiercache_lab.policies import MAIN
from tiercache_lab.replay.base import StorageTier, Tiers
from tiercache_lab.replay.cache import Setup
from tiercache_lab.replay.clairvoyant import Clairvoyant, Recorder
from tiercache_lab.replay.drive import Run
from tiercache_lab.replay.machines import ReplayMachine
from tiercache_lab.replay.needs import infinite, measure
from tiercache_lab.replay.plane import geometries
from tiercache_lab.replay.queueing.run import QueuedRun, Queueing
from tiercache_lab.replay.results import NO_CACHE, Result
from tiercache_lab.replay.sources import WorkloadSource

CAPACITIES: Final = (0.05, 0.1, 0.2)
"""Default capacities, as fractions of the infinite cache's peak in bytes."""
READING: Final = "reading"
"""Label of the stage in which the source is read."""


def possible(policy: str, profile: ModelProfile) -> bool:
    """Return whether the policy can be used with this model. Raises ConfigError for an unknown policy."""
    needs = policy_named(policy, Costs(profile)).needs_states
    return bool(profile.state_bytes) or not needs


@dataclass(frozen=True, slots=True)
class Question:
    """Parameters of a study.

    The size of the cache is given by `capacities` or by `tiers`. If both are missing and the source belongs
    to a published benchmark, the study uses the tiers of that benchmark. Otherwise it uses `CAPACITIES`.

    Raises ConfigError for parameters that are out of range or contradict each other.
    """

    source: WorkloadSource
    policies: Sequence[str]
    profile: ModelProfile
    capacities: Sequence[float] = ()
    """Sizes of the cache as fractions of the bytes that an infinite cache holds."""
    tiers: Tiers | None = None
    checkpoints: str | CheckpointRules = "rules"
    """Checkpoint policy, which says where states are taken (see `checkpoints_named`)."""
    machine: ReplayMachine = field(default_factory=ReplayMachine)
    seed: int = 0
    write: str = WRITE_THROUGH
    write_chance: float = WRITE_CHANCE
    """The controller's options of these names."""
    queueing: Queueing | None = None
    """The queue in front of the machine; None for requests that are served one after the other."""
    bounds: bool = True
    """Whether the study also runs the clairvoyant policy. With a queue, it runs without a cache instead: in
    which order requests are served then depends on the policy, and nothing is proven of orders that differ.
    With storage tiers, it also runs each policy in one pool of all bytes, and LRU in every tier."""

    def __post_init__(self) -> None:
        if not self.policies:
            raise ConfigError("no policy is named; name one or more, such as hvd,lru")
        for name in self.policies:
            if not possible(name, self.profile):
                others = ", ".join(one for one in MAIN if possible(one, self.profile))
                raise ConfigError(
                    f"policy {name!r} ranks recurrent states, and {self.profile.name} has none; use {others},"
                    " or another profile"
                )
        for capacity in self.capacities:
            if not 0.0 < capacity <= 1.0:
                raise ConfigError(
                    f"a capacity of {capacity:g} is out of range; use a fraction, such as 0.1, of the bytes"
                    " that an infinite cache would hold"
                )
        if self.capacities and self.tiers is not None:
            raise ConfigError("capacities are fractions and tiers are bytes; give only one of them")
        if self.tiers is not None and not self.tiers.nbytes:
            raise ConfigError(
                "tiers of 0 bytes cannot cache anything; give the device or the host some bytes"
            )
        if self.tiers is not None and self.tiers.storage and not self.tiers.host_bytes:
            raise ConfigError(
                "objects reach the storage tiers through the host, which has 0 bytes; give the host some"
            )

    @property
    def is_benchmark(self) -> bool:
        """Whether the tiers are those of the source's published benchmark."""
        return self.source.layout is not None and not self.capacities and self.tiers is None

    @property
    def needs_size(self) -> bool:
        """Whether the infinite cache must run with the default rules as well, for its size.

        Fractions are of that size whatever the checkpoints are, so that they can be compared at equal bytes.
        """
        is_default = self.checkpoints in ("rules", CheckpointRules())
        return not is_default and self.tiers is None and not self.is_benchmark

    @property
    def yardsticks(self) -> Sequence[tuple[str, str, Tiers]]:
        """Policy, label and tiers of runs with which the storage tiers are compared.

        These are LRU in every tier, unless it is one of the policies, and each policy in one pool of all
        bytes.
        """
        if not self.bounds or self.tiers is None or not self.tiers.storage:
            return []
        pool = Tiers(self.tiers.nbytes)
        return [
            *([("lru", "lru in every tier", self.tiers)] if "lru" not in self.policies else []),
            *((policy, f"{policy} in one pool", pool) for policy in self.policies),
        ]

    @property
    def stages(self) -> int:
        """Number of stages of a study with these parameters."""
        sizes = 1 if self.is_benchmark or self.tiers is not None else len(self.capacities or CAPACITIES)
        # 2: the source is read, and the infinite cache runs, twice if its size is another. Each policy runs
        # at each size. A benchmark also runs without offload. The bounds are one clairvoyant run per size.
        # With a queue, they are one run without a cache.
        bounds = len(self.yardsticks)
        if self.bounds:
            bounds += sizes if self.queueing is None else 1
        return 2 + self.needs_size + len(self.policies) * sizes + self.is_benchmark + bounds


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage of a study, such as the run of one policy at one capacity."""

    label: str
    requests: int
    """Number of requests that the stage processes."""


class Study:
    """Runs of one question, all with the same source and the same parameters.

    Making one reads the source. `stage` is called at the start of each stage and returns a function, which is
    called after each request of the stage. Thread safety: one thread.
    """

    def __init__(
        self, question: Question, stage: Callable[[Stage], Callable[[], object]] = lambda _: lambda: None
    ) -> None:
        self._question = question
        self._stage = stage
        self._source = question.source
        self._recorder = Recorder()
        self.need: Final = measure(self._source, stage(Stage(READING, len(self._source))))
        """Memory that the requests of the source need."""

    def infinite(self) -> Result:
        """Run the infinite cache."""
        unlimited = infinite(self._source, self.need, self._question.profile, self._question.checkpoints)
        free = self.run(unlimited, self._recorder, "infinite", None)
        filled = {name: replace(use, capacity=use.peak) for name, use in free.tiers.items()}
        footprint = max(1, free.peak_bytes)
        return replace(free, capacity=1.0, capacity_bytes=footprint, is_bound=True, tiers=filled)

    def results(self) -> Iterator[Result]:
        """Yield each result as soon as it is known; the first is that of the infinite cache."""
        question = self._question
        if question.tiers is not None:
            # If the device is too small, this raises ConfigError before the long run of the infinite cache.
            self._prepare(question.tiers, "lru")
        free = self.infinite()
        yield free
        sizes = self._sizes(self._footprint() if question.needs_size else free.capacity_bytes)
        for policy in question.policies:
            for capacity, tiers in sizes:
                yield self.run(tiers, policy, policy, capacity)
        if question.is_benchmark:
            device_only = replace(sizes[0][1], host_bytes=0, storage=())
            yield self.run(device_only, "lru", "lru without offload", None)
        for policy, label, tiers in question.yardsticks:
            found = self.run(tiers, policy, label, None)
            yield replace(found, is_bound=not tiers.storage)
        if question.bounds and question.queueing is not None:
            found = self.run(Tiers(0), "lru", NO_CACHE, None)
            yield replace(found, is_bound=True)
        elif question.bounds:
            for capacity, tiers in sizes:
                clairvoyant = Clairvoyant(Costs(question.profile), self._recorder.uses)
                yield replace(self.run(tiers, clairvoyant, "clairvoyant", capacity), is_bound=True)

    def _footprint(self) -> int:
        """Return the bytes that an infinite cache holds with the default rules."""
        question = replace(self._question, checkpoints="rules")
        tiers = infinite(self._source, self.need, question.profile, question.checkpoints)
        run = self._prepare(tiers, "lru", question)
        run.go(self._stage(Stage("infinite with the default rules", self.need.requests)))
        return max(1, run.peak_bytes)

    def _sizes(self, footprint: int) -> list[tuple[float | None, Tiers]]:
        question, need = self._question, self.need
        if question.tiers is not None:
            return [(None, question.tiers)]
        layout = self._source.layout
        if question.is_benchmark and layout is not None:
            kv = geometries(question.profile, self._source.page_size).get(PoolName.KV)
            page = kv.nbytes if kv else 0
            # The published benchmark limits states but not pages, so the device has room for all pages.
            pages = max(need.pages + need.longest, (need.longest + 1) * self._source.concurrency)
            device = layout.device_states * question.profile.state_bytes + pages * page
            unlimited = infinite(self._source, need, question.profile, question.checkpoints)
            disk = (StorageTier("disk", unlimited.host_bytes),)
            return [(None, Tiers(int(device * layout.host_ratio), device, disk, layout.device_states))]
        return [
            (capacity, Tiers(int(footprint * capacity))) for capacity in question.capacities or CAPACITIES
        ]

    def _prepare(
        self, tiers: Tiers, policy: str | Policy, question: Question | None = None
    ) -> Run | QueuedRun:
        question = question or self._question
        setup = Setup(
            policy, question.profile, tiers, question.checkpoints, question.machine, question.seed,
            question.write, question.write_chance,
        )  # fmt: skip
        if question.queueing is not None:
            return QueuedRun(self._source, self.need, setup, question.queueing)
        return Run(self._source, self.need, setup)

    def run(self, tiers: Tiers, policy: str | Policy, label: str, capacity: float | None) -> Result:
        """Run a policy with these tiers. `label` and `capacity` become those of the result.

        Raises ConfigError if the device is too small.
        """
        question = self._question
        at = "" if capacity is None else f" at {capacity * 100:.3g} %"
        step = self._stage(Stage(f"{label}{at}", self.need.requests))
        started = time.perf_counter()
        run = self._prepare(tiers, policy)
        run.go(step)
        mean, p95 = run.tally.ttft_ms()
        tally = run.tally
        return Result(
            source=self._source.name, policy=label, capacity=capacity, capacity_bytes=tiers.nbytes,
            token_hit_rate=tally.token_hit_rate, flops_saved=tally.flops_saved, ttft_ms_mean=mean,
            ttft_ms_p95=p95, peak_bytes=run.peak_bytes, working_bytes=run.working_bytes,
            requests=tally.requests, seconds=time.perf_counter() - started, seed=question.seed,
            profile=question.profile.name, write=question.write, write_chance=question.write_chance,
            cuts=tally.cuts, ttft_ms_p50=tally.ttft_ms_p50,
            serving=run.serving() if isinstance(run, QueuedRun) else None, tiers=run.uses(),
            published=self._source.published,
        )  # fmt: skip
