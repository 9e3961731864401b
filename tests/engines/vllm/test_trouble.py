"""Disks that fail, senseless jobs, resets and ends at bad moments: vLLM never sees an exception."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest
from vllm.v1.kv_offload.tiering.base import JobResult

import tiercache.integrations.settings as settings
from tests.engines.vllm.rig import HIT, MISS, RETRY, ROW, ROWS, Engine, content, job, key, keys, outcome
from tiercache.errors import StorageError
from tiercache.integrations.vllm import tier as tier_module
from tiercache.storage.base import StorageBackend
from tiercache.storage.registry import open_backend
from tiercache.storage.wrappers import Wrapper


class Held(Wrapper):
    """Operations in `held` wait inside the store for `go`; `reached` is set when one does."""

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner)
        self.held: set[str] = set()
        self.go, self.reached = Event(), Event()

    def _perform(self, operation, call, *arguments, **named):  # type: ignore[no-untyped-def]
        if operation in self.held:
            self.reached.set()
            assert self.go.wait(30)
        return super()._perform(operation, call, *arguments, **named)


class Broken(Wrapper):
    """Raises, which no store may."""

    def _perform(self, operation, call, *arguments, **named):  # type: ignore[no-untyped-def]
        if operation in ("exists", "get", "set"):
            raise ZeroDivisionError(operation)
        return super()._perform(operation, call, *arguments, **named)


@pytest.fixture
def tier(tmp_path: Path) -> dict[str, object]:
    return {"storage": f"file://{tmp_path}/store?capacity=64MiB", "revision": "r1"}


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Opens stores inside a wrapper."""

    def put(wrap: Callable[[StorageBackend], StorageBackend]) -> None:
        monkeypatch.setattr(settings, "open_backend", lambda url: wrap(open_backend(url)))

    return put


@pytest.fixture
def held(inside: Callable[..., None]) -> Iterator[list[Held]]:
    """The stores that are opened, which can be held up."""
    stores: list[Held] = []

    def wrap(store: StorageBackend) -> StorageBackend:
        stores.append(Held(store))
        return stores[-1]

    inside(wrap)
    yield stores
    for store in stores:
        store.go.set()


def test_a_load_brings_what_is_sound_and_the_rest_is_stored_anew(tier, tmp_path):
    with Engine(tier) as engine:
        for name in "abc":
            engine.store(name)
        needle, files = (
            content("b")[:512],
            (path for path in (tmp_path / "store").rglob("*") if path.is_file()),
        )
        [(path, at)] = [(path, at) for path in files if (at := path.read_bytes().find(needle)) >= 0]
        with path.open("r+b") as file:
            file.seek(at + 5)
            file.write(bytes([needle[5] ^ 1]))
        engine.evict()
        results: list[JobResult] = []
        real = engine.tier.get_finished_jobs
        engine.tier.get_finished_jobs = lambda: results.extend(found := list(real())) or found
        context = engine.request()
        assert engine.answers(keys("a", "b", "c"), context)[-1] == [HIT, MISS, HIT]
        assert [engine.read(key(name)) for name in "ac"] == [content(name) for name in "ac"]
        [result] = results
        assert not result.success
        assert set(result.successful_keys or ()) == set(keys("a", "c"))
        assert result.transfer_bytes == 2 * ROW
        assert engine.answers(keys("b"), context) == [[MISS]], "not asked again as long as the request lives"
        engine.finish(context)
        engine.store("b")
        engine.evict()
        assert engine.found("a", "b", "c") == [True, True, True]


def test_loads_do_not_wait_for_stores(tier: dict[str, object], held: list[Held]) -> None:
    with Engine(tier) as engine:
        engine.store("a")
        engine.evict()
        [store] = held
        store.held.add("set")
        engine.offer(keys("b"), "b")
        assert engine.found("a") == [True], "while a store hangs"
        store.go.set()


def test_a_store_that_raises_is_a_store_that_has_nothing(tier, inside, caplog):
    inside(Broken)
    with Engine(tier) as engine:
        engine.store("a")
        engine.store("b")
        engine.evict()
        assert engine.found("a") == [False]
        engine.tier.submit_load(job(77, keys("a"), [0], load=True))
        assert outcome_is(engine, 77) == (False, None)
    assert engine.region.mmap_obj is None, "the error that the log keeps holds no rows"
    raised = [record for record in caplog.records if "transfers raised" in record.message]
    assert len(raised) == 1, "trouble is told now and then, not each time"
    assert raised[0].exc_info is not None


def test_stores_beyond_the_queue_are_refused_and_their_rows_given_back(tier, held, caplog):
    with Engine(tier | {"queued_rows": 3}) as engine:
        held[0].held.add("set")
        first = engine.offer(keys("a", "b"), "ab")
        assert held[0].reached.wait(30)
        engine.offer(keys("c"), "c", first)
        assert len(engine.jobs) == 2
        for name in "defg":
            engine.offer(keys(name), [name], first)
        engine.settle(lambda: len(engine.jobs) <= 2)
        assert len(engine.jobs) == 2, "the other four were answered at once"
        # the primary tier has room for five: only three rows are held back
        engine.offer(keys(1, 2, 3, 4, 5), range(1, 6), first)
        assert [record.message for record in caplog.records if "refused" in record.message] == [
            "the store is too slow: 1 store jobs were refused so far; their rows are in the primary tier"
            " alone"
        ]
        held[0].go.set()
        engine.settle()
        engine.store("d")
        # private: rows that are counted as held for ever show only as refusals in the end
        assert engine.tier._jobs._pinned == 0
        engine.finish(first)
        engine.evict()
        assert engine.found("a", "b", "c", "e") == [True, True, True, False]


def test_a_job_that_is_larger_than_the_queue_is_taken_where_nothing_else_waits(tier):
    with Engine(tier | {"queued_rows": 1}) as engine:
        engine.store("a", "b", "c")
        engine.evict()
        assert engine.found("a", "b", "c") == [True] * 3


def test_a_reset_waits_for_what_runs_and_cancels_what_waits(tier, held):
    with Engine(tier | {"queued_rows": 8}) as engine:
        store = held[0]
        store.held.add("set")
        context = engine.offer(keys("a"), "a")
        assert store.reached.wait(30)
        engine.offer(keys("b"), "b", context)
        reset = threading.Thread(target=engine.manager.reset_cache)
        reset.start()
        reset.join(0.1)
        assert reset.is_alive(), "a row that is being read is not given up"
        store.go.set()
        reset.join(30)
        assert not reset.is_alive()
        assert not engine.jobs, "every job has its result"
        assert engine.manager.lookup(key("a"), context) is MISS, "promotions are held"
        engine.manager.on_reset_flushed()
        assert engine.found("a", "b") == [True, False]
        engine.store("b")
        engine.evict()
        assert engine.found("b") == [True]


def test_after_a_drain_nothing_touches_the_rows(tier: dict[str, object], held: list[Held]) -> None:
    with Engine(tier) as engine:
        engine.store("a", "b")
        engine.evict()
        held[0].held.add("get")
        for number, name in enumerate("abab"):
            engine.tier.submit_load(job(number, keys(name), [number], load=True))
        assert held[0].reached.wait(30)
        threading.Timer(0.05, held[0].go.set).start()
        engine.tier.drain_jobs()
        before = engine.memory()
        assert len(list(engine.tier.get_finished_jobs())) == 4
        time.sleep(0.1)
        assert engine.memory() == before


def test_an_end_with_jobs_waiting_closes_everything(tier, held, tmp_path):
    threads = set(threading.enumerate())
    engine = Engine(tier | {"queued_rows": 8})
    engine.store("a")
    engine.evict()
    context = engine.request()
    assert engine.manager.lookup(key("a"), context) is RETRY
    held[0].held.add("set")
    for name in "bcd":
        engine.offer(keys(name), name, context)
    assert held[0].reached.wait(30)
    threading.Timer(0.05, held[0].go.set).start()
    region, path = engine.region, engine.region.mmap_path
    engine.close()
    assert region.mmap_obj is None, "nothing holds on to the shared region"
    assert not Path(path).exists()
    assert set(threading.enumerate()) - threads <= {
        t for t in threading.enumerate() if isinstance(t, threading.Timer)
    }
    open_backend(str(tier["storage"])).close()


def test_the_end_does_not_wait_for_a_lookup_that_hangs(tier, held, monkeypatch):
    monkeypatch.setattr(tier_module, "PATIENCE_S", 0.05)
    with Engine(tier) as engine:
        engine.store("a")
        engine.evict()
        [store] = held
        store.held.add("exists")
        engine.manager.lookup(key("a"), engine.request())
        engine.step()
        assert store.reached.wait(30)
    assert engine.region.mmap_obj is None, "the engine's memory is free"
    store.go.set()
    deadline = time.monotonic() + 60
    while True:  # the store closes behind its answer
        try:
            open_backend(str(tier["storage"])).close()
            break
        except StorageError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_the_end_may_come_twice_and_calls_after_it_fail_quietly(tier: dict[str, object]) -> None:
    with Engine(tier) as engine:
        engine.store("a")
        context = engine.request()
        engine.tier.lookup(key("a"), context)
        engine.tier.shutdown()
        engine.tier.shutdown()
        engine.tier.submit_store(job(101, keys("b"), [0]))
        assert outcome_is(engine, 101) == (False, None)
        assert engine.tier.lookup(key("new"), context) is MISS
        engine.tier.drain_jobs()
        engine.tier.on_request_finished(context)


def test_jobs_that_make_no_sense_fail_and_spare_the_rows(tier, caplog):
    with Engine(tier) as engine:
        engine.store("a", "b")
        engine.evict()
        before, a, b = engine.memory(), *keys("a", "b")
        for number, (wanted, chunks) in enumerate(
            [([a], [ROWS]), ([a], [-1]), ([a], [-2]), ([a, b], [0]), ([a, b], [1, 1]), ([b""], [0])]
        ):
            for load in (False, True):
                made = job(2 * number + load, wanted, chunks, load=load)
                engine.tier.submit_load(made) if load else engine.tier.submit_store(made)
                result = outcome(engine.tier, made.job_id)
                assert (result.success, result.successful_keys) == (False, None), (wanted, chunks)
        assert engine.memory() == before
        strange = [
            b"", b"\0", a[:4], a[:-1], a[:-4] + b"\xff\xff\xff\xff", a[:-4] + b"\0\0\0\1", b"\0\0\0\0",
            a + b"x" * 300,
        ]  # fmt: skip
        engine.tier.submit_load(job(50, [*strange, b], range(len(strange), -1, -1), load=True))
        result = outcome(engine.tier, 50)
        assert (result.success, result.successful_keys) == (False, None) or len(strange) >= ROWS
        engine.tier.submit_load(job(51, [strange[0], b, strange[5]], [2, 3, 4], load=True))
        result = outcome(engine.tier, 51)
        assert (result.success, result.successful_keys, result.transfer_bytes) == (False, (b,), ROW)
        assert engine.memory()[3 * ROW : 4 * ROW] == content("b")
        assert engine.answers(strange)[-1] == [MISS] * len(strange)
        assert engine.found("a", "b") == [True, True]


def outcome_is(engine: Engine, number: int) -> tuple[bool, object]:
    result = outcome(engine.tier, number)
    return result.success, result.successful_keys
