"""Restores whose pieces are copied to the device while storage is still being read."""

import threading

from tiercache_backends.memory import MemoryBackend
from tiercache_kernels.reference import copy_segments

from tests.controller.harness import KV, MAMBA, Engine, Flaky, P, all_is_free, prompt
from tests.controller.test_interleavings import Gated, ask, failing, fetching, shut, until, wind_up
from tiercache.controller import ControllerOptions, Status
from tiercache.controller.operations import Fetch
from tiercache.core import Reason, as_tokens
from tiercache.transfer import CopyEngine

FIRST = [*prompt(1, 2, 3), 5]
LONG = [*prompt(1, 2, 3, 4, 5, 6), 5]


def options(**kwargs):
    """Pieces of one object, so that whatever lands is loaded at once."""
    return ControllerOptions(restore_deadline=20.0, piece_bytes=1, **kwargs)


def filled(store, *prompts, blocks=80):
    """The store, with the prompts in it: a state at each end."""
    before = Engine(store, pages=24, blocks=blocks)
    for one in prompts:
        before.keep(one)
    before.controller.close()
    return store


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


def test_a_prompt_larger_than_the_host_is_stored_and_restored_through_it():
    """The host has room for a state and two pages; the prompt has six pages."""
    store = filled(Flaky(MemoryBackend()), LONG, blocks=5)
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
    """The state on the host alone leaves it for a deeper restore that is given up; all slots are in use."""
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
