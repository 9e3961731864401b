"""Tests of damaged media, and of a full one: no damaged byte is ever returned."""

# ruff: noqa: D102 (a test is named for what it checks)

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tiercache.storage.base import StorageBackend
from tiercache.testing.conformance.hooks import CORRUPT, HIT, MISS, STORED, THROTTLED, BackendHooks
from tiercache.testing.objects import content, fetch, key, payload, put, to_get, to_set


class Damage(BackendHooks):
    """Tests of damage, and of a medium that takes no more.

    Thread safety: as `BackendHooks`.
    """

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
        assert [entry.key for entry in store.scan_all()] == [key("b")]
        assert (self.usage(store).objects, self.usage(store).payload_bytes) == (1, 9000)
        assert put(store, key("a"), data) is STORED
        assert fetch(store, key("a"), 9000) == data

    def test_corrupt_objects_are_counted_once_each(self, store: StorageBackend) -> None:
        if "corrupt" not in self.usage(store).details:
            pytest.skip("the store counts no corrupt objects")
        for n in range(5):
            put(store, key(n), payload(n, 5000))
        assert self.usage(store).details["corrupt"] == 0
        for n in range(3):
            self.corrupt(store, key(n))
        items = [to_get(key(n), 5000) for n in (0, 1, 1, 3, 4)]
        store.get(items)
        assert self.usage(store).details["corrupt"] == 2
        store.get(items)
        assert fetch(store, key(2), 5000) is CORRUPT
        assert self.usage(store).details["corrupt"] == 3

    def test_swapped_objects_are_corrupt(self, store: StorageBackend) -> None:
        for name in ("a", "b"):
            put(store, key(name), payload(name, 8192))
        self.swap(store, key("a"), key("b"))
        assert fetch(store, key("a"), 8192) is CORRUPT
        assert fetch(store, key("b"), 8192) is CORRUPT

    def test_every_single_flipped_bit_is_found(self, store: StorageBackend) -> None:
        """In each object a different bit is flipped, so that one get tests every bit position."""
        size = 64
        names = range(size * 8)
        store.set([to_set(key(n), payload(n, size)) for n in [*names, "sound", "too"]])
        for n in names:
            self.flip(store, key(n), n)
        items = [to_get(key(n), size) for n in ["sound", *names, "too"]]
        assert store.get(items) == [HIT, *[CORRUPT] * len(names), HIT]
        assert [content(items[0]), content(items[-1])] == [payload("sound", size), payload("too", size)]
        assert self.usage(store).objects == 2
        assert store.set([to_set(key(n), payload(n, size)) for n in names]) == [STORED] * len(names)

    @pytest.mark.parametrize("size", [5000, 300_000])
    def test_a_medium_that_ends_early_is_found(self, store: StorageBackend, size: int) -> None:
        if not self.has("truncate"):
            pytest.skip("the hooks cannot cut the medium")
        put(store, key("first"), payload("first", 5000))
        put(store, key("last"), payload("last", size))
        self.truncate(store, key("last"))
        items = [to_get(key("last"), size), to_get(key("first"), 5000)]
        answers = store.get(items)
        assert answers[0] is CORRUPT
        assert answers[1] in (HIT, CORRUPT)
        assert answers[1] is CORRUPT or content(items[1]) == payload("first", 5000)
        assert put(store, key("last"), payload("last", size)) is STORED
        assert fetch(store, key("last"), size) == payload("last", size)

    @pytest.fixture
    def full(self, store: StorageBackend) -> Iterator[StorageBackend]:
        """Provide a store with the objects 0 to 4 on a full medium; object 0 is damaged."""
        if not self.has("fill_disk"):
            pytest.skip("the hooks cannot fill the medium")
        for n in range(5):
            put(store, key(n), payload(n, 9000))
        self.corrupt(store, key(0))
        self.fill_disk(store)
        yield store
        self.free_disk(store)

    def test_new_objects_are_throttled_and_held_ones_are_there(self, full: StorageBackend) -> None:
        items = [to_set(key(n), payload(n, 9000)) for n in (7, 1, 8, 2)]
        assert full.set(items) == [THROTTLED, HIT, THROTTLED, HIT]
        assert full.exists([key(7), key(1), key(8)]) == [False, True, False]
        assert [fetch(full, key(n), 9000) for n in range(1, 5)] == [payload(n, 9000) for n in range(1, 5)]
        assert self.usage(full).objects == len(list(full.scan_all())) == 5
        self.free_disk(full)
        assert full.set(items) == [STORED, HIT, STORED, HIT]
        assert fetch(full, key(7), 9000) == payload(7, 9000)
