"""Model of a server: places in a batch, shared links, one engine for prefills and decoding.

The model is driven by events, in the order of their times; it has no threads and no random numbers. Where two
events have the same time, the engine comes first, then the links, then arrivals.

    arrival -> [waits for a place] -> loads -> [waits for the engine] -> prefill -> decoding -> end
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

from tiercache.errors import ConfigError
from tiercache_lab.replay.base import Request

T = TypeVar("T")


class Link(Generic[T]):
    """Link that serves all its loads at once, each at an equal share of the bandwidth (processor sharing).

    Times are seconds of a clock that never goes back. `bandwidth` is in bytes per second.

    Thread safety: one thread.
    """

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth
        self._at = 0.0
        self._served = 0.0  # bytes that a load has received that has been there from the beginning
        # A load ends when `_served` reaches the first number. No two loads have the same second number.
        self._loads: list[tuple[float, int, T]] = []
        self._count = 0
        self.busy = 0.0
        """Seconds in which at least one load was under way."""

    def add(self, now: float, nbytes: float, load: T) -> None:
        """Begin a load of `nbytes` bytes."""
        self._advance(now)
        heapq.heappush(self._loads, (self._served + nbytes, self._count, load))
        self._count += 1

    @property
    def next(self) -> float:
        """Time at which the next load ends, if no other begins before; infinite for an idle link."""
        if not self._loads:
            return math.inf
        rest = max(0.0, self._loads[0][0] - self._served)
        return self._at + rest * len(self._loads) / self._bandwidth

    def pop(self) -> T:
        """End the load that ends next, at the time `next`, and return it."""
        now, (served, _, load) = self.next, self._loads[0]
        self._advance(now)
        self._served = served  # without the rounding of `_advance`, which could make a load end twice
        heapq.heappop(self._loads)
        return load

    def _advance(self, now: float) -> None:
        passed = now - self._at
        if self._loads:
            self._served += passed * self._bandwidth / len(self._loads)
            self.busy += passed
        self._at = now


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


class Customer(Protocol):
    """Caller of the server, which knows the cache. The server calls it in the order of the virtual clock."""

    def placed(self, job: Job) -> Needed:
        """Return the work of a request that has got its place, at `job.begun`."""

    def computed(self, job: Job) -> None:
        """Note that the prefill has ended, at `job.first`."""

    def ended(self, job: Job) -> None:
        """Note that the request has ended, at `job.ended`."""


class QueueServer:
    """Server with `batch` places; `go` runs it until nothing is left to do.

    A request holds its place from its first load to its last token. It loads from one link after the other;
    each link waits its latency, and then shares its bandwidth with the loads of other requests. The engine
    runs one forward pass at a time. Prefills are computed in the order in which their loads ended, the passes
    of one before those of the next. A pass takes its own seconds and those of one token of each decoding
    request. Between prefills, all decoding requests get a token every `step(n)` seconds, where n is their
    number. Thread safety: one thread.
    """

    def __init__(
        self,
        batch: int,
        step: Callable[[int], float],
        links: Mapping[str, Link[Job]],
        latencies: Mapping[str, float],
        arrivals: SourceArrivals,
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
                job = link.pop()
                job.loads += 1
                self._load(job)
            elif delayed == when:
                job = heapq.heappop(self._delayed)[2]
                name, nbytes = job.work.loads[job.loads]
                self._links[name].add(self.now, nbytes, job)
            else:
                self._waiting += self._arrivals.take(self.now)

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


MAX_TOKENS: Final = 2**27
"""Maximum number of tokens of the requests that have come and not begun. They take 1 GiB."""


class SourceArrivals:
    """Requests of a source, `speed` times as fast as the source has them.

    No two requests of a session are in the server at once. If `closed`, a request comes as long after the
    end of the session's previous request as the source has between the arrivals of the two: the source's
    times are pauses. Otherwise it comes at the source's time, and waits for the end of the previous one.

    Thread safety: one thread.
    """

    def __init__(self, requests: Iterator[Request], speed: float, *, closed: bool) -> None:
        self._requests, self._speed, self._closed = requests, speed, closed
        self._ahead = next(requests, None)
        # Entries are (arrival, number, request); no two have the same number.
        self._coming: list[tuple[float, int, Request]] = []
        self._count = self._tokens = 0
        self._busy: dict[int, deque[Request]] = {}
        """For each session with a request that has not ended: the requests behind that one."""
        self._ended: dict[int, tuple[float, float]] = {}
        """For each other session: the end of its last request, and the arrival that the source has for it."""

    @property
    def next(self) -> float:
        """Time of the next arrival, or an earlier time; infinite if nothing comes before a request ends.

        An arrival is in the past if the request had to wait for the previous one of its session.
        """
        coming = self._coming[0][0] if self._coming else math.inf
        return min(coming, self._time(self._ahead)) if self._ahead is not None else coming

    def take(self, now: float) -> list[Job]:
        """Return the requests that have come until `now`.

        Raises ConfigError if those that have come and not begun have too many tokens for this process.
        """
        while self._ahead is not None and self._time(self._ahead) <= now:
            request, self._ahead = self._ahead, next(self._requests, None)
            self._tokens += len(request.prompt) + len(request.output)
            if self._tokens > MAX_TOKENS:
                raise ConfigError(
                    f"after {now:,.0f} s the requests that wait have more than {MAX_TOKENS:,} tokens, because"
                    " they come faster than this machine serves them; use a lower --rate or a faster machine"
                )
            if request.session in self._busy:
                self._busy[request.session].append(request)
            else:
                self._come(request)
        found = []
        while self._coming and self._coming[0][0] <= now:
            arrival, _, request = heapq.heappop(self._coming)
            found.append(Job(request, arrival))
        return found

    def begun(self, request: Request) -> None:
        """Note that a request has begun, so that it no longer waits."""
        self._tokens -= len(request.prompt) + len(request.output)

    def ended(self, request: Request, now: float) -> None:
        """Note that a request has ended, so that the next one of its session may come."""
        behind = self._busy.pop(request.session)
        self._ended[request.session] = now, self._time(request)
        if behind:
            self._come(behind.popleft())
            self._busy[request.session] = behind

    def _come(self, request: Request) -> None:
        """Let a request come whose session has no other one in the server."""
        self._busy[request.session] = deque()
        arrival = self._time(request)
        ended, before = self._ended.pop(request.session, (-math.inf, -math.inf))
        if self._closed and ended > -math.inf:
            arrival = ended + arrival - before
        self._count += 1
        heapq.heappush(self._coming, (arrival, self._count, request))

    def _time(self, request: Request) -> float:
        return request.arrival / self._speed
