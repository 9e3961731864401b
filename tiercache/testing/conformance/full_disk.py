"""Tests of a full medium: new objects are throttled, and no stored object is lost."""

# ruff: noqa: D102 (a test is named for what it checks)

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tiercache.storage.base import StorageBackend
from tiercache.testing.conformance.hooks import CORRUPT, HIT, MISS, STORED, THROTTLED, BackendHooks
from tiercache.testing.objects import fetch, key, payload, put, to_set


class FullDisk(BackendHooks):
    """Tests of a full medium.

    Thread safety: as `BackendHooks`.
    """

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

    def test_a_deletion_is_done_or_is_refused(self, full: StorageBackend) -> None:
        [gone] = full.delete([key(1)])
        assert full.exists([key(1)]) == [not gone]
        assert fetch(full, key(1), 9000) == (MISS if gone else payload(1, 9000))
        self.free_disk(full)
        assert full.delete([key(1)]) == [not gone]
        assert put(full, key(1), payload("anew", 9000)) is STORED

    def test_a_corrupt_object_is_out_of_sight_even_then(self, full: StorageBackend) -> None:
        assert fetch(full, key(0), 9000) is CORRUPT
        assert fetch(full, key(0), 9000) is MISS
        assert full.exists([key(0)]) == [False]
        assert self.usage(full).objects == len(list(full.scan_all())) == 4
        assert put(full, key(0), payload(0, 9000)) is THROTTLED
        self.free_disk(full)
        assert put(full, key(0), payload(0, 9000)) is STORED
        assert fetch(full, key(0), 9000) == payload(0, 9000)
