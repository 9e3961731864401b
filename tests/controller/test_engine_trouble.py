"""A transfer engine that refuses: its call raises after the index has already been told of the copy."""

from __future__ import annotations

from random import Random

import pytest
from tiercache_kernels.reference import copy_segments

from tests.controller.harness import KV, Engine, P, prompt
from tiercache.core import Tier, as_tokens
from tiercache.errors import ClosedError, InputError, SlotError, TransferError
from tiercache.storage.registry import open_backend
from tiercache.transfer import CopyEngine


class Refusing(CopyEngine):
    """Raises at the call, or in the middle of a copy, as often as `dice` say."""

    dice = Random(0)
    share = 0.0

    def store(self, units, *, after=()):
        self.perhaps_refuse()
        return super().store(units, after=after)

    def load(self, units, *, after=()):
        self.perhaps_refuse()
        return super().load(units, after=after)

    def perhaps_refuse(self):
        if self.dice.random() < self.share:
            raise self.dice.choice([SlotError, ClosedError, TransferError, RuntimeError, MemoryError])(
                "not this time"
            )


def refusing(dice, made):
    def copier(*columns):
        if dice.random() < made[0].share / 4:
            raise OSError("a bad copy")
        copy_segments(*columns)

    def make(devices, hosts):
        engine = Refusing(devices, hosts, copier=copier)
        engine.dice = dice
        made.append(engine)
        return engine

    return make


@pytest.mark.parametrize("error", [SlotError, RuntimeError])
def test_a_store_that_cannot_begin_leaves_nothing_behind(error):
    made = []
    engine = Engine(open_backend("memory://?capacity=16MiB"), engine=refusing(Random(1), made))
    made[0].share = 1.0
    engine.serve(prompt(1, 2, 3))
    engine.settle()
    engine.check()
    assert engine.arena.available == engine.arena.blocks, "no block is held for a copy that never was"
    assert engine.metrics.total("write_through_skipped_total", reason="transfer_failed") > 0
    made[0].share = 0.0
    engine.serve(prompt(1, 2, 3))
    engine.settle()
    engine.controller.evict(Tier.DEVICE)
    assert engine.serve([*prompt(1, 2, 3), 1]) == 3 * P, "the next commit of the path takes it down"


def test_a_load_that_cannot_begin_is_computed_instead():
    made = []
    engine = Engine(open_backend("memory://?capacity=16MiB"), engine=refusing(Random(1), made))
    engine.serve([*prompt(1, 2, 3), 1])
    engine.settle()
    engine.controller.evict(Tier.DEVICE)
    made[0].share = 1.0
    assert engine.serve([*prompt(1, 2, 3), 1]) == 0
    assert engine.metrics.value("restore_failures_total", "io_error") == 1
    made[0].share = 0.0
    engine.settle()
    engine.check()
    assert engine.serve([*prompt(1, 2, 3), 1]) == 3 * P


def test_a_layer_that_no_pool_has():
    engine = Engine()
    tokens = as_tokens(prompt(1, 2))
    admission = engine.controller.admit(engine.controller.lookup(tokens), states=1)
    admission.wait()
    for layer in (-1, 4, 99):
        with pytest.raises(InputError, match="layers 0 to 3"):
            admission.wait_layer(layer)
    admission.wait_layer(3)
    engine.controller.release(admission)
    assert engine.pools[KV].available == engine.pools[KV].capacity


def test_a_second_close_says_what_the_first_said():
    made = []
    engine = Engine(engine=refusing(Random(1), made))
    engine.context.in_flight.begin(Stuck())
    assert not engine.controller.close(0.1)
    assert not engine.controller.close()


class Stuck:
    kind, done, pins = "fetch", False, ()
