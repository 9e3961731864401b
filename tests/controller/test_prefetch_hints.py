"""Prefetches that no request waits for."""

import threading

import pytest

from tests.controller.harness import Engine, P, prompt
from tests.controller.test_hung_store import Hanging, until
from tests.controller.test_interleavings import Gated, ask, evict, shut, wind_up
from tests.integrity import no_pin_is_left
from tiercache.controller import ControllerOptions, Status
from tiercache.core import Outcome, Reason, Tier
from tiercache.errors import ClosedError, TokenError

FIRST = [*prompt(1, 2, 3), 5]
OPTIONS = ControllerOptions(restore_deadline=20.0)


def engine_over(store, *conversations, **sizes):
    """An engine in another process than the one that stored these conversations."""
    before = Engine(store, pages=60, states=24, blocks=128)
    for tokens in conversations:
        before.serve(tokens)
    before.settle()
    before.controller.close()
    return Engine(store, **{"options": OPTIONS, "pages": 60, "states": 24, "blocks": 64} | sizes)


def finish(engine, ticket):
    until(engine, lambda: ticket.done)
    return ticket


def fetched(engine):
    return engine.metrics.total("storage_gets_total")


def nothing_left(engine):
    engine.settle()
    evict(engine)
    engine.check()
    assert engine.arena.available == engine.arena.blocks
    assert no_pin_is_left(engine.controller)


def test_a_request_finds_on_the_host_what_a_prefetch_brought():
    engine = engine_over(Gated(), FIRST)
    ticket = finish(engine, engine.controller.prefetch(FIRST))
    assert (ticket.tokens, ticket.reason) == (3 * P, Reason.NONE)
    assert engine.metrics.value("prefetches_total", "hint", "complete") == 1
    asked = fetched(engine)
    assert engine.serve(FIRST) == 3 * P
    assert fetched(engine) == asked
    nothing_left(engine)


def test_a_prefix_of_whole_pages_is_prefetched_to_its_end():
    engine = engine_over(Gated(), FIRST)
    assert finish(engine, engine.controller.prefetch(FIRST[: 3 * P])).tokens == 3 * P
    nothing_left(engine)


def test_what_is_near_is_not_fetched():
    engine = engine_over(Gated(), FIRST)
    engine.serve(FIRST)
    engine.settle()
    asked = fetched(engine)
    ticket = engine.controller.prefetch(FIRST)
    assert (ticket.done, ticket.tokens, ticket.reason) == (True, 3 * P, Reason.NONE)
    engine.controller.evict(Tier.DEVICE)
    assert engine.controller.prefetch(FIRST).done
    assert fetched(engine) == asked
    nothing_left(engine)


def test_unknown_prefixes_and_engines_without_storage():
    engine = engine_over(Gated(), FIRST)
    assert finish(engine, engine.controller.prefetch(prompt(7, 8))).tokens == 0
    assert finish(engine, engine.controller.prefetch(FIRST, b"other")).tokens == 0
    nothing_left(engine)
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
    tickets = [engine.controller.prefetch([*FIRST, n]) for n in range(70)]
    refused = [ticket for ticket in tickets if ticket.done]
    assert {ticket.reason for ticket in refused} == {Reason.BUSY}
    assert len(refused) == 6 == engine.metrics.value("prefetches_total", "hint", "refused")
    huge = engine.controller.prefetch([1] * ((1 << 22) + 1))
    assert (huge.done, huge.reason) == (True, Reason.BUSY)
    gate.set()
    until(engine, lambda: all(ticket.done for ticket in tickets))
    nothing_left(engine)


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


@pytest.mark.parametrize("fault", [Outcome.MISS, Outcome.CORRUPT, Outcome.ERROR, "raise"])
def test_a_store_that_loses_objects_in_between(fault):
    store = Gated()
    engine = engine_over(store, FIRST)
    store.gets = [fault] * 8
    ticket = finish(engine, engine.controller.prefetch(FIRST))
    assert ticket.tokens == 0
    assert ticket.reason is not Reason.NONE
    nothing_left(engine)


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
        nothing_left(engine)
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
