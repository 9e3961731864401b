"""Write-back: units go to storage when the host is about to evict them, and if a hit is likely enough."""

from __future__ import annotations

import pytest
from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import KV, Engine, P, prompt
from tiercache.controller import WRITE_BACK, ControllerOptions
from tiercache.core import Tier
from tiercache.policy import Lru
from tiercache.storage.registry import open_backend

BLOCKS = 120
"""A session of three pages and a state takes some ten of them."""


class Never(Lru):
    """LRU that expects no hit."""

    def chance(self, units, ticks):
        return super().chance(units, ticks) * 0.0


def engine_over(store, *, chance=0.0, policy=None, hybrid=True, **extra):
    options = ControllerOptions(restore_deadline=10.0, write=WRITE_BACK, write_chance=chance)
    engine = Engine(store, blocks=BLOCKS, hybrid=hybrid, options=options, **extra)
    if policy is not None:
        engine.context.index.appraiser._policy = policy  # private: the harness makes its own controller
    return engine


def serve(engine, *names):
    """Serve these sessions, and wait until their copies to the host have landed."""
    for n in names:
        engine.serve([*prompt(n, n + 1, n + 2), 5])
        land(engine)


def land(engine):
    while engine.controller.tick(0.01):
        pass


@pytest.mark.parametrize("hybrid", [True, False])
def test_nothing_is_written_before_the_host_is_nearly_full(hybrid):
    store = MemoryBackend()
    engine = engine_over(store, hybrid=hybrid)
    serve(engine, 10)
    assert not list(store.scan_all())
    for n in range(20, 520, 10):
        serve(engine, n)
    assert list(store.scan_all())
    engine.check()


@pytest.mark.parametrize("hybrid", [True, False])
def test_what_the_host_evicted_is_restored_from_storage(hybrid):
    store = MemoryBackend()
    engine = engine_over(store, hybrid=hybrid)
    names = range(10, 510, 10)
    for n in names:
        serve(engine, n)
    engine.controller.evict(Tier.DEVICE)
    held = engine.arena.blocks - engine.arena.available
    assert held <= BLOCKS < len(names) * 3, "most sessions are not on the host any more"
    restored = [engine.serve([*prompt(n, n + 1, n + 2), 5, 6]) for n in names]
    assert restored.count(3 * P) == len(names), "none was lost, and the harness compares every byte"
    engine.check()


def test_a_shared_prefix_is_written_with_what_follows_it():
    store = MemoryBackend()
    engine = engine_over(store)
    for n in range(20, 320, 10):
        engine.serve([*prompt(1, 2, n), 5])
        land(engine)
    entries = {entry.key.page_key: entry.meta for entry in store.scan_all() if entry.key.pool is KV}
    assert entries
    assert all(meta.depth == 1 or meta.parent in entries for meta in entries.values())
    engine.check()


def test_flush_and_close_write_all_that_the_host_has(tmp_path):
    url = f"file://{tmp_path}/store?capacity=64MiB"
    engine = engine_over(open_backend(url), chance=1.0, policy=Never())
    serve(engine, 10, 20)
    assert engine.metrics.total("storage_sets_total") == 0
    assert engine.settle()
    assert engine.metrics.total("storage_sets_total") > 0
    serve(engine, 30)
    assert engine.controller.close()
    other = engine_over(open_backend(url))
    for n in (10, 20, 30):
        assert other.serve([*prompt(n, n + 1, n + 2), 5, 6]) == 3 * P


def test_what_is_not_likely_to_be_hit_is_not_written():
    store = MemoryBackend()
    engine = engine_over(store, chance=0.01, policy=Never())
    for n in range(10, 310, 10):
        serve(engine, n)
    assert not list(store.scan_all())
    engine.check()


def test_a_sequence_that_the_host_cannot_hold_is_written_through():
    store = MemoryBackend()
    engine = Engine(
        store,
        pages=64,
        blocks=8,
        hybrid=False,
        options=ControllerOptions(restore_deadline=10.0, write=WRITE_BACK, in_flight_share=1.0),
    )
    names = range(1, 31)
    engine.serve([*prompt(*names), 5])
    land(engine)
    assert len(list(store.scan_all())) == len(names)
    engine.check()


def test_without_storage_nothing_changes():
    engine = engine_over(None)
    for n in range(10, 310, 10):
        serve(engine, n)
    assert engine.serve([*prompt(300, 301, 302), 5, 6]) == 3 * P
    assert engine.settle()
    engine.check()
