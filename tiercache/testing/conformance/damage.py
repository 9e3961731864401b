"""Tests of a medium whose bytes change without the store's knowledge.

A get never returns wrong bytes. After a get has answered CORRUPT, a set stores the object again.
"""

# ruff: noqa: D102 (a test is named for what it checks)

from __future__ import annotations

from dataclasses import replace

import pytest

from tiercache.storage.base import StorageBackend
from tiercache.testing.conformance.hooks import CORRUPT, ERROR, HIT, MISS, STORED, BackendHooks
from tiercache.testing.objects import chain, content, fetch, key, payload, put, to_get, to_set


class Damage(BackendHooks):
    """Tests of damaged objects.

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

    def test_a_corrupt_object_can_be_deleted(self, store: StorageBackend) -> None:
        put(store, key("a"), payload("a", 9000))
        self.corrupt(store, key("a"))
        assert store.delete([key("a")]) == [True]
        assert put(store, key("a"), payload("a", 9000)) is STORED
        assert fetch(store, key("a"), 9000) == payload("a", 9000)

    def test_a_corrupt_page_costs_no_other(self, store: StorageBackend) -> None:
        pages = chain("s", 4)
        for k, parent in pages:
            put(store, k, payload(k, 5000), parent)
        self.corrupt(store, pages[1][0])
        assert [fetch(store, k, 5000) for k, _ in pages] == [
            CORRUPT if n == 1 else payload(k, 5000) for n, (k, _) in enumerate(pages)
        ]
        assert put(store, pages[1][0], payload("anew", 5000), pages[1][1]) is STORED
        assert store.exists([k for k, _ in pages]) == [True] * 4

    def test_swapped_objects_are_corrupt(self, store: StorageBackend) -> None:
        for name in ("a", "b"):
            put(store, key(name), payload(name, 8192))
        self.swap(store, key("a"), key("b"))
        assert fetch(store, key("a"), 8192) is CORRUPT
        assert fetch(store, key("b"), 8192) is CORRUPT

    def test_a_wrong_checksum_is_found_by_the_set_or_by_the_get(self, store: StorageBackend) -> None:
        item = to_set(key("a"), payload("a", 5000))
        [answer] = store.set([item._replace(meta=replace(item.meta, checksum=bytes(16)))])
        assert answer in (STORED, ERROR)
        assert fetch(store, key("a"), 5000) in ((CORRUPT, MISS) if answer is STORED else (MISS,))
        assert store.set([item]) == [STORED]

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
