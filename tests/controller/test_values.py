"""Values that the controller gives to its store: with each write, and again when they have changed."""

import threading

from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import KV, MAMBA, Engine, prompt


class Listening(MemoryBackend):
    """A store that keeps what it is advised, and can be made to fail or hang there."""

    def __init__(self, capacity=1 << 22):
        super().__init__(capacity)
        self.advice = []
        self.writes = []
        self.breaks = False
        self.go_on = threading.Event()
        self.go_on.set()

    def set(self, items):
        self.writes += [(item.key.pool, item.meta.value, item.meta.worker) for item in items]
        return super().set(items)

    def advise(self, keys, values, worker=0):
        self.advice += [(key.pool, value, worker) for key, value in zip(keys, values, strict=True)]
        assert self.go_on.wait(30)
        if self.breaks:
            raise RuntimeError("a store that breaks its contract")
        super().advise(keys, values, worker)


def busy(engine, turns=20):
    for turn in range(turns):
        engine.serve([*prompt(100 + turn), 5])
        assert engine.settle()


def states_of(store):
    """Values of the states of the deepest session, by depth in pages."""
    return {
        entry.meta.depth: entry.meta.value
        for entry in store.scan_all()
        if entry.key.pool is MAMBA and entry.meta.depth >= 3
    }


def test_every_write_has_a_value():
    store = Listening()
    engine = Engine(store)
    engine.serve([*prompt(1, 2, 3), 5])
    assert engine.settle()
    assert {pool for pool, _, _ in store.writes} == {KV, MAMBA}
    assert all(value > 0 for _, value, _ in store.writes)
    [worker] = {worker for _, _, worker in store.writes}
    other = Listening()
    Engine(other).serve([*prompt(1, 2, 3), 5])
    assert worker not in {worker for _, _, worker in other.writes}
    engine.check()


def test_a_superseded_state_is_advised_to_be_worth_less():
    store = Listening()
    engine = Engine(store)
    tokens = prompt(1, 2, 3)
    engine.serve([*tokens, 5])
    busy(engine)
    for n in range(4, 8):  # the session goes on, again and again
        tokens = [*tokens, *prompt(n)]
        engine.serve([*tokens, 5])
        assert engine.settle()
        busy(engine, 5)
    after = states_of(store)
    assert store.advice
    assert after[3] < after[max(after)]
    engine.check()


def test_a_store_that_cannot_be_advised_serves_on():
    store = Listening()
    store.breaks = True
    engine = Engine(store)
    busy(engine)
    assert store.advice
    store.breaks = False
    engine.serve([*prompt(100), 5])
    assert engine.settle()
    engine.check()


def test_one_report_is_under_way_at_a_time_and_nobody_waits_for_it():
    store = Listening()
    store.go_on.clear()
    engine = Engine(store)
    busy(engine)
    told = len(store.advice)
    busy(engine)
    assert len(store.advice) == told > 0
    store.go_on.set()
    busy(engine)
    assert len(store.advice) > told
    engine.check()
