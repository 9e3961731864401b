"""Commits whose pieces are written to storage while others are still being copied to the host."""

import threading
from collections import Counter
from functools import partial

import pytest
from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import KV, MAMBA, PAGES, Engine, Flaky, P, evict_checked, prompt
from tests.controller.test_hung_store import until
from tests.transfer.rigs import Passed
from tiercache.controller import ControllerOptions
from tiercache.core import Outcome, Tier, as_tokens
from tiercache.transfer import CopyEngine

LONG = [*prompt(1, 2, 3, 4, 5, 6), 5]
OBJECTS = 7
"""Six pages and the state at the end."""


class Watched(Flaky):
    """A store that keeps the keys of each set, and that can make one of them wait."""

    def __init__(self):
        super().__init__(MemoryBackend(1 << 24))
        self.arrived = threading.Condition()
        self.batches = []
        self.stored = Counter()
        self.hangs_at = 0
        """Number of the set that waits for `go_on`, from 1."""
        self.go_on = threading.Event()

    def set(self, items):
        with self.arrived:
            self.batches.append([item.key for item in items])
            number = len(self.batches)
            self.arrived.notify_all()
        if number == self.hangs_at:
            assert self.go_on.wait(60)
        outcomes = super().set(items)
        for item, outcome in zip(items, outcomes, strict=True):
            self.stored[item.key] += outcome is Outcome.STORED
        return outcomes

    def wait_for(self, batches, timeout=30):
        """Wait for that many sets; used on the thread that copies."""
        with self.arrived:
            return self.arrived.wait_for(lambda: len(self.batches) >= batches, timeout)

    @property
    def pools(self):
        return [[key.pool for key in batch] for batch in self.batches]


class Pieces:
    """Makes engines that call `before` with the number of each copy to the host, on the copying thread."""

    def __init__(self, before):
        self.before = before
        self.count = 0

    def __call__(self, devices, hosts):
        outer = self

        class Counting(CopyEngine):
            def store(self, units, *, after=()):
                number, outer.count = outer.count, outer.count + 1
                return super().store(units, after=[*after, Passed(partial(outer.before, number))])

        return Counting(devices, hosts)


def engine_on(store, before=lambda number: None, piece_bytes=1, **options):
    """An engine whose pieces are single objects."""
    pieces = Pieces(before)
    options = ControllerOptions(restore_deadline=20.0, piece_bytes=piece_bytes, **options)
    return Engine(store, pages=24, blocks=80, options=options, engine=pieces), pieces


def commit(engine):
    """Serve the prompt with one commit, so that there is one write."""
    tokens = as_tokens(LONG)
    admission = engine.admit(engine.controller.lookup(tokens), states=2)
    depth = engine.restore(admission, tokens)
    engine.compute(admission, tokens, depth, 6 * P)
    states = {6 * P: engine.take_state(admission, tokens[: 6 * P])}
    engine.controller.commit(admission, tokens[: 6 * P], states)
    engine.controller.release(admission)
    return depth


def check_restored(engine):
    """Storage has all of the prompt, each object was stored once, and the harness compares every byte."""
    evict_checked(engine, Tier.DEVICE, Tier.HOST)
    assert engine.serve([*LONG, 6]) == 6 * P
    engine.settle()
    engine.check()


def test_a_piece_is_stored_before_the_next_one_is_copied():
    store = Watched()

    def before(number):
        assert store.wait_for(number), "the store waits for the copies of later pieces"

    engine, pieces = engine_on(store, before)
    commit(engine)
    assert engine.settle()
    assert pieces.count == OBJECTS
    assert store.pools == [[KV]] * 6 + [[MAMBA]], "each has a call of its own, pages first"
    check_restored(engine)


def test_pieces_that_arrive_while_the_store_is_busy_share_a_call():
    store = Watched()
    store.hangs_at = 1
    engine, _ = engine_on(store)
    commit(engine)
    for pool, count in ((KV, 6), (MAMBA, 1)):
        until(engine, lambda p=pool, n=count: engine.metrics.value("written_objects_total", "host", p) == n)
    store.go_on.set()
    assert engine.settle()
    first = len(store.batches[0])
    # On a busy machine, all pages may arrive before the first call begins.
    assert store.pools == [[KV] * first, *([[KV] * (6 - first)] if first < 6 else []), [MAMBA]]
    check_restored(engine)


def test_each_piece_is_twice_as_large_as_the_one_before():
    engine, pieces = engine_on(Watched(), piece_bytes=PAGES.nbytes)
    commit(engine)
    assert engine.settle()
    assert pieces.count == 3, "page 1; pages 2 and 3; pages 4 to 6, which leave room, and the state"
    check_restored(engine)


@pytest.mark.parametrize("bad", range(OBJECTS))
def test_after_a_copy_that_fails_nothing_behind_it_is_stored(bad):
    store, failing = Watched(), [bad]

    def before(number):
        if number in failing:
            raise OSError("a bad copy")

    engine, _ = engine_on(store, before)
    commit(engine)
    assert not engine.settle()
    assert len(store.stored) == bad
    skipped = engine.metrics.total("write_through_skipped_total", reason="transfer_failed")
    assert skipped == OBJECTS - bad
    engine.check()
    failing.clear()
    commit(engine)
    assert engine.settle(), "the next commit writes the rest"
    assert set(store.stored.values()) == {1}
    assert len(store.stored) == OBJECTS
    check_restored(engine)


@pytest.mark.parametrize("outcome", [Outcome.ERROR, Outcome.THROTTLED, "raise"])
@pytest.mark.parametrize("bad", range(OBJECTS))
def test_what_storage_does_not_take_is_offered_again_and_before_its_state(bad, outcome):
    store = Watched()
    # A piece waits until the one before was offered, if it is offered at all before the retry.
    engine, _ = engine_on(store, lambda number: store.wait_for(number, 0.05))
    store.sets = [outcome, *[None] * bad]
    commit(engine)
    assert engine.settle(), "the retry stores it"
    assert store.sets == []
    assert set(store.stored.values()) == {1}
    assert len(store.stored) == OBJECTS
    assert store.pools[-1] == [MAMBA], "no state is stored before its pages"
    check_restored(engine)


@pytest.mark.parametrize("bad", range(1, OBJECTS + 1))
def test_a_call_that_hangs_keeps_its_pieces_until_it_returns(bad):
    store = Watched()
    store.hangs_at = bad
    engine, _ = engine_on(store, lambda number: store.wait_for(number, 0.05), storage_deadline=0.3)
    commit(engine)
    until(engine, lambda: engine.metrics.total("storage_hangs_total", operation="write"))
    assert not engine.controller.flush(20), "it is not waited for"
    engine.check()
    before = engine.metrics.total("write_through_skipped_total")
    assert before >= 1
    store.go_on.set()
    until(engine, lambda: not engine.context.in_flight.stranded)
    engine.check()
    until(engine, lambda: commit(engine) == 6 * P and engine.controller.flush(20))
    assert set(store.stored.values()) == {1}
    assert len(store.stored) == OBJECTS
    check_restored(engine)
