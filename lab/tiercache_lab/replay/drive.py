"""One run of a replay: all requests of a source go through a simulated cache, one after another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tiercache.core import Tier
from tiercache.policy import ModelProfile
from tiercache_lab.replay.base import Request
from tiercache_lab.replay.cache import Running, Setup, SimulatedCache
from tiercache_lab.replay.needs import Need
from tiercache_lab.replay.sources.base import WorkloadSource


class Tally:
    """Sums over the requests of one run. Thread safety: one thread."""

    def __init__(self, profile: ModelProfile) -> None:
        self._profile = profile
        self._rows: list[tuple[float, int]] = []  # seconds and cuts of each request
        # sums of prompt tokens, restored tokens, FLOPs of prompts and FLOPs of restored prefixes
        self._total: list[float] = [0.0] * 4

    def add(self, request: Request, depth: int, seconds: float, cuts: int = 0) -> None:
        """Count a request that restored `depth` tokens and had its first token after `seconds`.

        `cuts` is the number of checkpoints at which its prefill was cut.
        """
        prompt = len(request.prompt)
        self._rows.append((seconds, cuts))
        counted = (prompt, depth, self._profile.flops(0, prompt), self._profile.flops(0, depth))
        for i, value in enumerate(counted):
            self._total[i] += value

    @property
    def requests(self) -> int:
        """Number of counted requests."""
        return len(self._rows)

    @property
    def token_hit_rate(self) -> float:
        """Restored prompt tokens divided by prompt tokens."""
        return self._total[1] / self._total[0] if self._total[0] else 0.0

    @property
    def flops_saved(self) -> float:
        """FLOPs of the restored prefixes divided by FLOPs of the prompts."""
        return self._total[3] / self._total[2] if self._total[2] else 0.0

    @property
    def cuts(self) -> float:
        """Cuts of the prefill per request."""
        return sum(row[1] for row in self._rows) / len(self._rows) if self._rows else 0.0

    def ttft_ms(self) -> tuple[float, float]:
        """Return mean and 95th percentile of the modelled time to the first token, in milliseconds."""
        seconds = np.array([row[0] for row in self._rows]) * 1e3
        return (float(seconds.mean()), float(np.percentile(seconds, 95))) if len(seconds) else (0.0, 0.0)

    @property
    def ttft_ms_p50(self) -> float:
        """Median of the modelled time to the first token, in milliseconds."""
        return float(np.median([row[0] for row in self._rows])) * 1e3 if self._rows else 0.0


class Run(SimulatedCache):
    """A replay of one source through a controller.

    Raises ConfigError if the tiers are too small for the requests that run at once.

    Thread safety: one thread.
    """

    def __init__(self, source: WorkloadSource, need: Need, setup: Setup) -> None:
        super().__init__(source, need, setup, source.concurrency)
        self._source = source
        self._setup = setup
        self._bandwidths = {
            tier.name: setup.machine.storage(tier.name, tier.bandwidth).bandwidth
            for tier in setup.tiers.storage
        } | {str(Tier.HOST): setup.machine.host_bandwidth}
        self.tally = Tally(setup.profile)

    def go(self, step: Callable[[], object] = lambda: None) -> None:
        """Serve all requests; `step` is called after each request has begun.

        Raises RuntimeError if a call of storage has failed: the figures would be those of another cache.
        """
        for request in self._source:
            while self.running and (
                len(self.running) >= self._source.concurrency or self._waits_for(request)
            ):
                self.end(self.running[0])
            self.now = max(self.now, request.arrival)
            begun = self.begin(request)
            self.tally.add(request, begun.admission.depth, self._seconds(begun), len(begun.cuts))
            if self._source.concurrency == 1:
                self.end(begun)
            step()
        while self.running:
            self.end(self.running[0])
        self.check()

    def _waits_for(self, request: Request) -> bool:
        return any(one.request.session == request.session for one in self.running)

    def _seconds(self, begun: Running) -> float:
        """Return the modelled time to the first token, in seconds.

        All loads come first, one after the other. The prefill of the other tokens follows, with its cuts.
        """
        machine = self._setup.machine
        loads = sum(nbytes / self._bandwidths[name] for name, nbytes in begun.loads.items())
        flops = self._setup.profile.flops(begun.admission.depth, len(begun.request.prompt))
        return loads + len(begun.cuts) * machine.cut_seconds + flops / machine.flops
