"""The life of requests of a model that keeps states alone: no pool has pages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.controller.harness import IDENTITY, MAMBA, Engine, P, evict_checked, prompt
from tiercache.controller import WRITE_BACK, ControllerOptions, Status
from tiercache.core import Tier
from tiercache.errors import SlotError
from tiercache.index import CheckpointRules
from tiercache.policy import CheckpointKind
from tiercache.storage.registry import open_backend


def engine_of(storage=None, **options):
    more = {name: options.pop(name) for name in ("states", "blocks", "identity") if name in options}
    chosen = ControllerOptions(restore_deadline=10.0, **options)
    return Engine(storage, kv=False, options=chosen, **{"states": 12, **more})


@pytest.mark.parametrize("write", ["write_through", WRITE_BACK])
def test_a_restart_keeps_the_cache(tmp_path, write):
    url = f"file://{tmp_path}/store?capacity=16MiB"
    engine = engine_of(open_backend(url), write=write)
    engine.serve([*prompt(1, 2, 3), 7])
    engine.keep([*prompt(1, 2, 8), 7])
    engine = engine.restart(url)
    assert engine.serve([*prompt(1, 2, 3), 9]) == 3 * P
    assert engine.serve([*prompt(1, 2, 8), 9]) == 3 * P
    # The second prompt left a state where it left the first.
    assert engine.serve([*prompt(1, 2, 5), 9]) == 2 * P
    assert engine.controller.hint([*prompt(1, 2, 5), 9], 5.0) == 3 * P
    assert engine.controller.close()


def test_a_state_that_storage_lost_gives_way_to_the_one_before(store):
    engine = engine_of(store)
    engine.serve(prompt(1, 2))
    engine.keep(prompt(1, 2, 3, 4), Tier.DEVICE, Tier.HOST)
    deepest = max(store.scan_all(), key=lambda entry: entry.meta.depth)
    assert (deepest.meta.depth, deepest.meta.parent, deepest.key.pool) == (4, None, MAMBA)
    store.delete([deepest.key])
    assert engine.serve([*prompt(1, 2, 3, 4), 5]) == 3 * P
    engine.check()


def test_the_paths_of_evicted_states_are_remembered():
    engine = engine_of(checkpoints=CheckpointRules(request_end=False))
    engine.keep([*prompt(1, 2, 3), 7], Tier.DEVICE, Tier.HOST)
    assert not list(engine.context.index.nodes()), "no state, no path"
    admission = engine.controller.admit(engine.controller.lookup([*prompt(1, 2, 4, 5), 7]), states=2)
    assert admission.start().status is Status.READY
    kinds = {depth: admission.plan.depths[depth // P] for depth in admission.checkpoints}
    assert kinds == {2 * P: CheckpointKind.GHOST, 4 * P: CheckpointKind.PROMPT}
    engine.controller.release(admission)
    engine.check()


def test_a_commit_without_a_state_leaves_nothing_behind():
    engine = engine_of()
    tokens = prompt(1, 2, 3)
    admission = engine.controller.admit(engine.controller.lookup(tokens), states=1)
    admission.start()
    assert engine.controller.commit(admission, tokens[: 2 * P]) == {}
    assert engine.controller.preview([*tokens, 1]).restored == 0
    slots = engine.take_state(admission, tokens)
    engine.controller.commit(admission, tokens, {3 * P: slots})
    engine.controller.release(admission)
    engine.check()
    assert engine.controller.preview([*tokens, 1]).restored == 3 * P
    other = engine.controller.admit(engine.controller.lookup(prompt(5, 6)), states=1)
    other.start()
    engine.controller.commit(other, prompt(5, 6))
    engine.controller.release(other)
    assert [node.end for node in engine.context.index.nodes() if node.pages] == [3]


def test_tokens_beyond_the_admission_are_refused_although_pages_take_no_slots():
    engine = engine_of()
    admission = engine.controller.admit(engine.controller.lookup(prompt(1)), states=1)
    admission.start()
    with pytest.raises(SlotError, match="more than the 1 pages"):
        engine.controller.commit(admission, prompt(1, 2))
    admission.extend(2 * P)
    engine.controller.commit(admission, prompt(1, 2))
    engine.controller.release(admission)
    engine.check()


@pytest.mark.slow
def test_a_full_store_keeps_the_states_of_both_kinds_of_tenants_restorable(tmp_path):
    store = open_backend(f"file://{tmp_path}/store?capacity=4MiB")
    shared = {"states": 16, "blocks": 96}
    alone = engine_of(store, **shared, identity=replace(IDENTITY, tenant="alone"))
    hybrid = Engine(store, pages=40, **shared, identity=replace(IDENTITY, tenant="hybrid"))
    for turn in range(80):
        for engine in (alone, hybrid):
            engine.serve([*prompt(turn, 3, 4), 7], answer=[7] * (P - 1))
            engine.settle()
    usage = store.usage()
    assert usage.used_bytes > usage.capacity_bytes * 3 // 4
    assert int(usage.details["restorable_bytes"]) == usage.payload_bytes
    assert (int(usage.details["dead_bytes"]), int(usage.details["orphans"])) == (0, 0)
    states = [entry for entry in store.scan_all() if entry.key.pool is MAMBA]
    without_pages = sum(entry.meta.parent is None for entry in states)
    assert min(without_pages, len(states) - without_pages) > len(states) // 4, "neither pushes out the other"
    for engine in (alone, hybrid):
        evict_checked(engine, Tier.DEVICE, Tier.HOST)
        assert engine.serve([*prompt(79, 3, 4), 7]) == 3 * P


def test_a_full_store_of_states_alone_is_restorable_as_a_whole(tmp_path):
    url = f"file://{tmp_path}/store?capacity=4MiB"
    engine = engine_of(open_backend(url))
    for turn in range(240):
        engine.serve([*prompt(turn, 3, 4), 7], answer=prompt(turn))
        if turn % 10 == 0:
            engine.settle()
    engine.settle()
    for _ in range(2):  # the second time after the store was opened again
        usage = engine.context.storage.backend.usage()
        assert usage.used_bytes > usage.capacity_bytes // 2
        assert int(usage.details["restorable_bytes"]) == usage.payload_bytes
        assert (int(usage.details["dead_bytes"]), int(usage.details["orphans"])) == (0, 0)
        engine = engine.restart(url, states=12)


@pytest.mark.slow
def test_what_is_worth_most_stays_in_a_full_store(tmp_path):
    """A state that is hit again and again outlives those that nobody continues."""
    engine = engine_of(open_backend(f"file://{tmp_path}/store?capacity=4MiB"), policy="hvd")
    for turn in range(120):
        engine.serve([*prompt(1, 2), *prompt(100 + turn), 7])
        evict_checked(engine, Tier.DEVICE)
        if turn % 4 == 3:
            engine.settle()
            evict_checked(engine, Tier.DEVICE, Tier.HOST)
    engine.settle()
    evict_checked(engine, Tier.DEVICE, Tier.HOST)
    assert engine.serve([*prompt(1, 2), *prompt(999), 7]) == 2 * P
