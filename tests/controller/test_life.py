"""The life of a request through every tier, on real pools, threads and stores."""

import os
import threading
from dataclasses import replace

import numpy as np
import pytest
from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import IDENTITY, KV, MAMBA, Engine, Fence, P, evict_checked, prompt
from tests.faults import FaultEnv
from tiercache.controller import Poll, Status
from tiercache.core import PoolName, Reason, Tier
from tiercache.errors import ClosedError, InputError, PoolFullError
from tiercache.keys import Shard
from tiercache.storage.registry import open_backend


@pytest.mark.parametrize("pools", [(KV, MAMBA), (KV,), (MAMBA,)], ids=["hybrid", "attention", "states"])
def test_every_tier_gives_back_what_was_computed(store, pools):
    engine = Engine(store, hybrid=MAMBA in pools, kv=KV in pools)
    counts = {KV: 3, MAMBA: 1}  # three pages, and the state at their end
    first, again = [*prompt(1, 2, 3), 7], [*prompt(1, 2, 3), 7, 8]
    assert engine.serve(first) == 0
    engine.settle()
    for tiers, source in (([], "device"), ([Tier.DEVICE], "host"), ([Tier.DEVICE, Tier.HOST], "storage")):
        evict_checked(engine, *tiers)
        assert engine.controller.preview(again).restored == 3 * P
        assert engine.controller.lookup(again).near_tokens == (0 if source == "storage" else 3 * P)
        assert engine.serve(again) == 3 * P
        for pool in pools:
            restored = engine.metrics.total("restored_objects_total", tier=source, pool=str(pool))
            assert restored == counts[pool]
        engine.settle()
        engine.check()
    assert engine.metrics.total("lookups_total", result="hit", tier="storage") == len(pools)
    assert engine.controller.close()


def test_another_identity_shard_or_adapter_never_hits():
    store = MemoryBackend()
    engine = Engine(store)
    engine.keep(prompt(1, 2, 3))
    for change in ({"salt": b"x"}, {"kv_dtype": "bfloat16"}, {"revision": "2"}):
        assert Engine(store, identity=replace(IDENTITY, **change)).serve(prompt(1, 2, 3)) == 0
    assert Engine(store, shard=Shard(1, 2)).serve(prompt(1, 2, 3)) == 0
    assert engine.serve(prompt(1, 2, 3), extra=b"adapter") == 0
    assert engine.serve(prompt(1, 2, 3), extra=b"adapter") == 2 * P


def test_each_pool_has_its_own_shard(store):
    """Two ranks hold whole KV, and each its part of the states."""
    first, second = (Engine(store, shard={MAMBA: Shard(rank, 2)}) for rank in range(2))
    tokens = prompt(1, 2, 3)
    for engine in (first, second):
        engine.keep(tokens)
        assert engine.serve([*tokens, 1]) == 3 * P
    sets = second.metrics
    assert (
        sets.value("storage_sets_total", "kv", "hit"),
        sets.value("storage_sets_total", "kv", "stored"),
    ) == (3, 0)
    assert sets.value("storage_sets_total", "mamba", "stored") > 0
    with pytest.raises(InputError, match="swa, which is no pool here"):
        Engine(store, shard={PoolName.SWA: Shard(0, 2)})


def test_start_freezes_the_depth_and_late_arrivals_serve_the_next(tmp_path):
    env = FaultEnv()
    engine = Engine(open_backend(f"file://{tmp_path}/store?capacity=16MiB", env=env))
    engine.keep([*prompt(1, 2, 3), 5], Tier.DEVICE, Tier.HOST)
    hang = env.hang("preadv", times=1000)
    admission = engine.controller.admit(engine.controller.lookup(prompt(1, 2, 3, 4)), states=1)
    while not hang.reached.is_set():
        admission.poll()
    assert admission.start() == Poll(Status.READY, 0, Reason.NONE), "who does not want to wait has not failed"
    assert engine.metrics.total("restore_failures_total") == 0
    assert engine.metrics.value("lookups_total", "storage", "kv", "miss", "timeout") == 1
    engine.controller.release(admission)
    hang.release()
    engine.settle()
    engine.check()
    assert engine.serve(prompt(1, 2, 3, 4)) == 3 * P
    assert engine.metrics.value("restored_objects_total", "host", "kv") == 3


def test_the_engine_thread_makes_no_storage_call(tmp_path):
    names = set()

    class Watching(FaultEnv):
        def perform(self, name, call, arguments):
            names.add(threading.current_thread().name)
            return super().perform(name, call, arguments)

    engine = Engine(open_backend(f"file://{tmp_path}/store?capacity=16MiB", env=Watching()))
    names.clear()
    for tiers in ([], [Tier.DEVICE], [Tier.DEVICE, Tier.HOST]):
        evict_checked(engine, *tiers)
        engine.serve(prompt(1, 2, 3, 4))
        while engine.context.in_flight.operations:
            engine.controller.tick()
    assert names
    assert all(name.startswith(("tiercache-read", "tiercache-write", "tiercache-query")) for name in names)


def test_requests_that_overlap_share_loads_and_fetches_and_drop_duplicates():
    engine = Engine(MemoryBackend(), pages=32, states=24)
    controller = engine.controller
    engine.keep([*prompt(1, 2, 3), 1], Tier.DEVICE, Tier.HOST)
    tokens = np.array(prompt(1, 2, 3, 4, 5))
    admissions = [controller.admit(controller.lookup(tokens), states=2) for _ in range(3)]
    for admission in admissions:
        assert engine.restore(admission, tokens) == 3 * P
    assert len({tuple(a.pages[KV][:3].tolist()) for a in admissions}) == 1
    tables = set()
    for admission in admissions:
        engine.compute(admission, tokens, 3 * P, 5 * P)
        states = {5 * P: engine.take_state(admission, tokens)}
        tables.add(tuple(controller.commit(admission, tokens, states)[KV].tolist()))
    assert len(tables) == 1
    for admission in admissions:
        controller.release(admission)
    engine.settle()
    engine.check()
    assert engine.metrics.value("storage_gets_total", "kv", "hit") == 3
    assert engine.metrics.value("storage_sets_total", "kv", "stored") == 5


def test_a_duplicate_slot_is_free_only_behind_the_fence():
    engine = Engine(MemoryBackend())
    controller, fence, tokens = engine.controller, Fence(), np.array(prompt(1, 2))
    first, second = (controller.admit(controller.lookup(tokens), states=1) for _ in range(2))
    for admission in (first, second):
        engine.restore(admission, tokens)
        engine.compute(admission, tokens, 0, 2 * P)
    controller.commit(first, tokens)
    available = engine.pools[KV].available
    controller.commit(second, tokens, fence=fence)
    controller.tick()
    assert engine.pools[KV].available == available
    engine.check()
    fence.open()
    controller.tick()
    assert engine.pools[KV].available == available + 2
    controller.release(first)
    controller.release(second)
    engine.check()


def test_admit_gets_everything_or_changes_nothing():
    engine = Engine(MemoryBackend(), pages=8, states=8)
    controller = engine.controller
    engine.serve(prompt(1, 2, 3))
    held = controller.admit(controller.lookup(prompt(1, 2, 3)), tokens=5 * P, states=1)
    before = {name: pool.available for name, pool in engine.pools.items()}
    lookup = controller.lookup(prompt(4, 5, 6))
    for need in ({"tokens": 6 * P}, {"states": 8}):
        with pytest.raises(PoolFullError):
            controller.admit(lookup, **need)
        assert {name: pool.available for name, pool in engine.pools.items()} == before
        engine.check()
    controller.release(held)
    assert engine.serve(prompt(1, 2, 3)) == 2 * P
    assert engine.serve(prompt(4, 5, 6)) == 0


def test_many_states_on_a_path_do_not_block_the_state_pool():
    """A request pins its pages and its own state, not the states of all its ancestors."""
    engine = Engine(MemoryBackend(), pages=32, states=7, blocks=200)
    for turn in range(1, 12):
        assert engine.serve(prompt(*range(turn), 0)) == max(0, turn - 1) * P
        engine.settle()
    engine.check()


def test_without_states_a_request_holds_only_the_pages_that_it_matched():
    """The rest of the edge that its prompt enters can go while the request runs."""
    engine = Engine(MemoryBackend(), hybrid=False, pages=6)
    engine.keep(prompt(1, 2, 3, 4, 5, 6))
    tokens = np.array(prompt(1, 9, 8, 7, 6))
    admission = engine.controller.admit(engine.controller.lookup(tokens))
    assert engine.restore(admission, tokens) == P
    engine.controller.release(admission)
    engine.check()


def test_a_forked_child_is_turned_away_and_harms_nobody(store):
    """A child without the controller's threads would give away slots and blocks that its parent uses."""
    engine = Engine(store)
    controller, tokens = engine.controller, [*prompt(1, 2, 3), 7]
    engine.serve(tokens)
    admission = controller.admit(controller.lookup(tokens))
    child = os.fork()
    if not child:
        status = 1
        try:
            refused = 0
            calls = (
                lambda: controller.lookup(tokens), admission.poll, admission.wait, controller.tick,
                controller.flush,
            )  # fmt: skip
            for call in (*calls, lambda: controller.evict(Tier.HOST), lambda: controller.release(admission)):
                try:
                    call()
                except ClosedError as error:
                    refused += "make a new controller here" in str(error)
            status = 0 if refused == len(calls) + 2 and not controller.close() else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert engine.restore(admission, tokens) == 3 * P
    controller.release(admission)
    assert engine.settle()
    evict_checked(engine, Tier.DEVICE, Tier.HOST)
    assert engine.serve(tokens) == 3 * P
    assert controller.close()
