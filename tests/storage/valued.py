"""Tests of values: a full store evicts the objects of the lowest values first, and takes none below those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, nan
from random import Random
from threading import Event

import pytest

from tests.storage.restorable import OwnHooks
from tiercache.core import ObjectKey, PoolName
from tiercache.storage.base import StorageBackend
from tiercache.testing.conformance.hooks import HIT, STORED, THROTTLED
from tiercache.testing.conformance.threads import run_all
from tiercache.testing.objects import OTHER_NAMESPACE, chain, fetch, key, payload, state_of, to_set

SIZE = 60_000
HIGH = 2.0**40
"""Value of objects that must not go."""
ONE = 1 << 63
"""Number of a worker."""


class Valued(OwnHooks):
    """A theme beside those of the conformance suite: `ObjectMeta.value` and `advise`."""

    @pytest.fixture
    def ranked(self, bounded: StorageBackend) -> StorageBackend:
        """Provide a store of the small capacity that obeys values."""
        if not self.obeys_values:
            bounded.close()
            pytest.skip("the store does not obey values")
        return bounded

    def test_values_change_up_and_down_and_reads_change_none(self, ranked: StorageBackend) -> None:
        values = self._values(2)
        _store(ranked, values)
        changed = dict(zip(values, Random(3).sample(list(values.values()), len(values)), strict=True))
        ranked.advise(list(changed), list(changed.values()), ONE)
        for k in sorted(changed, key=changed.__getitem__)[: len(changed) // 2]:
            fetch(ranked, k, SIZE)
        _press(ranked, changed)

    def test_a_set_of_an_object_that_is_stored_changes_its_value(self, ranked: StorageBackend) -> None:
        values = self._values(5)
        _store(ranked, values)
        changed = {k: 1 / value for k, value in values.items()}
        assert set(_store(ranked, changed)) == {HIT}
        _press(ranked, changed)

    def test_dead_objects_go_before_any_value(self, ranked: StorageBackend) -> None:
        pages = chain("dead", 3)
        dead = {k: HIGH for k, _ in pages}
        _store(ranked, dead | {state_of(("dead", 2)): HIGH}, dict(pages))
        live = {key("low"): 2.0**-30, state_of("low"): 2.0**-30}
        _store(ranked, live)
        assert ranked.delete([state_of(("dead", 2))]) == [True]
        assert self._first_to_go(ranked, [*dead, *live]) <= set(dead)

    def test_values_age(self, ranked: StorageBackend) -> None:
        old, new = key("old"), key("new")
        _store(ranked, {old: 8.0})
        self.pass_time(ranked, 2 * 3600)
        _store(ranked, {new: 4.0})
        self.pass_time(ranked, 3600)
        assert self._first_to_go(ranked, [old, new]) == {old}

    def test_bad_advice_is_ignored(self, ranked: StorageBackend) -> None:
        values = self._values(6)
        _store(ranked, values)
        keys = list(values)
        for bad in (nan, inf, -1.0):
            ranked.advise(keys, [bad] * len(keys), ONE)
        for worker in (-1, 2**64):
            ranked.advise(keys, [HIGH] * len(keys), worker)
        ranked.advise([ObjectKey(k.pool, b"short") for k in keys], [HIGH] * len(keys), ONE)
        ranked.advise(keys, [], ONE)
        ranked.advise([key("unknown")], [1.0, 2.0], ONE)
        ranked.advise([], [])
        _press(ranked, values)

    def test_objects_without_a_value_go_by_their_last_use(self, ranked: StorageBackend) -> None:
        plain = [key(("plain", n)) for n in range(self.third // SIZE)]
        for k in plain:
            ranked.set([to_set(k, payload(k, SIZE))])
        _store(ranked, {key("valued"): HIGH})
        # A lower tier of a chain evicts them in the order in which they were copied. If half were used, it
        # would evict the first of the others just when the upper tier evicts the first that was used.
        used = plain[: len(plain) // 3]
        for k in used:
            fetch(ranked, k, SIZE)
        gone = self._first_to_go(ranked, plain)
        assert gone
        assert not gone & set(used)

    def test_what_is_worth_less_than_all_that_is_stored_is_refused(self, ranked: StorageBackend) -> None:
        _store(ranked, self._full(ranked, 2.0**10))
        before = {entry.key for entry in ranked.scan_all()}
        refused = key("refused")
        for _ in range(20):
            assert _store(ranked, {refused: 1.0}) == [THROTTLED]
        assert {entry.key for entry in ranked.scan_all()} == before
        assert sum(int(medium.details["not_worth"]) for medium in self.media(ranked)) >= 20
        assert ranked.set([to_set(key("plain"), payload("plain", SIZE))]) == [STORED]
        assert _store(ranked, {key("better"): 2.0**20}) == [STORED]

    def test_what_depends_on_a_refused_page_is_refused(self, ranked: StorageBackend) -> None:
        _store(ranked, self._full(ranked, 2.0**10))
        pages = chain("s", 3)
        values = {k: 2.0**20 for k, _ in pages} | {state_of(("s", 2)): 2.0**20}
        values[pages[1][0]] = 1.0
        assert _store(ranked, values, dict(pages)) == [STORED, THROTTLED, THROTTLED, THROTTLED]

    def test_threads_advise_and_fill_a_full_store(self, ranked: StorageBackend) -> None:
        done = Event()
        names = [(turn, n) for turn in range(2) for n in range(60)]

        def fill(turn: int) -> None:
            for n in range(60):
                assert set(_store(ranked, {key((turn, n)): 2.0 ** (n % 7)})) <= {STORED, THROTTLED, HIT}

        def advise() -> None:
            for n in range(100):
                ranked.advise(
                    [key(name) for name in names], [2.0 ** ((i * n) % 9) for i in range(120)], n % 3
                )

        def watch() -> None:
            while not done.is_set():
                assert self.usage(ranked).used_bytes <= self.small

        def work() -> None:
            try:
                run_all(lambda: fill(0), lambda: fill(1), advise)
            finally:
                done.set()

        run_all(work, watch)
        for name in names:
            found = fetch(ranked, key(name), SIZE)
            assert not isinstance(found, bytes) or found == payload(key(name), SIZE)

    def _values(self, seed: int) -> dict[ObjectKey, float]:
        """Return distinct values for objects that take a third of the store."""
        keys = [key((seed, n)) for n in range(self.third // SIZE)]
        return {k: 2.0 ** (n - 20) for n, k in enumerate(Random(seed).sample(keys, len(keys)))}

    def _full(self, store: StorageBackend, value: float) -> dict[ObjectKey, float]:
        """Return more objects of this value than the store has room for."""
        return {key(("full", n)): value for n in range(2 * self.small // SIZE)}

    def _first_to_go(self, store: StorageBackend, watched: Sequence[ObjectKey]) -> set[ObjectKey]:
        """Store objects of high value until some of those watched are gone, and return these."""
        for n in range(3 * self.small // SIZE):
            _press_with(store, ("press", n, len(watched)))
            gone = {k for k, there in zip(watched, store.exists(watched), strict=True) if not there}
            if gone:
                return gone
        return set()


def _store(
    store: StorageBackend,
    values: Mapping[ObjectKey, float],
    parents: Mapping[ObjectKey, bytes | None] | None = None,
) -> list[object]:
    """Store one object of each value, with one call; states are attached to their pages."""
    items = []
    for k, value in values.items():
        parent = (parents or {}).get(k, None if k.pool is PoolName.KV else k.page_key)
        items.append(to_set(k, payload(k, SIZE), parent=parent, value=value, worker=ONE))
    return list(store.set(items))


def _press_with(store: StorageBackend, name: object) -> None:
    """Store one object of high value, in a namespace in which all pages can be restored without a state."""
    k = key(name)
    store.set([to_set(k, payload(k, SIZE), namespace=OTHER_NAMESPACE, value=HIGH, worker=ONE)])


def _press(store: StorageBackend, values: Mapping[ObjectKey, float], share: float = 0.5) -> None:
    """Store objects of high value until a share of those with `values` is gone: these must be the lowest."""
    for n in range(10_000):
        _press_with(store, ("press", n, share))
        there = dict(zip(values, store.exists(list(values)), strict=True))
        gone = [values[k] for k in values if not there[k]]
        left = [values[k] for k in values if there[k]]
        assert not gone or not left or max(gone) < min(left), "the lowest values go first"
        if len(gone) >= share * len(values):
            return
    raise AssertionError("the store does not fill")
