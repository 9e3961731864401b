"""Tests of memory that callers attach to a store."""

from __future__ import annotations

from contextlib import closing

import pytest

from tiercache.pools import HostArena
from tiercache.storage.base import GetItem, SetItem, StorageBackend
from tiercache.testing.conformance.hooks import CORRUPT, ERROR, HIT, MISS, STORED, BackendHooks
from tiercache.testing.objects import fetch, key, payload, to_get, to_set

BLOCK = 4096
SIZE = 3 * BLOCK - 100


class Attaching(BackendHooks):
    """Tests of attached memory.

    Thread safety: as `BackendHooks`.
    """

    @pytest.mark.parametrize("late", [False, True])
    def test_objects_go_through_attached_memory_as_through_any(
        self, store: StorageBackend, late: bool
    ) -> None:
        """With `late`, the memory is attached after the store has stored an object."""
        arena = HostArena(16 * BLOCK, BLOCK, huge_pages=False)
        blocks = arena.alloc(12).reshape(4, 3)[:, ::-1]
        views = [[arena.view(int(block)) for block in row] for row in blocks]
        items = [to_set(key(n), payload(n, SIZE)) for n in range(3)]
        if late:
            assert store.set(items[:1]) == [STORED]
        store.attach(arena)
        store.attach(arena)
        for item, place in zip(items, views, strict=False):
            _fill(place, b"".join(item.buffers))
        inside = [SetItem(item.key, place, item.meta) for item, place in zip(items, views, strict=False)]
        assert store.set(inside) == [HIT if late else STORED, STORED, STORED]
        assert fetch(store, key(1), SIZE) == payload(1, SIZE), "buffers in other memory work as before"
        for n in range(3):
            _fill(views[3], b"\xaa" * 3 * BLOCK)
            outside = to_get(key((n + 1) % 3), SIZE)
            assert store.get(
                [GetItem(key(n), views[3], SIZE), outside, GetItem(key("x"), views[0], SIZE)]
            ) == [HIT, HIT, MISS]
            assert b"".join(views[3])[:SIZE] == payload(n, SIZE)
        assert b"".join(views[0])[:SIZE] == payload(0, SIZE), "an absent object leaves the buffers unchanged"
        self.check(store)
        store.close()
        for place in views:
            for view in place:
                view.release()
        arena.free(blocks.reshape(-1))
        arena.check_integrity()
        arena.close()

    def test_bytes_that_are_not_those_of_the_checksum_are_never_a_hit(self, store: StorageBackend) -> None:
        """A store that reads attached memory late, after a set was given up, finds such bytes."""
        with closing(HostArena(4 * BLOCK, BLOCK, huge_pages=False)) as arena:
            store.attach(arena)
            place = [arena.view(int(block)) for block in arena.alloc(3)]
            meant, item = payload("meant", SIZE), to_set(key("a"), payload("meant", SIZE))
            item = item._replace(buffers=place)
            _fill(place, payload("other", SIZE))
            [answer] = store.set([item])
            assert answer in (STORED, ERROR)
            assert fetch(store, key("a"), SIZE) in ((CORRUPT, MISS) if answer is STORED else (MISS,))
            _fill(place, meant)
            assert store.set([item]) == [STORED]
            assert fetch(store, key("a"), SIZE) == meant
            store.close()
            place.clear()


def _fill(views: list[memoryview], data: bytes) -> None:
    for n, view in enumerate(views):
        part = data[n * BLOCK : (n + 1) * BLOCK]
        view[: len(part)] = part
