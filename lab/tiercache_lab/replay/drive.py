"""One run of a replay: all requests of a source go through a simulated cache, one after another."""

from __future__ import annotations

from collections.abc import Callable

from tiercache.core import Tier
from tiercache_lab.replay.base import Request, Source
from tiercache_lab.replay.cache import Running, Setup, SimulatedCache
from tiercache_lab.replay.needs import Need
from tiercache_lab.replay.tally import Tally


class Run(SimulatedCache):
    """A replay of one source through a controller.

    Raises ConfigError if the tiers are too small for the requests that run at once.

    Thread safety: one thread.
    """

    def __init__(self, source: Source, need: Need, setup: Setup) -> None:
        super().__init__(source, need, setup, source.concurrency)
        self._source = source
        self._setup = setup
        self._bandwidths = {
            tier.name: setup.machine.storage(tier.name, tier.bandwidth).bandwidth
            for tier in setup.tiers.storage
        } | {str(Tier.HOST): setup.machine.host_bandwidth}
        self.tally = Tally(setup.profile, need.requests, lambda: self.host_bytes)

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
