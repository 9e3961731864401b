"""A store that hangs costs one deadline, and then nothing until it is back."""

import threading
import time

import pytest
from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import Engine, Flaky, P, prompt
from tiercache.controller import ControllerOptions
from tiercache.core import Outcome, Reason, Tier

DEADLINE = 0.4
OPTIONS = ControllerOptions(restore_deadline=DEADLINE, storage_deadline=DEADLINE, close_deadline=1.0)


class Hanging(Flaky):
    """A store whose calls of the verbs in `hangs` wait until `release`."""

    def __init__(self):
        super().__init__(MemoryBackend())
        self.hangs = set()
        self.open = threading.Event()
        self.calls = []

    def release(self):
        self.hangs.clear()
        self.open.set()

    def _pass(self, verb):
        self.calls.append(verb)
        if verb in self.hangs:
            assert self.open.wait(60)

    def _perform(self, operation, call, *arguments, **named):
        self._pass(operation)
        return super()._perform(operation, call, *arguments, **named)

    def close(self):
        self._pass("close")


@pytest.fixture
def store():
    store = Hanging()
    yield store
    store.release()


def engine_on(store, **sizes):
    return Engine(store, options=OPTIONS, **{"pages": 40, "states": 24, "blocks": 64} | sizes)


def stored(engine, *conversations):
    for ids in conversations:
        engine.serve([*prompt(*ids), 5])
        assert engine.settle()
    engine.controller.evict(Tier.DEVICE)
    engine.controller.evict(Tier.HOST)


def free_blocks(engine):
    """Blocks of the host that are free, or would be if something else needed them."""
    engine.controller.evict(Tier.HOST)
    return engine.arena.available


def until(engine, condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        engine.controller.tick(0.01)


@pytest.mark.parametrize("verb", ["get", "exists"])
def test_a_read_that_hangs_costs_one_deadline_in_all(store, verb):
    conversations = [(n, n + 20, n + 40) for n in range(8)]
    stored(engine_on(store), *conversations)
    engine = engine_on(store)  # another process, which has to ask
    store.hangs = {verb}
    waits = []
    for ids in conversations:
        started = time.monotonic()
        admission = engine.controller.admit(engine.controller.lookup([*prompt(*ids), 5]))
        poll = admission.wait()
        waits.append(time.monotonic() - started)
        assert poll.depth == 0
        engine.controller.release(admission)
    assert sorted(waits)[5] < DEADLINE, "after the first nobody waits for what is known to be out"
    assert engine.metrics.total("storage_hangs_total") >= 1
    assert engine.metrics.value("lookups_total", "storage", "kv", "miss", "unavailable") >= 1
    assert free_blocks(engine) >= engine.arena.blocks * 3 // 4
    engine.check()
    assert engine.serve([*prompt(1, 21, 50), 5]) == 0
    assert engine.serve([*prompt(1, 21, 50), 5]) == 3 * P, "what is near is served"
    store.release()
    until(engine, lambda: engine.serve([*prompt(2, 22, 42), 5]) == 3 * P)
    engine.settle()
    assert free_blocks(engine) == engine.arena.blocks
    engine.check()


def test_a_write_that_hangs_leaves_the_host_to_others(store):
    engine = engine_on(store)
    store.hangs = {"set"}
    for turn in range(12):
        engine.serve([*prompt(turn, turn + 20, turn + 40), 5])
        if turn == 4:
            until(engine, lambda: engine.metrics.total("storage_hangs_total", operation="write"))
        engine.controller.tick(0.05)
    engine.controller.evict(Tier.DEVICE)
    assert engine.serve([*prompt(11, 31, 51), 5]) == 3 * P, "the host holds what storage does not take"
    started = time.monotonic()
    assert not engine.controller.flush(300)
    assert time.monotonic() - started < 30, "a flush does not wait while calls of the store are suspended"
    assert free_blocks(engine) >= engine.arena.blocks // 2
    engine.check()
    before = store.inner.usage().objects
    store.release()
    until(engine, lambda: store.inner.usage().objects > before)
    until(engine, lambda: not engine.context.writes.is_suspended and engine.controller.flush(20))
    assert free_blocks(engine) == engine.arena.blocks
    engine.serve([*prompt(90, 91), 5])
    assert engine.controller.flush(20), "write-through goes on by itself"
    engine.check()


def test_a_write_that_hung_for_a_while_is_known_to_be_stored(store):
    engine = engine_on(store)
    store.hangs = {"set"}
    engine.serve([*prompt(1, 2, 3), 5])
    until(engine, lambda: engine.metrics.total("storage_hangs_total", operation="write"))
    store.release()
    until(engine, lambda: store.inner.usage().objects == 4 and not engine.context.in_flight.stranded)
    engine.controller.evict(Tier.DEVICE)
    engine.controller.evict(Tier.HOST)
    until(engine, lambda: engine.serve([*prompt(1, 2, 3), 5]) == 3 * P)
    engine.check()


def test_flush_and_close_have_their_deadlines(store):
    engine = engine_on(store)
    stored(engine, (1, 2))
    store.hangs = {"flush"}
    started = time.monotonic()
    assert not engine.controller.flush(0.3)
    assert not engine.controller.flush(0.3), "one that hangs is enough"
    assert store.calls.count("flush") == 2, "one of them before"
    store.hangs = {"get", "set", "exists", "flush", "close"}
    engine.serve([*prompt(3, 4), 5])
    assert not engine.controller.close(deadline=0.5)
    assert not engine.controller.close(), "twice says what once said"
    assert time.monotonic() - started < 30


def test_a_store_that_fails_again_and_again_is_left_alone(store):
    engine = engine_on(store)
    conversations = [(n, n + 20, n + 40) for n in range(8)]
    stored(engine, *conversations)
    store.gets = [Outcome.ERROR] * 1000
    for ids in conversations:
        engine.serve([*prompt(*ids), 5])
    asked = store.calls.count("get")
    engine.controller.evict(Tier.DEVICE)
    engine.controller.evict(Tier.HOST)
    admission = engine.controller.admit(engine.controller.lookup([*prompt(0, 20, 40), 5]))
    assert admission.wait().reason in (Reason.NONE, Reason.UNAVAILABLE)
    engine.controller.release(admission)
    assert store.calls.count("get") <= asked + 1, "a probe at most"
    store.gets = []
    until(engine, lambda: engine.serve([*prompt(0, 20, 40), 5]) == 3 * P)
