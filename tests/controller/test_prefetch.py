"""How long a request waits for storage, and what becomes of the rest."""

import threading

import numpy as np
import pytest

from tests.controller.harness import KV, MAMBA, Engine, P, all_is_free, prompt
from tests.controller.test_hung_store import Hanging
from tests.controller.test_interleavings import Gated, ask, evict, fetching, shut, until, wind_up
from tiercache.controller import ControllerOptions, Status
from tiercache.controller.operations import Fetch
from tiercache.core import Reason, Tier
from tiercache.errors import ClosedError, TokenError

FIRST = [*prompt(1, 2, 3), 5]
LONG = [*prompt(1, 2, 3, 4, 5, 6), 5]
OPTIONS = ControllerOptions(restore_deadline=20.0)


class Clock:
    """A clock that stands until the test sets it forward."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def engine_over(store, *conversations, **sizes):
    """An engine in another process than the one that stored these conversations."""
    before = Engine(store, pages=60, states=24, blocks=128)
    for tokens in conversations:
        before.keep(tokens)
    before.controller.close()
    return Engine(store, **{"options": OPTIONS, "pages": 60, "states": 24, "blocks": 64} | sizes)


def engine_with(clock=None):
    """An engine that has to ask, and its store, which has FIRST with a state at its end."""
    options = ControllerOptions(restore_deadline=20.0, storage_deadline=60.0, read_threads=4)
    store = Gated()
    return engine_over(store, FIRST, pages=16, states=8, clock=clock, options=options), store


def count(engine, outcome):
    return engine.metrics.value("prefetches_total", "request", outcome)


def test_a_request_waits_for_a_slow_store_until_its_deadline():
    clock = Clock()
    engine, store = engine_with(clock)
    gate = shut(store)
    admission = ask(engine, FIRST, states=2)
    until(engine, lambda: admission.poll() and fetching(admission))
    clock.now += 0.9
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
    engine.keep(LONG)
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
    engine.keep(FIRST)
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


# -- prefetches that no request waits for


def finish(engine, ticket):
    until(engine, lambda: ticket.done)
    return ticket


def fetched(engine):
    return engine.metrics.total("storage_gets_total")


@pytest.mark.parametrize("tokens", [FIRST, FIRST[: 3 * P]])
def test_a_request_finds_on_the_host_what_a_prefetch_brought(tokens):
    engine = engine_over(Gated(), FIRST)
    ticket = finish(engine, engine.controller.prefetch(tokens))
    assert (ticket.tokens, ticket.reason) == (3 * P, Reason.NONE)
    assert engine.metrics.value("prefetches_total", "hint", "complete") == 1
    asked = fetched(engine)
    assert engine.serve(FIRST) == 3 * P
    assert fetched(engine) == asked
    all_is_free(engine)


def test_what_is_near_is_not_fetched():
    engine = engine_over(Gated(), FIRST)
    engine.keep(FIRST)
    asked = fetched(engine)
    ticket = engine.controller.prefetch(FIRST)
    assert (ticket.done, ticket.tokens, ticket.reason) == (True, 3 * P, Reason.NONE)
    engine.controller.evict(Tier.DEVICE)
    assert engine.controller.prefetch(FIRST).done
    assert fetched(engine) == asked
    all_is_free(engine)


def test_unknown_prefixes_and_engines_without_storage():
    engine = engine_over(Gated(), FIRST)
    assert finish(engine, engine.controller.prefetch(prompt(7, 8))).tokens == 0
    assert finish(engine, engine.controller.prefetch(FIRST, b"other")).tokens == 0
    all_is_free(engine)
    alone = Engine()
    ticket = alone.controller.prefetch(FIRST)
    assert (ticket.done, ticket.tokens, ticket.reason) == (True, 0, Reason.DISABLED)
    with pytest.raises(TokenError):
        alone.controller.prefetch([])
    alone.controller.close()
    with pytest.raises(ClosedError):
        alone.controller.prefetch(FIRST)


def test_a_request_joins_a_prefetch_which_may_then_be_cancelled():
    store = Gated()
    engine = engine_over(store, FIRST)
    gate = shut(store)
    ticket = engine.controller.prefetch(FIRST)
    until(engine, lambda: engine.context.in_flight.count("fetch"))
    admission = ask(engine, FIRST, states=2)
    until(engine, lambda: admission.poll() and not engine.context.in_flight.count("query"))
    admission.poll()
    asked = fetched(engine)
    ticket.cancel()
    ticket.cancel()
    gate.set()
    assert engine.restore(admission, FIRST) == 3 * P
    assert fetched(engine) == asked + 4, "each object once"
    assert engine.metrics.value("prefetches_total", "hint", "cut_short") == 1
    wind_up(engine, admission)


def test_requests_go_first():
    """While a request fetches, no wave of a prefetch begins; and a wave takes a fourth of the budget."""
    store = Gated()
    long = [*prompt(*range(20, 32)), 5]
    engine = engine_over(store, FIRST, long)
    taken = []

    class Watched(type(engine.context.in_flight.fetching)):
        def take(self, blocks):
            super().take(blocks)
            taken.append(self.held)

    engine.context.in_flight.fetching = Watched(engine.context.in_flight.fetching.blocks)
    gate = shut(store)
    admission = ask(engine, FIRST, states=2)
    until(engine, lambda: admission.poll() and engine.context.in_flight.count("fetch"))
    before = len(taken)
    ticket = engine.controller.prefetch(long)
    until(engine, lambda: not engine.context.in_flight.count("query"))
    engine.controller.tick()
    assert len(taken) == before
    gate.set()
    assert engine.restore(admission, FIRST) == 3 * P
    assert finish(engine, ticket).tokens == 12 * P
    waves = taken[before:]
    assert len(waves) > 2
    assert max(waves) <= max(engine.context.in_flight.fetching.blocks // 4, engine.context.allocator.widest)
    wind_up(engine, admission)


def test_too_many_prefetches_are_refused():
    store = Gated()
    engine = engine_over(store, FIRST)
    gate = shut(store)
    tickets = [engine.controller.prefetch([*FIRST, n]) for n in range(1030)]
    refused = [ticket for ticket in tickets if ticket.done]
    assert {ticket.reason for ticket in refused} == {Reason.BUSY}
    assert len(refused) == 6 == engine.metrics.value("prefetches_total", "hint", "refused")
    huge = engine.controller.prefetch(np.ones((1 << 24) + 1, np.uint64))
    assert (huge.done, huge.reason) == (True, Reason.BUSY)
    gate.set()
    until(engine, lambda: all(ticket.done for ticket in tickets))
    all_is_free(engine)


def test_a_host_that_is_in_use_says_so():
    engine = engine_over(Gated(), FIRST, blocks=8)
    running = ask(engine, prompt(7, 8, 9, 10), states=2)
    running.wait()
    engine.compute(running, prompt(7, 8, 9, 10), 0, 4 * P)
    engine.controller.commit(running, prompt(7, 8, 9, 10))
    engine.settle()
    with engine.context.index.pinned(running._pin.node, Tier.HOST):  # private: a request that reads the host
        assert finish(engine, engine.controller.prefetch(FIRST)).reason is Reason.BUSY
    wind_up(engine, running)


def test_a_hung_store_ends_a_prefetch_after_its_deadline():
    store = Hanging()
    options = ControllerOptions(restore_deadline=0.3, storage_deadline=0.3, close_deadline=1.0)
    for verb in ("exists", "get"):
        engine = engine_over(store, FIRST, options=options)
        store.hangs = {verb}
        ticket = finish(engine, engine.controller.prefetch(FIRST))
        assert ticket.tokens == 0
        assert ticket.reason in (Reason.TIMEOUT, Reason.UNAVAILABLE)
        engine.check()
        store.release()
        until(engine, lambda: not engine.context.in_flight.quarantined.total())  # noqa: B023
        all_is_free(engine)
        store.open = threading.Event()


def test_a_flush_does_not_wait_for_prefetches():
    store = Gated()
    engine = engine_over(store, FIRST, [*prompt(7, 8), 5])
    first, second = engine.controller.prefetch(FIRST), engine.controller.prefetch([*prompt(7, 8), 5])
    assert engine.controller.flush(20)
    assert not second.done
    finish(engine, second)
    assert first.done
    assert second.tokens == 2 * P
    admission = ask(engine, FIRST, states=2)
    assert admission.poll().status is Status.READY
    wind_up(engine, admission)
