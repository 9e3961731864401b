"""Requests that are retracted in mid-decode and go on later, bit for bit."""

import numpy as np
import pytest
from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import KV, MAMBA, Fence, P, evict_checked, prompt
from tests.controller.parking import PROMPT, computed, go_on, options, parked, resume, scribble, verify
from tests.controller.test_interleavings import ask, until
from tests.controller.test_prefetch import Clock
from tiercache.controller import ParkedStatus, Status
from tiercache.core import Reason, Tier, as_tokens
from tiercache.errors import AdmissionError, InputError, PoolFullError, SlotError
from tiercache.transfer import CopyEngine

EXACT = prompt(1, 2, 3)
KINDS = {"hybrid": {}, "pages": {"hybrid": False}, "states": {"kv": False}}


def settled(engine):
    until(engine, lambda: not engine.context.in_flight.operations)


def empty(engine):
    """Everything that is not held leaves device and host, and free slots are overwritten."""
    settled(engine)
    evict_checked(engine, Tier.DEVICE, Tier.HOST)
    scribble(engine)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [PROMPT, EXACT, [5]], ids=["partial", "whole", "one"])
@pytest.mark.parametrize("commit", [True, False])
def test_a_parked_request_goes_on_bit_for_bit(rig, kind, tokens, commit):
    engine = rig(**KINDS[kind])
    held = parked(engine, tokens, commit=commit)
    engine.check()
    empty(engine)
    assert held.status is ParkedStatus.ON_HOST
    assert all(pool.available == pool.capacity for pool in engine.pools.values()), "the device is free"
    admission = engine.controller.resume(held)
    engine.check()
    assert admission.wait().status is Status.READY
    assert admission.resumed
    verify(engine, admission, tokens)
    engine.check()
    assert held.status is ParkedStatus.RESUMED
    longer = go_on(engine, admission, tokens)
    settled(engine)
    assert engine.serve([*longer, 1]) == len(longer) // P * P


def test_pages_that_the_host_has_already_are_not_copied_again(rig):
    engine = rig()
    engine.serve(PROMPT)
    settled(engine)
    before = engine.arena.available
    held = parked(engine)
    settled(engine)
    cost = engine.context.allocator.blocks_of
    assert before - engine.arena.available == cost(KV, 1) + cost(MAMBA, 1), "the tail and the live state"
    assert engine.metrics.value("parked_bytes") == (4 * cost(KV, 1) + cost(MAMBA, 1)) * 4096
    empty(engine)
    resume(engine, held)
    assert engine.metrics.value("parked_bytes") == 0


def test_pages_that_are_still_on_the_device_are_shared_again(rig):
    loaded = []

    class Recording(CopyEngine):
        def load(self, units, *, after=()):
            loaded.extend((one.pool, len(one)) for one in units)
            return super().load(units, after=after)

    engine = rig(pages=16, engine=Recording)
    held = parked(engine)
    settled(engine)
    other = ask(engine, PROMPT, states=1)
    engine.restore(other, as_tokens(PROMPT))
    admission = engine.controller.resume(held)
    admission.wait()
    assert np.array_equal(admission.pages[KV][:3], other.pages[KV][:3])
    assert sorted(loaded) == [(KV, 1), (MAMBA, 1)], "the last page and the live state"
    engine.controller.release(other)
    verify(engine, admission)
    engine.controller.release(admission)


def test_what_is_parked_is_offered_to_no_prompt_and_is_not_evicted(rig):
    engine = rig(MemoryBackend())
    held = parked(engine, commit=False)
    until(engine, lambda: held.status is ParkedStatus.ON_HOST)
    for prefix in (PROMPT, [*PROMPT, 5], EXACT, [*EXACT, 5]):
        lookup = ask(engine, prefix)
        assert lookup.wait().depth == 0
        engine.controller.release(lookup)
    for number in range(20, 40):
        engine.serve(prompt(number, number + 100, number + 200))
    settled(engine)
    scribble(engine)
    resume(engine, held)


def test_a_resume_reserves_what_the_request_needs_next(rig):
    engine = rig()
    held = parked(engine)
    settled(engine)
    admission = engine.controller.resume(held, tokens=6 * P, states=3)
    admission.wait()
    assert len(admission.pages[KV]) == 6
    for _ in range(2):
        admission.take_states()
    with pytest.raises(PoolFullError):
        admission.take_states()
    engine.controller.release(admission)


def test_a_resume_for_which_there_are_no_slots_changes_nothing(rig):
    engine = rig(pages=6, states=6)
    held = parked(engine)
    settled(engine)
    with pytest.raises(InputError, match="cannot hold the 14 tokens"):
        engine.controller.resume(held, tokens=13)
    with pytest.raises(InputError, match="for the live state"):
        engine.controller.resume(held, states=0)
    other = ask(engine, prompt(7, 8, 9))
    with pytest.raises(PoolFullError):
        engine.controller.resume(held)
    engine.check()
    engine.controller.release(other)
    resume(engine, held)


# -- the end of what is parked


def test_a_request_that_is_never_resumed_is_released_at_its_deadline(rig):
    clock = Clock()
    engine = rig(clock=clock)
    held = parked(engine, ttl=60.0)
    settled(engine)
    clock.now += 59.0
    engine.controller.tick()
    assert held.status is ParkedStatus.ON_HOST
    clock.now += 2.0
    engine.controller.tick()
    assert held.status is ParkedStatus.EXPIRED
    with pytest.raises(AdmissionError, match="has expired"):
        engine.controller.resume(held)
    with pytest.raises(AdmissionError, match="has expired"):
        held.release()
    assert engine.metrics.value("parked_bytes") == 0


def test_a_second_end_is_refused(rig):
    engine = rig(blocks=60)
    before, live = computed(engine)
    held = engine.controller.park(before, PROMPT, live, ttl=60)
    for call in (
        lambda: engine.controller.release(before),
        lambda: engine.controller.park(before, PROMPT, live, ttl=60),
    ):
        with pytest.raises(AdmissionError, match="released already"):
            call()
    with pytest.raises(AdmissionError, match="parked by another controller"):
        rig().controller.resume(held)
    admission = engine.controller.resume(held)
    with pytest.raises(AdmissionError, match="being resumed"):
        engine.controller.resume(held)
    admission.wait()
    other = parked(engine)
    other.release()
    for one, ended in ((held, "resumed"), (other, "released")):
        for again in (engine.controller.resume, lambda one: one.release()):
            with pytest.raises(AdmissionError, match=f"was {ended} already"):
                again(one)
    engine.controller.release(admission)


@pytest.mark.parametrize(("waits", "reason"), [(False, Reason.NONE), (True, Reason.TIMEOUT)])
def test_a_resume_that_waits_no_longer_is_an_ordinary_request(rig, waits, reason):
    clock, fence = Clock(), Fence()
    engine = rig(pages=12, states=10, clock=clock)
    admission = engine.controller.resume(parked(engine, fence=fence), deadline=5.0)
    assert admission.poll().status is Status.PENDING
    clock.now += 6.0 if waits else 0.0
    poll = admission.poll() if waits else admission.start()
    assert (poll.status, poll.depth, poll.reason) == (Status.READY, 3 * P, reason)
    assert not admission.resumed
    engine.verify(admission, as_tokens(PROMPT), 3)
    engine.check()
    fence.open()
    go_on(engine, admission)


# -- what is refused


def test_what_cannot_be_parked_is_refused_and_changes_nothing(rig):
    engine = rig()
    admission, live = computed(engine)
    park = engine.controller.park

    def refused(error, match, *args, **kwargs):
        with pytest.raises(error, match=match):
            park(admission, *args, **{"ttl": 60, **kwargs})
        engine.check()
        assert not admission.released

    refused(InputError, "0 tokens cannot be parked", [], live)
    refused(InputError, "17 tokens cannot be parked", [*PROMPT, 1, 2, 3], live)
    refused(InputError, "do not begin as the admitted prompt", [9, *PROMPT[1:]], live)
    refused(SlotError, "needs a slot of each", PROMPT)
    refused(SlotError, "is not this admission's", PROMPT, {MAMBA: 6 - live[MAMBA]})
    refused(InputError, "no storage to park", PROMPT, live, below=True)
    for ttl in (0, -1, float("nan"), 1e9, "1"):
        refused(InputError, "ttl=", PROMPT, live, ttl=ttl)
    engine.controller.release(admission)
    pending = rig(MemoryBackend())
    waiting = pending.controller.admit(pending.controller.lookup(PROMPT))
    if waiting.poll().status is Status.PENDING:
        with pytest.raises(AdmissionError, match="still pending"):
            pending.controller.park(waiting, PROMPT, ttl=60)
    pending.controller.release(waiting)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.7])
def test_parked_requests_keep_to_their_share(rig, share):
    engine = rig(pages=30, states=12, options=options(park_share=share))
    cost = engine.context.allocator.blocks_of
    each = 4 * cost(KV, 1) + cost(MAMBA, 1)
    held = []
    for n in range(4):
        tokens = [*prompt(1, 2, 3 + n), 70, 71]
        admission, live = computed(engine, tokens)
        if (n + 1) * each <= int(40 * share):
            held.append(engine.controller.park(admission, tokens, live, ttl=60))
            settled(engine)  # until then its slots are in use
            continue
        with pytest.raises(AdmissionError, match="raise park_share"):
            engine.controller.park(admission, tokens, live, ttl=60)
        engine.check()
        engine.verify(admission, as_tokens(tokens), 3)
        engine.controller.release(admission)
    assert len(held) == int(40 * share) // each
    for one in held:
        one.release()


def test_a_host_that_is_full_of_pins_refuses(rig):
    engine = rig(pages=30, states=12, blocks=15, options=options(pin_share=0.95))
    engine.serve(prompt(20, 21, 22, 23, 24, 25))
    settled(engine)
    engine.controller.pin(prompt(20, 21, 22, 23, 24, 25), 60)
    admission, live = computed(engine, commit=False)
    with pytest.raises(PoolFullError):
        engine.controller.park(admission, PROMPT, live, ttl=60)
    engine.check()
    engine.controller.unpin(prompt(20, 21, 22, 23, 24, 25))
    held = engine.controller.park(admission, PROMPT, live, ttl=60)
    held.release()
