"""Tokens that are computed because restoring them would take longer, by measured speeds."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import KV, MAMBA, Engine, Fence, P, prompt
from tests.controller.test_interleavings import Gated, ask, evict, until, wind_up
from tests.controller.test_prefetch import Clock
from tiercache.controller import ControllerOptions, Status, depths
from tiercache.controller.depths import ENOUGH_S, HALF_LIFE_S, Speed, Speeds, near_runs
from tiercache.core import Reason, Tier, as_tokens
from tiercache.errors import InputError
from tiercache.policy import profile_named
from tiercache.storage.base import SPEED_FIELD

FIRST = [*prompt(1, 2, 3), 5]
MIB = 1 << 20
PROFILE = profile_named("llama-3.1-8b")


def column(*numbers):
    return np.array(numbers, np.int64)


def filled(**options):
    """An engine whose store has FIRST, and neither device nor host, and its clock."""
    clock = Clock()
    engine = Engine(Gated(), clock=clock, options=ControllerOptions(restore_deadline=20.0, **options))
    engine.keep(FIRST)
    evict(engine)
    return engine, clock


def make_storage_slow(engine):
    engine.context.speeds.note_read(MIB, 10.0)
    engine.controller.note_prefill(0, 4096, 0.1)


def test_what_storage_would_bring_too_slowly_is_computed():
    engine, clock = filled()
    make_storage_slow(engine)
    assert engine.serve(FIRST) == 0
    assert engine.metrics.total("storage_gets_total") == 0
    assert engine.metrics.value("lookups_total", "storage", "kv", "miss", "not_worth") == 1
    assert engine.metrics.total("restore_failures_total") == 0, "nothing has failed"
    engine.settle()
    evict(engine)
    clock.now += 4 * HALF_LIFE_S
    engine.controller.note_prefill(0, 4096, 0.1)
    assert engine.serve(FIRST) == 3 * P, "an old measurement says nothing of storage now"


def test_who_wants_determinism_gets_what_is_there():
    engine, _ = filled(load_or_recompute=False)
    make_storage_slow(engine)
    engine.context.speeds.note_load(MIB, engine.context.clock() - 10.0)
    assert engine.serve(FIRST) == 3 * P
    engine.settle()
    engine.controller.evict(Tier.DEVICE)
    assert engine.serve(FIRST) == 3 * P


def test_what_the_host_would_bring_too_slowly_is_computed_and_what_the_device_has_is_used():
    engine, clock = filled()
    assert engine.serve(FIRST) == 3 * P
    begun = clock.now
    clock.now += 10.0
    engine.context.speeds.note_load(MIB, begun)
    engine.controller.note_prefill(0, 4096, 0.1)
    assert engine.serve(FIRST) == 3 * P
    assert engine.metrics.value("restored_objects_total", "device", str(MAMBA)) == 1
    saved = [engine.metrics.total(f"{what}_seconds_total") for what in ("prefill", "restore")]
    assert saved == [pytest.approx(3 * P * 0.1 / 4096, rel=0.1), 0], "a hit on the device"
    engine.settle()
    engine.controller.evict(Tier.DEVICE)
    admission = ask(engine, FIRST)
    poll = admission.wait()
    assert (poll.status, poll.depth, poll.reason) == (Status.FAILED, 0, Reason.NOT_WORTH)
    assert engine.metrics.value("lookups_total", "host", "mamba", "miss", "not_worth") == 1
    wind_up(engine, admission)


def test_speeds_are_unknown_until_enough_was_measured():
    clock = Clock()
    speeds = Speeds(PROFILE, 2, clock)

    def gains():
        return speeds.gains(0, column(1000), column(MIB), column(MIB))

    assert gains() is None
    speeds.note_prefill(0, 100, 0.009)
    speeds.note_read(MIB - 1, 10.0)
    assert gains() is None, "too little to be a measurement"
    speeds.note_prefill(0, 1000, 1.0)
    assert gains() is None, "of what a restore takes nothing is known"
    speeds.note_read(MIB, 1.0)
    assert gains()[0] == pytest.approx(1.0 - 0.5), "two threads read"
    begun = clock.now
    clock.now += 0.75
    speeds.note_load(MIB, begun)
    assert gains()[0] == pytest.approx(1.0 - 0.75, rel=1e-6), "the slower leg counts"


def test_what_any_pass_takes_is_not_saved():
    speeds, gains = Speeds(PROFILE, 2, Clock()), []
    speeds.note_prefill(0, 1000, 0.08, 0.5)
    for least in (0.02, 0.2, 1.0):
        gains += [*speeds.gains(0, column(1000), column(0), column(0))]
        speeds.note_least_pass(least)
    assert gains == pytest.approx([0.08, 0.07, 0.025])
    assert speeds.gains(0, column(1000), column(0), column(0)) == 0.0, "none takes less than nothing"


def test_a_read_that_one_thread_makes_is_not_shared_among_all():
    speeds = Speeds(PROFILE, 4, Clock())
    speeds.note_prefill(0, 1000, 100.0)
    speeds.note_read(MIB, 1.0)
    reads = column(1, 4, 6, 40) * MIB
    gains = speeds.gains(0, column(1000, 1000, 1000, 1000), reads, reads, part=4 * MIB)
    assert gains == pytest.approx([99.0, 96.0, 96.0, 90.0]), "parts of 4 MiB: 1, 1, 2 and 10 of them"
    assert speeds.gains(0, column(1000), reads[3:], reads[3:], 0, 4 * MIB, 6 * MIB) == pytest.approx([72.0])


def test_a_part_of_a_read_is_as_large_as_a_fetch_makes_it():
    """One state that one of four threads reads, which is not worth it; in four parts it would be."""
    engine, _ = filled(read_threads=4)
    speeds, pages = engine.context.speeds, engine.pools[KV].geometry.nbytes
    speeds.note_read(MIB, 10.0)
    cost = (3 * pages + engine.pools[MAMBA].geometry.nbytes) * 10.0 / MIB
    engine.controller.note_prefill(
        0, 4096, 0.5 * cost * engine.context.profile.flops(0, 4096) / engine.context.profile.flops(0, 3 * P)
    )
    assert engine.serve(FIRST) == 0


def test_a_depth_in_the_middle_saves_most():
    """The host has pages 0 to 11, and storage a state behind each of 6, 12 and 14 pages. The first depth does
    not repay its state, and the last one does not repay its own two pages.
    """
    store, clock = Gated(), Clock()
    whole = prompt(*range(1, 13))
    prompts = [
        [*prompt(*range(1, 7)), 5], [*whole, 5], [*whole, *prompt(21, 22), 5], [*whole, *prompt(31, 32), 5],
    ]  # fmt: skip
    for one in prompts:
        engine = Engine(store, pages=32, states=12, blocks=160)
        engine.keep(one)
        engine.controller.close()
    engine = Engine(
        store,
        pages=32,
        blocks=160,
        clock=clock,
        options=ControllerOptions(restore_deadline=20.0, read_threads=1),
    )
    assert engine.serve(prompts[2]) == 14 * P
    engine.settle()
    engine.controller.evict(Tier.DEVICE)
    page, state = (engine.pools[pool].geometry.nbytes for pool in (KV, MAMBA))
    flops = engine.context.profile.flops
    engine.context.speeds.note_read(MIB, 10.0)
    seconds = 0.9 * 2 * page * 10.0 / MIB * flops(0, 4096) / flops(12 * P, 14 * P)
    engine.controller.note_prefill(0, 4096, seconds)
    match = engine.context.index.match(as_tokens(prompts[3]))
    assert near_runs(engine.context, match, 14) == (0, 12)
    assert 10 * page < state < 11 * page, "the first 12 pages repay a state at nine tenths of a read each"
    assert engine.serve(prompts[3]) == 12 * P


def test_loads_that_wait_for_each_other_are_not_counted_twice():
    clock = Clock()
    speeds = Speeds(PROFILE, 1, clock)
    speeds.note_prefill(0, 1000, 1.0)
    begun = clock.now
    for _ in range(4):  # four loads, begun at once, of one second each
        clock.now += 1.0
        speeds.note_load(MIB, begun)
    assert speeds.gains(0, column(1000), column(0), column(MIB))[0] == pytest.approx(0.0, abs=1e-6)


def test_a_load_that_waited_for_the_device_is_not_measured(monkeypatch):
    """The work that still uses its slots goes on for ten seconds."""
    monkeypatch.setattr(depths, "LEAST_BYTES", 1)
    engine, clock = filled()
    assert engine.serve(FIRST) == 3 * P
    engine.controller.evict(Tier.DEVICE)
    fence = Fence()
    engine.context.device_work.note(fence, [(KV, np.arange(engine.pools[KV].capacity))])
    admission = ask(engine, FIRST)
    assert admission.poll().depth == 3 * P
    clock.now += 10.0
    fence.open()
    until(engine, lambda: not engine.context.in_flight.operations)
    engine.controller.note_prefill(0, 4096, 0.1)
    assert engine.context.speeds.gains(0, column(1000), column(0), column(MIB)) is None
    engine.verify(admission, FIRST, 3)
    wind_up(engine, admission)


def test_a_prefill_of_no_flops_says_nothing():
    """At this depth, the float64 of both ends is the same."""
    engine, _ = filled()
    engine.context.speeds.note_read(MIB, 10.0)
    engine.controller.note_prefill(2**62, 2**62 + 1, 1.0)
    assert engine.serve(FIRST) == 3 * P


@given(st.lists(st.tuples(st.floats(1.0, 1e12), st.floats(1e-6, 100.0), st.floats(0.0, 100.0)), min_size=1))
def test_a_pace_lies_between_the_slowest_and_the_fastest_measurement(measurements):
    clock = Clock()
    speed = Speed(clock)
    for amount, seconds, pause in measurements:
        speed.add(amount, seconds)
        clock.now += pause
    pace = speed.pace()
    if pace is None:
        assert sum(seconds for _, seconds, _ in measurements) < ENOUGH_S or clock.now > 100.0
        return
    paces = [seconds / amount for amount, seconds, _ in measurements]
    assert min(paces) * 0.999999 <= pace <= max(paces) * 1.000001


@pytest.mark.parametrize(
    ("start", "end", "seconds"), [(4, 4, 1.0), (-1, 4, 1.0), (0, 4, math.nan), (0, 4, -1.0)]
)
def test_an_impossible_prefill(start, end, seconds):
    engine, _ = filled()
    with pytest.raises(InputError, match="is not possible"):
        engine.controller.note_prefill(start, end, seconds)


def test_the_store_learns_how_fast_the_prefill_is_once_it_is_known():
    """A daemon then knows how much time a hit saves. The engine waits for no call."""
    store = MemoryBackend()
    engine = Engine(store, profile=PROFILE, clock=Clock())
    engine.controller.note_prefill(0, 10, 0.01)
    engine.settle()
    assert SPEED_FIELD not in store.namespaces()[0].identity, "too short to be measured"
    engine.controller.note_prefill(0, 4096, 0.5)
    until(engine, lambda: SPEED_FIELD in store.namespaces()[0].identity)
    [record] = store.namespaces()
    speed = record.identity[SPEED_FIELD]
    assert speed == pytest.approx(PROFILE.flops(0, 4096) / 0.5, rel=0.05)
    engine.controller.note_prefill(0, 4096, 5.0)
    engine.settle()
    assert store.namespaces()[0].identity[SPEED_FIELD] == speed, "once is enough"
    other = MemoryBackend()
    guessing = Engine(other, clock=Clock())
    guessing.controller.note_prefill(0, 4096, 0.5)
    guessing.settle()
    [record] = other.namespaces()
    assert SPEED_FIELD not in record.identity, "the default profile is a guess"
