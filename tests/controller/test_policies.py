"""Policies in the controller: eviction under pressure, checkpoints, write-through."""

from __future__ import annotations

import pytest

from tests.controller.harness import Engine, P
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
