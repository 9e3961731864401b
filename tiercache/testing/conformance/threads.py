"""Tests of several threads at once, and of closing a store during calls."""

# ruff: noqa: D102 (a test is named for what it checks)

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest

from tiercache.core import ObjectKey, Outcome
from tiercache.errors import ClosedError
from tiercache.storage.base import GetItem, NamespaceRecord, SetItem, StorageBackend
from tiercache.testing.conformance.hooks import CORRUPT, HIT, MISS, STORED, BackendHooks
from tiercache.testing.objects import NAMESPACE, content, fetch, key, payload, put, to_get, to_set

LARGE = 1_500_000
"""Bytes of a large object.

Large objects are copied and hashed without the interpreter's lock, so that other threads run meanwhile.
"""


def run_all(*tasks: Callable[[], Any]) -> list[Any]:
    """Run each task in a thread of its own, and return the results.

    The threads start together and switch often. If a task raises, its exception is raised here.
    """
    start = Barrier(len(tasks))

    def run(task: Callable[[], Any]) -> Any:
        start.wait(30)
        return task()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(20e-6)  # seconds; the default is 5 ms
    try:
        with ThreadPoolExecutor(len(tasks)) as pool:
            return [future.result() for future in [pool.submit(run, task) for task in tasks]]
    finally:
        sys.setswitchinterval(interval)


class Threads(BackendHooks):
    """Tests of concurrent calls.

    Thread safety: as `BackendHooks`; the tests start threads of their own.
    """

    def test_threads_that_set_and_get_the_same_keys(self, store: StorageBackend) -> None:
        names = range(24)

        def work(turn: int) -> list[Outcome]:
            answers: list[Outcome] = []
            for n in [*names[turn * 6 :], *names[: turn * 6]]:
                answers += store.set([to_set(key(n), payload(n, 20_000))])
                items = [to_get(key(m), 20_000) for m in (n, (n + 7) % 24)]
                first, second = store.get(items)
                assert first is HIT, "an acknowledged object is stored"
                assert content(items[0]) == payload(n, 20_000)
                assert second in (HIT, MISS)
                assert second is MISS or content(items[1]) == payload((n + 7) % 24, 20_000)
            return answers

        parts = run_all(*(lambda turn=turn: work(turn) for turn in range(4)))
        answers = [answer for part in parts for answer in part]
        assert (answers.count(STORED), answers.count(HIT)) == (24, 72)
        assert (self.usage(store).objects, self.usage(store).payload_bytes) == (24, 24 * 20_000)

    def test_one_key_from_many_threads_is_stored_once(self, store: StorageBackend) -> None:
        """Each thread sets different bytes; the object has the bytes of the thread that got STORED."""
        for n in range(15):
            size = LARGE if n % 2 else 1000
            items = [to_set(key(n), payload((n, turn), size)) for turn in range(4)]
            answers = [answer for [answer] in run_all(*(partial(store.set, [item]) for item in items))]
            assert sorted(answers) == [HIT] * 3 + [STORED]
            assert fetch(store, key(n), size) == payload((n, answers.index(STORED)), size)
        assert self.usage(store).payload_bytes == sum(entry.meta.length for entry in store.scan_all())

    def test_batches_that_overlap_in_opposite_order(self, store: StorageBackend) -> None:
        """Calls that wait for each other's objects must not deadlock."""
        for turn in range(15):
            names = [(turn, n) for n in range(12)]
            orders = [names, names[::-1], names[6:] + names[:6], names + names]
            parts = run_all(
                *(lambda o=o: store.set([to_set(key(n), payload(n, 3000)) for n in o]) for o in orders)
            )
            answers = [answer for part in parts for answer in part]
            assert (answers.count(STORED), answers.count(HIT)) == (12, 48)
        assert self.usage(store).objects == 15 * 12

    def test_threads_that_delete_while_others_read(self, store: StorageBackend) -> None:
        data = payload("a", 30_000)

        def write() -> list[bool]:
            gone: list[bool] = []
            for _ in range(40):
                assert put(store, key("a"), data) in (STORED, HIT)
                gone += store.delete([key("a")])
            return gone

        def read() -> None:
            for _ in range(80):
                assert fetch(store, key("a"), 30_000) in (data, MISS)
                store.exists([key("a")])
                [entry] = store.describe([key("a")])
                assert entry is None or (entry.key, entry.meta.length) == (key("a"), 30_000)

        run_all(write, write, read, read)
        assert store.exists([key("a")]) == [False]
        assert (self.usage(store).objects, self.usage(store).payload_bytes) == (0, 0)

    def test_a_corrupt_object_is_dropped_once_and_what_replaces_it_stays(self, store: StorageBackend) -> None:
        """A reader that finds the old object corrupt must not drop a new object under the same key.

        1. Threads A and B read the corrupt object.   2. A drops it and stores a new object.
        3. B finds that what it has read is corrupt.   4. The new object must stay.
        """
        data = payload("a", LARGE)
        item = to_set(key("a"), data)

        def heal(wanted: GetItem) -> None:
            [found] = store.get([wanted])
            assert found in (CORRUPT, MISS) or (found is HIT and content(wanted) == data)
            if found is not HIT:
                assert store.set([item])[0] in (STORED, HIT)

        for _ in range(15):
            store.set([item])
            self.corrupt(store, key("a"))
            run_all(*(partial(heal, to_get(key("a"), LARGE)) for _ in range(4)))
            assert fetch(store, key("a"), LARGE) == data
            store.delete([key("a")])

    def test_scans_and_figures_while_others_write(self, store: StorageBackend) -> None:
        steady = {key(("steady", n)) for n in range(1200)}
        store.set([to_set(k, payload(k, 16)) for k in steady])
        done = Event()

        def write() -> None:
            try:
                for n in range(25):
                    store.set([to_set(key((n, m)), payload((n, m), 64)) for m in range(20)])
                    store.delete([key((n, m)) for m in range(0, 20, 2)])
            finally:
                done.set()

        def watch() -> int:
            scans = 0
            while not done.is_set() or not scans:
                seen: list[ObjectKey] = [entry.key for entry in store.scan_all()]
                assert len(seen) == len(set(seen))
                assert steady <= set(seen)
                assert self.usage(store).objects >= len(steady)
                scans += 1
            return scans

        run_all(write, watch)
        assert self.usage(store).objects == len(steady) + 250

    def test_close_twice_and_use_after_it(self, store: StorageBackend) -> None:
        with store:
            put(store, key("a"), payload("a", 100))
        store.close()
        for call in (
            lambda: store.exists([]),
            lambda: store.get([]),
            lambda: store.set([]),
            lambda: store.delete([]),
            lambda: store.exists([key("a")]),
            lambda: store.get([to_get(key("a"), 100)]),
            lambda: store.set([to_set(key("b"), b"b")]),
            lambda: store.delete([key("a")]),
            lambda: store.describe([]),
            lambda: store.describe([key("a")]),
            store.scan,
            store.namespaces,
            store.usage,
            store.flush,
            lambda: store.advise([key("a")], [1.0]),
            lambda: store.register_namespace(NamespaceRecord(NAMESPACE, {})),
        ):
            with pytest.raises(ClosedError):
                call()

    def test_close_while_calls_are_inside(self, store: StorageBackend, tmp_path: Path) -> None:
        """A call either completes or raises ClosedError; acknowledged objects of a persistent store stay."""
        batches = {
            (turn, n): [to_set(key((turn, n, m)), payload((turn, n, m), LARGE)) for m in range(2)]
            for turn in range(4)
            for n in range(4)
        }
        about_to = [Event() for _ in range(4)]

        def work(turn: int) -> list[SetItem]:
            stored: list[SetItem] = []
            put(store, key(turn), payload(turn, 9000))
            try:
                for n in range(100_000):
                    about_to[turn].set()
                    batch = batches.get((turn, n), [])
                    assert store.set(batch) == [STORED] * len(batch)
                    stored += batch
                    assert store.exists([item.key for item in batch]) == [True] * len(batch)
                    assert fetch(store, key(turn), 9000) == payload(turn, 9000)
            except ClosedError:
                return stored
            raise AssertionError("no call raised ClosedError although the store was closed")

        def close() -> list[SetItem]:
            for event in about_to:
                assert event.wait(30)
            store.close()
            with pytest.raises(ClosedError):
                store.exists([])
            return []

        parts = run_all(close, *(partial(work, turn) for turn in range(4)))
        stored = [item for part in parts for item in part]
        if store.capabilities.persistent:
            with self.open_store(tmp_path / "store") as again:
                wanted = [to_get(item.key, LARGE) for item in stored]
                assert again.get(wanted) == [HIT] * len(stored)
                assert all(
                    content(found) == b"".join(item.buffers)
                    for found, item in zip(wanted, stored, strict=True)
                )
                assert self.usage(again).objects == len(stored) + 4
                self.check(again)
