"""Write-back: units go to storage when the host is about to evict them, and if a hit is likely enough."""

from __future__ import annotations

import time

import pytest
from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import KV, Engine, Flaky, P, evict_checked, prompt
from tests.controller.test_hung_store import Hanging
from tests.controller.test_outage import land
from tests.controller.test_prefetch import Clock
from tests.faulty import Outage
from tiercache.controller import WRITE_BACK, ControllerOptions
from tiercache.core import Tier
from tiercache.errors import StorageError
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


def test_a_flush_writes_each_page_whatever_storage_has_and_lacks_of_its_edge():
    engine = engine_over(MemoryBackend(), hybrid=False)
    engine.keep([*prompt(1, 2), 5], Tier.HOST)  # as many pages as follow
    engine.controller.pin(prompt(1, 2, 3, 4, 5), 3600.0)  # the last of which no tier has
    engine.keep([*prompt(1, 2, 3, 4), 5])
    assert engine.metrics.total("storage_sets_total") == 4


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


# -- what `flush` and `close` say under faults is right, and nothing is lost that they stored


NAMES = range(10, 80, 10)
PAGES = 4


def session(n, pages=PAGES):
    return [*prompt(*range(n, n + pages)), 5]


def serve_all(engine, pages=PAGES):
    for n in NAMES:
        engine.serve(session(n, pages))
        land(engine)


def restored(engine, names=NAMES):
    """How many sessions are restored as a whole; the harness compares every byte."""
    return [engine.serve([*session(n), 6]) for n in names].count(PAGES * P)


def kept_back(store, *, hybrid=True, storage_deadline=10.0):
    """An engine that writes nothing before a flush."""
    options = ControllerOptions(
        write=WRITE_BACK, write_chance=1.0, storage_deadline=storage_deadline, write_retries=1
    )
    engine = Engine(store, pages=24, blocks=BLOCKS, hybrid=hybrid, options=options)
    engine.context.index.appraiser._policy = Never()  # private: the harness makes its own controller
    return engine


def flush(engine):
    """Flush as soon as calls of the store go on."""
    end = time.monotonic() + 60
    while not engine.controller.flush(20):
        engine.controller.tick(0.1)
        assert time.monotonic() < end
    engine.check()


def unwritten(store, names=NAMES):
    return len(names) * (PAGES + 1) - store.usage().objects


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("pages", range(4, 9))
def test_a_flush_writes_whole_units_though_writes_have_little_room(pages, hybrid):
    store = MemoryBackend()
    engine = kept_back(store, hybrid=hybrid)
    serve_all(engine, pages)
    assert store.usage().objects == 0
    assert engine.settle()
    assert store.usage().objects == len(NAMES) * (pages + hybrid)
    engine.check()


def test_a_flush_in_an_outage_says_what_is_not_stored_and_writes_it_afterwards():
    store = Outage(MemoryBackend())
    engine = kept_back(store)
    serve_all(engine)
    store.begin()
    for _ in range(2):
        with pytest.raises(StorageError, match="out of reach"):
            engine.controller.flush()
        assert unwritten(store.inner)
    store.end()
    flush(engine)
    assert not unwritten(store.inner)
    evict_checked(engine, Tier.DEVICE, Tier.HOST)
    assert restored(engine) == len(NAMES)


class HangsLater(Hanging):
    """A store whose sets hang after some of them."""

    at = 0

    def _pass(self, verb):
        if verb == "set" and self.calls.count("set") == self.at:
            self.hangs.add("set")
        super()._pass(verb)


@pytest.fixture
def hanging():
    store = HangsLater()
    yield store
    store.release()


def about_to_hang(store, sets):
    """An engine that has kept everything on the host, over a store that hangs after `sets` more sets."""
    engine = kept_back(store, storage_deadline=1.0)
    serve_all(engine)
    store.at = sets
    return engine


@pytest.mark.parametrize("sets", [0, 3])
def test_a_flush_in_whose_middle_the_store_hangs_says_what_is_not_stored(hanging, caplog, sets):
    engine = about_to_hang(hanging, sets)
    assert not engine.controller.flush(0.3)
    assert hanging.hangs
    assert unwritten(hanging.inner)
    assert "objects" in caplog.text
    hanging.at = -1
    hanging.release()
    flush(engine)
    assert not unwritten(hanging.inner)
    evict_checked(engine, Tier.DEVICE, Tier.HOST)
    assert restored(engine) == len(NAMES)


@pytest.mark.parametrize("sets", [0, 3])
def test_a_close_in_whose_middle_the_store_hangs_says_what_is_not_stored(hanging, caplog, sets):
    engine = about_to_hang(hanging, sets)
    assert not engine.controller.close(0.3)
    assert unwritten(hanging.inner)
    assert "objects" in caplog.text


def test_write_back_goes_on_after_a_suspension_in_which_no_write_waits():
    """The write that failed was given up, and only another write can show that the store is well again."""
    clock, store = Clock(), Flaky(MemoryBackend())
    options = ControllerOptions(write=WRITE_BACK, write_chance=0.0, write_retries=0)
    engine = Engine(store, pages=24, blocks=BLOCKS, options=options, clock=clock)
    store.sets = ["raise"] * 1000
    while not engine.context.writes.is_suspended:
        engine.serve(session(len(store.sets)))
        engine.controller.flush(20)
    store.sets.clear()
    while engine.context.in_flight.operations:
        clock.now += 100.0
        engine.controller.tick(0.01)
    engine.serve(session(7))
    for _ in range(4):
        engine.controller.flush(20)
        clock.now += 100.0
        engine.controller.tick(0.01)
    assert not engine.context.writes.is_suspended
    assert engine.controller.flush(20)


def test_a_flush_ends_though_each_check_takes_longer_than_the_pause_behind_it():
    class Slow(Flaky):
        def exists(self, keys):
            time.sleep(0.1)
            return super().exists(keys)

    engine = Engine(Slow(MemoryBackend()), pages=24, blocks=BLOCKS)
    engine.serve(session(1))
    engine.controller.flush(20)
    engine.controller.tick(0.2)
    assert engine.controller.flush(20)
    assert not engine.context.in_flight.operations


def test_a_unit_that_storage_loses_while_it_is_written_is_given_up():
    """The pages of a unit that needs several writes are gone before its state is written."""

    class Losing(Flaky):
        def set(self, items):
            outcomes = super().set(items)
            self.delete([item.key for item in items])
            return outcomes

    options = ControllerOptions(write=WRITE_BACK, write_chance=0.0, in_flight_share=0.01, write_retries=0)
    engine = Engine(Losing(MemoryBackend()), pages=24, blocks=BLOCKS, options=options)
    engine.serve(session(1, 8))
    land(engine)
    assert not engine.controller.flush(60)
    assert not engine.context.in_flight.operations
    assert engine.controller._write_back.is_idle  # private: nothing tells whether a flush ended by its time
