"""Tests of what a store reports about its contents: scans, descriptions, usage, namespaces, changes.

`describe` answers as a scan does, and does not count as a use of the objects.
"""

# ruff: noqa: D102 (a test is named for what it checks)

from __future__ import annotations

import threading
import time
from dataclasses import replace
from random import Random

import pytest

from tiercache.core import ObjectKey, ObjectMeta
from tiercache.events import EventKind
from tiercache.events.base import ResidencyMap
from tiercache.storage.base import NamespaceRecord, SetItem, StorageBackend
from tiercache.storage.store_events import StoreEvents
from tiercache.testing.conformance.hooks import CORRUPT, HIT, STORED, BackendHooks
from tiercache.testing.objects import (
    NAMESPACE,
    OTHER_NAMESPACE,
    chain,
    fetch,
    key,
    page_key,
    payload,
    put,
    state_of,
    to_set,
)

_SIZE = 40_000
_SECONDS = 20.0
CLOCKS = 60.0
"""Largest difference in seconds that is allowed between the store's clock and the test's."""


class Figures(BackendHooks):
    """Tests of scans, descriptions, usage and namespaces.

    Thread safety: as `BackendHooks`.
    """

    def test_scans_and_descriptions_name_everything(self, store: StorageBackend) -> None:
        before = time.time() - CLOCKS
        state = state_of("b")
        items = [
            to_set(key("parent"), payload("parent", 100), depth=6),
            to_set(key("a"), payload("a", 5000), parent=page_key("parent"), depth=7),
            to_set(key("b"), payload("b", 100), namespace=OTHER_NAMESPACE),
            to_set(state, payload("state", 9000), namespace=OTHER_NAMESPACE, parent=state.page_key, depth=0),
        ]
        assert store.set([*items, items[0]]) == [STORED] * 4 + [HIT]
        assert _sorted(self._scan(store)) == _sorted(self._expected(items))
        assert sorted(e.key for e in store.scan_all(NAMESPACE)) == sorted([key("parent"), key("a")])
        assert sorted(e.key for e in store.scan_all(OTHER_NAMESPACE)) == sorted([key("b"), state])
        assert list(store.scan_all(bytes(32))) == []
        scanned = {entry.key: entry for entry in store.scan_all()}
        asked = [state, key("x"), key("a"), state, key("b"), key("x"), key("a")]
        assert store.describe(asked) == [scanned.get(k) for k in asked], "in the order of the keys"
        assert store.describe([]) == []
        times = [entry.stored_at for entry in scanned.values() if entry.stored_at is not None]
        assert all(before < at < time.time() + CLOCKS for at in times)

    def test_metadata_come_back_to_their_limits(self, store: StorageBackend) -> None:
        items = [to_set(key(n), payload(n, 100)) for n in range(6)]
        meta = [item.meta for item in items]
        limits = [
            meta[0],
            replace(meta[1], depth=0),
            replace(meta[2], depth=2**32 - 1),
            replace(meta[3], parent=items[0].key.page_key),
            replace(meta[4], namespace=b"n"),
            replace(meta[5], namespace=bytes(64)),
        ]
        items = [item._replace(meta=limit) for item, limit in zip(items, limits, strict=True)]
        assert store.set(items) == [STORED] * len(items)
        assert _sorted(self._scan(store)) == _sorted(self._expected(items))

    def test_a_scan_of_a_namespace_and_a_big_batch_go_through_all_pages(self, store: StorageBackend) -> None:
        rare = range(0, 2600, 650)
        store.set(
            [
                to_set(key(n), payload(n, 16), namespace=OTHER_NAMESPACE if n in rare else NAMESPACE)
                for n in range(2600)
            ]
        )
        assert {e.key for e in store.scan_all(OTHER_NAMESPACE)} == {key(n) for n in rare}
        scanned = {entry.key: entry for entry in store.scan_all()}
        asked = [key(n) for n in (*range(2700, -1, -1), *range(2600))]
        assert store.describe(asked) == [scanned.get(k) for k in asked]
        assert len(list(store.scan_all(NAMESPACE))) == 2600 - len(rare)

    def test_objects_may_come_and_go_during_a_scan(self, store: StorageBackend) -> None:
        names = range(2500)
        store.set([to_set(key(n), payload(n, 64)) for n in names])
        gone: set[ObjectKey] = set()
        seen: list[ObjectKey] = []
        cursor, turn = b"", 0
        while cursor or not turn:
            page = store.scan(None, cursor)
            seen += [e.key for e in page.entries]
            cursor = page.cursor
            leaving = [key(n) for n in range(turn, 2500, 50)]
            gone.update(leaving)
            store.delete(leaving)
            store.set([to_set(key(n), payload(n, 64)) for n in range(3000 + 10 * turn, 3010 + 10 * turn)])
            turn += 1
            assert turn < 1000, "a scan ends"
        assert len(seen) == len(set(seen))
        assert set(seen) >= {key(n) for n in names} - gone

    def test_bytes_that_are_no_cursor_are_harmless(self, store: StorageBackend) -> None:
        self.need(store, "listed")
        items = [to_set(key(n), payload(n, 100)) for n in range(5)]
        store.set(items)
        for cursor in (b"x", b"-1", b"9" * 40, b"1" * 400, b"\xff" * 8, b"\xff" * 64, "٣".encode()):
            found = store.scan(None, cursor)
            assert {entry.key for entry in found.entries} <= {item.key for item in items}

    def test_namespaces_are_remembered(self, store: StorageBackend) -> None:
        records = [
            NamespaceRecord(NAMESPACE, {"model": "m", "page_size": 64}),
            NamespaceRecord(bytes(64), {"model": "", "größe": 2**63 - 1}),
            NamespaceRecord(b"n", {}),
        ]
        for record in [*records, *records]:
            store.register_namespace(record)
        put(store, key("a"), payload("a", 10))
        store.set([to_set(key("b"), payload("b", 10), namespace=OTHER_NAMESPACE)])
        found = store.namespaces()
        assert len(found) == len(records)
        assert {r.namespace: dict(r.identity) for r in found} == {
            r.namespace: dict(r.identity) for r in records
        }
        store.delete([key("a"), key("b")])
        assert len(store.namespaces()) == len(records)

    def test_that_there_are_states_is_never_taken_back(self, store: StorageBackend) -> None:
        plain, hybrid = (
            NamespaceRecord(NAMESPACE, {"model": "m"}),
            NamespaceRecord(NAMESPACE, {"model": "m"}, states=True),
        )
        store.register_namespace(plain)
        store.register_namespace(NamespaceRecord(OTHER_NAMESPACE, {}))
        assert _states(store) == {NAMESPACE: False, OTHER_NAMESPACE: False}
        for record in (hybrid, plain, hybrid, plain):
            store.register_namespace(record)
            assert _states(store) == {NAMESPACE: True, OTHER_NAMESPACE: False}
        [found] = [record for record in store.namespaces() if record.namespace == NAMESPACE]
        assert found.identity["model"] == "m"

    def test_flush(self, store: StorageBackend) -> None:
        store.flush()
        put(store, key("a"), payload("a", 10))
        store.flush()
        assert fetch(store, key("a"), 10) == payload("a", 10)
        assert put(store, key("a"), payload("a", 10)) is HIT

    def _scan(self, store: StorageBackend) -> list[tuple[ObjectKey, ObjectMeta]]:
        return [(entry.key, self.scanned(entry.meta)) for entry in store.scan_all()]

    def _expected(self, items: list[SetItem]) -> list[tuple[ObjectKey, ObjectMeta]]:
        return [(item.key, self.scanned(item.meta)) for item in items]


def _states(store: StorageBackend) -> dict[bytes, bool]:
    return {record.namespace: record.states for record in store.namespaces()}


def _sorted(found: list[tuple[ObjectKey, ObjectMeta]]) -> list[tuple[ObjectKey, ObjectMeta]]:
    return sorted(found, key=lambda pair: pair[0].digest)


class Watching(BackendHooks):
    """Tests of changes that are told.

    Thread safety: as `BackendHooks`.
    """

    def test_what_is_told_adds_up_to_what_is_stored(self, bounded: StorageBackend) -> None:
        put(bounded, key("before"), payload(0, _SIZE))
        told = StoreFollower.required(bounded)

        def work(seed: int) -> None:
            random = Random(seed)
            for turn in range(60):
                pages = chain((seed % 2, random.randrange(20)), random.randint(1, 6))
                if random.random() < 0.8:
                    bounded.set([to_set(k, payload(k, _SIZE), parent=parent) for k, parent in pages])
                    name = (turn, seed)
                    bounded.set([to_set(state_of(name), payload(name, 512), parent=page_key(name))])
                    bounded.set([to_set(key(name), payload(name, 512), parent=pages[-1][0].page_key)])
                else:
                    bounded.delete([k for k, _ in pages])

        workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(120)
        told.await_truth()
        assert told.removed, "nothing was evicted or deleted"

    def test_a_corrupt_object_is_told_as_removed(self, store: StorageBackend) -> None:
        told = StoreFollower.required(store)
        put(store, key(1), payload(1, _SIZE))
        told.await_truth()
        self.corrupt(store, key(1))
        assert fetch(store, key(1), _SIZE) is CORRUPT
        told.await_truth()
        assert told.removed

    def test_nothing_is_told_when_nobody_watches_any_more(self, store: StorageBackend) -> None:
        noted: list[bytes] = []
        if not store.watch(lambda digests, _: noted.extend(digests)):
            pytest.skip("the store does not tell of changes")
        put(store, key(1), payload(1, _SIZE))
        end = time.monotonic() + _SECONDS
        while not noted and time.monotonic() < end:
            time.sleep(0.01)
        assert store.watch(None)
        put(store, key(2), payload(2, _SIZE))
        later = StoreFollower.required(store)
        put(store, key(3), payload(3, _SIZE))
        later.await_truth()
        assert noted == [key(1).digest]


class StoreFollower:
    """Subscriber of the events of one store, without a publisher in between.

    It begins with a snapshot. `is_told` is False if the store does not tell of changes.

    Thread safety: one thread.
    """

    def __init__(self, store: StorageBackend) -> None:
        self._store = store
        self._source = StoreEvents(store, "store")
        self._map = ResidencyMap()
        self.is_told = not self._source.silent
        self.removed = 0
        """Number of objects that were told as removed."""
        for events in self._source.snapshot():
            self._map.apply(events)

    @classmethod
    def required(cls, store: StorageBackend) -> StoreFollower:
        """Return a follower; skips the test if the store does not tell of changes."""
        made = cls(store)
        if not made.is_told:
            pytest.skip("the store does not tell of changes")
        return made

    def held(self) -> set[bytes]:
        """Return the digests of the objects that the store has, by its events."""
        while events := self._source.collect():
            self._map.apply(events)
            self.removed += sum(len(event.keys) for event in events if event.kind is EventKind.REMOVED)
        return {found.layout + found.key for held in self._map.places().values() for found in held}

    def await_truth(self) -> None:
        """Wait until the events give what a scan finds."""
        end = time.monotonic() + _SECONDS
        while True:
            found, known = {entry.key.digest for entry in self._store.scan_all()}, self.held()
            if not self.is_told or found == known:
                return
            assert time.monotonic() < end, f"{len(found - known)} not told, {len(known - found)} not there"
            time.sleep(0.01)
