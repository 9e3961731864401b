"""One run: every request of a source through a real controller over the null data plane."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tiercache.controller import Admission, ControllerOptions, HybridCacheController, Status
from tiercache.core import PoolName, Tier, full_pages
from tiercache.index import CheckpointRules
from tiercache.keys import Identity
from tiercache.policy import ModelProfile
from tiercache.replay.base import Request, Source
from tiercache.replay.plane import Inline, NullArena, NullEngine, block_bytes, device_pool, geometries
from tiercache.replay.tally import Tally

_SPARE_STATES: Final = 8


@dataclass(frozen=True, slots=True)
class Machine:
    """What the modelled time to the first token rests on: FLOPs per second that a prefill reaches, and bytes per second of each load."""

    flops: float = 250e12
    host_bandwidth: float = 50e9
    disk_bandwidth: float = 6e9


@dataclass(frozen=True, slots=True)
class Setup:
    """What one run is made of. `host_bytes`: the cache; the device holds what runs and nothing else unless `device_bytes` are given."""

    policy: str
    profile: ModelProfile
    host_bytes: int
    checkpoints: CheckpointRules = field(default_factory=CheckpointRules)
    machine: Machine = field(default_factory=Machine)
    refresh_path: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Need:
    """What the requests of a source take at most, in pages: all of them together without sharing, and one."""

    requests: int
    pages: int
    longest: int


def measure(source: Source) -> Need:
    """Read a source once."""
    requests = pages = longest = 0
    for request in source:
        size = -(-(len(request.prompt) + len(request.output)) // source.page_size)
        requests += 1
        pages += size
        longest = max(longest, size)
    return Need(requests, pages, longest)


class Run:
    """Drives a controller. Thread rule: one thread."""

    def __init__(self, source: Source, need: Need, setup: Setup) -> None:
        geometry = geometries(setup.profile, source.page_size)
        self._source = source
        self._setup = setup
        self._now = 0.0
        self._running: deque[_Running] = deque()
        states = source.concurrency * (
            _SPARE_STATES + (need.longest * source.page_size // setup.checkpoints.every if setup.checkpoints.every else 0)
        )
        slots = {PoolName.KV: (source.concurrency + 1) * (need.longest + 1), PoolName.MAMBA: states}
        self._arena = NullArena(setup.host_bytes, block_bytes(geometry[PoolName.KV]))
        self._controller = HybridCacheController(
            Identity(setup.profile.name, "replay", "bytes", "bytes", "bytes", page_size=source.page_size),
            {name: device_pool(one, slots[name]) for name, one in geometry.items()},
            self._arena,
            options=ControllerOptions(policy=setup.policy, checkpoints=setup.checkpoints, seed=setup.seed, refresh_path=setup.refresh_path),
            profile=setup.profile,
            engine=NullEngine,
            threads=Inline,
            clock=lambda: self._now,
        )
        self.tally = Tally(setup.profile, need.requests, lambda: (self._arena.blocks - self._arena.available) * self._arena.block_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most that the host ever held."""
        return self._arena.peak * self._arena.block_bytes

    def go(self, step: Callable[[], object] = lambda: None) -> None:
        """Serve every request; `step` is called after each."""
        for request in self._source:
            while self._running and (len(self._running) >= self._source.concurrency or self._waits_for(request)):
                self._finish()
            self._now = max(self._now, request.arrival)
            self._begin(request)
            step()
        while self._running:
            self._finish()

    def _waits_for(self, request: Request) -> bool:
        return any(one.request.session == request.session for one in self._running)

    def _begin(self, request: Request) -> None:
        controller = self._controller
        admission = controller.admit(controller.lookup(request.prompt))
        while admission.poll().status is Status.PENDING:
            pass
        self.tally.add(request, admission.depth, self._seconds(request, admission))
        self._running.append(_Running(request, admission))
        if self._source.concurrency == 1:
            self._finish()

    def _seconds(self, request: Request, admission: Admission) -> float:
        """The modelled time to the first token: the loads, then the prefill of what is not restored."""
        machine, seconds = self._setup.machine, 0.0
        for (tier, pool), count in admission.sources.objects.items():
            bandwidth = {Tier.HOST: machine.host_bandwidth, Tier.STORAGE: machine.disk_bandwidth}.get(tier)
            if bandwidth:
                seconds += count * self._bytes(pool) / bandwidth
        return seconds + self._setup.profile.flops(admission.depth, len(request.prompt)) / machine.flops

    def _bytes(self, pool: PoolName) -> int:
        profile = self._setup.profile
        return profile.kv_bytes_per_token * self._source.page_size if pool is PoolName.KV else profile.state_bytes

    def _finish(self) -> None:
        """The oldest request is done: its states and pages go to the cache."""
        running = self._running.popleft()
        request, admission, controller = running.request, running.admission, self._controller
        has_states = bool(self._setup.profile.state_bytes)
        sequence = np.concatenate([request.prompt, request.output[:-1]])  # the last token's KV is never computed
        prompt_end = len(request.prompt)
        admission.extend(len(sequence), len(admission.checkpoints) + 1 if has_states else 0)
        taken = {depth: admission.take_states() for depth in admission.checkpoints} if has_states else {}
        controller.commit(admission, request.prompt, taken)
        end = full_pages(len(sequence), controller.page_size) * controller.page_size
        at_end = {}
        if has_states and self._setup.checkpoints.request_end and end > max(prompt_end - controller.page_size, admission.depth, *taken, 0):
            at_end = {end: admission.take_states()}
        if end > prompt_end - prompt_end % controller.page_size or at_end:
            controller.commit(admission, sequence, at_end)
        controller.release(admission)
        controller.evict(Tier.DEVICE)


@dataclass(frozen=True, slots=True)
class _Running:
    request: Request
    admission: Admission
