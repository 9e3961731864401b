"""Tests of items that a store must refuse: wrong lengths, unusable buffers, malformed metadata.

The caller's buffers stay unchanged.
"""

# ruff: noqa: D102 (a test is named for what it checks)

from __future__ import annotations

from dataclasses import replace

import pytest

from tiercache.core import ObjectKey, PoolName
from tiercache.storage.base import GetItem, StorageBackend
from tiercache.testing.conformance.hooks import ERROR, HIT, MISS, STORED, BackendHooks
from tiercache.testing.objects import content, fetch, key, payload, put, to_get, to_set

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


class Refusals(BackendHooks):
    """Tests of refusals.

    Thread safety: as `BackendHooks`.
    """

    @pytest.mark.parametrize("size", [4999, 5001, 1, 100_000])
    def test_a_get_of_another_length_is_refused(self, store: StorageBackend, size: int) -> None:
        put(store, key("a"), payload("a", SIZE))
        wrong, right = to_get(key("a"), size, pieces=3), to_get(key("a"), SIZE)
        assert store.get([wrong, right]) == [ERROR, HIT]
        assert content(wrong) == b"\xaa" * size
        assert fetch(store, key("a"), SIZE) == payload("a", SIZE), "the object is as sound as before"

    @pytest.mark.parametrize("length", [0, -1])
    def test_a_get_of_nothing_is_refused(self, store: StorageBackend, length: int) -> None:
        put(store, key("a"), payload("a", SIZE))
        item = to_get(key("a"), SIZE)._replace(length=length)
        assert store.get([item]) == [ERROR]
        assert b"".join(item.buffers) == b"\xaa" * SIZE

    def test_buffers_that_are_too_small_or_read_only_are_refused(self, store: StorageBackend) -> None:
        put(store, key("a"), payload("a", SIZE))
        short = to_get(key("a"), 4999)._replace(length=SIZE)
        none = to_get(key("a"), SIZE)._replace(buffers=[])
        half = bytearray(b"\xaa" * 2500)
        frozen = GetItem(key("a"), [memoryview(half), memoryview(bytes(2500))], SIZE)
        assert store.get([short, none, frozen, to_get(key("a"), SIZE)]) == [ERROR, ERROR, ERROR, HIT]
        assert b"".join(short.buffers) == b"\xaa" * 4999
        assert half == b"\xaa" * 2500

    def test_an_absent_object_leaves_the_buffers_alone(self, store: StorageBackend) -> None:
        put(store, key("a"), payload("a", SIZE))
        store.delete([key("a")])
        items = [to_get(key(n), SIZE, pieces=3, slack=96) for n in ("a", "never")]
        assert store.get(items) == [MISS, MISS]
        assert {b"".join(item.buffers) for item in items} == {b"\xaa" * (SIZE + 96)}

    @pytest.mark.parametrize("kind", ODD)
    def test_a_get_into_an_odd_view_is_refused(self, store: StorageBackend, kind: str) -> None:
        put(store, key("a"), payload("a", SIZE))
        data, first = bytearray(b"\xaa" * (2 * SIZE)), bytearray(b"\xaa" * 1000)
        odd = GetItem(key("a"), [memoryview(first), odd_view(kind, data)], SIZE)
        right = to_get(key("a"), SIZE)
        assert store.get([odd, odd._replace(buffers=odd.buffers[1:]), right]) == [ERROR, ERROR, HIT]
        assert first == b"\xaa" * 1000
        assert data == b"\xaa" * (2 * SIZE)
        assert content(right) == payload("a", SIZE)

    @pytest.mark.parametrize("kind", ODD)
    def test_a_set_from_an_odd_view_is_refused(self, store: StorageBackend, kind: str) -> None:
        good = to_set(key("good"), payload("good", SIZE))
        data = bytearray(payload("odd", 2 * SIZE))
        odd = to_set(key("odd"), payload("odd", SIZE))._replace(buffers=[odd_view(kind, data)])
        assert store.set([odd, good]) == [ERROR, STORED]
        assert store.exists([key("odd"), key("good")]) == [False, True]

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
            good._replace(key=ObjectKey(PoolName.KV, b"short")),
        ]
        mixed = [*bad[:6], good, *bad[6:]]
        assert store.set(mixed) == [ERROR] * 6 + [STORED] + [ERROR] * (len(bad) - 6)
        assert [entry.key for entry in store.scan_all()] == [key("good")]
        assert self.usage(store).objects == 1
