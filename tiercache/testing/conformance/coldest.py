"""Tests of `coldest`: the store says what it will evict next, in an order in which it can be copied."""

# ruff: noqa: D102 (a test is named for what it checks)

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from tiercache.core import ObjectKey
from tiercache.storage.base import NamespaceRecord, ScanEntry, StorageBackend
from tiercache.testing.conformance.hooks import HIT, MISS, STORED, BackendHooks
from tiercache.testing.conformance.threads import run_all
from tiercache.testing.objects import (
    NAMESPACE,
    OTHER_NAMESPACE,
    chain,
    content,
    fetch,
    key,
    page_key,
    payload,
    put,
    state_of,
    to_get,
    to_set,
)

SIZE = 60_000
ALL = 1 << 40
"""More bytes than any store of a test has."""


class Coldest(BackendHooks):
    """Tests of what is evicted next.

    Thread safety: as `BackendHooks`.
    """

    def test_what_is_coldest_goes_first(self, bounded: StorageBackend) -> None:
        random = Random(5)
        pages = [page for name in range(self.small // SIZE // 3) for page in chain(name, 3)]
        for k, parent in pages:
            put(bounded, k, payload(k, SIZE), parent)
        for name in random.choices(range(self.small // SIZE // 3), k=40):
            for k, _ in chain(name, random.randint(1, 3)):
                fetch(bounded, k, SIZE)
        before = {k for k, _ in pages if bounded.exists([k]) == [True]}
        said = [entry.key for entry in _said(bounded, 12 * SIZE)]
        gone: set[ObjectKey] = set()
        for n in range(self.small // SIZE):
            bounded.set([to_set(key(("new", n)), payload(n, SIZE), namespace=OTHER_NAMESPACE)])
            gone = {k for k in before if bounded.exists([k]) == [False]}
            if len(gone) >= 8:
                break
        assert len(gone) >= 8, "the store filled"
        assert len(gone - set(said)) <= len(gone) // 4

    def test_to_be_the_coldest_is_not_to_be_used(self, bounded: StorageBackend) -> None:
        put(bounded, key("hot"), payload("hot", SIZE))
        put(bounded, key("asked"), payload("asked", SIZE))
        named = 0
        for n in range(250):
            put(bounded, key(n), payload(n, SIZE))
            assert put(bounded, key("hot"), payload("hot", SIZE)) is HIT
            named += key("asked") in [entry.key for entry in _said(bounded, SIZE)]
        assert named
        assert bounded.exists([key("hot"), key("asked")]) == [True, False]

    def test_to_be_copied_is_not_to_be_used(self, bounded: StorageBackend) -> None:
        _said(bounded, 1)
        put(bounded, key("hot"), payload("hot", SIZE))
        put(bounded, key("copied"), payload("copied", SIZE))
        for n in range(250):
            put(bounded, key(n), payload(n, SIZE))
            item = to_get(key("copied"), SIZE)
            [outcome] = bounded.peek([item])
            assert outcome is MISS or content(item) == payload("copied", SIZE)
            assert put(bounded, key("hot"), payload("hot", SIZE)) is HIT
        assert bounded.exists([key("hot"), key("copied")]) == [True, False]

    def test_an_object_comes_after_the_pages_that_it_needs(self, store: StorageBackend) -> None:
        """The pages of a prefix come along, although another sequence keeps them in use."""
        trunk = chain("trunk", 3)
        for k, parent in trunk:
            put(store, k, payload(k, 5000), parent)
        for name in ("cold", "warm"):
            put(store, key(name), payload(name, 5000), page_key(("trunk", 2)))
        for k in [*(k for k, _ in trunk), key("warm")]:
            fetch(store, k, 5000)
        assert [entry.key for entry in _said(store, 1)] == [*(k for k, _ in trunk), key("cold")]
        assert _said(store, 0) == []

    def test_all_that_can_be_restored_is_said_and_nothing_else(self, store: StorageBackend) -> None:
        store.register_namespace(NamespaceRecord(NAMESPACE, {}, states=True))
        useful: set[ObjectKey] = set()
        for name in range(20):
            pages = chain(name, 6)
            store.set([to_set(k, payload(k, 500), parent=p, depth=n + 1) for n, (k, p) in enumerate(pages)])
            states = [state_of((name, n)) for n in (1, 3)]
            store.set([to_set(k, payload(k, 900), parent=k.page_key) for k in states])
            useful |= {*(k for k, _ in pages[:4]), *states}  # no state follows the last two pages
        store.delete([key((3, 1)), state_of((5, 3)), key((7, 5)), state_of((8, 1))])
        useful -= {*(k for k, _ in chain(3, 4)), state_of((3, 1)), state_of((3, 3))}
        useful -= {state_of((5, 3)), key((5, 2)), key((5, 3)), state_of((8, 1))}
        said = _said(store, ALL)
        assert {entry.key for entry in said} == useful
        assert len(said) == len(useful), "every object once"
        assert list(store.describe([entry.key for entry in said])) == said

    def test_what_is_said_can_be_copied_in_that_order(self, bounded: StorageBackend) -> None:
        random = Random(2)
        depths = dict.fromkeys(range(12), 0)
        for _ in range(120):
            name = random.choice(list(depths))
            depth = depths[name] = 1 + depths[name] % 8
            items = [
                to_set(k, payload(k, SIZE), parent=p, depth=n + 1)
                for n, (k, p) in enumerate(chain(name, depth))
            ]
            states = [state_of((name, n)) for n in range(depth) if (name + n) % 3 == 0]
            assert set(bounded.set(items)) <= {STORED, HIT}
            bounded.set([to_set(k, payload(k, SIZE), parent=k.page_key) for k in states])
            said = _said(bounded, random.choice([1, 4 * SIZE, ALL]))
            there: set[bytes] = set()
            for entry in said:
                assert entry.meta.parent is None or entry.meta.parent in there
                there.add(entry.key.page_key)
            assert all(bounded.exists([entry.key for entry in said]))

    def test_threads_store_and_delete_meanwhile(self, bounded: StorageBackend) -> None:
        _said(bounded, 1)
        known = {key((turn, n)) for turn in range(2) for n in range(60)}

        def write(turn: int) -> None:
            for n in range(60):
                put(bounded, key((turn, n)), payload(n, SIZE))
                if n % 3 == 0:
                    bounded.delete([key((turn, n - 1))])

        def ask() -> None:
            for _ in range(60):
                assert {entry.key for entry in _said(bounded, 8 * SIZE)} <= known

        run_all(lambda: write(0), lambda: write(1), ask)
        said = [entry.key for entry in _said(bounded, ALL)]
        assert set(said) == {entry.key for entry in bounded.scan_all()}


def _said(store: StorageBackend, nbytes: int) -> Sequence[ScanEntry]:
    """Return what a store says is coldest; skip the test if the store cannot say."""
    said = store.coldest(nbytes)
    if said is None:
        store.close()
        pytest.skip("the store cannot say what it will evict")
    return said
