"""What every store must do: `StorageBackend`'s contract, line by line.

    class TestMyBackend(BackendConformance):
        def open_store(self, path, capacity=None): ...
        def corrupt(self, store, key): ...          # behind the store's back

A test of something that a backend does not declare in its `Capabilities` is skipped. Sizes are small; nothing here waits on a clock.
"""

# ruff: noqa: D102 (a test is named for what it checks)

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest

from tiercache.core import ObjectKey, Outcome, PoolName
from tiercache.errors import ClosedError
from tiercache.storage.base import NamespaceRecord, StorageBackend
from tiercache.testing.objects import (
    NAMESPACE,
    OTHER_NAMESPACE,
    chain,
    content,
    fetch,
    key,
    page_key,
    payload,
    put,
    to_get,
    to_set,
)

HIT, MISS, STORED = Outcome.HIT, Outcome.MISS, Outcome.STORED
CORRUPT, THROTTLED, ERROR = Outcome.CORRUPT, Outcome.THROTTLED, Outcome.ERROR

SIZES = (1, 4095, 4096, 4097, 10_000, 65_536)


class BackendConformance:
    """Subclass it, supply the hooks, and pytest runs the contract over your store.

    Thread rule: pytest makes one instance per test.
    """

    large = 256 << 20
    """Capacity in bytes that holds everything that a test without `capacity` stores."""

    small = 8 << 20
    """The smallest capacity with which a bounded store works well."""

    def open_store(self, path: Path, capacity: int | None = None) -> StorageBackend:
        """Open a store that keeps its data in `path`, if anywhere; `capacity` None means plenty (see `large`)."""
        raise NotImplementedError

    def corrupt(self, store: StorageBackend, k: ObjectKey) -> None:
        """Change a bit of the stored payload behind the store's back."""
        raise NotImplementedError

    def swap(self, store: StorageBackend, a: ObjectKey, b: ObjectKey) -> None:
        """Exchange the stored payloads of two objects of one length behind the store's back."""
        raise NotImplementedError

    def check(self, store: StorageBackend) -> None:
        """Raise AssertionError unless the store's own counts add up; no call is inside."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[StorageBackend]:
        """A store with room; checked at the end, if it is open."""
        opened = self.open_store(tmp_path / "store")
        yield opened
        self._finish(opened)

    @pytest.fixture
    def bounded(self, tmp_path: Path) -> Iterator[StorageBackend]:
        """A store that is soon full."""
        opened = self.open_store(tmp_path / "store", self.small)
        self.need(opened, "bounded")
        yield opened
        self._finish(opened)

    def need(self, store: StorageBackend, capability: str) -> None:
        """Skip the test unless the store declares the capability."""
        if not getattr(store.capabilities, capability):
            store.close()
            pytest.skip(f"the store does not declare {capability}")

    def _finish(self, store: StorageBackend) -> None:
        try:
            store.usage()
        except ClosedError:
            return
        self.check(store)
        store.close()

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize(("pieces", "slack"), [(1, 0), (7, 0), (1, 4096), (5, 10_000)])
    def test_what_is_stored_comes_back(self, store: StorageBackend, size: int, pieces: int, slack: int) -> None:
        data = payload("a", size)
        assert store.set([to_set(key("a"), data, pieces=pieces, slack=slack)]) == [STORED]
        item = to_get(key("a"), size, pieces=pieces + 2, slack=slack)
        assert store.get([item]) == [HIT]
        assert content(item) == data

    def test_more_buffers_than_one_vectored_call_takes(self, store: StorageBackend) -> None:
        data = payload("many", 20_000)
        assert store.set([to_set(key("many"), data, pieces=3000)]) == [STORED]
        item = to_get(key("many"), 20_000, pieces=2500)
        assert store.get([item]) == [HIT]
        assert content(item) == data

    def test_nothing_is_there_at_first(self, store: StorageBackend) -> None:
        assert store.exists([key("a")]) == [False]
        assert fetch(store, key("a"), 10) is MISS
        assert store.delete([key("a")]) == [False]
        assert list(store.scan_all()) == []
        usage = store.usage()
        assert (usage.objects, usage.payload_bytes) == (0, 0)

    def test_a_batch_answers_in_input_order(self, store: StorageBackend) -> None:
        names = ["a", "b", "c", "d", "e"]
        sizes = dict(zip(names, SIZES, strict=False))
        assert store.set([to_set(key(n), payload(n, sizes[n])) for n in ("a", "c", "e")]) == [STORED] * 3
        assert store.set([to_set(key(n), payload(n, sizes[n])) for n in names]) == [HIT, STORED, HIT, STORED, HIT]
        assert store.delete([key("d"), key("x"), key("b"), key("d")]) == [True, False, True, False]
        assert store.exists([key(n) for n in names]) == [True, False, True, False, True]
        items = [to_get(key(n), sizes[n]) for n in reversed(names)]
        assert store.get(items) == [HIT, MISS, HIT, MISS, HIT]
        assert [content(i) for i in items[::2]] == [payload(n, sizes[n]) for n in ("e", "c", "a")]

    def test_empty_batches(self, store: StorageBackend) -> None:
        assert (store.exists([]), store.get([]), store.set([]), store.delete([])) == ([], [], [], [])

    def test_duplicates_in_a_batch(self, store: StorageBackend) -> None:
        data = payload("a", 5000)
        assert store.set([to_set(key("a"), data), to_set(key("b"), data), to_set(key("a"), data)]) == [STORED, STORED, HIT]
        items = [to_get(key("a"), 5000), to_get(key("a"), 5000)]
        assert store.get(items) == [HIT, HIT]
        assert {content(i) for i in items} == {data}
        assert store.exists([key("a"), key("a")]) == [True, True]

    def test_a_big_batch_of_small_objects(self, store: StorageBackend) -> None:
        names = range(3000)
        assert store.set([to_set(key(n), payload(n, 100 + n % 50)) for n in names]) == [STORED] * 3000
        assert store.exists([key(n) for n in range(3001)]) == [True] * 3000 + [False]
        items = [to_get(key(n), 100 + n % 50) for n in names]
        assert store.get(items) == [HIT] * 3000
        assert all(content(i) == payload(n, 100 + n % 50) for n, i in zip(names, items, strict=True))
        assert len({entry.key for entry in store.scan_all()}) == 3000
        assert store.delete([key(n) for n in names]) == [True] * 3000

    def test_setting_again_keeps_the_first(self, store: StorageBackend) -> None:
        put(store, key("a"), payload("first", 5000))
        assert put(store, key("a"), payload("other", 5000)) is HIT
        assert fetch(store, key("a"), 5000) == payload("first", 5000)

    def test_pools_of_one_page_are_different_objects(self, store: StorageBackend) -> None:
        page, state = key("p", PoolName.KV), key("p", PoolName.MAMBA)
        put(store, page, payload("kv", 5000))
        assert store.exists([page, state]) == [True, False]
        put(store, state, payload("state", 9000))
        assert (fetch(store, page, 5000), fetch(store, state, 9000)) == (payload("kv", 5000), payload("state", 9000))

    @pytest.mark.parametrize("size", [4999, 5001, 1, 100_000])
    def test_a_get_of_another_length_is_refused(self, store: StorageBackend, size: int) -> None:
        put(store, key("a"), payload("a", 5000))
        wrong, right = to_get(key("a"), size), to_get(key("a"), 5000)
        assert store.get([wrong, right]) == [ERROR, HIT]
        assert content(wrong) == b"\xaa" * size
        assert fetch(store, key("a"), 5000) == payload("a", 5000)

    def test_buffers_that_are_too_small_or_read_only_are_refused(self, store: StorageBackend) -> None:
        put(store, key("a"), payload("a", 5000))
        short = to_get(key("a"), 4999)._replace(length=5000)
        frozen = to_get(key("a"), 5000)
        half = bytearray(b"\xaa" * 2500)
        frozen = frozen._replace(buffers=[memoryview(half), memoryview(bytes(2500))])
        assert store.get([short, frozen, to_get(key("a"), 5000)]) == [ERROR, ERROR, HIT]
        assert b"".join(short.buffers) == b"\xaa" * 4999
        assert half == b"\xaa" * 2500

    def test_a_malformed_set_is_an_error_and_hurts_nobody(self, store: StorageBackend) -> None:
        good = to_set(key("good"), payload("good", 5000))
        bad = [
            good._replace(key=key("1"), meta=replace(good.meta, length=5001)),
            good._replace(key=key("2"), meta=replace(good.meta, length=0)),
            good._replace(key=key("3"), meta=replace(good.meta, checksum=b"short")),
            good._replace(key=key("4"), meta=replace(good.meta, namespace=b"")),
            good._replace(key=key("5"), meta=replace(good.meta, parent=b"short")),
            good._replace(key=ObjectKey(PoolName.KV, b"short")),
            good._replace(key=key("6"), buffers=[]),
        ]
        assert store.set([*bad, good]) == [ERROR] * len(bad) + [STORED]
        assert store.usage().objects == 1

    def test_read_only_buffers_can_be_stored(self, store: StorageBackend) -> None:
        item = to_set(key("a"), payload("a", 5000))
        assert store.set([item._replace(buffers=[memoryview(payload("a", 5000))])]) == [STORED]
        assert fetch(store, key("a"), 5000) == payload("a", 5000)

    def test_buffers_are_not_kept(self, store: StorageBackend) -> None:
        data = bytearray(payload("a", 9000))
        item = to_set(key("a"), bytes(data))._replace(buffers=[memoryview(data)])
        store.set([item])
        item.buffers[0].release()
        data.clear()  # raises BufferError if anybody still looks at it
        target = to_get(key("a"), 9000)
        store.get([target])
        assert content(target) == payload("a", 9000)

    def test_a_corrupt_object_is_reported_dropped_and_stored_anew(self, store: StorageBackend) -> None:
        data = payload("a", 9000)
        put(store, key("a"), data)
        put(store, key("b"), data)
        self.corrupt(store, key("a"))
        assert store.get([to_get(key("a"), 9000), to_get(key("b"), 9000), to_get(key("a"), 9000)]) in (
            [CORRUPT, HIT, CORRUPT],
            [CORRUPT, HIT, MISS],
        )
        assert store.exists([key("a"), key("b")]) == [False, True]
        assert fetch(store, key("a"), 9000) is MISS
        assert put(store, key("a"), data) is STORED
        assert fetch(store, key("a"), 9000) == data

    def test_swapped_objects_are_corrupt(self, store: StorageBackend) -> None:
        for name in ("a", "b"):
            put(store, key(name), payload(name, 8192))
        self.swap(store, key("a"), key("b"))
        assert fetch(store, key("a"), 8192) is CORRUPT
        assert fetch(store, key("b"), 8192) is CORRUPT

    def test_a_wrong_checksum_is_found_by_the_get(self, store: StorageBackend) -> None:
        item = to_set(key("a"), payload("a", 5000))
        store.set([item._replace(meta=replace(item.meta, checksum=bytes(16)))])
        assert fetch(store, key("a"), 5000) is CORRUPT

    def test_threads_that_set_and_get_the_same_keys(self, store: StorageBackend) -> None:
        names = range(24)
        start = Barrier(4)

        def work(turn: int) -> list[Outcome]:
            start.wait()
            answers: list[Outcome] = []
            for n in [*names[turn * 6 :], *names[: turn * 6]]:
                answers += store.set([to_set(key(n), payload(n, 20_000))])
                items = [to_get(key(m), 20_000) for m in (n, (n + 7) % 24)]
                for m, item, outcome in zip((n, (n + 7) % 24), items, store.get(items), strict=True):
                    assert outcome in (HIT, MISS)
                    assert outcome is MISS or content(item) == payload(m, 20_000)
            return answers

        with ThreadPoolExecutor(4) as pool:
            answers = [o for part in pool.map(work, range(4)) for o in part]
        assert answers.count(STORED) == 24
        assert answers.count(HIT) == 72
        assert store.usage().objects == 24

    def test_threads_that_delete_while_others_read(self, store: StorageBackend) -> None:
        data = payload("a", 30_000)

        def write() -> None:
            for _ in range(40):
                store.set([to_set(key("a"), data)])
                store.delete([key("a")])

        def read() -> None:
            for _ in range(80):
                found = fetch(store, key("a"), 30_000)
                assert found in (data, MISS)

        with ThreadPoolExecutor(3) as pool:
            for task in [pool.submit(write), pool.submit(read), pool.submit(read)]:
                task.result()

    def test_a_scan_names_everything_once(self, store: StorageBackend) -> None:
        parent = page_key("parent")
        store.set([to_set(key("a"), payload("a", 5000), parent=parent, depth=7)])
        store.set([to_set(key("b", PoolName.MAMBA), payload("b", 100), namespace=OTHER_NAMESPACE)])
        found = {entry.key: entry.meta for entry in store.scan_all()}
        assert found == {
            key("a"): to_set(key("a"), payload("a", 5000), parent=parent, depth=7).meta,
            key("b", PoolName.MAMBA): to_set(key("b", PoolName.MAMBA), payload("b", 100), namespace=OTHER_NAMESPACE).meta,
        }
        assert [e.key for e in store.scan_all(NAMESPACE)] == [key("a")]
        assert [e.key for e in store.scan_all(OTHER_NAMESPACE)] == [key("b", PoolName.MAMBA)]
        assert list(store.scan_all(bytes(32))) == []

    def test_objects_may_go_during_a_scan(self, store: StorageBackend) -> None:
        names = range(2500)
        store.set([to_set(key(n), payload(n, 64)) for n in names])
        first = store.scan()
        gone = {key(n) for n in range(0, 2500, 5)}
        store.delete(list(gone))
        store.set([to_set(key(n), payload(n, 64)) for n in range(3000, 3010)])
        seen = [e.key for e in first.entries]
        cursor = first.cursor
        while cursor:
            page = store.scan(None, cursor)
            seen += [e.key for e in page.entries]
            cursor = page.cursor
        assert len(seen) == len(set(seen))
        assert set(seen) >= {key(n) for n in names} - gone

    def test_usage_is_the_sum(self, store: StorageBackend) -> None:
        for n, size in enumerate(SIZES):
            put(store, key(n), payload(n, size))
        store.delete([key(0)])
        usage = store.usage()
        assert (usage.objects, usage.payload_bytes) == (len(SIZES) - 1, sum(SIZES[1:]))
        assert usage.used_bytes >= usage.payload_bytes
        assert usage.payload_bytes == sum(entry.meta.length for entry in store.scan_all())

    def test_namespaces_are_remembered(self, store: StorageBackend) -> None:
        record = NamespaceRecord(NAMESPACE, {"model": "m", "page_size": 64})
        for _ in range(2):
            store.register_namespace(record)
        put(store, key("a"), payload("a", 10))
        store.set([to_set(key("b"), payload("b", 10), namespace=OTHER_NAMESPACE)])
        assert store.namespaces() == [record]

    def test_flush(self, store: StorageBackend) -> None:
        put(store, key("a"), payload("a", 10))
        store.flush()
        assert fetch(store, key("a"), 10) == payload("a", 10)

    def test_close_twice_and_use_after_it(self, store: StorageBackend) -> None:
        store.close()
        store.close()
        for call in (
            lambda: store.exists([]),
            lambda: store.get([]),
            lambda: store.set([]),
            lambda: store.delete([]),
            store.scan,
            store.namespaces,
            store.usage,
            store.flush,
            lambda: store.register_namespace(NamespaceRecord(NAMESPACE, {})),
        ):
            with pytest.raises(ClosedError):
                call()

    def test_what_was_acknowledged_is_there_after_a_reopen(self, store: StorageBackend, tmp_path: Path) -> None:
        self.need(store, "persistent")
        record = NamespaceRecord(NAMESPACE, {"model": "m", "page_size": 64})
        store.register_namespace(record)
        for n, size in enumerate(SIZES):
            put(store, key(n), payload(n, size))
        store.delete([key(1)])
        before = {entry.key: entry.meta for entry in store.scan_all()}
        store.close()
        with self.open_store(tmp_path / "store") as again:
            assert {entry.key: entry.meta for entry in again.scan_all()} == before
            for n, size in enumerate(SIZES):
                assert fetch(again, key(n), size) == (MISS if n == 1 else payload(n, size))
            assert again.namespaces() == [record]
            assert again.usage().payload_bytes == sum(SIZES) - SIZES[1]
            assert put(again, key("new"), payload("new", 5000)) is STORED
            self.check(again)

    def test_the_cap_holds_and_suffixes_go_first(self, bounded: StorageBackend) -> None:
        size = 60_000
        parents: dict[ObjectKey, bytes | None] = {}
        for sequence in range(20):
            for k, parent in chain(sequence, 12):
                parents[k] = parent
                assert put(bounded, k, payload(k, size), parent) is STORED
                assert bounded.usage().used_bytes <= self.small
        kept = {entry.key for entry in bounded.scan_all()}
        assert len(kept) < len(parents), "something was evicted"
        assert len(kept) * size > self.small // 3, "not more than was needed"
        pages = {k.page_key for k in kept}
        assert all(parents[k] is None or parents[k] in pages for k in kept), "no page went before its descendants"
        assert {k for k, _ in chain(19, 12)} <= kept, "the newest stay"
        for k in kept:
            assert fetch(bounded, k, size) == payload(k, size)

    def test_a_state_goes_before_its_page_and_does_not_hold_deeper_pages_back(self, bounded: StorageBackend) -> None:
        size = 60_000
        pages = chain("s", 3)
        for k, parent in pages:
            put(bounded, k, payload(k, size), parent)
        state = ObjectKey(PoolName.MAMBA, key(("s", 1), PoolName.MAMBA).digest)
        put(bounded, state, payload(state, size), state.page_key)
        order: list[ObjectKey] = []
        watched = [k for k, _ in pages] + [state]
        for n in range(300):
            put(bounded, key(n), payload(n, size))
            gone = [k for k, there in zip(watched, bounded.exists(watched), strict=True) if not there and k not in order]
            order += sorted(gone, key=watched.index, reverse=True)
        assert set(order) == set(watched)
        place = {k: order.index(k) for k in watched}
        assert place[pages[2][0]] < place[pages[1][0]] < place[pages[0][0]]
        assert place[state] < place[pages[1][0]]

    def test_the_recently_used_stay(self, bounded: StorageBackend) -> None:
        size = 60_000
        put(bounded, key("hot"), payload("hot", size))
        put(bounded, key("cold"), payload("cold", size))
        for n in range(250):
            put(bounded, key(n), payload(n, size))
            assert fetch(bounded, key("hot"), size) == payload("hot", size)
        assert bounded.exists([key("hot"), key("cold")]) == [True, False]

    def test_an_object_larger_than_the_store_is_throttled(self, bounded: StorageBackend) -> None:
        put(bounded, key("a"), payload("a", 5000))
        big, small = to_set(key("big"), bytes(self.small + 1)), to_set(key("b"), payload("b", 5000))
        assert bounded.set([big, small]) == [THROTTLED, STORED]
        assert fetch(bounded, key("a"), 5000) == payload("a", 5000)

    def test_a_batch_larger_than_the_store_keeps_its_beginning(self, bounded: StorageBackend) -> None:
        items = [to_set(k, payload(k, 100_000), parent=parent) for k, parent in chain("long", 120)]
        answers = bounded.set(items)
        stored = answers.count(STORED)
        assert 0 < stored < 120
        assert answers == [STORED] * stored + [THROTTLED] * (120 - stored)

    def test_threads_that_fill_a_full_store(self, bounded: StorageBackend) -> None:
        def work(turn: int) -> None:
            for n in range(40):
                name = (turn, n)
                assert put(bounded, key(name), payload(name, 100_000)) in (STORED, THROTTLED)
                assert fetch(bounded, key(name), 100_000) in (payload(name, 100_000), MISS)
                assert bounded.usage().used_bytes <= self.small

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
