"""Tests of what a store reports about its contents: scans, descriptions, usage, namespaces.

`describe` answers as a scan does, and does not count as a use of the objects.
"""

# ruff: noqa: D102 (a test is named for what it checks)

from __future__ import annotations

import time
from dataclasses import replace

from tiercache.core import ObjectKey, ObjectMeta
from tiercache.storage.base import NamespaceRecord, SetItem, StorageBackend
from tiercache.testing.conformance.hooks import HIT, STORED, BackendHooks
from tiercache.testing.objects import (
    NAMESPACE,
    OTHER_NAMESPACE,
    fetch,
    key,
    page_key,
    payload,
    put,
    state_of,
    to_set,
)

SIZE = 60_000
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
