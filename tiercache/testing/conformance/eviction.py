"""Tests of bounded stores: the capacity holds at every instant, and pages are evicted from the end.

An object that can never fit evicts no other object. `coldest` says what goes next, in an order in which it
can be copied.
"""

# ruff: noqa: D102 (a test is named for what it checks)

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from threading import Event

import pytest

from tiercache.core import ObjectKey
from tiercache.storage.base import NamespaceRecord, ScanEntry, StorageBackend
from tiercache.testing.conformance.hooks import HIT, MISS, STORED, THROTTLED, BackendHooks
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


class Eviction(BackendHooks):
    """Tests of eviction under a capacity.

    Thread safety: as `BackendHooks`.
    """

    def test_the_cap_holds_and_suffixes_go_first(self, bounded: StorageBackend) -> None:
        assert self.usage(bounded).capacity_bytes == self.small
        parents: dict[ObjectKey, bytes | None] = {}
        for sequence in range(20):
            for k, parent in chain(sequence, 12):
                parents[k] = parent
                assert put(bounded, k, payload(k, SIZE), parent) is STORED
                assert self.usage(bounded).used_bytes <= self.small
        kept = {entry.key for entry in bounded.scan_all()}
        assert len(kept) < len(parents), "something was evicted"
        assert len(kept) * SIZE > self.third, "no more was evicted than was needed"
        pages = {k.page_key for k in kept}
        assert all(parents[k] is None or parents[k] in pages for k in kept), (
            "no page was evicted before the pages that follow it"
        )
        assert {k for k, _ in chain(19, 12)} <= kept, "the newest objects stay"
        for k in kept:
            assert fetch(bounded, k, SIZE) == payload(k, SIZE)

    def test_a_state_goes_before_its_page_and_does_not_hold_deeper_pages_back(
        self, bounded: StorageBackend
    ) -> None:
        pages = chain("s", 3)
        for k, parent in pages:
            put(bounded, k, payload(k, SIZE), parent)
        state = state_of(("s", 1))
        put(bounded, state, payload(state, SIZE), state.page_key)
        order: list[ObjectKey] = []
        watched = [k for k, _ in pages] + [state]
        for n in range(300):
            # No state is stored in this namespace, so all of its pages are useful.
            assert bounded.set([to_set(key(n), payload(n, SIZE), namespace=OTHER_NAMESPACE)]) == [STORED]
            gone = [
                k
                for k, there in zip(watched, bounded.exists(watched), strict=True)
                if not there and k not in order
            ]
            # One call may evict several objects. The test cannot see their order, and assumes a right one.
            order += sorted(gone, key=watched.index, reverse=True)
        assert set(order) == set(watched)
        place = {k: order.index(k) for k in watched}
        assert place[pages[2][0]] < place[pages[1][0]] < place[pages[0][0]]
        assert place[state] < place[pages[1][0]]

    def test_gets_and_sets_are_uses_and_questions_are_none(self, bounded: StorageBackend) -> None:
        used, asked = ("read", "set again", "told"), ("described", "peeked", "coldest")
        for name in (*used, *asked):
            put(bounded, key(name), payload(name, SIZE))
        named = 0
        for n in range(250):
            put(bounded, key(n), payload(n, SIZE))
            assert fetch(bounded, key("read"), SIZE) == payload("read", SIZE)
            assert put(bounded, key("set again"), payload("set again", SIZE)) is HIT
            bounded.advise([key("told"), key("unknown")], [])
            bounded.describe([key("described")] * 2)
            item = to_get(key("peeked"), SIZE)
            assert bounded.peek([item]) == [MISS] or content(item) == payload("peeked", SIZE)
            said = bounded.coldest(3 * SIZE)
            named += said is None or key("coldest") in [entry.key for entry in said]
        assert named
        assert bounded.exists([key(name) for name in (*used, *asked)]) == [True] * 3 + [False] * 3

    def test_an_object_larger_than_the_store_is_throttled_and_costs_nothing(
        self, bounded: StorageBackend
    ) -> None:
        for n in range(200):
            put(bounded, key(n), payload(n, SIZE))
        before = {entry.key for entry in bounded.scan_all()}
        assert put(bounded, key("big"), bytes(self.small + 1)) is THROTTLED
        assert {entry.key for entry in bounded.scan_all()} == before
        big, small = to_set(key("big"), bytes(self.small + 1)), to_set(key("b"), payload("b", 5000))
        assert bounded.set([big, small]) == [THROTTLED, STORED]
        assert fetch(bounded, key("b"), 5000) == payload("b", 5000)

    def test_a_batch_larger_than_the_store_keeps_its_beginning(self, bounded: StorageBackend) -> None:
        put(bounded, key("old"), payload("old", 5000))
        items = [to_set(k, payload(k, 100_000), parent=parent) for k, parent in chain("long", 120)]
        answers = bounded.set(items)
        stored = answers.count(STORED)
        assert 0 < stored < 120
        assert answers == [STORED] * stored + [THROTTLED] * (120 - stored)
        assert bounded.exists([item.key for item in items]) == [True] * stored + [False] * (120 - stored)
        assert self.usage(bounded).used_bytes <= self.small

    @pytest.mark.parametrize("size", [100, SIZE])
    def test_space_comes_back(self, bounded: StorageBackend, size: int) -> None:
        """Deleted objects leave room for new objects, so that no other object is evicted."""
        put(bounded, key("keep"), payload("keep", SIZE))
        batch = min(500, self.small // (6 * size))
        for turn in range(20):
            names = [(turn, n) for n in range(batch)]
            assert bounded.set([to_set(key(name), payload(name, size)) for name in names]) == [STORED] * batch
            assert bounded.delete([key(name) for name in names]) == [True] * batch
        assert bounded.exists([key("keep")]) == [True]
        assert (self.usage(bounded).objects, self.usage(bounded).payload_bytes) == (1, SIZE)

    def test_threads_that_fill_a_full_store(self, bounded: StorageBackend) -> None:
        done = Event()

        def work(turn: int) -> None:
            for n in range(40):
                name = (turn, n)
                assert put(bounded, key(name), payload(name, 100_000)) in (STORED, THROTTLED)
                item = to_get(key(name), 100_000)
                assert bounded.get([item])[0] in (HIT, MISS)
                assert content(item) in (payload(name, 100_000), b"\xaa" * 100_000)

        def fill() -> None:
            try:
                run_all(*(lambda turn=turn: work(turn) for turn in range(4)))
            finally:
                done.set()

        def watch() -> None:
            while not done.is_set():
                assert self.usage(bounded).used_bytes <= self.small

        run_all(fill, watch)
        usage = self.usage(bounded)
        assert usage.payload_bytes == usage.objects * 100_000
        assert usage.payload_bytes > self.third, "a full store uses most of its capacity"


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
