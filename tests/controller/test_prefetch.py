"""How long a request waits for storage, and what becomes of the rest."""

import threading

from tests.controller.harness import KV, MAMBA, Engine, P, prompt
from tests.controller.test_interleavings import Gated, ask, evict, fetching, shut, until, wind_up
from tiercache.controller import ControllerOptions, Status
from tiercache.controller.operations import Fetch
from tiercache.core import Reason, Tier

FIRST = [*prompt(1, 2, 3), 5]
LONG = [*prompt(1, 2, 3, 4, 5, 6), 5]


class Clock:
    """A clock that stands until the test sets it forward."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def engine_with(clock=None):
    """An engine that has to ask, and its store, which has FIRST with a state at its end."""
    store = Gated()
    before = Engine(store)
    before.serve(FIRST)
    before.settle()
    before.controller.close()
    options = ControllerOptions(restore_deadline=20.0, read_threads=4)
    return Engine(store, blocks=64, clock=clock, options=options), store


def count(engine, outcome):
    return engine.metrics.value("prefetches_total", "request", outcome)


def test_a_request_waits_for_a_slow_store_until_its_deadline():
    clock = Clock()
    engine, store = engine_with(clock)
    gate = shut(store)
    admission = ask(engine, FIRST, states=2)
    until(engine, lambda: admission.poll() and fetching(admission))
    clock.now += 0.9  # the store's calls hang after 20 s
    assert admission.poll().status is Status.PENDING
    gate.set()
    assert engine.restore(admission, FIRST) == 3 * P
    assert count(engine, "complete") == 1
    engine.controller.release(admission)
    engine.settle()
    evict(engine)
    gate = shut(store)
    admission = ask(engine, FIRST, states=2)
    until(engine, lambda: admission.poll() and fetching(admission))
    clock.now += 20.0
    assert admission.poll().reason is Reason.TIMEOUT
    assert count(engine, "cut_short") == 1
    gate.set()
    wind_up(engine, admission)


def test_a_hung_query_is_left_and_nothing_leaks():
    """The wait ends before storage has said what it has."""
    clock, asked = Clock(), threading.Event()
    engine, store = engine_with(clock)
    ask_store = store.exists
    store.exists = lambda keys: asked.wait(30) and ask_store(keys)
    admission = ask(engine, FIRST, states=2)
    clock.now += 20.0
    poll = admission.poll()
    assert (poll.status, poll.depth, poll.reason) == (Status.FAILED, 0, Reason.TIMEOUT)
    asked.set()
    wind_up(engine, admission)


def test_the_wait_ends_with_the_deepest_depth_that_has_landed(monkeypatch):
    """Pages of the deeper depth have landed, its state has not; the depth above was near all along."""
    monkeypatch.setattr(Fetch, "part", 1)
    clock = Clock()
    engine, store = engine_with(clock)
    admission = ask(engine, LONG, states=4)
    engine.restore(admission, LONG)
    depth = 3 * P
    for end in (*admission.checkpoints, len(LONG)):
        engine.compute(admission, LONG, depth, end)
        engine.controller.commit(
            admission, LONG[:end], {end: engine.take_state(admission, LONG[:end])} if end % P == 0 else {}
        )
        depth = end
    engine.controller.release(admission)
    engine.settle()
    evict(engine)
    assert engine.serve(FIRST) == 3 * P  # near again: three pages and their state
    engine.settle()
    engine.controller.evict(Tier.DEVICE)
    gate = shut(store, 6)  # page 6 and the state behind it
    got = engine.metrics.value("storage_gets_total", "kv", "hit")
    admission = ask(engine, LONG, states=2, deadline=1.0)
    until(
        engine,
        lambda: admission.poll() and engine.metrics.value("storage_gets_total", "kv", "hit") == got + 2,
    )
    clock.now += 1.1
    poll = admission.poll()
    assert (poll.depth, poll.reason) == (3 * P, Reason.TIMEOUT)
    assert engine.restore(admission, LONG) == 3 * P
    gate.set()
    engine.controller.release(admission)
    engine.settle()
    engine.check()
    assert engine.serve(LONG) == 6 * P, "what was under way has landed for the next request"
    assert engine.metrics.value("storage_gets_total", "kv", "hit") == got + 3, "no page is fetched twice"


def test_a_lost_state_leaves_its_pages_to_the_depth_above(monkeypatch):
    monkeypatch.setattr(Fetch, "part", 1)
    engine, store = engine_with()
    engine.serve(LONG)
    engine.settle()
    evict(engine)
    [gone] = [e.key for e in store.scan_all() if e.key.pool is MAMBA and e.meta.depth == 6]
    store.lose(gone)
    got = engine.metrics.value("storage_gets_total", "kv", "hit")
    assert engine.serve(LONG) == 3 * P
    assert engine.metrics.value("storage_gets_total", "kv", "hit") == got + 6
    engine.settle()
    engine.check()


def test_what_nobody_waits_for_is_cancelled_and_can_be_fetched_again(monkeypatch):
    """Fetches may hold two blocks. Page 1 is being read when the first request stops waiting, and page 2 is
    cancelled. The second request joins page 1, fetches page 2 anew, and then page 3.
    """
    monkeypatch.setattr(Fetch, "part", 1)
    store = Gated()
    options = ControllerOptions(restore_deadline=20.0, read_threads=1, in_flight_share=2 / 12)
    engine = Engine(store, hybrid=False, blocks=12, options=options)
    engine.serve(FIRST)
    engine.settle()
    evict(engine)
    gate = shut(store, 1)
    one = ask(engine, FIRST)
    until(engine, lambda: one.poll() and fetching(one))
    reading = engine.context.reads
    until(engine, lambda: bool(reading._running))  # private: no public call tells that a read has begun
    assert one.start().depth == 0
    page = engine.context.host[KV].geometry.nbytes
    assert engine.metrics.value("prefetch_aborted_bytes_total") == page
    engine.check()
    two = ask(engine, FIRST)
    until(engine, lambda: two.poll() and fetching(two))
    gate.set()
    assert engine.restore(two, FIRST) == 3 * P
    wind_up(engine, one, two)
