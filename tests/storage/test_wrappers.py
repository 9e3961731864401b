"""Additions of each wrapper to the store inside it.

The conformance suite shows that a wrapper keeps the rest of the contract.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from tiercache_backends.memory import MemoryBackend

from tests.faulty import Faulty, Outage, Rates
from tests.storage.backends import FileHooks, Watching
from tests.storage.late import Late
from tiercache.core import Outcome
from tiercache.errors import ClosedError, ConfigError, UnavailableError
from tiercache.metrics.table import OPERATIONS
from tiercache.pools import HostArena
from tiercache.storage.base import NamespaceRecord, StorageBackend, StoreContext
from tiercache.storage.env import Env
from tiercache.storage.wrappers import Metered, Wrapper, unwrap
from tiercache.testing.conformance.hooks import CORRUPT, ERROR, HIT, MISS, STORED, THROTTLED
from tiercache.testing.objects import NAMESPACE, content, fetch, key, payload, put, to_get, to_set

RECORD = NamespaceRecord(NAMESPACE, {"model": "m"})


def call_everything(store: StorageBackend) -> None:
    """Each call of the contract once, in the order of `OPERATIONS`."""
    store.exists([key("a"), key("x")])
    store.get([to_get(key("a"), 5000), to_get(key("x"), 10)])
    store.peek([to_get(key("a"), 5000)])
    store.set([to_set(key("b"), payload("b", 100)), to_set(key("a"), payload("a", 5000))])
    store.delete([key("b"), key("x")])
    store.scan()
    store.describe([key("a"), key("x"), key("a")])
    store.register_namespace(RECORD)
    store.namespaces()
    store.usage()
    store.coldest(5000)
    store.advise([key("a"), key("x")], [1.0, 2.0])
    store.flush()


class SteppingEnv(Env):
    """A clock that is 2 ms later whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 0.002
        return self.now


# -- all of them


def test_wrappers_nest_and_have_the_capabilities_of_the_store_inside(tmp_path: Path) -> None:
    inner = FileHooks().open_store(tmp_path / "s")
    with Metered(Faulty(inner, Rates())) as store:
        assert store.capabilities == inner.capabilities
        assert unwrap(store) is inner
        assert unwrap(inner) is inner
    with pytest.raises(ClosedError):
        inner.usage()


@pytest.mark.parametrize("kind", [Metered, Faulty, Outage])
def test_a_wrapper_has_no_section(kind: type[Wrapper]) -> None:
    with pytest.raises(ConfigError, match=f"{kind.__name__} is put around a store in code"):
        kind.from_config({}, StoreContext(Env()))


def test_wrappers_pass_on_outages_and_memory() -> None:
    inner = Watching()
    cut = Outage(inner)
    arena = HostArena(4096, 4096, huge_pages=False)
    with Metered(Faulty(cut, Rates())) as store:
        store.attach(arena)
        assert inner.attached == [arena]
        cut.begin()
        with pytest.raises(UnavailableError):
            store.exists([key("a")])
        assert store.get([to_get(key("a"), 1)]) == [Outcome.UNAVAILABLE]
    arena.close()


def test_a_wrapper_closes_behind_the_calls_inside_it() -> None:
    reached, go_on = Event(), Event()

    def wait() -> None:
        reached.set()
        assert go_on.wait(30)

    inner = MemoryBackend()
    put(inner, key("a"), payload("a", 5000))
    store = Metered(Late(inner, {"get"}, wait))
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
        assert reading.result(30) == payload("a", 5000)
        closing.result(30)
    with pytest.raises(ClosedError):
        inner.exists([])


# -- metered


def test_metered_counts_calls_items_bytes_and_answers() -> None:
    store = Metered(MemoryBackend(20_000), "near", env=SteppingEnv())

    def value(name: str, **labels: str) -> float:
        return store.metrics.total(f"store_{name}", **labels)

    good = to_set(key("a"), payload("a", 5000))
    assert store.set([good, good, good._replace(buffers=[]), to_set(key("big"), bytes(30_000))]) == [
        STORED, HIT, ERROR, THROTTLED,
    ]  # fmt: skip
    assert store.get([to_get(key("a"), 5000), to_get(key("a"), 4000), to_get(key("x"), 10)]) == [
        HIT,
        ERROR,
        MISS,
    ]
    call_everything(store)

    def items(operation: str) -> dict[str, float]:
        found = {
            o: value("items_total", store="near", operation=operation, outcome=o) for o in map(str, Outcome)
        }
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


# -- faults


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
        wanted = [
            to_get(item.key, 100) for item, answer in zip(items, answers, strict=True) if answer is STORED
        ]
        found = store.get(wanted)
        assert set(found) == {HIT, *rates.outcomes}
        for target, answer in zip(wanted, found, strict=True):
            assert unwrap(store).exists([target.key]) == [answer is not CORRUPT]
            assert (content(target) in right) == (answer is HIT)
        return answers + found

    assert run(1) == run(1) != run(2)
    assert Rates(miss=0.1).outcomes == {MISS}
