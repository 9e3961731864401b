"""Tests of many objects in one call.

The themes are the order of the answers, duplicates, empty and huge batches, and bad items among good items.
"""

# ruff: noqa: D102 (a test is named for what it checks)

from __future__ import annotations

from dataclasses import replace

import pytest

from tiercache.core import ObjectKey, PoolName
from tiercache.storage.base import StorageBackend
from tiercache.testing.conformance.hooks import CORRUPT, ERROR, HIT, MISS, SIZES, STORED, BackendHooks
from tiercache.testing.objects import content, fetch, key, payload, put, to_get, to_set

MANY = 10_000


class Batches(BackendHooks):
    """Tests of batches.

    Thread safety: as `BackendHooks`.
    """

    def test_a_batch_answers_in_input_order(self, store: StorageBackend) -> None:
        names = ["a", "b", "c", "d", "e"]
        sizes = dict(zip(names, SIZES, strict=False))
        assert store.set([to_set(key(n), payload(n, sizes[n])) for n in ("a", "c", "e")]) == [STORED] * 3
        assert store.set([to_set(key(n), payload(n, sizes[n])) for n in names]) == [
            HIT,
            STORED,
            HIT,
            STORED,
            HIT,
        ]
        assert store.delete([key("d"), key("x"), key("b"), key("d")]) == [True, False, True, False]
        assert store.exists([key(n) for n in names]) == [True, False, True, False, True]
        items = [to_get(key(n), sizes[n]) for n in reversed(names)]
        assert store.get(items) == [HIT, MISS, HIT, MISS, HIT]
        assert [content(i) for i in items[::2]] == [payload(n, sizes[n]) for n in ("e", "c", "a")]

    def test_empty_batches(self, store: StorageBackend) -> None:
        put(store, key("a"), payload("a", 10))
        assert (store.exists([]), store.get([]), store.set([]), store.delete([])) == ([], [], [], [])
        assert self.usage(store).objects == 1

    def test_duplicates_in_a_batch(self, store: StorageBackend) -> None:
        data = payload("a", 5000)
        assert store.set([to_set(key("a"), data), to_set(key("b"), data), to_set(key("a"), data)]) == [
            STORED,
            STORED,
            HIT,
        ]
        items = [
            to_get(key("a"), 5000),
            to_get(key("x"), 5000),
            to_get(key("a"), 5000),
            to_get(key("x"), 5000),
        ]
        assert store.get(items) == [HIT, MISS, HIT, MISS]
        assert {content(i) for i in items[::2]} == {data}
        assert store.exists([key("a"), key("x"), key("a"), key("x")]) == [True, False, True, False]
        assert store.delete([key("a"), key("x"), key("a"), key("b"), key("b")]) == [
            True,
            False,
            False,
            True,
            False,
        ]
        assert self.usage(store).objects == 0

    def test_the_first_of_two_different_duplicates_is_kept(self, store: StorageBackend) -> None:
        assert store.set([to_set(key("a"), payload(n, 5000 + n)) for n in range(3)]) == [STORED, HIT, HIT]
        assert fetch(store, key("a"), 5000) == payload(0, 5000)

    def test_a_malformed_duplicate_does_not_take_the_place_of_a_good_one(self, store: StorageBackend) -> None:
        good = to_set(key("a"), payload("a", 5000))
        bad = good._replace(meta=replace(good.meta, checksum=b"short"))
        assert store.set([bad, good, bad, good]) == [ERROR, STORED, ERROR, HIT]
        assert fetch(store, key("a"), 5000) == payload("a", 5000)

    def test_a_big_batch_of_small_objects(self, store: StorageBackend) -> None:
        items = [to_set(key(n), payload(n, 1 + n % 50)) for n in range(MANY)]
        assert store.set(items[: MANY // 2]) == [STORED] * (MANY // 2)
        assert store.set(items) == [HIT] * (MANY // 2) + [STORED] * (MANY // 2)
        wanted = [to_get(item.key, item.meta.length) for item in items]
        assert store.get([*wanted, to_get(key(MANY), 1)]) == [HIT] * MANY + [MISS]
        assert all(
            content(found) == b"".join(item.buffers) for found, item in zip(wanted, items, strict=True)
        )
        assert store.exists([item.key for item in items] * 2 + [key(MANY)]) == [True] * (2 * MANY) + [False]
        seen = [entry.key for entry in store.scan_all()]
        assert len(seen) == MANY
        assert set(seen) == {item.key for item in items}
        assert self.usage(store).objects == MANY
        assert store.delete([item.key for item in items[::2]] * 2) == [True] * (MANY // 2) + [False] * (
            MANY // 2
        )
        assert store.exists([item.key for item in items]) == [False, True] * (MANY // 2)

    def test_one_bad_item_never_fails_a_batch(self, store: StorageBackend) -> None:
        for n in range(4):
            put(store, key(n), payload(n, 5000))
        put(store, key("spoiled"), payload("spoiled", 5000))
        self.corrupt(store, key("spoiled"))
        frozen = to_get(key(0), 5000)._replace(buffers=[memoryview(bytes(5000))])
        bad = [to_get(key(0), 4999), frozen, to_get(key("absent"), 5000), to_get(key("spoiled"), 5000)]
        good = [to_get(key(n), 5000) for n in range(4)]
        mixed = [item for pair in zip(good, bad, strict=True) for item in pair]
        assert store.get(mixed) == [HIT, ERROR, HIT, ERROR, HIT, MISS, HIT, CORRUPT]
        assert [content(item) for item in good] == [payload(n, 5000) for n in range(4)]

    @pytest.mark.parametrize("digest", [b"", b"short", bytes(63), bytes(65), bytes(700)])
    def test_a_key_that_cannot_be_is_not_there(self, store: StorageBackend, digest: bytes) -> None:
        odd = ObjectKey(PoolName.KV, digest)
        put(store, key("a"), payload("a", 5000))
        item = to_get(odd, 5000)
        assert store.set([to_set(odd, payload("x", 5000)), to_set(key("b"), payload("b", 5000))]) == [
            ERROR,
            STORED,
        ]
        assert store.exists([odd, key("a"), odd]) == [False, True, False]
        first, second = store.get([item, to_get(key("a"), 5000)])
        assert (first in (MISS, ERROR), second) == (True, HIT)
        assert content(item) == b"\xaa" * 5000
        assert store.delete([odd, key("a"), odd]) == [False, True, False]
        assert self.usage(store).objects == 1
