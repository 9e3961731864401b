"""What each wrapper adds to the store inside it; that it takes nothing away is the conformance suite's to show."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from ctypes import c_uint32
from pathlib import Path
from threading import Event

import pytest
from prometheus_client import CollectorRegistry
from tiercache_backends.memory import MemoryBackend

from tests.storage.backends import FileHooks, MemoryHooks, TrustingHooks, TrustingStore
from tiercache.core import ObjectKey, Outcome, PoolName, Reason
from tiercache.errors import ClosedError, ConfigError, StorageError
from tiercache.pools import HostArena
from tiercache.storage.base import GetItem, NamespaceRecord, SharedMemory, StorageBackend, StoreContext
from tiercache.storage.checksum import Seal
from tiercache.storage.env import Env
from tiercache.storage.wrappers import Metered, ReadOnly, StoreMetrics, Verified, Wrapper, unwrap
from tiercache.storage.wrappers.base import OPERATIONS
from tiercache.storage.wrappers.verified import TRAILER_BYTES
from tiercache.testing.conformance import BackendConformance
from tiercache.testing.faulty import Faulty, Rates
from tiercache.testing.latency import Latency
from tiercache.testing.objects import NAMESPACE, content, fetch, key, payload, put, to_get, to_set
from tiercache.testing.outage import Outage

HIT, MISS, STORED = Outcome.HIT, Outcome.MISS, Outcome.STORED
CORRUPT, THROTTLED, ERROR = Outcome.CORRUPT, Outcome.THROTTLED, Outcome.ERROR
RECORD = NamespaceRecord(NAMESPACE, {"model": "m"})


def call_everything(store: StorageBackend) -> None:
    """Each call of the contract once, in the order of `OPERATIONS`."""
    store.exists([key("a"), key("x")])
    store.get([to_get(key("a"), 5000), to_get(key("x"), 10)])
    store.set([to_set(key("b"), payload("b", 100)), to_set(key("a"), payload("a", 5000))])
    store.delete([key("b"), key("x")])
    store.scan()
    store.describe([key("a"), key("x"), key("a")])
    store.register_namespace(RECORD)
    store.namespaces()
    store.usage()
    store.flush()


class SteppingEnv(Env):
    """A clock that is 2 ms later whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 0.002
        return self.now


# --- all of them -----------------------------------------------------------------------------------------------------------------------


def test_wrappers_nest_and_have_the_capabilities_of_the_store_inside(tmp_path: Path) -> None:
    inner = FileHooks().open_store(tmp_path / "s")
    with Metered(Verified(ReadOnly(inner))) as store:
        assert store.capabilities == inner.capabilities
        assert unwrap(store) is inner
        assert unwrap(inner) is inner
    with pytest.raises(ClosedError):
        inner.usage()


@pytest.mark.parametrize("kind", [Metered, ReadOnly, Verified, Faulty, Latency, Outage])
def test_a_wrapper_has_no_section(kind: type[Wrapper]) -> None:
    with pytest.raises(ConfigError, match=f"{kind.__name__} is put around a store in code"):
        kind.from_config({}, StoreContext(Env()))


def test_wrappers_pass_on_outages_and_memory() -> None:
    class Watching(MemoryBackend):
        def __init__(self) -> None:
            super().__init__()
            self.attached: list[SharedMemory] = []

        def attach(self, memory: SharedMemory) -> None:
            self.attached.append(memory)

    inner = Watching()
    cut = Outage(inner)
    arena = HostArena(4096, 4096, huge_pages=False)
    with Metered(Verified(ReadOnly(Faulty(Latency(cut, 0.0), Rates())))) as store:
        store.attach(arena)
        assert inner.attached == [arena]
        assert store.outage() is Reason.NONE
        cut.begin()
        assert store.exists([key("a")]) == [False]
        assert store.outage() is Reason.UNAVAILABLE
    arena.close()


def test_a_wrapper_closes_behind_the_calls_inside_it() -> None:
    reached, go_on = Event(), Event()

    def sleep(_seconds: float) -> None:
        reached.set()
        assert go_on.wait(30)

    inner = MemoryBackend()
    put(inner, key("a"), payload("a", 5000))
    store = Verified(Latency(inner, {"get": 1}, sleep))
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(fetch, store, key("a"), 5000)
        assert reached.wait(30)
        closing = pool.submit(store.close)
        while True:
            try:
                store.exists([])
            except ClosedError:
                break
        assert not closing.done()
        inner.exists([])
        go_on.set()
        assert reading.result(30) is ERROR, "it was stored without a trailer"
        closing.result(30)
    with pytest.raises(ClosedError):
        inner.exists([])


# --- metered ---------------------------------------------------------------------------------------------------------------------------


def test_metered_counts_calls_items_bytes_and_answers() -> None:
    store = Metered(TrustingStore(20_000), "near", env=SteppingEnv())
    value = store.metrics.value
    good = to_set(key("a"), payload("a", 5000))
    assert store.set([good, good, good._replace(buffers=[]), to_set(key("big"), bytes(30_000))]) == [STORED, HIT, ERROR, THROTTLED]
    assert store.get([to_get(key("a"), 5000), to_get(key("a"), 4000), to_get(key("x"), 10)]) == [HIT, ERROR, MISS]
    call_everything(store)

    def items(operation: str) -> dict[str, float]:
        found = {o: value("items_total", store="near", operation=operation, outcome=o) for o in map(str, Outcome)}
        return {outcome: n for outcome, n in found.items() if n}

    assert items("set") == {"stored": 2, "hit": 2, "error": 1, "throttled": 1}
    assert items("get") == {"hit": 2, "error": 1, "miss": 2}
    assert items("exists") == {"hit": 1, "miss": 1}
    assert items("delete") == {"hit": 1, "miss": 1}
    assert items("scan") == {"hit": 1}
    assert items("describe") == {"hit": 2, "miss": 1}
    assert value("bytes_total", operation="set") == 5000 + 100
    assert value("bytes_total", operation="get") == 2 * 5000
    for operation in OPERATIONS:
        calls = 2 if operation in ("set", "get") else 1
        assert value("calls_total", operation=operation, result="returned") == calls
        assert value("seconds_count", operation=operation) == calls
        assert value("seconds_sum", operation=operation) == pytest.approx(0.002 * calls)
        assert value("seconds_bucket", operation=operation, le="0.001") == 0
        assert value("seconds_bucket", operation=operation, le="0.0025") == calls
    store.close()
    with pytest.raises(ClosedError):
        store.flush()
    assert value("calls_total", operation="flush", result="raised") == 1
    assert value("calls_total", result="raised") == 1


def test_two_stores_share_a_registry_and_every_label_set_is_there_from_the_start() -> None:
    registry = CollectorRegistry()
    metrics = StoreMetrics(registry)
    near, far = Metered(MemoryBackend(), "near", metrics), Metered(MemoryBackend(), "far", metrics)
    before = {(s.name, *sorted(s.labels.items())) for f in registry.collect() for s in f.samples if not s.name.endswith("_created")}
    put(near, key("a"), b"abc")
    call_everything(far)
    after = {(s.name, *sorted(s.labels.items())) for f in registry.collect() for s in f.samples if not s.name.endswith("_created")}
    assert before == after
    assert metrics.value("items_total", store="near", outcome="stored") == 1
    assert registry.get_sample_value("tiercache_store_bytes_total", {"store": "near", "operation": "set"}) == 3
    assert registry.get_sample_value("tiercache_store_bytes_total", {"store": "far", "operation": "set"}) == 5100


# --- read-only -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hooks", [MemoryHooks, FileHooks])
def test_a_read_only_store_is_read_and_not_changed(hooks: type[BackendConformance], tmp_path: Path) -> None:
    inner = hooks().open_store(tmp_path / "s")
    inner.register_namespace(RECORD)
    for n in range(4):
        put(inner, key(n), payload(n, 5000))
    before = {entry.key: entry.meta for entry in inner.scan_all()}
    with ReadOnly(inner) as store:
        new, known = to_set(key("new"), payload("new", 5000)), to_set(key(1), payload("other", 9000))
        bad = new._replace(buffers=[])
        assert store.set([new, known, bad, new, known._replace(buffers=[])]) == [THROTTLED, HIT, ERROR, THROTTLED, ERROR]
        assert store.set([]) == []
        assert store.delete([key(0), key("x"), key(0)]) == [False] * 3
        store.register_namespace(NamespaceRecord(bytes(32), {}))
        assert store.namespaces() == [RECORD]
        assert {entry.key: entry.meta for entry in store.scan_all()} == before
        assert store.usage().objects == 4
        assert store.exists([key(0), key("new"), key(0)]) == [True, False, True]
        items = [to_get(key(0), 5000), to_get(key("new"), 5000), to_get(key(1), 5000), to_get(key(2), 7)]
        assert store.get(items) == [HIT, MISS, HIT, ERROR]
        assert [content(item) for item in items[::2]] == [payload(0, 5000), payload(1, 5000)]
        store.flush()
    for call in (lambda: store.set([]), lambda: store.delete([]), lambda: store.register_namespace(RECORD)):
        with pytest.raises(ClosedError):
            call()


def test_a_read_only_store_still_finds_damage() -> None:
    hooks = MemoryHooks()
    store = ReadOnly(MemoryBackend())
    put(store.inner, key("a"), payload("a", 5000))
    hooks.corrupt(store, key("a"))
    assert fetch(store, key("a"), 5000) is CORRUPT
    assert put(store, key("a"), payload("a", 5000)) is THROTTLED


# --- verified --------------------------------------------------------------------------------------------------------------------------


def test_every_bit_of_payload_and_trailer_counts() -> None:
    hooks = TrustingHooks()
    for seal, bits in ((None, (64 + 16) * 8), (Seal(bytes(32)), (64 + TRAILER_BYTES) * 8)):
        store = Verified(TrustingStore(), seal)
        store.set([to_set(key(n), payload(n, 64)) for n in range(bits)])
        for n in range(bits):
            hooks.flip(store, key(n), n)
        assert store.get([to_get(key(n), 64) for n in range(bits)]) == [CORRUPT] * bits
        assert store.usage().objects == unwrap(store).usage().objects == 0


def test_without_it_the_trusting_store_gives_damage_away() -> None:
    """Else the tests of `Verified` over that store would show nothing."""
    store = TrustingStore()
    put(store, key("a"), payload("a", 64))
    TrustingHooks().corrupt(store, key("a"))
    assert fetch(store, key("a"), 64) not in (payload("a", 64), CORRUPT)


def test_who_has_not_the_key_cannot_forge() -> None:
    """An attacker who knows everything but the key stores bytes of his own, with right checksums, under a key of ours."""
    data, forged = payload("ours", 5000), payload("his", 5000)
    for secret in (None, bytes(32)):
        medium = TrustingStore()
        ours = Verified(medium, None if secret is None else Seal(secret))
        assert put(ours, key("a"), data) is STORED
        medium.delete([key("a")])
        assert put(Verified(medium, None if secret is None else Seal(b"guess" * 8)), key("a"), forged) is STORED
        assert fetch(ours, key("a"), 5000) == (forged if secret is None else CORRUPT)


def test_a_new_key_costs_the_old_objects_and_heals() -> None:
    medium = TrustingStore()
    data = payload("a", 5000)
    put(Verified(medium), key("a"), data)
    for seal in (Seal(bytes(32)), Seal(b"x" * 32)):
        store = Verified(medium, seal)
        assert fetch(store, key("a"), 5000) is CORRUPT
        assert store.usage().details["corrupt"] == 1
        assert put(store, key("a"), data) is STORED
        assert fetch(store, key("a"), 5000) == data


def test_objects_lie_whole_in_the_inner_store_and_are_measured_without_the_trailer() -> None:
    medium = MemoryBackend()
    store = Verified(medium)
    put(store, key("a"), payload("a", 5000))
    assert medium.usage().payload_bytes == 5000 + TRAILER_BYTES
    assert store.usage().payload_bytes == 5000
    assert [entry.meta.length for entry in store.scan_all()] == [5000]
    whole = fetch(medium, key("a"), 5000 + TRAILER_BYTES)
    assert isinstance(whole, bytes)
    assert whole.startswith(payload("a", 5000))
    assert put(store, ObjectKey(PoolName.KV, key("a").digest), b"other") is HIT


def test_a_view_that_cannot_be_cut_is_refused_before_the_inner_store_sees_it() -> None:
    store = Verified(MemoryBackend())
    put(store, key("a"), b"ab")
    scalar = memoryview(c_uint32(7))
    assert store.get([GetItem(key("a"), [scalar], 2), to_get(key("a"), 2)]) == [ERROR, HIT]
    item = to_set(key("b"), b"ab")
    assert store.set([item._replace(buffers=[scalar]), item]) == [ERROR, STORED]


def test_a_second_look_lets_a_passing_fault_pass() -> None:
    """The first read goes wrong on the way, the second does not: the object stays."""
    hooks = TrustingHooks()
    medium = TrustingStore()
    put(Verified(medium), key("a"), payload("a", 5000))

    def sleep(_seconds: float) -> None:
        hooks.flip(medium, key("a"), 9)  # before the first get away from what is right, before the second back to it

    store = Verified(Latency(medium, {"get": 1}, sleep))
    assert fetch(store, key("a"), 5000) == payload("a", 5000)
    assert store.usage().details["corrupt"] == 0


# --- latency and faults ----------------------------------------------------------------------------------------------------------------


def test_latency_waits_once_per_call_and_operation() -> None:
    slept: list[float] = []
    call_everything(Latency(MemoryBackend(), 0.5, slept.append))
    assert slept == [0.5] * len(OPERATIONS)
    slept.clear()
    call_everything(Latency(MemoryBackend(), {"get": 2.0, "flush": 0.25}, slept.append))
    assert slept == [2.0, 0.25]
    with pytest.raises(ValueError, match="'read' is not an operation"):
        Latency(MemoryBackend(), {"read": 1.0})


def test_faults_come_at_their_rates_and_are_the_same_for_a_seed() -> None:
    rates = Rates(error=0.1, throttled=0.1, corrupt=0.1, miss=0.1)
    right = {payload(n, 100) for n in range(2000)}

    def run(seed: int) -> list[Outcome]:
        store = Faulty(MemoryBackend(), rates, seed)
        items = [to_set(key(n), payload(n, 100)) for n in range(2000)]
        answers = store.set(items)
        assert set(answers) == {STORED, ERROR, THROTTLED}
        assert 0.75 < answers.count(STORED) / 2000 < 0.85
        for item, answer in zip(items, answers, strict=True):
            assert unwrap(store).exists([item.key]) == [answer is STORED]
        wanted = [to_get(item.key, 100) for item, answer in zip(items, answers, strict=True) if answer is STORED]
        found = store.get(wanted)
        assert set(found) == {HIT, *rates.outcomes}
        for target, answer in zip(wanted, found, strict=True):
            assert unwrap(store).exists([target.key]) == [answer is not CORRUPT]
            assert (content(target) in right) == (answer is HIT)
        return answers + found

    assert run(1) == run(1) != run(2)
    assert Rates(miss=0.1).outcomes == {MISS}


def test_a_fault_is_no_answer_to_nonsense() -> None:
    store = Faulty(MemoryBackend(), Rates(throttled=1.0))
    assert store.get([to_get(key("a"), 10)._replace(buffers=[])]) == [MISS]
    assert store.set([to_set(key("a"), b"a")._replace(buffers=[])]) == [ERROR]
    assert Faulty(MemoryBackend(), Rates(corrupt=1.0)).get([to_get(key("a"), 10)]) == [MISS], "what is not there is not corrupt"
    assert Faulty(MemoryBackend(), Rates(error=1.0)).delete([key("a")]) == [False]
    with pytest.raises(ValueError, match="rates"):
        Rates(error=0.6, miss=0.6)


def test_an_outage_answers_nothing_and_loses_nothing() -> None:
    store = Outage(MemoryBackend())
    put(store, key("a"), payload("a", 5000))
    store.begin()
    assert store.outage() is Reason.NONE, "nobody has found out"
    item = to_get(key("a"), 5000)
    assert (store.get([item]), content(item)) == ([MISS], b"\xaa" * 5000)
    assert store.outage() is Reason.UNAVAILABLE
    assert store.set([to_set(key("b"), payload("b", 10))] * 2) == [ERROR] * 2
    assert (store.exists([key("a")]), store.delete([key("a"), key("x")])) == ([False], [False, False])
    store.register_namespace(RECORD)
    for call in (store.scan, store.usage, store.namespaces, store.flush, lambda: store.describe([key("a")])):
        with pytest.raises(StorageError, match="out of reach"):
            call()
    store.end()
    assert store.outage() is Reason.UNAVAILABLE, "nobody has found out"
    assert fetch(store, key("a"), 5000) == payload("a", 5000)
    assert store.outage() is Reason.NONE
    assert store.exists([key("a"), key("b")]) == [True, False]
    assert store.namespaces() == [RECORD]
    store.begin()
    store.close()
    with pytest.raises(ClosedError):
        store.exists([key("a")])
