"""Model of a server: places in a batch, shared links, one engine for prefills and decoding.

The model is driven by events, in the order of their times; it has no threads and no random numbers. Where two
events have the same time, the engine comes first, then the links, then arrivals.

    arrival -> [waits for a place] -> loads -> [waits for the engine] -> prefill -> decoding -> end
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from tiercache_lab.replay.base import Request
from tiercache_lab.replay.queueing.links import Link

_ROUNDING: Final = 1e-9
"""Fraction of a token by which a decoding may be short of its end because of rounding."""


@dataclass(frozen=True, slots=True)
class Needed:
    """Work that a request makes once it has a place."""

    loads: tuple[tuple[str, float], ...]
    """Bytes to load from each link, one after the other."""
    passes: tuple[float, ...]
    """Seconds of each forward pass of the prefill; at least one."""
    steps: int
    """Number of tokens to decode after the first token, which comes from the prefill."""


@dataclass(slots=True, eq=False)
class Job:
    """Request in the server. Times are in seconds, and NaN until they are known."""

    request: Request
    arrival: float
    begun: float = math.nan
    """Time at which it got a place."""
    loaded: float = math.nan
    """Time at which everything was loaded."""
    first: float = math.nan
    """Time of the first token: the end of the prefill."""
    ended: float = math.nan
    """Time of the last token, at which its place became free."""
    work: Needed = field(default_factory=lambda: Needed((), (0.0,), 0))
    loads: int = 0
    """Number of loads that have ended."""
    passes: int = 0
    """Number of forward passes that have ended."""

    @property
    def ttft(self) -> float:
        """Seconds from the arrival to the first token."""
        return self.first - self.arrival

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None if there is none."""
        return (self.ended - self.first) / self.work.steps if self.work.steps else None


class Arrivals(Protocol):
    """Requests in the order in which they come."""

    @property
    def next(self) -> float:
        """Time from which `take` may return requests; infinite if all have been taken, or wait for others."""

    def take(self, now: float) -> list[Job]:
        """Return the requests that have come until `now` and were not returned before."""


class Customer(Protocol):
    """Caller of the server, which knows the cache. The server calls it in the order of the virtual clock."""

    def placed(self, job: Job) -> Needed:
        """Return the work of a request that has got its place, at `job.begun`."""

    def computed(self, job: Job) -> None:
        """Note that the prefill has ended, at `job.first`."""

    def ended(self, job: Job) -> None:
        """Note that the request has ended, at `job.ended`."""


class QueueServer:
    """QueueServer with `batch` places; `go` runs it until nothing is left to do.

    A request holds its place from its first load to its last token. It loads from one link after the other;
    each link waits its latency, and then shares its bandwidth with the loads of other requests. The engine
    runs one forward pass at a time. Prefills are computed in the order in which their loads ended, the passes
    of one before those of the next. A pass takes its own seconds and those of one token of each decoding
    request. Between prefills, all decoding requests get a token every `step(n)` seconds, where n is their
    number.

    Thread safety: one thread.
    """

    def __init__(
        self,
        batch: int,
        step: Callable[[int], float],
        links: Mapping[str, Link[Job]],
        latencies: Mapping[str, float],
        arrivals: Arrivals,
        customer: Customer,
    ) -> None:
        self._batch, self._step = batch, step
        self._links, self._latencies = links, latencies
        self._arrivals, self._customer = arrivals, customer
        self._waiting: deque[Job] = deque()
        self._running = 0
        self._delayed: list[tuple[float, int, Job]] = []  # loads that wait for the latency of their link
        self._ready: deque[Job] = deque()  # for the engine; the first is being computed, if there is one
        self._pass_end = math.inf
        self._decoding: list[tuple[float, int, Job]] = []  # each ends when `_tokens` reaches the first number
        self._tokens = 0.0  # that a request has got which has been decoding from the beginning
        self._decoded_at = 0.0
        self._count = 0
        self.now = 0.0
        self.busy = 0.0
        """Seconds in which the engine computed."""
        self.held = 0.0
        """Sum over all requests of the seconds for which each held a place."""
        self.longest_queue = 0
        """Most requests that waited for a place at any time."""

    def go(self) -> None:
        """Serve all requests."""
        while True:
            self._fill()
            link = min(self._links.values(), key=lambda one: one.next, default=None)
            delayed = self._delayed[0][0] if self._delayed else math.inf
            linked = link.next if link is not None else math.inf
            engine = min(self._pass_end, self._next_decoded())
            when = min(engine, delayed, linked, self._arrivals.next)
            if when == math.inf:
                return
            self.now = max(self.now, when)
            if engine == when:
                self._compute()
            elif link is not None and linked == when:
                self._loaded(link.pop())
            elif delayed == when:
                job = heapq.heappop(self._delayed)[2]
                name, nbytes = job.work.loads[job.loads]
                self._links[name].add(self.now, nbytes, job)
            else:
                self._waiting += self._arrivals.take(self.now)
                self.longest_queue = max(self.longest_queue, len(self._waiting) - self._free())

    def _free(self) -> int:
        return self._batch - self._running

    def _fill(self) -> None:
        """Give free places to the requests that have waited longest."""
        while self._waiting and self._running < self._batch:
            job = self._waiting.popleft()
            self._running += 1
            job.begun = self.now
            job.work = self._customer.placed(job)
            self._load(job)

    def _load(self, job: Job) -> None:
        """Begin the next load of a request, or pass it on to the engine."""
        if job.loads == len(job.work.loads):
            job.loaded = self.now
            self._ready.append(job)
            if self._pass_end == math.inf:
                self._start_pass()
            return
        name, nbytes = job.work.loads[job.loads]
        if self._latencies[name]:
            heapq.heappush(self._delayed, (self.now + self._latencies[name], self._next_number(), job))
        else:
            self._links[name].add(self.now, nbytes, job)

    def _loaded(self, job: Job) -> None:
        job.loads += 1
        self._load(job)

    def _start_pass(self) -> None:
        """Begin the next forward pass of the first request that is ready."""
        self._decode()
        job = self._ready[0]
        seconds = job.work.passes[job.passes] + self._step(len(self._decoding))
        self._pass_end = self.now + seconds
        self.busy += seconds

    def _compute(self) -> None:
        """End the forward pass that is under way, or else the decoding that ends now."""
        if self._pass_end == math.inf:
            self._decode()
            self._tokens = self._decoding[0][0]  # without the rounding of `_decode`
            self._end_decoded()
            return
        # Nothing has begun to decode during the pass, so each decoding request has got one token.
        self._tokens += 1.0
        self._decoded_at, self._pass_end = self.now, math.inf
        job = self._ready[0]
        self._end_decoded()
        job.passes += 1
        if job.passes == len(job.work.passes):
            self._ready.popleft()
            job.first = self.now
            self._customer.computed(job)
            if job.work.steps:
                entry = (self._tokens + job.work.steps, self._next_number(), job)
                heapq.heappush(self._decoding, entry)
            else:
                self._end(job)
        if self._ready:
            self._start_pass()

    def _end_decoded(self) -> None:
        while self._decoding and self._decoding[0][0] <= self._tokens + _ROUNDING:
            self._end(heapq.heappop(self._decoding)[2])

    def _end(self, job: Job) -> None:
        job.ended = self.now
        self._running -= 1
        self.held += job.ended - job.begun
        self._customer.ended(job)

    def _next_decoded(self) -> float:
        """Return when the next decoding ends, if no pass of a prefill is under way."""
        if not self._decoding or self._pass_end < math.inf:
            return math.inf
        rest = max(0.0, self._decoding[0][0] - self._tokens)
        return self._decoded_at + rest * self._step(len(self._decoding))

    def _decode(self) -> None:
        """Count the tokens that were decoded since the last call, in which no pass was under way."""
        passed, self._decoded_at = self.now - self._decoded_at, self.now
        if not self._decoding:
            return
        step = self._step(len(self._decoding))
        self._tokens += passed / step if step else 0.0
        self.busy += passed

    def _next_number(self) -> int:
        self._count += 1
        return self._count
