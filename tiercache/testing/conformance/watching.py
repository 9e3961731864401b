"""Tests of `watch`: replaying the events of a store that tells gives exactly the objects that it has."""

# ruff: noqa: D102 (a test is named for what it checks)

from __future__ import annotations

import threading
import time
from random import Random

import pytest

from tiercache.events import EventKind
from tiercache.events.base import ResidencyMap
from tiercache.storage.base import StorageBackend
from tiercache.storage.store_events import StoreEvents
from tiercache.testing.conformance.hooks import CORRUPT, BackendHooks
from tiercache.testing.objects import chain, fetch, key, page_key, payload, put, state_of, to_set

_SIZE = 40_000
_SECONDS = 20.0


class Watching(BackendHooks):
    """Tests of changes that are told.

    Thread safety: as `BackendHooks`.
    """

    def test_what_is_told_adds_up_to_what_is_stored(self, bounded: StorageBackend) -> None:
        put(bounded, key("before"), payload(0, _SIZE))
        told = StoreFollower.required(bounded)

        def work(seed: int) -> None:
            random = Random(seed)
            for turn in range(60):
                pages = chain((seed % 2, random.randrange(20)), random.randint(1, 6))
                if random.random() < 0.8:
                    bounded.set([to_set(k, payload(k, _SIZE), parent=parent) for k, parent in pages])
                    name = (turn, seed)
                    bounded.set([to_set(state_of(name), payload(name, 512), parent=page_key(name))])
                    bounded.set([to_set(key(name), payload(name, 512), parent=pages[-1][0].page_key)])
                else:
                    bounded.delete([k for k, _ in pages])

        workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(120)
        told.await_truth()
        assert told.removed, "nothing was evicted or deleted"

    def test_a_corrupt_object_is_told_as_removed(self, store: StorageBackend) -> None:
        told = StoreFollower.required(store)
        put(store, key(1), payload(1, _SIZE))
        told.await_truth()
        self.corrupt(store, key(1))
        assert fetch(store, key(1), _SIZE) is CORRUPT
        told.await_truth()
        assert told.removed

    def test_nothing_is_told_when_nobody_watches_any_more(self, store: StorageBackend) -> None:
        noted: list[bytes] = []
        if not store.watch(lambda digests, _: noted.extend(digests)):
            pytest.skip("the store does not tell of changes")
        put(store, key(1), payload(1, _SIZE))
        end = time.monotonic() + _SECONDS
        while not noted and time.monotonic() < end:
            time.sleep(0.01)
        assert store.watch(None)
        put(store, key(2), payload(2, _SIZE))
        later = StoreFollower.required(store)
        put(store, key(3), payload(3, _SIZE))
        later.await_truth()
        assert noted == [key(1).digest]


class StoreFollower:
    """Subscriber of the events of one store, without a publisher in between.

    It begins with a snapshot. `is_told` is False if the store does not tell of changes.

    Thread safety: one thread.
    """

    def __init__(self, store: StorageBackend) -> None:
        self._store = store
        self._source = StoreEvents(store, "store")
        self._map = ResidencyMap()
        self.is_told = not self._source.silent
        self.removed = 0
        """Number of objects that were told as removed."""
        for events in self._source.snapshot():
            self._map.apply(events)

    @classmethod
    def required(cls, store: StorageBackend) -> StoreFollower:
        """Return a follower; skips the test if the store does not tell of changes."""
        made = cls(store)
        if not made.is_told:
            pytest.skip("the store does not tell of changes")
        return made

    def held(self) -> set[bytes]:
        """Return the digests of the objects that the store has, by its events."""
        while events := self._source.collect():
            self._map.apply(events)
            self.removed += sum(len(event.keys) for event in events if event.kind is EventKind.REMOVED)
        return {found.layout + found.key for held in self._map.places().values() for found in held}

    def await_truth(self) -> None:
        """Wait until the events give what a scan finds."""
        end = time.monotonic() + _SECONDS
        while True:
            found, known = {entry.key.digest for entry in self._store.scan_all()}, self.held()
            if not self.is_told or found == known:
                return
            assert time.monotonic() < end, f"{len(found - known)} not told, {len(known - found)} not there"
            time.sleep(0.01)
