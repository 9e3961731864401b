"""Tests of one object at a time.

A get returns an object as it was stored, an object is identified by its key alone, and a store does not keep
the caller's buffers.
"""

# ruff: noqa: D102 (a test is named for what it checks)

from __future__ import annotations

from dataclasses import replace

import pytest

from tiercache.core import ObjectKey, PoolName
from tiercache.errors import ConfigError
from tiercache.storage.base import Capabilities, GetItem, StorageBackend, StoreContext
from tiercache.storage.env import Env
from tiercache.testing.conformance.hooks import HIT, MISS, SIZES, STORED, BackendHooks
from tiercache.testing.objects import content, fetch, key, payload, put, to_get, to_set


class Objects(BackendHooks):
    """Tests of single objects.

    Thread safety: as `BackendHooks`.
    """

    def test_it_says_what_it_can_do(self, store: StorageBackend) -> None:
        assert isinstance(store.capabilities, Capabilities)
        with pytest.raises(ConfigError):
            type(store).from_config({"no such setting": 1}, StoreContext(Env()))

    def test_nothing_is_there_at_first(self, store: StorageBackend) -> None:
        assert store.exists([key("a")]) == [False]
        assert fetch(store, key("a"), 10) is MISS
        assert store.delete([key("a")]) == [False]
        assert list(store.scan_all()) == []
        assert store.namespaces() == []
        usage = self.usage(store)
        assert (usage.objects, usage.payload_bytes) == (0, 0)

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize(("pieces", "slack"), [(1, 0), (7, 0), (1, 4096), (5, 10_000)])
    def test_what_is_stored_comes_back(
        self, store: StorageBackend, size: int, pieces: int, slack: int
    ) -> None:
        data = payload("a", size)
        assert store.set([to_set(key("a"), data, pieces=pieces, slack=slack)]) == [STORED]
        assert store.exists([key("a")]) == [True]
        item = to_get(key("a"), size, pieces=pieces + 2, slack=slack)
        assert store.get([item]) == [HIT]
        assert content(item) == data

    @pytest.mark.parametrize("size", SIZES)
    def test_a_set_without_a_checksum_gets_the_one_of_its_bytes(
        self, store: StorageBackend, size: int
    ) -> None:
        item = to_set(key("a"), payload("a", size), pieces=3, slack=100)
        assert store.set([item._replace(meta=replace(item.meta, checksum=b""))]) == [STORED]
        assert fetch(store, key("a"), size) == payload("a", size)
        [entry] = store.scan_all()
        assert self.scanned(entry.meta) == self.scanned(item.meta)

    def test_more_buffers_than_one_vectored_call_takes(self, store: StorageBackend) -> None:
        data = payload("many", 20_000)
        assert store.set([to_set(key("many"), data, pieces=3000)]) == [STORED]
        item = to_get(key("many"), 20_000, pieces=2500)
        assert store.get([item]) == [HIT]
        assert content(item) == data

    def test_setting_again_keeps_the_first(self, store: StorageBackend) -> None:
        put(store, key("a"), payload("first", 5000))
        assert put(store, key("a"), payload("other", 5000)) is HIT
        assert put(store, key("a"), payload("longer", 9000)) is HIT
        assert fetch(store, key("a"), 5000) == payload("first", 5000)
        assert self.usage(store).payload_bytes == 5000

    def test_a_deleted_object_can_be_another_one(self, store: StorageBackend) -> None:
        put(store, key("a"), payload("first", 5000))
        assert store.delete([key("a")]) == [True]
        assert store.exists([key("a")]) == [False]
        assert fetch(store, key("a"), 5000) is MISS
        assert put(store, key("a"), payload("second", 70_000)) is STORED
        assert fetch(store, key("a"), 70_000) == payload("second", 70_000)

    def test_pools_of_one_page_are_different_objects(self, store: StorageBackend) -> None:
        page, state = key("p", PoolName.KV), key("p", PoolName.MAMBA)
        put(store, page, payload("kv", 5000))
        assert store.exists([page, state]) == [True, False]
        put(store, state, payload("state", 9000))
        assert (fetch(store, page, 5000), fetch(store, state, 9000)) == (
            payload("kv", 5000),
            payload("state", 9000),
        )
        assert store.delete([page]) == [True]
        assert fetch(store, state, 9000) == payload("state", 9000)

    def test_the_digest_alone_names_an_object(self, store: StorageBackend) -> None:
        other = ObjectKey(PoolName.SWA, key("a").digest)
        put(store, key("a"), payload("a", 5000))
        assert store.exists([other]) == [True]
        assert put(store, other, payload("b", 5000)) is HIT
        assert fetch(store, other, 5000) == payload("a", 5000)
        assert store.delete([other]) == [True]
        assert store.exists([key("a")]) == [False]

    def test_read_only_buffers_can_be_stored(self, store: StorageBackend) -> None:
        item = to_set(key("a"), payload("a", 5000))
        assert store.set([item._replace(buffers=[memoryview(payload("a", 5000))])]) == [STORED]
        assert fetch(store, key("a"), 5000) == payload("a", 5000)

    def test_a_set_changes_no_buffer(self, store: StorageBackend) -> None:
        item = to_set(key("a"), payload("a", 5000), slack=5000, pieces=3)
        before = b"".join(item.buffers)
        assert store.set([item, item]) == [STORED, HIT]
        assert b"".join(item.buffers) == before

    def test_buffers_are_not_kept(self, store: StorageBackend) -> None:
        data, target = bytearray(payload("a", 9000)), bytearray(9000)
        item = to_set(key("a"), bytes(data))._replace(buffers=[memoryview(data)])
        wanted = GetItem(key("a"), [memoryview(target)], 9000)
        assert store.set([item, item]) == [STORED, HIT]
        assert store.get([wanted, wanted]) == [HIT, HIT]
        assert target == data
        for view, owner in ((item.buffers[0], data), (wanted.buffers[0], target)):
            view.release()
            owner[:] = bytes(9000)
            owner.clear()  # raises BufferError while any view of `owner` exists
        assert fetch(store, key("a"), 9000) == payload("a", 9000)

    def test_what_is_left_behind_a_payload_is_nobody_s(self, store: StorageBackend) -> None:
        store.set([to_set(key("a"), payload("a", 5000), slack=3192)])
        tail = bytearray(b"\xaa" * 3192)
        target = bytearray(5000)
        assert store.get([GetItem(key("a"), [memoryview(target), memoryview(tail)], 5000)]) == [HIT]
        assert target == payload("a", 5000)
        put(store, key("b"), payload("b", 5000))
        assert fetch(store, key("b"), 5000) == payload("b", 5000)
