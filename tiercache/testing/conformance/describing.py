"""Tests of `describe`: it answers as a scan does, and does not count as a use of the objects."""

# ruff: noqa: D102 (a test is named for what it checks)

from __future__ import annotations

import time
from pathlib import Path

from tiercache.core import ObjectKey, PoolName
from tiercache.storage.base import StorageBackend
from tiercache.testing.conformance.hooks import CORRUPT, HIT, STORED, BackendHooks
from tiercache.testing.objects import OTHER_NAMESPACE, fetch, key, page_key, payload, put, state_of, to_set

SIZE = 60_000
CLOCKS = 60.0
"""Largest difference in seconds that is allowed between the store's clock and the test's."""


class Describing(BackendHooks):
    """Tests of descriptions.

    Thread safety: as `BackendHooks`.
    """

    def test_it_says_what_a_scan_says_in_the_order_of_the_keys(self, store: StorageBackend) -> None:
        state = state_of("b")
        items = [
            to_set(key("parent"), payload("parent", 100), depth=6),
            to_set(key("a"), payload("a", 5000), parent=page_key("parent"), depth=7),
            to_set(key("b"), payload("b", 100), namespace=OTHER_NAMESPACE),
            to_set(state, payload("state", 9000), namespace=OTHER_NAMESPACE, parent=state.page_key, depth=0),
        ]
        assert store.set(items) == [STORED] * 4
        scanned = {entry.key: entry for entry in store.scan_all()}
        asked = [state, key("x"), key("a"), state, key("b"), key("x"), key("a")]
        assert store.describe(asked) == [scanned.get(k) for k in asked]
        assert all(self.scanned(scanned[item.key].meta) == self.scanned(item.meta) for item in items)
        assert store.describe([]) == []

    def test_it_says_when_an_object_was_stored(self, store: StorageBackend) -> None:
        before = time.time() - CLOCKS
        put(store, key("a"), payload("a", 5000))
        put(store, key("a"), payload("a", 5000))
        [entry] = store.describe([key("a")])
        assert entry is not None
        assert entry.stored_at is None or before < entry.stored_at < time.time() + CLOCKS

    def test_what_is_gone_is_not_described(self, store: StorageBackend) -> None:
        for name in ("a", "b", "c"):
            put(store, key(name), payload(name, 5000))
        store.delete([key("a")])
        self.corrupt(store, key("b"))
        assert fetch(store, key("b"), 5000) is CORRUPT
        found = store.describe([key(name) for name in ("a", "b", "c")])
        assert [entry is not None for entry in found] == [False, False, True]
        assert put(store, key("a"), payload("other", 70_000)) is STORED
        [entry] = store.describe([key("a")])
        assert entry is not None
        assert (entry.key, entry.meta.length) == (key("a"), 70_000)

    def test_the_digest_alone_names_what_is_described(self, store: StorageBackend) -> None:
        put(store, key("a"), payload("a", 5000))
        others = [
            ObjectKey(PoolName.SWA, key("a").digest),
            *(ObjectKey(PoolName.KV, bytes(n)) for n in (0, 5, 32, 63, 65, 700)),
        ]
        [found, *none] = store.describe(others)
        assert found is not None
        assert found.key == key("a")
        assert none == [None] * 6

    def test_a_big_batch_is_described(self, store: StorageBackend) -> None:
        names = range(2500)
        store.set([to_set(key(n), payload(n, 16)) for n in names])
        scanned = {entry.key: entry for entry in store.scan_all()}
        asked = [key(n) for n in (*range(2600, -1, -1), *names)]
        assert store.describe(asked) == [scanned.get(k) for k in asked]

    def test_descriptions_outlive_the_process(self, store: StorageBackend, tmp_path: Path) -> None:
        self.need(store, "persistent")
        keys = [key(n) for n in range(5)]
        store.set([to_set(k, payload(k, 5000), depth=3) for k in keys[:4]])
        before = store.describe(keys)
        store.close()
        with self.open_store(tmp_path / "store") as again:
            assert again.describe(keys) == before

    def test_to_be_described_is_not_to_be_used(self, bounded: StorageBackend) -> None:
        put(bounded, key("hot"), payload("hot", SIZE))
        put(bounded, key("asked"), payload("asked", SIZE))
        for n in range(250):
            put(bounded, key(n), payload(n, SIZE))
            bounded.describe([key("asked"), key("asked")])
            assert put(bounded, key("hot"), payload("hot", SIZE)) is HIT
        assert [entry is not None for entry in bounded.describe([key("hot"), key("asked")])] == [True, False]
