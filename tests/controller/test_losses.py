"""Storage that lacks, damages or does not take objects, and copies that fail: never a wrong restore."""

import time
from random import Random

import numpy as np
import pytest
from tiercache_backends.memory import MemoryBackend
from tiercache_kernels.reference import copy_segments

from tests.controller.harness import KV, MAMBA, PAGES, STATES, Engine, Flaky, P, evict_checked, prompt
from tests.controller.test_hung_store import Hanging
from tests.controller.test_interleavings import until
from tests.faults import FaultEnv
from tiercache.controller import ControllerOptions
from tiercache.core import Outcome, Tier, as_tokens
from tiercache.errors import ClosedError, InputError, SlotError, TransferError
from tiercache.metrics import HIT
from tiercache.storage.registry import open_backend
from tiercache.transfer import CopyEngine


@pytest.mark.parametrize("answer", [Outcome.ERROR, Outcome.THROTTLED])
def test_what_could_not_be_read_is_not_taken_for_absent(answer):
    store = Flaky(MemoryBackend(1 << 24))
    engine = Engine(store)
    engine.keep([*prompt(1, 2, 3), 5], Tier.DEVICE, Tier.HOST)
    store.gets = [answer] * 20
    assert engine.serve([*prompt(1, 2, 3), 5]) == 0
    engine.settle()
    store.gets = []
    assert engine.metrics.total("storage_sets_total", pool="kv") == 3, "nothing is written a second time"
    evict_checked(engine, Tier.DEVICE, Tier.HOST)
    assert engine.serve([*prompt(1, 2, 3), 5]) == 3 * P


def test_a_flush_says_what_is_not_in_storage(caplog):
    store = Flaky(MemoryBackend(1 << 24))
    engine = Engine(store)
    store.sets = [Outcome.THROTTLED] * 1000
    engine.serve([*prompt(1, 2, 3), 5])
    assert not engine.settle()
    assert "some objects" in caplog.text
    assert engine.metrics.total("write_through_skipped_total", reason="refused") == 4
    assert engine.settle(), "that was said"
    store.sets = []
    engine.keep([*prompt(1, 2, 3), 5], Tier.DEVICE, Tier.HOST)
    assert engine.serve([*prompt(1, 2, 3), 5]) == 3 * P
    full = Engine(Flaky(MemoryBackend(1 << 24)), blocks=2)
    full.serve(prompt(1, 2, 3))
    assert not full.settle(), "the host had no room"
    assert full.metrics.total("write_through_skipped_total", reason="host_full") > 0
    assert full.serve(prompt(1, 2, 3)) == 2 * P, "the device still has it"


def test_what_waits_for_storage_is_a_quarter_of_the_host_at_most():
    store = Flaky(MemoryBackend(1 << 24))
    store.sets = [Outcome.THROTTLED] * 1000
    engine = Engine(store, pages=60, states=40, blocks=32, options=ControllerOptions(write_retries=1))
    for turn in range(8):
        engine.serve([*prompt(turn, turn + 10), 5])
        engine.controller.tick()
        assert engine.context.in_flight.writing.held <= 8
    assert not engine.settle()
    engine.check()
    evict_checked(engine, Tier.DEVICE, Tier.HOST)
    assert engine.arena.available == engine.arena.blocks


def drop(store, pool, number):
    """Take the `number`-th object of a pool, by depth, out of the store."""
    entries = sorted((e for e in store.scan_all() if e.key.pool is pool), key=lambda e: e.meta.depth)
    assert store.delete([entries[number].key]) == [True]
    return entries[number].meta.depth * P


def test_after_a_restart_a_dropped_state_is_a_miss_with_its_reason(tmp_path):
    url = f"file://{tmp_path}/store?capacity=16MiB"
    engine = Engine(open_backend(url))
    engine.keep([*prompt(1, 2, 3), 5])
    engine.controller.close()
    store = open_backend(url)
    drop(store, MAMBA, 0)
    engine = Engine(store)
    assert engine.serve(prompt(1, 2, 3, 4)) == 0
    assert engine.metrics.value("lookups_total", "storage", "kv", "miss", "partial_pools") == 1
    assert engine.metrics.value("lookups_total", "storage", "mamba", "miss", "absent") == 1


def test_a_corrupt_object_is_never_served_and_is_stored_anew(tmp_path):
    env = FaultEnv()
    engine = Engine(open_backend(f"file://{tmp_path}/store?capacity=16MiB", env=env))
    engine.keep([*prompt(1, 2, 3), 5], Tier.DEVICE, Tier.HOST)
    env.spoil(times=1000)  # a store looks twice before it gives an object up
    assert engine.serve(prompt(1, 2, 3, 4)) == 0
    env.clear()
    assert engine.metrics.value("restore_failures_total", "checksum") == 1
    assert engine.metrics.total("storage_gets_total", outcome="corrupt") >= 1
    engine.settle()
    evict_checked(engine, Tier.DEVICE, Tier.HOST)
    assert engine.serve(prompt(1, 2, 3, 4)) == 3 * P
    engine.check()


# -- a transfer engine that refuses


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
    engine.keep(prompt(1, 2, 3))
    engine.controller.evict(Tier.DEVICE)
    assert engine.serve([*prompt(1, 2, 3), 1]) == 3 * P, "the next commit of the path takes it down"


def test_a_load_that_cannot_begin_is_computed_instead():
    made = []
    engine = Engine(open_backend("memory://?capacity=16MiB"), engine=refusing(Random(1), made))
    engine.keep([*prompt(1, 2, 3), 1])
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


# -- what the store evicts without telling the index


def believed(engine):
    """Pages and states that the index counts as stored."""
    pages = states = 0
    for node in engine.context.index.nodes():
        pages += int(np.count_nonzero(node.where[Tier.STORAGE] >= 0))
        states += node.state(Tier.STORAGE, 0) >= 0
    return pages, states


@pytest.mark.slow
def test_a_store_of_a_tenth_of_the_working_set():
    conversations = 60
    whole = conversations * (8 * PAGES.nbytes + STATES.nbytes)
    store = MemoryBackend(whole // 10)
    engine = Engine(store, pages=60, states=40, blocks=64)
    rng = np.random.default_rng(1)
    for _ in range(600):
        who = int(rng.integers(conversations))
        engine.serve([*prompt(*(8 * who + n for n in range(8))), 5], check=False)
    engine.settle()
    time.sleep(0.06)  # longer than the pause between two checks
    engine.controller.lookup([1])  # begins a check of what the last writes have driven out
    until(engine, lambda: not engine.context.in_flight.operations)
    pages, states = believed(engine)
    kinds = [entry.key.pool for entry in store.scan_all()]
    assert pages - kinds.count(KV) <= 0.05 * pages
    assert states - kinds.count(MAMBA) <= 0.05 * states
    assert kinds
    assert engine.metrics.total("forgotten_objects_total") > 0
    engine.check()


@pytest.mark.parametrize("checks", [512, pytest.param(0, id="control")])
def test_what_a_store_has_evicted_is_written_again(checks):
    """A page that the device alone has, because the store gave up its copy, is stored by its next commit."""
    store = MemoryBackend(1 << 20)
    engine = Engine(store, options=ControllerOptions(belief_checks=checks))
    tokens = [*prompt(1, 2, 3), 5]
    engine.keep(tokens)
    engine.controller.evict(Tier.HOST)
    store.delete([entry.key for entry in store.scan_all()])
    for turn in range(3):
        engine.keep([*prompt(50 + turn), 5])
        time.sleep(0.06)  # longer than the pause between two checks
    engine.keep(tokens)
    kept = sum(entry.key.pool is KV and entry.meta.depth <= 3 for entry in store.scan_all())
    assert (kept == 3 + 3) is bool(checks)
    engine.check()


def test_a_query_forgets_what_is_not_there():
    store = MemoryBackend(1 << 20)
    engine = Engine(store, options=ControllerOptions(belief_checks=0))
    engine.keep([*prompt(1, 2, 3), 5], Tier.DEVICE, Tier.HOST)
    assert believed(engine) == (3, 1)
    store.delete(
        [entry.key for entry in store.scan_all() if entry.key.pool is MAMBA or entry.meta.depth == 2]
    )
    gets = engine.metrics.total("storage_gets_total", outcome=HIT)
    assert engine.serve([*prompt(1, 2, 3), 5]) == 0
    assert engine.metrics.total("storage_gets_total", outcome=HIT) == gets, "nothing was fetched"
    assert engine.settle()
    assert engine.metrics.total("forgotten_objects_total") == 2
    assert len(list(store.scan_all())) == 4
    engine.check()


def test_an_edge_that_is_cut_while_storage_is_asked():
    """The answer is about the pages as they were asked for, which are two edges by then."""
    store = Hanging()
    engine = Engine(store)
    controller, other = engine.controller, prompt(1, 8)
    engine.keep([*prompt(1, 2, 3), 5])
    admission = controller.admit(controller.lookup([*other, 5]), states=2)
    engine.compute(admission, other, admission.wait().depth, 2 * P)
    store.hangs = {"exists"}
    store.calls.clear()
    end = time.monotonic() + 60
    while "exists" not in store.calls:
        assert time.monotonic() < end, "nothing was asked"
        # all of it is near, so that only what is believed is asked for
        controller.lookup([*prompt(1, 2, 3), 5])
        controller.tick(0.01)
    controller.commit(admission, other, {2 * P: engine.take_state(admission, other)})
    store.inner.delete(
        [entry.key for entry in store.scan_all() if entry.key.pool is KV and entry.meta.depth == 3]
    )
    store.release()
    while controller.tick(0.01):
        pass
    controller.release(admission)
    assert engine.settle()
    assert believed(engine) == (3, 2)
    assert engine.metrics.total("forgotten_objects_total") == 1
    engine.check()


def test_an_answer_about_another_path_says_nothing_of_this_one():
    engine = Engine(MemoryBackend(1 << 20), options=ControllerOptions(belief_checks=0))
    engine.keep([*prompt(1, 2, 3), 5])
    for other in (prompt(1, 8, 8, 5), prompt(9, 9)):
        admission = engine.controller.admit(engine.controller.lookup(other))
        assert not admission.wait().depth
        engine.controller.release(admission)
    assert engine.settle()
    assert believed(engine) == (3, 1)
