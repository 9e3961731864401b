"""Views of a store, by tenant or namespaces, keep the whole contract; what is outside appears absent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiercache_backends.memory import MemoryBackend

from tests.storage.backends import MemoryHooks, another_way, without_checksum
from tiercache.core import ObjectKey, Outcome
from tiercache.daemon.tenants.store import NameCipher, TenantStore
from tiercache.storage.base import NamespaceRecord, SetItem, StorageBackend
from tiercache.testing.conformance import BackendConformance
from tiercache.testing.objects import (
    NAMESPACE,
    OTHER_NAMESPACE,
    content,
    fetch,
    key,
    payload,
    put,
    to_get,
    to_set,
)

VEIL = NameCipher(b"a salt of the operator's, 32 bytes")
OTHER_VEIL = NameCipher(b"another salt of the operator's, 32")


def veiled(inner: StorageBackend, tenant: str = "acme", cipher: NameCipher = VEIL) -> TenantStore:
    """The view of one tenant."""
    return TenantStore(inner, rename=cipher, tenant=tenant)


def fenced(inner: StorageBackend, *names: bytes) -> TenantStore:
    """The view of who is limited to some namespaces."""
    return TenantStore(inner, named=frozenset(names or (NAMESPACE,)))


class TestVeiled(MemoryHooks):
    """The suite of the contract, as one tenant."""

    def open_store(self, path: Path, capacity: int | None = None) -> StorageBackend:
        return veiled(super().open_store(path, capacity))

    def object_of(self, store: StorageBackend, k: ObjectKey) -> Any:
        return super().object_of(store, ObjectKey(k.pool, k.layout + VEIL.hide(k.page_key)))

    scanned = without_checksum

    def test_metadata_come_back_to_their_limits(self, store: StorageBackend) -> None:
        items = [
            to_set(key(n), b"abc", namespace=namespace)
            for n, namespace in enumerate((b"n", bytes(48), bytes(49), bytes(64)))
        ]
        assert store.set(items) == [Outcome.STORED, Outcome.STORED, Outcome.ERROR, Outcome.ERROR]
        assert {entry.meta.namespace for entry in store.scan_all()} == {b"n", bytes(48)}

    def test_namespaces_are_remembered(self, store: StorageBackend) -> None:
        for namespace in (NAMESPACE, b"n", bytes(64)):
            store.register_namespace(NamespaceRecord(namespace, {"model": "m", "tenant": "me"}))
        assert {r.namespace for r in store.namespaces()} == {NAMESPACE, b"n"}
        assert all(r.identity == {"model": "m", "tenant": "acme"} for r in store.namespaces())


class Scribbled(MemoryBackend):
    """A store into whose buffers somebody writes before it reads them."""

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        for item in items:
            item.buffers[0][:1] = b"\x55"
        return super().set(items)


@pytest.mark.parametrize("is_summed", [True, False])
def test_bytes_that_change_behind_the_view_are_never_a_hit(is_summed: bool) -> None:
    """The checksum under the hidden key is of the bytes that the view compared, and of no others."""
    with veiled(Scribbled()) as view:
        item = to_set(key("a"), bytearray(payload("a", 5000)))
        if not is_summed:
            item = item._replace(meta=replace(item.meta, checksum=b""))
        assert view.set([item]) == [Outcome.STORED]
        assert fetch(view, key("a"), 5000) is Outcome.CORRUPT


@another_way
class TestFenced(MemoryHooks):
    """The suite of the contract, inside the fence, but for what the store inside evicts and keeps."""

    def open_store(self, path: Path, capacity: int | None = None) -> StorageBackend:
        inner = super().open_store(path, capacity)
        return fenced(inner, NAMESPACE, OTHER_NAMESPACE, b"n", bytes(64))


@given(st.binary(max_size=64))
def test_a_veil_is_a_permutation(name: bytes) -> None:
    assert VEIL.reveal(VEIL.hide(name)) == name
    assert VEIL.hide(VEIL.reveal(name)) == name
    assert len(VEIL.hide(name)) == len(name)
    assert VEIL.unmark(VEIL.mark(name)) == (name or None)
    assert OTHER_VEIL.unmark(VEIL.mark(name)) is None
    assert VEIL.unmark(name) is None


def test_a_veil_hides_every_bit() -> None:
    names = [bytes([i]) + bytes(31) for i in range(64)]
    seen = {VEIL.hide(name) for name in names} | {OTHER_VEIL.hide(name) for name in names}
    assert len(seen) == 128
    flips = [
        (int.from_bytes(VEIL.hide(name)) ^ int.from_bytes(VEIL.hide(names[0]))).bit_count()
        for name in names[1:]
    ]
    assert min(flips) > 90
    assert max(flips) < 166, "some half of 256 bits change"


def test_a_false_checksum_is_found_before_it_is_stored() -> None:
    store = veiled(MemoryBackend())
    item = to_set(key(1), b"abc")
    assert store.set([item._replace(meta=replace(item.meta, checksum=bytes(16)))]) == [Outcome.ERROR]
    assert store.set([item]) == [Outcome.STORED]


def test_what_is_beyond_the_fence_is_not_there() -> None:
    store = MemoryBackend()
    view = fenced(store)
    for namespace in (NAMESPACE, OTHER_NAMESPACE):
        store.register_namespace(NamespaceRecord(namespace, {}))
        view.register_namespace(NamespaceRecord(bytes(32), {}))
    mine, foreign = key("mine"), key("foreign")
    store.set([to_set(mine, b"abc"), to_set(foreign, b"abc", namespace=OTHER_NAMESPACE)])
    assert view.exists([mine, foreign, key("none")]) == [True, False, False]
    assert view.get([to_get(mine, 3), to_get(foreign, 3), to_get(key("none"), 3)]) == [
        Outcome.HIT,
        Outcome.MISS,
        Outcome.MISS,
    ]
    assert [entry is not None for entry in view.describe([mine, foreign])] == [True, False]
    assert view.delete([foreign, mine]) == [False, True]
    assert store.exists([foreign]) == [True]
    assert [e.key for e in view.scan_all()] == []
    assert [e.key for e in store.scan_all()] == [foreign]
    assert list(view.scan_all(OTHER_NAMESPACE)) == []
    assert [r.namespace for r in view.namespaces()] == [NAMESPACE]
    assert {r.namespace for r in store.namespaces()} == {NAMESPACE, OTHER_NAMESPACE}, "bytes(32) is not in"


def test_the_suites_above_are_the_whole_contract() -> None:
    assert issubclass(TestVeiled, BackendConformance)
    assert issubclass(TestFenced, BackendConformance)


def test_who_knows_a_hidden_name_is_told_that_there_is_no_such_object() -> None:
    store = MemoryBackend(1 << 20)
    acme = veiled(store)
    put(acme, key(0), payload(0, 5000))
    hidden = next(iter(store.scan_all())).key
    common = TenantStore(store, allows=lambda name: VEIL.unmark(name) is None, cursors=OTHER_VEIL)
    put(common, key(1), payload(1, 5000))
    assert common.exists([hidden, key(1)]) == [False, True]
    assert [entry is not None for entry in common.describe([hidden, key(1)])] == [False, True]
    assert fetch(common, hidden, 5000) is Outcome.MISS
    assert fetch(common, key(1), 5000) == payload(1, 5000)
    assert common.peek([to_get(hidden, 5000)]) == [Outcome.MISS]
    assert [list(tier.present) for tier in common.history([hidden, key(1)], []).tiers] == [[False, True]]
    assert common.set([to_set(hidden, payload(2, 5000))]) == [Outcome.ERROR]
    common.advise([hidden], [1.0])
    assert common.delete([hidden]) == [False]
    assert fetch(acme, key(0), 5000) == payload(0, 5000)


@pytest.mark.parametrize("view_of", [fenced, veiled])
def test_a_view_shows_no_more_to_a_peek_than_to_a_get(view_of):
    store = MemoryBackend(1 << 20)
    store.set([to_set(key("other"), payload("other", 5000), namespace=OTHER_NAMESPACE)])
    view = view_of(store)
    assert view.peek([to_get(key("other"), 5000)]) == view.get([to_get(key("other"), 5000)]) == [Outcome.MISS]
    view.set([to_set(key("own"), payload("own", 5000))])
    item = to_get(key("own"), 5000)
    assert view.peek([item]) == [Outcome.HIT]
    assert content(item) == payload("own", 5000)
    assert view.coldest(1 << 20) is None
    assert store.coldest(1 << 20), "the store itself can say it"
