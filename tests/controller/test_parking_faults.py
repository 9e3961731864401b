"""Faults while a request is parked or resumed: it is whole, or an ordinary request, and nothing leaks."""

import pytest
from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import KV, Engine, Fence, Flaky, P
from tests.controller.parking import PROMPT, go_on, options, parked, verify
from tests.controller.test_hung_store import Hanging
from tests.controller.test_interleavings import failing, until
from tests.controller.test_parking import empty, settled
from tests.controller.test_prefetch import Clock
from tests.integrity import check_controller
from tiercache.controller import ParkedStatus, Status
from tiercache.core import Reason
from tiercache.errors import PoolFullError
from tiercache.transfer import CopyEngine


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


def test_a_store_that_is_suspended_leaves_the_request_on_the_host(rig):
    clock, store = Clock(), Hanging()
    engine = rig(store, blocks=60, clock=clock, options=options(storage_deadline=5.0))
    store.hangs = {"set"}
    first = parked(engine, commit=False, below=True)
    until(engine, lambda: "set" in store.calls)
    clock.now += 6.0
    engine.controller.tick()
    assert engine.context.writes.is_suspended
    second = parked(engine, [*PROMPT, 3], commit=False, below=True)
    settled(engine)
    assert first.status is second.status is ParkedStatus.ON_HOST
    engine.check()
    store.release()
    for held in (first, second):
        held.release()
    recover(engine, clock)


def test_a_fence_that_never_comes_does_not_keep_close():
    fence = Fence()
    engine = Engine(Flaky(MemoryBackend()), blocks=60, options=options())
    held = parked(engine, commit=False, below=True, fence=fence)
    admission = engine.controller.resume(held)
    engine.check()
    assert not engine.controller.close(deadline=0.3)
    assert admission.released
    check_controller(engine.controller)
    fence.open()


def test_slots_whose_copy_failed_before_the_fence_stay_out_of_use_until_it_passes(rig):
    class Broken(CopyEngine):
        def store(self, units, *, after=()):
            raise OSError("a bad device")

    engine = rig(pages=4, states=4, blocks=60, engine=Broken)
    fence = Fence()
    held = parked(engine, commit=False, fence=fence)
    until(engine, lambda: held.status is ParkedStatus.LOST)
    engine.check()
    assert engine.pools[KV].available == 0
    fence.open()
    until(engine, lambda: engine.pools[KV].available == 4)


@pytest.mark.parametrize("fails_at", ["park", "resume"])
def test_a_request_that_is_lost_on_a_full_device_waits_for_slots(rig, fails_at):
    """The ordinary request needs a slot more, for the state that it restores."""
    armed = []
    engine = rig(Flaky(MemoryBackend()), pages=12, states=6, blocks=60, engine=failing(armed))
    engine.serve(PROMPT)
    settled(engine)
    if fails_at == "park":
        armed[:] = [True]
    held = parked(engine)
    until(engine, lambda: held.status is not ParkedStatus.COPYING)
    assert held.status is (ParkedStatus.LOST if fails_at == "park" else ParkedStatus.ON_HOST)
    armed.clear()
    empty(engine)
    other = engine.controller.admit(engine.controller.lookup([1, 2]), states=5)
    assert other.start().status is Status.READY
    if fails_at == "resume":
        armed[:] = [True]
    admission = engine.controller.resume(held)
    assert admission.status is Status.PENDING
    with pytest.raises(PoolFullError):
        until(engine, lambda: admission.poll().status is not Status.PENDING)
    armed.clear()
    for _ in range(3):
        with pytest.raises(PoolFullError):
            admission.poll()
        engine.check()
    engine.controller.release(other)
    assert not resumed_or_ordinary(engine, admission, Reason.IO_ERROR, near=3 * P)


def test_a_resume_while_reads_are_suspended_is_an_ordinary_restore():
    clock, store = Clock(), Flaky(MemoryBackend())
    engine = Engine(store, blocks=60, clock=clock, options=options(storage_deadline=5.0))
    held = parked(engine, commit=False, below=True)
    until(engine, lambda: held.status is ParkedStatus.STORED)
    settled(engine)
    engine.context.reads._breaker.trip()  # private: no public call suspends reads at once
    assert not resumed_or_ordinary(engine, engine.controller.resume(held), Reason.UNAVAILABLE)
    engine.check()
