"""Policies in the controller: eviction under pressure, checkpoints, write-through."""

from __future__ import annotations

import threading

import pytest
from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import KV, MAMBA, Engine, P, prompt
from tests.examples import slow_after
from tests.integrity import check_controller
from tiercache.controller import ControllerOptions
from tiercache.errors import ConfigError, InputError
from tiercache.index import CheckpointRules
from tiercache.policy import Ending
from tiercache_lab.policies import MAIN, RIVALS


def tokens(start: int, pages: int) -> list[int]:
    return list(range(start, start + pages * P))


@pytest.mark.parametrize("policy", slow_after(2, ["lru", "hvd", *sorted({*MAIN, *RIVALS} - {"lru", "hvd"})]))
def test_every_policy_serves_right_bytes_under_pressure(policy: str):
    engine = Engine(pages=20, states=10, blocks=64, options=ControllerOptions(policy=policy, seed=3))
    for turn in range(60):
        engine.serve(tokens(1000 * (turn % 5), 2 + turn % 3), tokens(7000 + turn, 1))
        assert engine.controller.flush()
    check_controller(engine.controller)
    assert engine.metrics.value("tokens_total", "restored") > 0


def test_policies_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="seglen"):
        Engine(hybrid=False, options=ControllerOptions(policy="seglen"))
    with pytest.raises(ConfigError, match="no eviction policy"):
        Engine(options=ControllerOptions(policy="fifo"))
    with pytest.raises(ConfigError, match="no checkpoint policy"):
        ControllerOptions(checkpoints="best")
    with pytest.raises(ConfigError, match="checkpoints=7 is not possible"):
        ControllerOptions(checkpoints=7)  # type: ignore[arg-type]


def test_the_rules_say_where_a_prefill_is_cut():
    rules = CheckpointRules(branch=False, ghost=False, prompt_end=False, every=2 * P)
    engine = Engine(options=ControllerOptions(checkpoints=rules))
    admission = engine.controller.admit(engine.controller.lookup(tokens(1, 7)), states=3)
    admission.wait()
    assert admission.checkpoints == (2 * P, 4 * P, 6 * P)
    assert admission.keeps_end
    engine.controller.release(admission)


def test_how_a_request_ended_is_known_of_the_state_that_the_next_one_restores():
    engine = Engine()
    controller, told = engine.controller, []
    watched = engine.context.index.policy
    learn = watched.reused
    watched.reused = lambda reuse: (told.append(reuse.ending), learn(reuse))[1]  # type: ignore[method-assign]
    said = tokens(1, 4)
    for ending in (Ending.CALL, Ending.TURN, Ending.UNKNOWN):
        admission = controller.admit(controller.lookup([*said, 5]), states=1)
        admission.wait()
        controller.commit(admission, said, {len(said): admission.take_states()})
        controller.release(admission, ending=ending)
        said = [*said, *tokens(100 * len(said), 2)]
    admission = controller.admit(controller.lookup([*said[: -2 * P], 5]), states=1)
    admission.wait()
    assert told == [Ending.CALL, Ending.TURN, Ending.UNKNOWN]
    with pytest.raises(InputError, match="ending 7"):
        controller.release(admission, ending=7)  # type: ignore[arg-type]
    controller.release(admission, ending=Ending.LAST)


def test_an_ending_without_a_commit_changes_nothing():
    engine = Engine()
    engine.serve(tokens(1, 4))
    (node,) = [at for at in engine.context.index.nodes() if at.is_complete and not at.children]
    admission = engine.controller.admit(engine.controller.lookup([*tokens(1, 4), 5]))
    admission.wait()
    engine.controller.release(admission, ending=Ending.LAST)
    assert node.ending == Ending.UNKNOWN


# -- values that the controller gives to its store: with each write, and again when they have changed


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
        engine.keep([*prompt(100 + turn), 5])


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
    engine.keep([*prompt(1, 2, 3), 5])
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
        engine.keep([*tokens, 5])
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
    engine.keep([*prompt(100), 5])
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
