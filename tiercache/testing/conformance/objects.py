"""Tests of gets and sets.

Objects one at a time and in batches, in any memory; what must be refused. A get returns an object as it was
stored, an object is identified by its key alone, a store keeps no buffer of the caller, and an item that is
refused leaves the buffers unchanged.
"""

# ruff: noqa: D102 (a test is named for what it checks)

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import product
from math import inf, nan

import pytest

from tiercache.core import ObjectKey, PoolName
from tiercache.errors import ConfigError
from tiercache.pools import HostArena
from tiercache.storage.base import Capabilities, GetItem, SetItem, StorageBackend, StoreContext
from tiercache.storage.env import Env
from tiercache.testing.conformance.hooks import CORRUPT, ERROR, HIT, MISS, SIZES, STORED, BackendHooks
from tiercache.testing.objects import content, fetch, key, payload, put, to_get, to_set

MANY = 10_000
SIZE = 5000


def odd_view(kind: str, data: bytearray) -> memoryview:
    """Return a view of SIZE bytes that is not a C-contiguous, one-dimensional view of unsigned bytes.

    `data` has 2 * SIZE bytes.
    """
    if kind == "every other byte":
        return memoryview(data)[::2]
    if kind == "backwards":
        return memoryview(data)[SIZE - 1 :: -1]
    if kind == "items of four bytes":
        return memoryview(data)[:SIZE].cast("I")
    if kind == "signed bytes":
        return memoryview(data)[:SIZE].cast("b")
    return memoryview(data)[:SIZE].cast("B", (50, SIZE // 50))


ODD = ("every other byte", "backwards", "items of four bytes", "two dimensions", "signed bytes")
BLOCK = 4096
ATTACHED = 3 * BLOCK - 100


class Objects(BackendHooks):
    """Tests of single objects, of batches, of refused items, and of memory that callers attach.

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

    def test_what_is_stored_comes_back(self, store: StorageBackend) -> None:
        """The object has a checksum or none, few buffers or many, and bytes behind it or none."""
        shapes = ((1, 0, True), (7, 0, True), (1, 4096, True), (5, 10_000, True), (3, 100, False))
        for size, (pieces, slack, summed) in product(SIZES, shapes):
            name = (size, pieces, slack)
            data = payload(name, size)
            item = to_set(key(name), data, pieces=pieces, slack=slack)
            if not summed:
                item = item._replace(meta=replace(item.meta, checksum=b""))
            assert store.set([item]) == [STORED]
            assert store.exists([key(name)]) == [True]
            wanted = to_get(key(name), size, pieces=pieces + 2, slack=slack)
            assert (store.get([wanted]), name) == ([HIT], name)
            assert content(wanted) == data
            [entry] = store.describe([key(name)])
            assert entry is not None
            whole = to_set(key(name), data).meta
            assert self.scanned(entry.meta) == self.scanned(whole), "a set without a checksum gets one"

    def test_more_buffers_than_one_vectored_call_takes(self, store: StorageBackend) -> None:
        data = payload("many", 20_000)
        assert store.set([to_set(key("many"), data, pieces=3000)]) == [STORED]
        item = to_get(key("many"), 20_000, pieces=2500)
        assert store.get([item]) == [HIT]
        assert content(item) == data

    def test_the_digest_alone_names_an_object(self, store: StorageBackend) -> None:
        other = ObjectKey(PoolName.SWA, key("a").digest)
        put(store, key("a"), payload("a", 5000))
        assert store.exists([other]) == [True]
        assert put(store, other, payload("b", 5000)) is HIT
        assert fetch(store, other, 5000) == payload("a", 5000)
        no_keys = [ObjectKey(PoolName.KV, bytes(n)) for n in (0, 5, 32, 63, 65, 700)]
        [found, *none] = store.describe([other, *no_keys])
        assert found is not None
        assert found.key == key("a")
        assert none == [None] * 6
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

    def test_a_key_that_cannot_be_is_not_there(self, store: StorageBackend) -> None:
        put(store, key("a"), payload("a", 5000))
        for digest in (b"", b"short", bytes(63), bytes(65), bytes(700)):
            odd, name = ObjectKey(PoolName.KV, digest), (digest, "b")
            item = to_get(odd, 5000)
            assert store.set([to_set(odd, payload("x", 5000)), to_set(key(name), payload(name, 5000))]) == [
                ERROR,
                STORED,
            ]
            assert store.exists([odd, key("a"), odd]) == [False, True, False]
            first, second = store.get([item, to_get(key("a"), 5000)])
            assert (first in (MISS, ERROR), second) == (True, HIT)
            assert content(item) == b"\xaa" * 5000
            assert store.delete([odd, key(name), odd]) == [False, True, False]
        assert self.usage(store).objects == 1

    def test_a_get_that_cannot_be_is_refused(self, store: StorageBackend) -> None:
        """The length is another, or the memory is too small or of another kind; no buffer is changed."""
        put(store, key("a"), payload("a", SIZE))
        fit, half = to_get(key("a"), SIZE), bytearray(b"\xaa" * 2500)
        wrong = [
            *(to_get(key("a"), size, pieces=3) for size in (SIZE - 1, SIZE + 1, 1, 100_000)),
            *(to_get(key("a"), SIZE)._replace(length=length) for length in (0, -1)),
            to_get(key("a"), SIZE - 1)._replace(length=SIZE),
            fit._replace(buffers=[]),
            fit._replace(buffers=[memoryview(half), memoryview(bytes(2500))]),  # the second is read-only
        ]
        for kind in ODD:
            data, first = bytearray(b"\xaa" * (2 * SIZE)), memoryview(bytearray(b"\xaa" * 1000))
            odd = odd_view(kind, data)
            wrong += [GetItem(key("a"), buffers, SIZE) for buffers in ([first, odd], [odd])]
        for item in wrong:
            right = to_get(key("a"), SIZE)
            assert store.get([item, right]) == [ERROR, HIT], item
            assert content(right) == payload("a", SIZE)
            writable = [bytes(view.obj) for view in item.buffers if not view.readonly]
            assert set(b"".join(writable)) <= {0xAA}

    def test_an_absent_object_leaves_the_buffers_alone(self, store: StorageBackend) -> None:
        put(store, key("a"), payload("a", SIZE))
        store.delete([key("a")])
        items = [to_get(key(n), SIZE, pieces=3, slack=96) for n in ("a", "never")]
        assert store.get(items) == [MISS, MISS]
        assert {b"".join(item.buffers) for item in items} == {b"\xaa" * (SIZE + 96)}

    def test_a_malformed_set_is_an_error_and_hurts_nobody(self, store: StorageBackend) -> None:
        good = to_set(key("good"), payload("good", SIZE))
        bad = [
            good._replace(key=key("1"), meta=replace(good.meta, length=SIZE + 1)),
            good._replace(key=key("2"), meta=replace(good.meta, length=0)),
            good._replace(key=key("3"), meta=replace(good.meta, length=-1)),
            good._replace(key=key("4"), meta=replace(good.meta, checksum=bytes(15))),
            good._replace(key=key("5"), meta=replace(good.meta, checksum=bytes(17))),
            good._replace(key=key("6"), meta=replace(good.meta, namespace=b"")),
            good._replace(key=key("7"), meta=replace(good.meta, namespace=bytes(65))),
            good._replace(key=key("8"), meta=replace(good.meta, parent=bytes(31))),
            good._replace(key=key("9"), meta=replace(good.meta, parent=b"")),
            good._replace(key=key("10"), meta=replace(good.meta, depth=-1)),
            good._replace(key=key("11"), meta=replace(good.meta, depth=2**32)),
            good._replace(key=key("12"), buffers=[]),
            *(good._replace(key=key(kind), buffers=[odd_view(kind, bytearray(2 * SIZE))]) for kind in ODD),
            *(
                good._replace(key=key(value), meta=replace(good.meta, value=value))
                for value in (nan, inf, -inf, -1.0, -(10**400), 10**400)
            ),
            *(
                good._replace(key=key(worker), meta=replace(good.meta, value=1.0, worker=worker))
                for worker in (-2, 2**64)
            ),
            good._replace(key=ObjectKey(PoolName.KV, b"short")),
        ]
        mixed = [*bad[:6], good, *bad[6:]]
        assert store.set(mixed) == [ERROR] * 6 + [STORED] + [ERROR] * (len(bad) - 6)
        assert [entry.key for entry in store.scan_all()] == [key("good")]
        assert self.usage(store).objects == 1

    def test_values_and_workers_may_have_their_limits(self, store: StorageBackend) -> None:
        limits = ((1.0, 0), (1e308, 0), (0.0, 2**64 - 1))
        items = [
            to_set(key(n), payload(n, 100), value=value, worker=worker)
            for n, (value, worker) in enumerate(limits)
        ]
        assert store.set(items) == [STORED] * 3

    @pytest.mark.parametrize("late", [False, True])
    def test_objects_go_through_attached_memory_as_through_any(
        self, store: StorageBackend, late: bool
    ) -> None:
        """With `late`, the memory is attached after the store has stored an object."""
        arena = HostArena(16 * BLOCK, BLOCK, huge_pages=False)
        blocks = arena.alloc(12).reshape(4, 3)[:, ::-1]
        views = [[arena.view(int(block)) for block in row] for row in blocks]
        items = [to_set(key(n), payload(n, ATTACHED)) for n in range(3)]
        if late:
            assert store.set(items[:1]) == [STORED]
        store.attach(arena)
        store.attach(arena)
        for item, place in zip(items, views, strict=False):
            _write(place, b"".join(item.buffers))
        inside = [SetItem(item.key, place, item.meta) for item, place in zip(items, views, strict=False)]
        assert store.set(inside) == [HIT if late else STORED, STORED, STORED]
        assert fetch(store, key(1), ATTACHED) == payload(1, ATTACHED), "other memory works as before"
        for n in range(3):
            _write(views[3], b"\xaa" * 3 * BLOCK)
            outside = to_get(key((n + 1) % 3), ATTACHED)
            assert store.get(
                [GetItem(key(n), views[3], ATTACHED), outside, GetItem(key("x"), views[0], ATTACHED)]
            ) == [HIT, HIT, MISS]
            assert b"".join(views[3])[:ATTACHED] == payload(n, ATTACHED)
        assert b"".join(views[0])[:ATTACHED] == payload(0, ATTACHED), "a miss changes no buffer"
        self.check(store)
        store.close()
        for place in views:
            for view in place:
                view.release()
        arena.free(blocks.reshape(-1))
        assert arena.available == 16, "no block is withheld"
        arena.close()

    def test_bytes_that_are_not_those_of_the_checksum_are_never_a_hit(self, store: StorageBackend) -> None:
        """A store that reads attached memory late, after a set was given up, finds such bytes."""
        with closing(HostArena(4 * BLOCK, BLOCK, huge_pages=False)) as arena:
            store.attach(arena)
            place = [arena.view(int(block)) for block in arena.alloc(3)]
            meant, item = payload("meant", ATTACHED), to_set(key("a"), payload("meant", ATTACHED))
            item = item._replace(buffers=place)
            _write(place, payload("other", ATTACHED))
            [answer] = store.set([item])
            assert answer in (STORED, ERROR)
            assert fetch(store, key("a"), ATTACHED) in ((CORRUPT, MISS) if answer is STORED else (MISS,))
            _write(place, meant)
            assert store.set([item]) == [STORED]
            assert fetch(store, key("a"), ATTACHED) == meant
            store.close()
            place.clear()


def _write(views: list[memoryview], data: bytes) -> None:
    for n, view in enumerate(views):
        part = data[n * BLOCK : (n + 1) * BLOCK]
        view[: len(part)] = part
