"""Tests of persistent stores: acknowledged objects are there when the store is opened again.

This holds after a close and after the process of the store was killed.
"""

# ruff: noqa: D102 (a test is named for what it checks)

from __future__ import annotations

from pathlib import Path

import pytest

from tiercache.storage.base import NamespaceRecord, StorageBackend
from tiercache.testing.conformance.hooks import CORRUPT, MISS, SIZES, STORED, BackendHooks
from tiercache.testing.objects import NAMESPACE, OTHER_NAMESPACE, chain, fetch, key, payload, put, to_set

ENDS = ("closed", "killed")


class Persistence(BackendHooks):
    """Tests of persistence, after a close and after a kill.

    Thread safety: as `BackendHooks`.
    """

    def end(self, store: StorageBackend, path: Path, how: str, capacity: int | None = None) -> StorageBackend:
        """Close the store or kill its process, as `how` says; open the store again and return it."""
        if how == "killed":
            return self.kill(store, path, capacity)
        store.close()
        return self.open_store(path, capacity)

    @pytest.mark.parametrize("how", ENDS)
    def test_what_was_acknowledged_is_there_afterwards(
        self, store: StorageBackend, tmp_path: Path, how: str
    ) -> None:
        self.need(store, "persistent")
        records = [
            NamespaceRecord(NAMESPACE, {"model": "m", "page_size": 64}),
            NamespaceRecord(OTHER_NAMESPACE, {}),
        ]
        for record in records:
            store.register_namespace(record)
        for n, size in enumerate(SIZES):
            put(store, key(n), payload(n, size))
        store.set(
            [
                to_set(k, payload(k, 5000), parent=parent, depth=n)
                for n, (k, parent) in enumerate(chain("s", 5), 9)
            ]
        )
        store.delete([key(1)])
        put(store, key("spoiled"), payload("spoiled", 5000))
        self.corrupt(store, key("spoiled"))
        assert fetch(store, key("spoiled"), 5000) is CORRUPT
        before = {entry.key: entry.meta for entry in store.scan_all()}
        with self.end(store, tmp_path / "store", how) as again:
            assert {entry.key: entry.meta for entry in again.scan_all()} == before
            for n, size in enumerate(SIZES):
                assert fetch(again, key(n), size) == (MISS if n == 1 else payload(n, size))
            assert all(fetch(again, k, 5000) == payload(k, 5000) for k, _ in chain("s", 5))
            assert fetch(again, key("spoiled"), 5000) is MISS
            assert {r.namespace: dict(r.identity) for r in again.namespaces()} == {
                r.namespace: dict(r.identity) for r in records
            }
            assert self.usage(again).payload_bytes == sum(SIZES) - SIZES[1] + 5 * 5000
            assert put(again, key("new"), payload("new", 5000)) is STORED
            assert put(again, key(1), payload("anew", 70_000)) is STORED
            self.check(again)

    @pytest.mark.parametrize("how", ENDS)
    def test_that_there_are_states_is_known_afterwards(
        self, store: StorageBackend, tmp_path: Path, how: str
    ) -> None:
        self.need(store, "persistent")
        for namespace, states in ((NAMESPACE, True), (OTHER_NAMESPACE, False)):
            store.register_namespace(NamespaceRecord(namespace, {"model": "m"}, states))
            store.set([to_set(key(namespace), payload(namespace, 100), namespace=namespace)])
        with self.end(store, tmp_path / "store", how) as again:
            for _ in range(2):
                assert {r.namespace: r.states for r in again.namespaces()} == {
                    NAMESPACE: True,
                    OTHER_NAMESPACE: False,
                }
                again.register_namespace(NamespaceRecord(NAMESPACE, {"model": "m"}))
            assert {e.key: e.meta.namespace for e in again.scan_all()} == {
                key(n): n for n in (NAMESPACE, OTHER_NAMESPACE)
            }

    @pytest.mark.parametrize("how", ENDS)
    def test_again_and_again(self, store: StorageBackend, tmp_path: Path, how: str) -> None:
        self.need(store, "persistent")
        for turn in range(4):
            store = self.end(store, tmp_path / "store", how)
            assert put(store, key(turn), payload(turn, 9000)) is STORED
            assert self.usage(store).objects == turn + 1
            self.check(store)
        assert all(fetch(store, key(turn), 9000) == payload(turn, 9000) for turn in range(4))
        store.close()

    @pytest.mark.parametrize("how", ENDS)
    def test_damage_done_while_it_was_closed_is_found(
        self, store: StorageBackend, tmp_path: Path, how: str
    ) -> None:
        self.need(store, "persistent")
        for name in ("a", "b", "c"):
            put(store, key(name), payload(name, 8192))
        self.corrupt(store, key("a"))
        self.swap(store, key("b"), key("c"))
        with self.end(store, tmp_path / "store", how) as again:
            assert [fetch(again, key(name), 8192) for name in ("a", "b", "c")] == [CORRUPT] * 3
            assert self.usage(again).objects == 0
            assert put(again, key("a"), payload("a", 8192)) is STORED
            assert fetch(again, key("a"), 8192) == payload("a", 8192)
            self.check(again)

    def test_what_is_flushed_survives_a_kill(self, store: StorageBackend, tmp_path: Path) -> None:
        self.need(store, "persistent")
        store.set([to_set(key(n), payload(n, 3000)) for n in range(50)])
        store.flush()
        with self.kill(store, tmp_path / "store") as again:
            assert all(fetch(again, key(n), 3000) == payload(n, 3000) for n in range(50))

    @pytest.mark.parametrize("how", ENDS)
    def test_eviction_goes_on_where_it_was(self, bounded: StorageBackend, tmp_path: Path, how: str) -> None:
        self.need(bounded, "persistent")
        size = 60_000
        for k, parent in [pair for sequence in range(4) for pair in chain(sequence, 12)]:
            put(bounded, k, payload(k, size), parent)
        held = {entry.key: entry.meta for entry in bounded.scan_all()}
        with self.end(bounded, tmp_path / "store", how, self.small) as again:
            assert {entry.key: entry.meta for entry in again.scan_all()} == held
            for n in range(150):
                assert put(again, key(n), payload(n, size)) is STORED
                assert self.usage(again).used_bytes <= self.small
                left = held.keys() & {entry.key for entry in again.scan_all()}
                pages = {k.page_key for k in left}
                assert all(held[k].parent is None or held[k].parent in pages for k in left), (
                    "a page was evicted before a page that follows it"
                )
            assert len(left) < len(held)
            self.check(again)
