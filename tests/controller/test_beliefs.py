"""The index's record of what the store holds, while the store evicts without telling it.

An object that the index counts as stored is in the store, or the index soon finds out that it is not.
"""

import time

import numpy as np
import pytest
from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import KV, MAMBA, PAGES, STATES, Engine, P, prompt
from tests.controller.test_hung_store import Hanging
from tests.controller.test_interleavings import until
from tiercache.controller import ControllerOptions
from tiercache.core import Tier
from tiercache.metrics import HIT


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
    """A page that stays on the device, while the store gave its copy up, is held nowhere else; the next
    commit of it mends that.
    """
    store = MemoryBackend(1 << 20)
    engine = Engine(store, options=ControllerOptions(belief_checks=checks))
    tokens = [*prompt(1, 2, 3), 5]
    engine.serve(tokens)
    assert engine.settle()
    engine.controller.evict(Tier.HOST)
    store.delete([entry.key for entry in store.scan_all()])
    for turn in range(3):
        engine.serve([*prompt(50 + turn), 5])
        engine.settle()
        time.sleep(0.06)  # longer than the pause between two checks
    engine.serve(tokens)
    engine.settle()
    kept = sum(entry.key.pool is KV and entry.meta.depth <= 3 for entry in store.scan_all())
    assert (kept == 3 + 3) is bool(checks)
    engine.check()


def test_a_query_forgets_what_is_not_there():
    store = MemoryBackend(1 << 20)
    engine = Engine(store, options=ControllerOptions(belief_checks=0))
    engine.serve([*prompt(1, 2, 3), 5])
    assert engine.settle()
    engine.controller.evict(Tier.DEVICE)
    engine.controller.evict(Tier.HOST)
    assert believed(engine) == (3, 1)
    store.delete(
        [entry.key for entry in store.scan_all() if entry.key.pool is MAMBA or entry.meta.depth == 2]
    )
    gets = engine.metrics.total("storage_gets_total", outcome=HIT)
    assert engine.serve([*prompt(1, 2, 3), 5]) == 0
    assert engine.metrics.total("storage_gets_total", outcome=HIT) == gets, (
        "nothing was fetched against the store's own answer"
    )
    assert engine.settle()
    assert engine.metrics.total("forgotten_objects_total") == 2
    assert len(list(store.scan_all())) == 4
    engine.check()


def test_an_edge_that_is_cut_while_storage_is_asked():
    """The answer is about the pages as they were asked for, which are two edges by then."""
    store = Hanging()
    engine = Engine(store)
    controller, other = engine.controller, prompt(1, 8)
    engine.serve([*prompt(1, 2, 3), 5])
    assert engine.settle()
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
    engine.serve([*prompt(1, 2, 3), 5])
    assert engine.settle()
    for other in (prompt(1, 8, 8, 5), prompt(9, 9)):
        admission = engine.controller.admit(engine.controller.lookup(other))
        assert not admission.wait().depth
        engine.controller.release(admission)
    assert engine.settle()
    assert believed(engine) == (3, 1)
