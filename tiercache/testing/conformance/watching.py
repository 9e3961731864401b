"""Tests of `watch`: a store that says that it tells of changes tells of all of them, in their order."""

# ruff: noqa: D102 (a test is named for what it checks)

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from random import Random

import pytest

from tiercache.storage.base import StorageBackend
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
        told = _Told(bounded)

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
        told.await_truth({key("before").digest})
        assert told.removed, "nothing was evicted or deleted"

    def test_a_corrupt_object_is_told_as_removed(self, store: StorageBackend) -> None:
        told = _Told(store)
        put(store, key(1), payload(1, _SIZE))
        told.await_truth()
        self.corrupt(store, key(1))
        assert fetch(store, key(1), _SIZE) is CORRUPT
        told.await_truth()
        assert told.removed == [key(1).digest]

    def test_nothing_is_told_when_nobody_watches_any_more(self, store: StorageBackend) -> None:
        told = _Told(store)
        put(store, key(1), payload(1, _SIZE))
        told.await_truth()
        assert store.watch(None)
        put(store, key(2), payload(2, _SIZE))
        later = _Told(store)
        put(store, key(3), payload(3, _SIZE))
        later.await_truth({key(1).digest, key(2).digest})
        assert told.stored == [key(1).digest]


class _Told:
    """Changes that a store has told since the construction. Skips the test if the store does not tell.

    Thread safety: the store's threads call `_note`, which is called one at a time.
    """

    def __init__(self, store: StorageBackend) -> None:
        self._store = store
        self._held = set[bytes]()
        self.stored: list[bytes] = []
        self.removed: list[bytes] = []
        if not store.watch(self._note):
            pytest.skip("the store does not tell of changes")

    def _note(self, digests: Sequence[bytes], stored: bool) -> None:
        if stored:
            assert self._held.isdisjoint(digests), "an object is told as stored twice"
            self.stored += digests
            self._held.update(digests)
        else:
            self.removed += digests
            self._held.difference_update(digests)

    def await_truth(self, before: set[bytes] | None = None) -> None:
        """Wait until what was told, and what was stored `before`, is what a scan finds."""
        end = time.monotonic() + _SECONDS
        while True:
            found = {entry.key.digest for entry in self._store.scan_all()}
            known = self._held | ((before or set()) - set(self.removed))
            if found == known:
                return
            assert time.monotonic() < end, f"{len(found - known)} not told, {len(known - found)} not there"
            time.sleep(0.01)
