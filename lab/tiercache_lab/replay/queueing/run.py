"""Run of a replay with a queue: the server of `queueing.server` in front of a simulated cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tiercache.core import Tier
from tiercache.errors import ConfigError
from tiercache_lab.replay.cache import Running, Setup, SimulatedCache
from tiercache_lab.replay.drive import Tally
from tiercache_lab.replay.needs import Need
from tiercache_lab.replay.queueing.server import Job, Link, Needed, QueueServer, SourceArrivals
from tiercache_lab.replay.results import Objective, Serving
from tiercache_lab.replay.sources.base import WorkloadSource

ENGINE: Final = "engine"
"""Name of the engine beside those of the tiers, in `Serving.busy`."""


@dataclass(frozen=True, slots=True)
class Queueing:
    """Parameters of the queue in front of the machine of a replay."""

    rate: float | None = None
    """Requests per second on average, by scaling the times of the source; None for the source's own times."""
    closed: bool = True
    """Whether a request of a session waits its pause after the previous one has ended (`SourceArrivals`)."""
    objective: Objective = field(default_factory=Objective)


class QueuedRun(SimulatedCache):
    """A replay of one source whose requests wait for places, share bandwidth, and overlap.

    A request looks its prompt up when it gets a place. It finds what was committed before: the prompts whose
    prefills have ended, and the answers of requests that have ended.

    Raises ConfigError if the device does not hold as many requests as the machine has places, and for a rate
    if all requests come at once. Thread safety: one thread.
    """

    def __init__(self, source: WorkloadSource, need: Need, setup: Setup, queueing: Queueing) -> None:
        # More requests than there are need no more places.
        super().__init__(source, need, setup, min(setup.machine.batch, max(1, need.requests)))
        self._source, self._setup, self._queueing = source, setup, queueing
        self._step: Callable[[], object] = lambda: None
        self._begun: dict[Job, Running] = {}
        self._served: list[Job] = []
        self.tally = Tally(setup.profile)
        machine = setup.machine
        speeds = {tier.name: machine.storage(tier.name, tier.bandwidth) for tier in setup.tiers.storage}
        self._links = {name: Link[Job](speed.bandwidth) for name, speed in speeds.items()}
        self._links[str(Tier.HOST)] = Link(machine.host_bandwidth)
        latencies = {name: speed.latency for name, speed in speeds.items()}
        speed = 1.0
        if queueing.rate is not None:
            if not need.last:
                raise ConfigError("a rate cannot scale arrivals that are all at once; leave it out")
            speed = queueing.rate * need.last / need.requests
        self._arrivals = SourceArrivals(iter(source), speed, closed=queueing.closed)
        self._server = QueueServer(
            machine.batch,
            lambda requests: machine.step(setup.profile, requests),
            self._links,
            latencies | {str(Tier.HOST): machine.host_latency},
            self._arrivals,
            self,
        )

    def go(self, step: Callable[[], object] = lambda: None) -> None:
        """Serve all requests; `step` is called after each request has ended.

        Raises RuntimeError if a call of storage has failed, and ConfigError if requests come so much faster
        than they are served that those that wait do not fit into this process.
        """
        self._step = step
        self._server.go()
        self.check()

    def serving(self) -> Serving:
        """Return the times of the requests, once all have been served."""
        busy = {name: link.busy for name, link in self._links.items()}
        return serving(self._served, self._queueing.objective, busy | {ENGINE: self._server.busy})

    def placed(self, job: Job) -> Needed:
        """Return the work of a request that has got its place."""
        self.now = job.begun
        self._arrivals.begun(job.request)
        begun = self._begun[job] = self.begin(job.request)
        machine, prompt = self._setup.machine, len(job.request.prompt)
        passes = machine.prefill(self._setup.profile, begun.admission.depth, prompt, begun.cuts)
        return Needed(tuple(begun.loads.items()), tuple(passes), max(0, len(job.request.output) - 1))

    def computed(self, job: Job) -> None:
        """Commit the prompt of a request whose prefill has ended."""
        self.now = job.first
        begun = self._begun[job]
        self.compute(begun)
        self.tally.add(job.request, begun.admission.depth, job.ttft, len(begun.cuts))

    def ended(self, job: Job) -> None:
        """Commit the answer of a request that has ended, and let the next one of its session come."""
        self.now = job.ended
        self.end(self._begun.pop(job))
        self._arrivals.ended(job.request, self.now)
        self._served.append(job)
        self._step()


def serving(jobs: Sequence[Job], objective: Objective, busy: Mapping[str, float]) -> Serving:
    """Return the figures of requests that have all ended; `busy` has seconds by name."""
    times = np.array([(job.arrival, job.begun, job.loaded, job.first, job.ended) for job in jobs])
    arrival, begun, loaded, first, ended = times.reshape(-1, 5).T
    per_token = np.array([tpot for job in jobs if (tpot := job.tpot) is not None])
    span = float(ended.max() - arrival.min()) if len(jobs) else 0.0
    arriving = float(arrival.max() - arrival.min()) if len(jobs) else 0.0
    met = sum(_meets(objective, job) for job in jobs)
    return Serving(
        objective=objective,
        wait_ms_mean=_mean(begun - arrival),
        load_ms_mean=_mean(loaded - begun),
        prefill_ms_mean=_mean(first - loaded),
        tpot_ms_mean=_mean(per_token),
        arrived_per_second=_per(len(jobs) - 1, arriving),
        served_per_second=_per(len(jobs), span),
        within=met / len(jobs) if objective.is_given and len(jobs) else None,
        goodput=_per(met, span) if objective.is_given else None,
        busy={name: _per(seconds, span) for name, seconds in busy.items()},
    )


def _mean(seconds: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    return float(seconds.mean()) * 1e3 if len(seconds) else 0.0


def _per(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else 0.0


def _meets(objective: Objective, job: Job) -> bool:
    """Return whether a request that was served met the objective; a time just at the limit does."""
    tpot = job.tpot
    return (objective.ttft is None or job.ttft <= objective.ttft) and (
        objective.tpot is None or tpot is None or tpot <= objective.tpot
    )
