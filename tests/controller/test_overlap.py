"""Restores whose pieces are copied to the device while storage is still being read."""

import threading

import pytest
from tiercache_backends.memory import MemoryBackend
from tiercache_kernels.reference import copy_segments

from tests.controller.harness import KV, MAMBA, PAGES, STATES, Engine, Flaky, P, prompt
from tests.controller.test_interleavings import Gated, ask, evict, failing, fetching, shut, until, wind_up
from tests.controller.test_prefetch import Clock
from tiercache.controller import ControllerOptions, Status
from tiercache.controller.operations import Fetch
from tiercache.core import Reason, Tier, as_tokens
from tiercache.errors import ConfigError, PoolFullError
from tiercache.transfer import CopyEngine

FIRST = [*prompt(1, 2, 3), 5]
LONG = [*prompt(1, 2, 3, 4, 5, 6), 5]


def options(**kwargs):
    """Pieces of one object, so that whatever lands is loaded at once."""
    return ControllerOptions(restore_deadline=20.0, piece_bytes=1, **kwargs)


def filled(store, *prompts):
    """The store, with the prompts in it: a state at each end."""
    before = Engine(store, pages=24, blocks=80)
    for one in prompts:
        before.serve(one)
    assert before.settle()
    before.controller.close()
    return store


def all_is_free(engine):
    """Everything lands and is evicted; then nobody holds anything."""
    engine.settle()
    engine.check()
    evict(engine)
    engine.check()
    assert engine.arena.available == engine.arena.blocks
    assert all(pool.available == pool.capacity for pool in engine.pools.values())
    assert engine.context.index.holds_only([])


def on_device(engine, tokens, pool=KV):
    """How many pages of the prompt the device has, and how many are on their way to it."""
    index = engine.context.index
    match = index.match(as_tokens(tokens))
    at = index.locations(match, match.path_depth).pages[pool].device
    return int((at >= 0).sum())


def test_what_has_landed_is_on_the_device_before_the_last_page_is_read():
    store = filled(Gated(), LONG)
    engine = Engine(store, blocks=64, options=options(read_threads=4))
    gate = shut(store, 5)
    admission = ask(engine, LONG, states=2)
    until(engine, lambda: admission.poll() and on_device(engine, LONG) == 5)
    assert admission.poll().status is Status.PENDING
    gate.set()
    assert engine.restore(admission, LONG) == 6 * P
    restored = engine.metrics.value
    assert restored("restored_objects_total", "storage", "kv") == 6, "the device is not where they came from"
    assert restored("restored_objects_total", "storage", "mamba") == 1
    assert restored("restored_objects_total", "device", "kv") == 0
    wind_up(engine, admission)


def test_less_than_a_piece_is_loaded_with_the_rest(monkeypatch):
    monkeypatch.setattr(Fetch, "part", 1)
    store = filled(Gated(), LONG)
    engine = Engine(store, blocks=64, options=ControllerOptions(restore_deadline=20.0, read_threads=8))
    gate = shut(store, 6)
    admission = ask(engine, LONG, states=2)
    until(engine, lambda: admission.poll() and engine.metrics.value("storage_gets_total", "kv", "hit") == 5)
    admission.poll()
    assert not engine.context.in_flight.count("load")
    assert on_device(engine, LONG) == 0
    gate.set()
    assert engine.restore(admission, LONG) == 6 * P
    wind_up(engine, admission)


def test_pages_of_a_depth_that_was_not_reached_do_not_keep_the_slots():
    """The device has seven slots, which the request needs. It stops to wait for storage while a copy into one
    of them hangs: it waits for that copy alone, and then computes into all of them.
    """
    gate, armed = threading.Event(), threading.Event()

    def copier(*columns):
        if armed.is_set():
            assert gate.wait(30)
        copy_segments(*columns)

    store = filled(Gated(), LONG)
    engine = Engine(
        store,
        pages=7,
        states=4,
        blocks=64,
        options=options(read_threads=8),
        engine=lambda d, h: CopyEngine(d, h, copier=copier),
    )
    fifth, last = shut(store, 5), shut(store, 6)
    admission = ask(engine, LONG, states=2)
    until(engine, lambda: admission.poll() and on_device(engine, LONG) == 4)
    armed.set()
    fifth.set()
    until(engine, lambda: admission.poll() and engine.context.in_flight.count("load") == 1)
    assert admission.start().status is Status.PENDING
    engine.check()
    gate.set()
    poll = admission.wait()
    assert (poll.status, poll.depth) == (Status.READY, 0)
    engine.compute(admission, as_tokens(LONG), 0, 6 * P)
    state = engine.take_state(admission, as_tokens(LONG[: 6 * P]))
    engine.controller.commit(admission, as_tokens(LONG), {6 * P: state})
    engine.verify(admission, as_tokens(LONG), 6)
    last.set()
    wind_up(engine, admission)


def test_two_requests_share_the_pieces():
    store = filled(Gated(), LONG)
    engine = Engine(store, pages=20, blocks=64, options=options(read_threads=8))
    gate = shut(store, 6)
    one = ask(engine, LONG, states=1)
    until(engine, lambda: one.poll() and on_device(engine, LONG) == 5)
    two = ask(engine, LONG, states=1)
    until(engine, lambda: two.poll() and fetching(two))
    gate.set()
    assert engine.restore(one, LONG) == engine.restore(two, LONG) == 6 * P
    assert engine.metrics.value("storage_gets_total", "kv", "hit") == 6, "no page is read twice"
    assert engine.metrics.value("restored_objects_total", "storage", "kv") == 6
    assert engine.metrics.value("restored_objects_total", "device", "kv") == 6, "the first has brought them"
    wind_up(engine, one, two)


def test_a_prompt_larger_than_the_host_is_restored_through_it():
    """The host has room for a state and two pages; the prompt has six pages."""
    store = filled(Flaky(MemoryBackend()), LONG)
    engine = Engine(store, blocks=5, options=options(in_flight_share=1.0))
    blocks = {pool: engine.context.allocator.blocks_of(pool, 1) for pool in (KV, MAMBA)}
    assert 6 * blocks[KV] + blocks[MAMBA] > 5
    assert engine.serve(LONG) == 6 * P
    assert engine.metrics.value("restored_objects_total", "storage", "kv") == 6
    all_is_free(engine)


def test_a_host_too_small_for_the_deepest_restore_takes_the_next():
    """A load ahead has failed, so that nothing leaves the host before the depth is settled."""
    armed = [True]
    store = filled(Gated(), [*prompt(1, 2), 5], [*prompt(1, 2, 3, 4), 5])
    engine = Engine(store, blocks=6, options=options(read_threads=1), engine=failing(armed))
    admission = ask(engine, prompt(1, 2, 3, 4, 6), states=1)
    assert engine.restore(admission, as_tokens(prompt(1, 2, 3, 4, 6))) == 2 * P
    assert not armed
    assert admission.reason is Reason.BUSY
    wind_up(engine, admission)


def test_a_prompt_larger_than_the_host_whose_loads_fail_is_computed():
    def copier(*columns):
        raise OSError("a bad device")

    store = filled(Flaky(MemoryBackend()), LONG)
    engine = Engine(
        store,
        blocks=5,
        options=options(in_flight_share=1.0),
        engine=lambda d, h: CopyEngine(d, h, copier=copier),
    )
    admission = ask(engine, LONG)
    poll = admission.wait()
    assert (poll.status, poll.depth, poll.reason) == (Status.FAILED, 0, Reason.BUSY)
    engine.controller.release(admission)
    engine.settle()
    engine.check()


def test_a_state_loaded_for_a_deeper_depth_takes_no_slot_of_the_caller(monkeypatch):
    """The device has three states: one to restore, and two for the caller. The deepest state is loaded ahead,
    and then page 5 turns out to be lost.
    """
    monkeypatch.setattr(Fetch, "part", 1)
    store = filled(Gated(), FIRST, LONG)
    engine = Engine(store, states=3, blocks=64, options=options(read_threads=1))
    gate = shut(store, 4)  # read behind the state
    store.lose(store.page(5))
    admission = ask(engine, LONG, states=2)

    def is_state_on_device():
        index = engine.context.index
        match = index.match(as_tokens(LONG))
        return match.path_depth >= 6 and index.locations(match, 6).states[MAMBA].device >= 0

    until(engine, lambda: admission.poll() and is_state_on_device())
    gate.set()
    assert engine.restore(admission, LONG) == 3 * P
    for _ in range(2):
        admission.take_states()
    wind_up(engine, admission)


def test_a_piece_of_no_bytes_is_refused():
    with pytest.raises(ConfigError, match="piece_bytes=0 is not possible"):
        ControllerOptions(piece_bytes=0)


@pytest.mark.parametrize(
    ("depth", "near"), [*((d, 0) for d in range(1, 7)), *((d, 3 * P) for d in (4, 5, 6))]
)
def test_any_piece_whose_read_hangs_leaves_the_depth_below(depth, near):
    """The read of one page hangs beyond the deadline of the store; the others are on the device by then.

    Storage is not asked again, so what is left is what the host had before.
    """
    clock = Clock()
    store = filled(Gated(), FIRST, LONG)
    engine = Engine(
        store, blocks=64, clock=clock, options=options(read_threads=8, storage_deadline=5.0, write_retries=0)
    )
    if near:
        assert engine.serve(FIRST) == near
        engine.settle()
        engine.controller.evict(Tier.DEVICE)
    gate = shut(store, depth)
    admission = ask(engine, LONG, states=2)
    until(engine, lambda: admission.poll() and fetching(admission) and on_device(engine, LONG) == 5)
    reading = engine.context.reads
    # private: no public call tells that a read has begun; at depth 6 a page and a state are read
    until(engine, lambda: len(reading._running) == (2 if depth == 6 else 1))
    clock.now += 6.0
    assert engine.restore(admission, LONG) == near
    engine.check()
    engine.controller.release(admission)
    gate.set()
    until(engine, lambda: not any(engine.context.in_flight.quarantined.values()))
    all_is_free(engine)


def test_pages_loaded_ahead_make_room_when_the_rest_fails():
    """The device has seven slots, which the request needs. Copies fail when five of them are filled."""
    broken = threading.Event()

    def copier(*columns):
        if broken.is_set():
            raise OSError("a bad device")
        copy_segments(*columns)

    store = filled(Gated(), LONG)
    engine = Engine(
        store,
        pages=7,
        blocks=64,
        options=options(read_threads=8),
        engine=lambda d, h: CopyEngine(d, h, copier=copier),
    )
    gate = shut(store, 6)
    admission = ask(engine, LONG, states=1)
    until(engine, lambda: admission.poll() and on_device(engine, LONG) == 5)
    broken.set()
    gate.set()
    assert engine.restore(admission, as_tokens(LONG)) == 0
    assert admission.reason is Reason.IO_ERROR
    engine.compute(admission, as_tokens(LONG), 0, 6 * P)
    engine.controller.commit(admission, as_tokens(LONG))
    engine.verify(admission, as_tokens(LONG), 6)
    wind_up(engine, admission)


def test_a_near_depth_that_made_room_on_the_host_does_not_keep_its_slots():
    """The device has seven slots: three pages of the prompt, and four that the request reserves. The state
    behind these pages is on the host alone, and leaves it for the deeper restore, which is then given up.
    """
    store = filled(Gated(), FIRST, LONG)
    engine = Engine(store, pages=7, states=2, blocks=6, options=options(read_threads=8, in_flight_share=1.0))
    first = ask(engine, FIRST)
    assert engine.restore(first, FIRST) == 3 * P
    engine.controller.release(first)
    engine.settle()
    engine.controller.release(ask(engine, [1], states=2))
    gates = [shut(store, depth) for depth in (4, 5, 6)]
    admission = ask(engine, LONG, states=1)
    assert admission.slots.unused(KV) == 4
    until(engine, lambda: admission.poll() and fetching(admission))
    assert admission.start().depth == 0
    engine.compute(admission, as_tokens(LONG), 0, 6 * P)
    engine.controller.commit(admission, as_tokens(LONG))
    engine.verify(admission, as_tokens(LONG), 6)
    for gate in gates:
        gate.set()
    wind_up(engine, admission)


def test_the_slot_of_a_state_whose_load_ahead_failed_stays_with_its_request(monkeypatch):
    """The state is loaded again when the depth is frozen, and the device has no other slot for it."""
    monkeypatch.setattr(Fetch, "part", 1)
    store, armed = filled(Gated(), LONG), [True]
    engine = Engine(
        store,
        states=2,
        blocks=64,
        options=ControllerOptions(
            restore_deadline=20.0, read_threads=8, piece_bytes=5 * PAGES.nbytes + STATES.nbytes
        ),
        engine=failing(armed),
    )
    gate = shut(store, 5)
    admission = ask(engine, LONG, states=1)
    until(engine, lambda: admission.poll() and not armed and not engine.context.in_flight.count("load"))
    with pytest.raises(PoolFullError):
        ask(engine, [1], states=1)
    gate.set()
    assert engine.restore(admission, LONG) == 6 * P
    wind_up(engine, admission)


def test_pages_whose_load_ahead_failed_count_for_the_tier_that_had_them_then(monkeypatch):
    """After the failure, another request computes the first three pages, so that the device has them."""
    monkeypatch.setattr(Fetch, "part", 1)
    store, armed = filled(Gated(), LONG), [True]
    engine = Engine(store, blocks=64, options=options(read_threads=1), engine=failing(armed))
    gate = shut(store, 5)
    admission = ask(engine, LONG, states=1)
    until(engine, lambda: admission.poll() and not armed and not engine.context.in_flight.count("load"))
    assert on_device(engine, LONG) == 0
    tokens = as_tokens(prompt(1, 2, 3))
    rival = ask(engine, tokens)
    assert rival.start().depth == 0
    engine.compute(rival, tokens, 0, 3 * P)
    engine.controller.commit(rival, tokens)
    engine.controller.release(rival)
    assert on_device(engine, LONG) == 3
    gate.set()
    assert engine.restore(admission, LONG) == 6 * P
    counted = [engine.metrics.value("restored_objects_total", tier, "kv") for tier in ("device", "storage")]
    assert counted == [3, 3]
    wind_up(engine, admission)
