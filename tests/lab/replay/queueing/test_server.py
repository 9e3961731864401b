"""The server against times that are computed by hand, against a plain model, and its invariants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import example_count
from tiercache_lab.replay.base import Request
from tiercache_lab.replay.queueing.run import serving
from tiercache_lab.replay.queueing.server import Job, Link, Needed, QueueServer, SourceArrivals
from tiercache_lab.replay.results import Objective

ONE = np.zeros(1, np.uint64)


@dataclass
class Hall:
    """A server whose requests have the work that is given, and what happened in it."""

    works: Sequence[Needed]
    arrivals: Sequence[float]
    batch: int = 1
    step: float = 0.0
    per_request: float = 0.0
    latency: float = 0.0
    sessions: Sequence[int] = ()
    closed: bool = True
    jobs: dict[int, Job] = field(default_factory=dict)
    events: list[tuple[str, int, float]] = field(default_factory=list)
    here: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        sessions = self.sessions or range(len(self.works))
        requests = [
            Request(np.full(1, n, np.uint64), ONE, arrival, session)
            for n, (arrival, session) in enumerate(zip(self.arrivals, sessions, strict=True))
        ]
        self.links = {name: Link[Job](100.0) for name in ("host", "disk")}
        self.source = SourceArrivals(iter(requests), 1.0, closed=self.closed)
        self.server = QueueServer(
            self.batch, lambda n: self.step + self.per_request * n if n else 0.0, self.links,
            {"host": 0.0, "disk": self.latency}, self.source, self,
        )  # fmt: skip
        self.server.go()

    def placed(self, job: Job) -> Needed:
        number = int(job.request.prompt[0])
        self.jobs[number] = job
        self.here.add(number)
        assert len(self.here) <= self.batch
        self.source.begun(job.request)
        self._note("placed", number, job.begun)
        return self.works[number]

    def computed(self, job: Job) -> None:
        self._note("computed", int(job.request.prompt[0]), job.first)

    def ended(self, job: Job) -> None:
        number = int(job.request.prompt[0])
        self.here.remove(number)
        self._note("ended", number, job.ended)
        self.source.ended(job.request, job.ended)

    def _note(self, what: str, number: int, time: float) -> None:
        assert not self.events or self.events[-1][2] <= time, "the clock never goes back"
        self.events.append((what, number, time))

    def times(self, name: str) -> list[float]:
        return [getattr(self.jobs[number], name) for number in range(len(self.works))]


def prefill(*passes: float) -> Needed:
    return Needed((), passes, 0)


def test_one_place_is_a_queue_of_one_server() -> None:
    """Requests at 0, 1 and 9, each with 4 s of work: the second waits 3 s, the third not at all."""
    hall = Hall([prefill(4.0)] * 3, [0.0, 1.0, 9.0])
    assert hall.times("begun") == [0, 4, 9]
    assert hall.times("ttft") == [4, 7, 4]
    assert hall.server.busy == 12


def test_a_deterministic_queue_waits_as_the_textbook_says() -> None:
    """M/D/1: the mean wait is rho * s / (2 * (1 - rho)), with s the time of service (Pollaczek-Khinchine)."""
    rho, total = 0.6, 20_000
    arrivals = np.cumsum(np.random.default_rng(3).exponential(1 / rho, total)).tolist()
    hall = Hall([prefill(1.0)] * total, arrivals)
    waits = np.array(hall.times("begun")) - arrivals
    assert waits.mean() == pytest.approx(rho / (2 * (1 - rho)), rel=0.06)
    assert hall.server.busy / hall.server.now == pytest.approx(rho, rel=0.02)


def test_a_second_place_loads_while_the_first_computes() -> None:
    works = [Needed((("host", 200.0),), (4.0,), 0)] * 2  # 2 s of loads alone
    assert Hall(works, [0.0, 3.0]).times("ttft") == [6, 3 + 2 + 4]
    hall = Hall(works, [0.0, 3.0], batch=2)
    assert hall.times("loaded") == [2, 5]
    assert hall.times("first") == [6, 10], "the engine computes one prefill at a time"
    assert hall.server.busy == 8


def test_loads_share_a_link() -> None:
    """200 bytes from 0 and 100 bytes from 1 at 100 bytes/s: each gets half until the second ends at 3."""
    works = [Needed((("host", 200.0),), (0.5,), 0), Needed((("host", 100.0),), (0.5,), 0)]
    hall = Hall(works, [0.0, 1.0], batch=2)
    assert hall.times("loaded") == [3, 3]
    assert hall.times("first") == [3.5, 4]
    assert hall.links["host"].busy == 3
    apart = [works[0], Needed((("disk", 100.0),), (0.5,), 0)]
    assert Hall(apart, [0.0, 1.0], batch=2).times("loaded") == [2, 2], "links do not share"


def test_a_request_loads_from_one_link_after_the_other_and_waits_for_latency_without_using_it() -> None:
    works = [Needed((("disk", 100.0), ("host", 100.0)), (1.0,), 0), Needed((("disk", 100.0),), (1.0,), 0)]
    hall = Hall(works, [0.0, 0.0], batch=2, latency=0.25)
    assert hall.times("loaded") == [0.25 + 2 + 1, 0.25 + 2]
    assert hall.links["disk"].busy == 2


def test_a_pass_gives_each_decoding_request_one_token() -> None:
    """The first request decodes 10 tokens of 1 s each; a prefill of two passes comes at 4."""
    hall = Hall([Needed((), (2.0,), 10), prefill(3.0, 3.0)], [0.0, 4.0], batch=2, step=1.0)
    # Two tokens from 2 to 4; two passes of 3 + 1 s, each with one token; six tokens of 1 s.
    assert hall.times("first") == [2, 12]
    assert hall.times("ended") == [18, 12]
    assert hall.jobs[0].tpot == 1.6
    assert hall.server.busy == 18


def test_decoding_slows_down_with_the_number_of_requests() -> None:
    """Steps of 1 s alone and 2 s together: request 0 has 4 tokens from 1 on, request 1 has 2 from 3 on."""
    works = [Needed((), (1.0,), 4), Needed((), (1.0,), 2)]
    hall = Hall(works, [0.0, 2.0], batch=2, per_request=1.0)
    # 1..2 one token; 2..4 a pass of 1 s and a step of 1 s: one token; then 2 tokens of 2 s for both.
    assert hall.times("first") == [1, 4]
    assert hall.times("ended") == [8, 8]


def test_a_session_waits_for_its_answer() -> None:
    works = [Needed((), (3.0,), 0), Needed((), (1.0,), 0), Needed((), (1.0,), 0)]
    closed = Hall(works, [0.0, 2.0, 2.5], sessions=[7, 7, 8], batch=3)
    assert closed.times("arrival") == [0, 5, 2.5], "a pause of 2 s after the answer at 3"
    assert closed.times("ttft") == [3, 1, 1.5]
    opened = Hall(works, [0.0, 2.0, 2.5], sessions=[7, 7, 8], batch=3, closed=False)
    assert opened.times("arrival") == [0, 2, 2.5]
    assert opened.times("begun") == [0, 3, 2.5]
    assert sorted(opened.times("first")) == [3, 4, 5]


def test_goodput_counts_what_is_just_in_time() -> None:
    hall = Hall([prefill(2.0), prefill(2.0), Needed((), (2.0,), 2)], [0.0, 1.0, 4.0], step=0.5)
    jobs = list(hall.jobs.values())
    assert hall.times("ttft") == [2, 3, 2]
    assert hall.times("ended") == [2, 4, 7]
    figures = serving(jobs, Objective(ttft=2.0), {"engine": hall.server.busy})
    assert figures.within == pytest.approx(2 / 3)
    assert figures.goodput == pytest.approx(2 / 7)
    assert figures.served_per_second == pytest.approx(3 / 7)
    assert figures.arrived_per_second == pytest.approx(2 / 4)
    assert figures.busy == {"engine": 1.0}
    assert figures.wait_ms_mean == pytest.approx(1000 / 3)
    assert serving(jobs, Objective(ttft=math.nextafter(2.0, 0)), {}).within == 0
    assert serving(jobs, Objective(tpot=0.5), {}).within == 1, "requests of one token have no time per token"
    assert serving(jobs, Objective(tpot=0.4), {}).within == pytest.approx(2 / 3)
    assert serving(jobs, Objective(), {}).goodput is None
    assert serving([], Objective(ttft=1.0), {}).served_per_second == 0


seconds = st.integers(0, 40).map(lambda n: n / 8)
works = st.builds(
    Needed,
    st.lists(st.tuples(st.sampled_from(["host", "disk"]), st.integers(0, 400).map(float)), max_size=3).map(
        tuple
    ),
    st.lists(seconds, min_size=1, max_size=3).map(tuple),
    st.integers(0, 5),
)


@given(
    drawn=st.lists(st.tuples(works, seconds, st.integers(0, 3)), max_size=12),
    batch=st.integers(1, 4),
    step=st.sampled_from([0.0, 0.125, 1.0]),
    per_request=st.sampled_from([0.0, 0.5]),
    latency=st.sampled_from([0.0, 0.5]),
    closed=st.booleans(),
)
@settings(max_examples=example_count(150), deadline=None)
def test_nothing_is_lost_early_or_faster_than_possible(drawn, batch, step, per_request, latency, closed):
    arrivals = np.cumsum([gap for _, gap, _ in drawn]).tolist()
    given = [work for work, _, _ in drawn]
    sessions = [session for _, _, session in drawn]
    hall = Hall(given, arrivals, batch, step, per_request, latency, sessions or (), closed)
    again = Hall(given, arrivals, batch, step, per_request, latency, sessions or (), closed)
    assert hall.events == again.events
    assert len(hall.jobs) == len(given)
    assert not hall.here
    for number, work in enumerate(given):
        job = hall.jobs[number]
        assert arrivals[number] <= job.arrival <= job.begun <= job.loaded <= job.first <= job.ended
        alone = sum(nbytes / 100 + (latency if name == "disk" else 0) for name, nbytes in work.loads)
        assert job.loaded - job.begun >= alone - 1e-6, "no load is faster than its link"
        assert job.first - job.loaded >= sum(work.passes) - 1e-6
        assert job.ended - job.first >= work.steps * step - 1e-6
    # The engine computes each pass once, and each token in a step that it shares at most with the batch. A
    # pass that begins in the middle of a token gives a whole one, at the cost of a whole step.
    busy, passes = hall.server.busy, sum(sum(work.passes) for work in given)
    tokens = sum(work.steps + len(work.passes) for work in given)
    assert passes - 1e-6 <= busy <= passes + tokens * (step + batch * per_request) + 1e-6
    assert busy <= hall.server.now + 1e-6
    for name, link in hall.links.items():
        nbytes = sum(n for work in given for link_name, n in work.loads if link_name == name)
        assert link.busy * 100 == pytest.approx(nbytes), "a link is never idle while a load waits"
    if closed:
        placed = [hall.jobs[number].arrival for what, number, _ in hall.events if what == "placed"]
        assert placed == sorted(placed), "places go to those who have waited longest"


@given(st.lists(st.tuples(seconds, st.integers(1, 300)), min_size=1, max_size=10))
@settings(max_examples=example_count(100), deadline=None)
def test_a_link_ends_every_load_no_sooner_than_alone_and_in_all_no_later_than_one_by_one(drawn):
    link, now, begun, ends = Link[int](10.0), 0.0, [], {}
    for number, (gap, nbytes) in enumerate(drawn):
        now += gap
        while link.next <= now:
            at = link.next
            ends[link.pop()] = at
        begun.append(now)
        link.add(now, nbytes, number)
    while link.next < math.inf:
        at = link.next
        ends[link.pop()] = at
    assert len(ends) == len(drawn)
    for number, (_, nbytes) in enumerate(drawn):
        assert ends[number] - begun[number] >= nbytes / 10 - 1e-9
    free = 0.0
    for at, (_, nbytes) in zip(begun, drawn, strict=True):
        free = max(free, at) + nbytes / 10
    assert max(ends.values()) == pytest.approx(free), "work is conserved"
