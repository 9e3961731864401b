"""Every copy and every call of the store of a park and of a resume fails, hangs or is aborted in turn.

What is resumed is whole, and what cannot be resumed is an ordinary request; nothing leaks.
"""

import itertools
import threading

import pytest
from tiercache_backends.memory import MemoryBackend
from tiercache_kernels.reference import copy_segments

from tests.controller.harness import KV, Engine, Fence, Flaky, P, evict_checked
from tests.controller.parking import PROMPT, go_on, parked, scribble, verify
from tests.controller.test_interleavings import until
from tests.controller.test_overlap import all_is_free
from tests.controller.test_parking import empty, options, settled
from tests.controller.test_prefetch import Clock
from tests.examples import slow_after
from tiercache.controller import ParkedStatus, Status
from tiercache.core import Outcome, Reason, Tier
from tiercache.errors import PoolFullError
from tiercache.transfer import CopyEngine

COPIES = 10
"""Copies of layers of a park or a resume, at most: four pages of two layers, and a state of two."""
OBJECTS = (0, 4, 1, 2, 3)
"""Calls of the store of a park or a resume, one for each page and one for the state, from 0 on."""


class Copier:
    """A copier of which the n-th copy after `arm` fails, or hangs until `gate` is open."""

    def __init__(self):
        self.armed = threading.Event()
        self.gate = threading.Event()
        self.seen = False

    def arm(self, nth, hangs=False):
        self.nth, self.hangs, self.count = nth, hangs, itertools.count()
        self.armed.set()

    def __call__(self, *columns):
        if self.armed.is_set() and next(self.count) == self.nth:
            self.seen = True
            if not self.hangs:
                raise OSError("a bad layer")
            assert self.gate.wait(30)
        copy_segments(*columns)

    def engine(self, device, host):
        return CopyEngine(device, host, copier=self)


class Hanging(Flaky):
    """A store of which the n-th get or set after `arm` hangs until `gate` is open."""

    def __init__(self):
        super().__init__(MemoryBackend())
        self.gate, self.hung = threading.Event(), threading.Event()
        self.count = {"get": itertools.repeat(-1), "set": itertools.repeat(-1)}

    def arm(self, kind, nth):
        self.nth, self.count[kind] = nth, itertools.count()

    def get(self, items):
        self._pass("get")
        return super().get(items)

    def set(self, items):
        self._pass("set")
        return super().set(items)

    def _pass(self, kind):
        if (count := next(self.count[kind])) >= 0 and count == self.nth:
            self.hung.set()
            assert self.gate.wait(30)


def recover(engine, clock):
    """Wait until the store is called again, and everything is over."""

    def is_over():
        calls = engine.context.writes
        if calls.is_suspended and not calls.hung:
            clock.now += 0.2  # a suspension ends after a pause
        return not engine.context.in_flight.operations and not calls.is_suspended and not calls.hung

    until(engine, is_over)


def resumed_or_ordinary(engine, admission, *reasons, near=0):
    """A resume ends in one of the two ways, with right bytes; the request then goes on."""
    while True:
        try:
            poll = admission.wait()
            break
        except PoolFullError:
            engine.controller.tick(0.01)
    engine.check()
    if admission.resumed:
        verify(engine, admission)
    else:
        assert poll.reason in reasons
        assert poll.depth == near
        assert engine.restore(admission, PROMPT) == near
    go_on(engine, admission)
    return admission.resumed


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("nth", slow_after(4, range(COPIES)))
def test_any_copy_of_a_park_may_fail(nth, commit):
    copier = Copier()
    engine = Engine(Flaky(MemoryBackend()), blocks=60, options=options(), engine=copier.engine)
    engine.serve(PROMPT)
    settled(engine)
    copier.arm(nth)
    held = parked(engine, commit=commit)
    engine.check()
    settled(engine)
    copier.armed.clear()
    assert held.status is (ParkedStatus.LOST if copier.seen else ParkedStatus.ON_HOST)
    empty(engine)
    admission = engine.controller.resume(held)
    assert resumed_or_ordinary(engine, admission, Reason.IO_ERROR, near=3 * P) is not copier.seen
    all_is_free(engine)


@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("nth", slow_after(4, range(COPIES)))
def test_any_copy_of_a_resume_may_fail(nth, below):
    copier = Copier()
    engine = Engine(Flaky(MemoryBackend()), blocks=60, options=options(), engine=copier.engine)
    held = parked(engine, commit=False, below=below)
    empty(engine)
    copier.arm(nth)
    admission = engine.controller.resume(held)
    while not admission.poll().status and not copier.seen:
        engine.controller.tick(0.01)
    until(engine, lambda: admission.poll().status is not Status.PENDING)
    copier.armed.clear()
    assert resumed_or_ordinary(engine, admission, Reason.IO_ERROR) is not copier.seen
    assert copier.seen
    all_is_free(engine)


@pytest.mark.parametrize("what", ["park", "resume"])
@pytest.mark.parametrize("end", ["wait", "release", "deadline", "start"])
@pytest.mark.parametrize("nth", slow_after(2, range(0, COPIES, 3)))
def test_any_copy_may_hang(nth, what, end):
    """The slots of a copy that hangs are given to nobody, and nobody reads what it has not brought."""
    clock, copier = Clock(), Copier()
    engine = Engine(
        Flaky(MemoryBackend()), pages=9, blocks=60, clock=clock, options=options(), engine=copier.engine
    )
    if what == "park":
        copier.arm(nth, hangs=True)
    held = parked(engine, commit=False)
    if what == "resume":
        empty(engine)
        copier.arm(nth, hangs=True)
    admission = engine.controller.resume(held, deadline=5.0)
    until(engine, lambda: copier.seen)
    engine.check()
    assert admission.poll().status is Status.PENDING
    if end == "release":
        engine.controller.release(admission)
        engine.check()
        assert any(pool.available < pool.capacity for pool in engine.pools.values())
    elif end == "deadline":
        clock.now += 6.0
        assert admission.poll().status is (Status.FAILED if what == "park" else Status.PENDING)
    elif end == "start":
        assert admission.start().status is (Status.READY if what == "park" else Status.PENDING)
    engine.check()
    copier.gate.set()
    copier.armed.clear()
    if end != "release":
        near = resumed_or_ordinary(engine, admission, Reason.NONE, Reason.TIMEOUT)
        assert near is (end == "wait")
    all_is_free(engine)


@pytest.mark.parametrize("near", [0, 3 * P])
@pytest.mark.parametrize("fault", [Outcome.MISS, Outcome.CORRUPT, Outcome.THROTTLED, Outcome.ERROR, "raise"])
@pytest.mark.parametrize("nth", slow_after(2, OBJECTS))
def test_any_read_of_a_resume_may_fail(nth, fault, near):
    store = Flaky(MemoryBackend())
    engine = Engine(store, blocks=60, options=options(read_threads=1))
    if near:
        engine.serve(PROMPT)
        engine.settle()
        evict_checked(engine, Tier.DEVICE)
    held = parked(engine, commit=False, below=True)
    until(engine, lambda: held.status is ParkedStatus.STORED)
    ticket = held.to_bytes()
    engine.settle()
    assert engine.controller.close()
    engine = Engine(store, blocks=60, options=options(read_threads=1))
    scribble(engine)
    admission = engine.controller.resume(ticket)
    store.gets = [fault, *[None] * nth]
    reason = Reason.IO_ERROR if fault == "raise" else fault.reason
    if not resumed_or_ordinary(engine, admission, reason, near=near):
        assert engine.metrics.value("parked_requests_total", "missed") == 1
    engine.settle()
    assert {entry.key.page_key for entry in store.scan_all()}.isdisjoint(held.keys)
    all_is_free(engine)


def stored(engine):
    held = parked(engine, commit=False, below=True)
    until(engine, lambda: held.status is ParkedStatus.STORED)
    empty(engine)
    return held


@pytest.mark.parametrize("end", ["hang", "late", "release", "start"])
@pytest.mark.parametrize("nth", slow_after(2, OBJECTS))
def test_any_read_of_a_resume_may_hang(nth, end):
    """Host objects of a read that hangs are in use until it returns, whatever becomes of the request."""
    clock, store = Clock(), Hanging()
    engine = Engine(store, blocks=60, clock=clock, options=options(storage_deadline=5.0))
    held = stored(engine)
    store.arm("get", nth)
    admission = engine.controller.resume(held)
    until(engine, lambda: admission.poll() and store.hung.is_set())
    engine.check()
    if end == "hang":
        clock.now += 6.0
        assert not resumed_or_ordinary(engine, admission, Reason.TIMEOUT)
        engine.check()
        assert engine.arena.available < engine.arena.blocks
    elif end == "release":
        engine.controller.release(admission)
        engine.check()
    elif end == "start":
        admission.start()
    store.gate.set()
    if end in ("late", "start"):
        assert resumed_or_ordinary(engine, admission, Reason.NONE) is (end == "late")
    until(engine, lambda: not engine.context.reads.hung)
    all_is_free(engine)


@pytest.mark.parametrize("end", ["hang", "resume", "release", "expire", "close"])
@pytest.mark.parametrize("nth", slow_after(2, OBJECTS))
def test_any_write_of_a_park_may_hang(nth, end):
    clock, store = Clock(), Hanging()
    engine = Engine(store, blocks=60, clock=clock, options=options(storage_deadline=5.0))
    store.arm("set", nth)
    held = parked(engine, commit=False, below=True, ttl=60.0)
    until(engine, store.hung.is_set)
    engine.check()
    if end == "close":
        assert not engine.controller.close(deadline=0.3)
        engine.controller.check_integrity()
        store.gate.set()
        return
    if end == "hang":
        clock.now += 6.0
        engine.controller.tick()
        assert held.status is ParkedStatus.ON_HOST
    elif end == "expire":
        clock.now += 61.0
        engine.controller.tick()
        assert held.status is ParkedStatus.EXPIRED
    elif end == "release":
        held.release()
    engine.check()
    if end in ("hang", "resume"):
        scribble(engine)
        assert resumed_or_ordinary(engine, engine.controller.resume(held))
    engine.check()
    store.gate.set()
    until(engine, lambda: not engine.context.writes.hung)
    recover(engine, clock)
    assert not any(entry.key.page_key in held.keys for entry in store.scan_all())
    all_is_free(engine)


def test_a_store_that_is_suspended_leaves_the_request_on_the_host():
    clock, store = Clock(), Hanging()
    engine = Engine(store, blocks=60, clock=clock, options=options(storage_deadline=5.0))
    store.arm("set", 0)
    first = parked(engine, commit=False, below=True)
    until(engine, store.hung.is_set)
    clock.now += 6.0
    engine.controller.tick()
    assert engine.context.writes.is_suspended
    second = parked(engine, [*PROMPT, 3], commit=False, below=True)
    settled(engine)
    assert first.status is second.status is ParkedStatus.ON_HOST
    engine.check()
    store.gate.set()
    for held in (first, second):
        held.release()
    recover(engine, clock)
    all_is_free(engine)


def test_a_fence_that_never_comes_does_not_keep_close():
    fence = Fence()
    engine = Engine(Flaky(MemoryBackend()), blocks=60, options=options())
    held = parked(engine, commit=False, below=True, fence=fence)
    admission = engine.controller.resume(held)
    engine.check()
    assert not engine.controller.close(deadline=0.3)
    assert admission.released
    engine.controller.check_integrity()
    fence.open()


def test_slots_whose_copy_failed_before_the_fence_stay_out_of_use_until_it_passes():
    class Broken(CopyEngine):
        def store(self, units, *, after=()):
            raise OSError("a bad device")

    engine = Engine(pages=4, states=4, blocks=60, options=options(), engine=Broken)
    fence = Fence()
    held = parked(engine, commit=False, fence=fence)
    until(engine, lambda: held.status is ParkedStatus.LOST)
    engine.check()
    assert engine.pools[KV].available == 0
    fence.open()
    until(engine, lambda: engine.pools[KV].available == 4)
    all_is_free(engine)


def test_a_full_host_while_parking_evicts_what_is_not_in_use():
    engine = Engine(Flaky(MemoryBackend()), pages=16, states=10, blocks=12, options=options())
    for number in range(5):
        engine.serve([100 * number + n for n in range(3 * P)])
    settled(engine)
    held = parked(engine, commit=False)
    engine.check()
    empty(engine)
    assert resumed_or_ordinary(engine, engine.controller.resume(held))
    all_is_free(engine)


def test_a_resume_that_fails_on_a_full_device_waits_for_slots():
    """The request needs a slot more as an ordinary one, for the state that it restores."""
    copier = Copier()
    engine = Engine(
        Flaky(MemoryBackend()), pages=12, states=6, blocks=60, options=options(), engine=copier.engine
    )
    engine.serve(PROMPT)
    settled(engine)
    held = parked(engine)
    empty(engine)
    other = engine.controller.admit(engine.controller.lookup([1, 2]), states=5)
    assert other.start().status is Status.READY
    copier.arm(0)
    admission = engine.controller.resume(held)
    with pytest.raises(PoolFullError):
        until(engine, lambda: admission.poll().status is not Status.PENDING)
    copier.armed.clear()
    for _ in range(3):
        with pytest.raises(PoolFullError):
            admission.poll()
        engine.check()
    engine.controller.release(other)
    assert not resumed_or_ordinary(engine, admission, Reason.IO_ERROR, near=3 * P)
    all_is_free(engine)


def test_a_lost_request_that_finds_no_slots_at_once_is_pending_and_leaks_nothing():
    copier = Copier()
    engine = Engine(
        Flaky(MemoryBackend()), pages=12, states=6, blocks=60, options=options(), engine=copier.engine
    )
    engine.serve(PROMPT)
    settled(engine)
    copier.arm(0)
    held = parked(engine)
    until(engine, lambda: held.status is ParkedStatus.LOST)
    copier.armed.clear()
    empty(engine)
    other = engine.controller.admit(engine.controller.lookup([1, 2]), states=5)
    assert other.start().status is Status.READY
    admission = engine.controller.resume(held)
    assert admission.status is Status.PENDING
    with pytest.raises(PoolFullError):
        admission.poll()
    engine.check()
    engine.controller.release(other)
    assert not resumed_or_ordinary(engine, admission, Reason.IO_ERROR, near=3 * P)
    all_is_free(engine)


def test_a_resume_while_reads_are_suspended_is_an_ordinary_restore():
    clock, store = Clock(), Flaky(MemoryBackend())
    engine = Engine(store, blocks=60, clock=clock, options=options(storage_deadline=5.0))
    held = parked(engine, commit=False, below=True)
    until(engine, lambda: held.status is ParkedStatus.STORED)
    settled(engine)
    engine.context.reads._breaker.trip()  # private: no public call suspends reads at once
    assert not resumed_or_ordinary(engine, engine.controller.resume(held), Reason.UNAVAILABLE)
    engine.check()
