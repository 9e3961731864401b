"""A store out of reach: a miss with its reason, nothing is forgotten, and hits come back by themselves."""

import numpy as np
import pytest
from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import KV, Engine, P, evict_checked, prompt
from tests.faulty import Outage
from tiercache.controller import Status
from tiercache.core import Outcome, Reason, Tier
from tiercache.errors import StorageError
from tiercache.storage.registry import open_backend


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    return Outage(
        open_backend("memory://" if request.param == "memory" else f"file://{tmp_path}/store?capacity=16MiB")
    )


class FallsAway(Outage):
    """Its outage begins with the next get, where that is said: after the query was answered."""

    soon = False

    def get(self, items):
        if self.soon:
            self.begin()
        return super().get(items)


def served(engine, *ids):
    engine.serve([*prompt(*ids), 5])
    engine.settle()


def evict(engine):
    evict_checked(engine, Tier.DEVICE, Tier.HOST)


def land(engine):
    while engine.controller.tick(0.01):
        pass
    engine.check()


def known_to_be_stored(engine, tokens):
    """Tell which pages of a prompt, and whether the state at its end, the index counts as stored."""
    index = engine.context.index
    match = index.match(np.array(tokens, np.uint64), b"")
    node = index.node_at(match, len(tokens) // P)
    return index.locations(node, len(tokens) // P).pages[KV].stored.tolist(), node.state(
        Tier.STORAGE, 0
    ) != -1


@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "attention"])
def test_lookups_during_an_outage_say_so_and_hits_come_back(store, hybrid):
    engine = Engine(store, hybrid=hybrid)
    served(engine, 1, 2, 3)
    evict(engine)
    store.begin()
    gets = engine.metrics.total("storage_gets_total")
    before = engine.metrics.total("lookups_total", tier="storage", reason="absent")
    for turn in range(1, 3):
        admission = engine.controller.admit(engine.controller.lookup(prompt(1, 2, 3, 4)))
        poll = admission.wait()
        assert (poll.status, poll.depth) == (Status.READY, 0)
        engine.controller.release(admission)
        assert engine.metrics.value("lookups_total", "storage", "kv", "miss", "unavailable") == turn
    assert engine.metrics.total("lookups_total", tier="storage", reason="unavailable") == (4 if hybrid else 2)
    assert engine.metrics.total("lookups_total", tier="storage", reason="absent") == before
    assert engine.metrics.total("storage_gets_total") == gets, "nothing is evicted for a fetch that cannot be"
    store.end()
    assert engine.serve(prompt(1, 2, 3, 4)) == 3 * P
    assert engine.metrics.total("lookups_total", tier="storage", result="hit") == (2 if hybrid else 1)
    land(engine)


def test_a_fetch_that_meets_an_outage_is_tried_once_and_forgets_nothing():
    store = FallsAway(MemoryBackend())
    engine = Engine(store)
    served(engine, 1, 2, 3)
    served(engine, 1, 2)
    evict(engine)
    assert known_to_be_stored(engine, prompt(1, 2, 3)) == ([True] * 3, True)
    store.soon = True
    admission = engine.controller.admit(engine.controller.lookup(prompt(1, 2, 3, 4)))
    poll = admission.wait()
    assert (poll.status, poll.depth, poll.reason) == (Status.FAILED, 0, Reason.UNAVAILABLE)
    engine.controller.release(admission)
    # private: a round that fetches nothing leaves no trace
    assert admission._prefetch.rounds == 1, "the depths below would fail alike"
    assert engine.metrics.value("restore_failures_total", "unavailable") == 1
    assert engine.metrics.total("restore_failures_total") == 1
    for pool in ("kv", "mamba"):
        assert engine.metrics.value("lookups_total", "storage", pool, "miss", "unavailable") == 1
    assert known_to_be_stored(engine, prompt(1, 2, 3)) == ([True] * 3, True)
    engine.check()
    store.soon = False
    store.end()
    assert engine.serve(prompt(1, 2, 3, 4)) == 3 * P
    land(engine)


def test_of_a_read_that_is_answered_in_part_only_what_is_gone_is_forgotten():
    """One call's items have outcomes of their own: absent, and not known."""

    class HalfAway(MemoryBackend):
        half = False

        def exists(self, keys):
            return [True] * len(keys) if self.half else super().exists(keys)

        def get(self, items):
            outcomes = super().get(items)
            return [Outcome.UNAVAILABLE if self.half and o is Outcome.HIT else o for o in outcomes]

    store = HalfAway()
    engine = Engine(store)
    served(engine, 1, 2, 3)
    evict(engine)
    pages = [entry for entry in store.scan_all() if entry.key.pool is KV]
    [second] = [entry.key for entry in pages if entry.meta.depth == 2]
    store.delete([second])
    store.half = True
    assert engine.controller.admit(engine.controller.lookup(prompt(1, 2, 3, 4))).wait().depth == 0
    assert known_to_be_stored(engine, prompt(1, 2, 3)) == ([True, False, True], True)


def test_what_could_not_be_stored_is_stored_with_the_next_commit(store):
    engine = Engine(store)
    store.begin()
    engine.serve([*prompt(1, 2, 3), 5])
    land(engine)
    assert engine.metrics.total("storage_sets_total", outcome="unavailable") == 3 * 4, "offered again"
    assert engine.metrics.total("storage_sets_total", outcome="throttled") == 4
    assert known_to_be_stored(engine, prompt(1, 2, 3)) == ([False] * 3, False)
    with pytest.raises(StorageError, match="out of reach"):
        engine.controller.flush(20)
    store.end()
    served(engine, 1, 2, 3)
    evict(engine)
    assert engine.serve(prompt(1, 2, 3, 4)) == 3 * P
    land(engine)


def test_a_query_that_raises_costs_the_query():
    class Broken(MemoryBackend):
        broken = False

        def exists(self, keys):
            if self.broken:
                raise StorageError("this store's disk fails")
            return super().exists(keys)

    store = Broken()
    engine = Engine(store)
    served(engine, 1, 2, 3)
    evict(engine)
    other = Engine(store)
    store.broken = True
    assert other.serve(prompt(9, 2, 3, 4)) == 0
    assert other.metrics.value("lookups_total", "storage", "kv", "miss", "io_error") == 1
    store.broken = False
    assert engine.serve(prompt(1, 2, 3, 4)) == 3 * P
    land(engine)
    land(other)
