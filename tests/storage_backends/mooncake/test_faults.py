"""Providers that die or hang, a master that dies, a full pool: never wrong bytes, and hits come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from tiercache_backends.mooncake.settings import read_settings
from tiercache_backends.mooncake.store import MooncakeBackend

from tests.storage_backends.mooncake.rig import Pool, own_network, require
from tests.waiting import until
from tiercache.core import ObjectKey, Outcome
from tiercache.errors import PoolFullError, StorageError
from tiercache.pools import HostArena
from tiercache.storage.base import GetItem, NamespaceRecord, SetItem
from tiercache.testing.conformance.hooks import HIT, MISS, STORED
from tiercache.testing.objects import NAMESPACE, content, fetch, key, payload, put, state_of, to_get, to_set

THROTTLED, UNAVAILABLE = Outcome.THROTTLED, Outcome.UNAVAILABLE
SIZE = 40_000
BLOCK = 1 << 20
PATIENCE = 20.0
SHORT_LEASES = ("-default_kv_lease_ttl", "500")


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    require()
    # Mooncake gives up a connection after so many seconds without a byte; its own default is 30.
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "4")
    monkeypatch.setenv("MC_TCP_STATUS_TIMEOUT_SEC", "4")
    with own_network():
        yield


def open_in(pool: Pool, prefix: str = "f", **more: Any) -> MooncakeBackend:
    settings = {"deadline": "700ms", "breaker_pause": "200ms", "staging": "4MiB", **more}
    return MooncakeBackend(read_settings(pool.section(prefix, **settings)))


def stored(store: MooncakeBackend, items: list[SetItem]) -> None:
    """Store items of which a busy machine may miss the deadline, and wait until no call is under way."""
    until(lambda: set(store.set(items)) <= {STORED, HIT} and not store.usage().details["hung_calls"])


def answers(store: MooncakeBackend) -> bool:
    try:
        return store.exists([key("nobody's")]) == [False]
    except StorageError:
        return False


def read_all(store: MooncakeBackend, keys: list[ObjectKey]) -> list[Outcome]:
    """The outcomes of gets, of which the hits have the right bytes."""
    items = [to_get(k, SIZE) for k in keys]
    outcomes = store.get(items)
    assert all(content(i) == payload(i.key, SIZE) for i, o in zip(items, outcomes, strict=True) if o is HIT)
    return outcomes


@pytest.mark.slow
def test_a_provider_that_is_killed_takes_pages_and_no_state() -> None:
    with Pool(master=SHORT_LEASES) as pool, open_in(pool) as store:
        pages, states = [key(n) for n in range(40)], [state_of(n) for n in range(10)]
        items = [to_set(k, payload(k, SIZE)) for k in pages]
        items += [to_set(k, payload(k, SIZE), parent=k.page_key) for k in states]
        assert store.set(items) == [STORED] * 50
        pool.providers[0].kill()
        seen: set[Outcome] = set()

        def settled() -> bool:
            found = read_all(store, pages)
            seen.update(found)
            return set(found) == {HIT, MISS}

        until(settled)
        assert seen <= {HIT, MISS, UNAVAILABLE}
        until(lambda: read_all(store, states) == [HIT] * 10)
        until(lambda: store.set(items) and read_all(store, [*pages, *states]) == [HIT] * 50)


def test_a_provider_that_hangs_writes_late_into_memory_that_is_withheld() -> None:
    """The bytes arrive after the caller has UNAVAILABLE, and before Mooncake itself gives up."""
    arena = HostArena(8 * BLOCK, BLOCK, huge_pages=False)
    with Pool(segments=[64 << 20]) as pool, open_in(pool, deadline="300ms") as store:
        store.attach(arena)
        blocks = arena.alloc(2)
        target = arena.view(int(blocks[0]))
        target[:] = data = payload("big", BLOCK)
        small = payload("small", SIZE)
        big = SetItem(key("big"), [target], to_set(key("big"), data).meta)
        stored(store, [big, to_set(key("small"), small)])
        lost = int(store.usage().details["lost_calls"])
        target[:] = b"\xaa" * BLOCK
        pool.providers[0].stop()
        outside = to_get(key("small"), SIZE)
        assert store.get([GetItem(key("big"), [target], BLOCK), outside]) == [UNAVAILABLE] * 2
        assert content(outside) == b"\xaa" * SIZE
        state = to_set(state_of("new"), small, parent=key("new").page_key)
        assert store.set([to_set(key("new"), small), state]) == [UNAVAILABLE] * 2
        assert store.usage().details["lost_calls"] == lost + 2, "one for the get, one for a set of two kinds"
        assert store.exists([key("big"), key("new")]) == [True, False]
        for _ in range(2):
            assert fetch(store, key("small"), SIZE) is UNAVAILABLE
        assert store.usage().details["lost_calls"] == lost + 3, "the master closes no breaker"
        target.release()
        arena.free(blocks)
        taken = arena.alloc(7)
        assert int(blocks[0]) not in taken, "the block is withheld"
        with pytest.raises(PoolFullError):
            arena.alloc(1)
        for block in taken:
            arena.view(int(block))[:] = b"\x55" * BLOCK
        assert store.usage().details["hung_calls"]
        pool.providers[0].go_on()
        until(lambda: not store.usage().details["hung_calls"])
        assert all(bytes(arena.view(int(block))) == b"\x55" * BLOCK for block in taken)
        assert content(outside) == b"\xaa" * SIZE, "a late answer reaches no buffer of a caller"
        assert arena.alloc(1) == blocks[:1], "the quarantine is over"
        until(lambda: fetch(store, key("small"), SIZE) == small)
        again = arena.view(int(blocks[0]))
        until(lambda: store.get([GetItem(key("big"), [again], BLOCK)]) == [HIT])
        assert bytes(again) == data
        until(lambda: store.usage().details["staging_free_bytes"] == 4 << 20)


@pytest.mark.slow
def test_a_provider_that_hangs_and_reads_late_costs_a_miss() -> None:
    """Mooncake sends bytes that the caller has written to its block after its set was given up."""
    large = 24 << 20  # more than the kernel takes while nobody receives
    with (
        Pool(segments=[128 << 20]) as pool,
        closing(HostArena(large, large, huge_pages=False)) as arena,
        open_in(pool, deadline="300ms", staging="64MiB") as store,
    ):
        store.attach(arena)
        target = arena.view(0)
        target[:] = data = payload("big", large)
        big = SetItem(key("big"), [target], replace(to_set(key("big"), data).meta, checksum=b""))
        into = GetItem(key("small"), [target], SIZE)
        stored(store, [to_set(key("small"), payload("small", SIZE))])
        pool.providers[0].stop()
        until(lambda: store.set([big]) == [UNAVAILABLE] and store.usage().details["hung_calls"])
        target[:] = b"\x55" * large
        assert store.get([into]) == [UNAVAILABLE]
        pool.providers[0].go_on()
        until(lambda: not store.usage().details["hung_calls"])
        assert bytes(target) == b"\x55" * large
        until(lambda: store.get([into]) == [HIT])
        until(lambda: fetch(store, key("big"), large) in (Outcome.CORRUPT, MISS))
        target[:] = data
        until(lambda: store.set([big])[0] in (STORED, HIT))
        until(lambda: fetch(store, key("big"), large) == data)
        target.release()


@pytest.mark.slow
def test_a_store_is_closed_while_a_call_hangs() -> None:
    """The caller's memory goes away, and the late bytes reach the store's own mapping of it."""
    with Pool(segments=[64 << 20]) as pool:
        store = open_in(pool, deadline="300ms")
        arena = HostArena(4 * BLOCK, BLOCK, huge_pages=False)
        store.attach(arena)
        blocks = arena.alloc(1)
        view = arena.view(int(blocks[0]))
        view[:] = payload("big", BLOCK)
        stored(store, [SetItem(key("big"), [view], to_set(key("big"), payload("big", BLOCK)).meta)])
        pool.providers[0].stop()
        link = store._link  # private: whether the late call has returned
        # On a busy machine the master's answer may be what is late, and such a call does not hang.
        until(lambda: store.get([GetItem(key("big"), [view], BLOCK)]) == [UNAVAILABLE] and link.guard.hung)
        store.close()
        view.release()
        assert link.guard.hung
        arena.free(blocks)
        arena.close()
        pool.providers[0].go_on()
        until(lambda: not link.guard.hung)
        with open_in(pool) as again:
            assert fetch(again, key("big"), BLOCK) == payload("big", BLOCK)


@pytest.mark.slow
def test_many_threads_while_providers_hang_and_die() -> None:
    with Pool(segments=[64 << 20] * 3, master=SHORT_LEASES) as pool, open_in(pool) as store:
        keys = [key(n) for n in range(24)]
        items = [to_set(k, payload(k, SIZE)) for k in keys]
        until(lambda: set(store.set(items)) <= {STORED, HIT})
        over = threading.Event()
        odd: list[Exception] = []

        def work() -> None:
            try:
                while not over.is_set():
                    read_all(store, keys)
                    store.set(items)
            except Exception as error:  # noqa: BLE001  asserted below
                odd.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for provider in pool.providers[:2]:
            provider.stop()
            time.sleep(0.4)
            provider.go_on()
            time.sleep(0.2)
        pool.providers[0].kill()
        pool.providers[1].stop()
        time.sleep(0.6)
        pool.providers[1].go_on()
        time.sleep(0.5)
        over.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert not odd
        until(lambda: set(store.set(items)) <= {STORED, HIT} and read_all(store, keys) == [HIT] * 24)


@pytest.mark.slow
def test_a_master_that_is_killed_and_started_again() -> None:
    arena = HostArena(4 * BLOCK, BLOCK, huge_pages=False)
    with Pool(segments=[64 << 20]) as pool, open_in(pool) as store, closing(arena):
        record = NamespaceRecord(NAMESPACE, {"model": "m"}, states=True)
        store.register_namespace(record)
        stored(store, [to_set(key("a"), payload("a", SIZE))])
        assert pool.master is not None
        pool.master.kill()
        assert put(store, key("b"), payload("b", SIZE)) is UNAVAILABLE
        assert store.get([to_get(key("a"), SIZE)] * 2) == [UNAVAILABLE] * 2
        for ask in (
            lambda: store.exists([key("a")]),
            lambda: store.delete([key("a")]),
            store.usage,
            store.clear,
        ):
            with pytest.raises(StorageError):
                ask()
        store.attach(arena)
        link = store._link  # private: whether payloads move directly
        assert not link.attached.memories
        pool.start_master()
        until(lambda: answers(store))
        until(lambda: link.attached.memories)
        until(lambda: fetch(store, key("a"), SIZE) is MISS)
        until(lambda: put(store, key("a"), payload("a", SIZE)) in (STORED, HIT))
        assert fetch(store, key("a"), SIZE) == payload("a", SIZE)
        assert store.namespaces() == [record], "what the pool has lost is registered again"
        open_in(pool, "other").close()
        pool.master.kill()
        pool.start_master()
        with open_in(pool, "other", deadline="20s") as other:
            until(lambda: answers(other))


@pytest.mark.slow
def test_a_store_that_is_opened_before_its_master() -> None:
    with Pool(segments=[]) as pool:
        assert pool.master is not None
        pool.master.kill()
        with open_in(pool) as store:
            store.register_namespace(NamespaceRecord(NAMESPACE, {"model": "m"}))
            assert store.get([to_get(key("a"), SIZE)]) == [UNAVAILABLE]
            pool.start_master()
            pool.provide(64 << 20)
            until(lambda: put(store, key("a"), payload("a", SIZE)) in (STORED, HIT))
            assert fetch(store, key("a"), SIZE) == payload("a", SIZE)
            assert [found.namespace for found in store.namespaces()] == [NAMESPACE]


@pytest.mark.slow
def test_a_full_pool() -> None:
    """The pool may evict later what was told STORED, and refuses what has no room."""
    with Pool(segments=[16 << 20], master=["-default_kv_lease_ttl", "200"]) as pool, open_in(pool) as store:
        keys = [key(n) for n in range(120)]
        outcomes = [put(store, k, payload(k, 8 * SIZE)) for k in keys]
        assert set(outcomes) <= {STORED, THROTTLED}
        found = [fetch(store, k, 8 * SIZE) for k in keys]
        assert any(isinstance(o, bytes) for o in found)
        assert MISS in found
        assert all(o in (MISS, payload(k, 8 * SIZE)) for k, o in zip(keys, found, strict=True))
        usage = store.usage()
        assert 0 < usage.used_bytes <= usage.capacity_bytes <= 16 << 20
