"""Tests of quotas and guarantees: an owner never has more, and others do not take what is guaranteed."""

# ruff: noqa: D102 (a test is named for what it checks)

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Event

import pytest

from tiercache.core import ObjectKey, Outcome
from tiercache.errors import ConfigError
from tiercache.storage.base import NamespaceRecord, StorageBackend
from tiercache.storage.shares import OwnerUse, Share, Shares
from tiercache.testing.conformance.hooks import HIT, STORED, THROTTLED, BackendHooks
from tiercache.testing.conformance.threads import run_all
from tiercache.testing.objects import chain, key, payload, state_of, to_set

SIZE = 40_900
TAKEN = 42 << 10
"""Bytes that an object of `SIZE` takes of its owner's share: a little more than in any store."""
ASH, BIRCH, COMMON = b"ash", b"birch", b"common"


def owner_of(namespace: bytes) -> str:
    """Return the owner of a namespace of these tests."""
    return namespace.decode() if namespace in (ASH, BIRCH) else ""


class SharesTests(BackendHooks):
    """Tests of `StorageBackend.share`. A store that keeps several copies counts all, so `copies` multiplies.

    Thread safety: as `BackendHooks`.
    """

    @pytest.fixture
    def shared(self, bounded: StorageBackend) -> StorageBackend:
        self.need(bounded, "shares")
        return bounded

    def share(self, store: StorageBackend, **objects: tuple[int | None, int]) -> None:
        """Give quotas and guarantees, in objects of `SIZE` bytes."""
        size = TAKEN * self.copies
        limits = {
            name: Share(None if quota is None else quota * size, guarantee * size)
            for name, (quota, guarantee) in objects.items()
        }
        store.share(Shares(owner_of, limits))

    def put_all(self, store: StorageBackend, owner: bytes, names: Sequence[int]) -> list[Outcome]:
        return [self.put_one(store, owner, name) for name in names]

    def put_one(self, store: StorageBackend, owner: bytes, name: object) -> Outcome:
        item = to_set(key((owner, name)), payload(name, SIZE), namespace=owner)
        return store.set([item])[0]

    def flood(self, store: StorageBackend, owner: bytes, value: float | None = None) -> None:
        """Store more than the store has room for, in batches."""
        for first in range(0, self.small * 4 // 3 // SIZE, 16):
            names = [("flood", first + n) for n in range(16)]
            items = [
                to_set(key((owner, n)), payload(n, SIZE), namespace=owner, value=value, worker=1)
                for n in names
            ]
            assert store.set(items) == [STORED] * 16

    def flood_tiny(self, store: StorageBackend, name: str, room: int) -> None:
        """Store objects of one byte of ASH, until it has what is its own, and then a batch more."""
        full = room * TAKEN * self.copies * 9 // 10
        for first in range(0, 8192, 512):
            was_full = store.usage().owners["ash"].used_bytes >= full
            items = [(ASH, name, first + n) for n in range(512)]
            store.set([to_set(key(item), b"x", namespace=ASH) for item in items])
            if was_full:
                return
        assert store.usage().owners["ash"].used_bytes >= full

    def held(self, store: StorageBackend, owner: bytes, names: Sequence[int]) -> list[int]:
        found = store.exists([key((owner, name)) for name in names])
        return [name for name, there in zip(names, found, strict=True) if there]

    def test_what_an_owner_has_is_counted(self, shared: StorageBackend) -> None:
        self.put_all(shared, ASH, range(3))
        self.put_all(shared, COMMON, range(2))
        assert not shared.usage().owners
        self.share(shared, ash=(None, 0), birch=(8, 4))
        self.put_all(shared, BIRCH, range(4))
        shared.delete([key((BIRCH, 0))])
        owners, payload_bytes = shared.usage().owners, shared.usage().payload_bytes
        total = sum(use.used_bytes for use in owners.values())
        assert payload_bytes < total <= payload_bytes // SIZE * TAKEN
        assert {name: use.used_bytes * 8 // total for name, use in owners.items()} == {
            "": 2,
            "ash": 3,
            "birch": 3,
        }
        assert self.usage(shared).payload_bytes == 8 * SIZE
        assert owners["birch"].quota_bytes == 8 * TAKEN * self.copies
        assert owners["birch"].guarantee_bytes == 4 * TAKEN * self.copies
        assert owners["ash"] == OwnerUse(used_bytes=owners["ash"].used_bytes)

    def test_a_quota_evicts_the_coldest_of_its_owner_only(self, shared: StorageBackend) -> None:
        self.share(shared, ash=(8, 0))
        self.put_all(shared, COMMON, range(5))
        self.put_all(shared, BIRCH, range(5))
        for name in range(30):
            assert self.put_one(shared, ASH, name) is STORED
            use = shared.usage().owners["ash"]
            assert use.used_bytes <= 8 * TAKEN * self.copies
        kept = self.held(shared, ASH, range(30))
        assert kept == list(range(30 - len(kept), 30)), "the coldest went first"
        assert len(kept) * self.copies >= 5, "no more was evicted than was needed"
        assert use.evicted_objects >= 30 - 8 * self.copies
        assert use.throttled_objects == 0
        assert self.held(shared, COMMON, range(5)) == self.held(shared, BIRCH, range(5)) == list(range(5))

    def test_what_cannot_be_within_a_quota_is_throttled(self, shared: StorageBackend) -> None:
        self.share(shared, ash=(4, 0), birch=(0, 0))
        pages = chain("ash", 40)
        items = [to_set(k, payload(k, SIZE), namespace=ASH, parent=parent) for k, parent in pages]
        answers = shared.set(items)
        stored = answers.count(STORED)
        assert 0 < stored <= 4 * self.copies
        assert answers == [STORED] * stored + [THROTTLED] * (40 - stored), "the beginning of a batch is kept"
        assert shared.set(items[: stored + 1]) == [HIT] * stored + [THROTTLED]
        assert self.put_one(shared, BIRCH, 0) is THROTTLED
        assert self.put_one(shared, COMMON, 0) is STORED
        assert shared.usage().owners["birch"].throttled_objects >= 1
        assert shared.usage().owners["ash"].throttled_objects >= 1

    def test_others_do_not_evict_what_is_guaranteed(self, shared: StorageBackend) -> None:
        self.share(shared, ash=(None, 20), birch=(None, 0))
        names = range(10)
        assert self.put_all(shared, ASH, names) == [STORED] * 10
        self.flood(shared, BIRCH)
        self.flood(shared, COMMON)
        assert self.held(shared, ASH, names) == list(names), "the coldest of all, and guaranteed"

    def test_objects_of_one_byte_take_no_more_than_their_owner_has(self, shared: StorageBackend) -> None:
        """Two tenants within their guarantees leave each other alone, whatever the sizes of their objects."""
        room = self.small // 5 // TAKEN
        self.share(shared, ash=(None, room), birch=(None, room))
        self.flood_tiny(shared, "tiny", room)
        assert self.put_all(shared, BIRCH, range(room)) == [STORED] * room
        self.flood_tiny(shared, "more", room)
        assert self.held(shared, BIRCH, range(room)) == list(range(room))

    def test_a_guarantee_ends_the_eviction_of_a_unit(self, shared: StorageBackend) -> None:
        """Without the state at its end no page of the sequence is of use, and five of its objects stay."""
        self.share(shared, ash=(None, 5))
        shared.register_namespace(NamespaceRecord(ASH, {}, states=True))
        pages = chain("ash", 6)
        items = [
            to_set(k, payload(k, SIZE), namespace=ASH, parent=up, depth=n + 1)
            for n, (k, up) in enumerate(pages)
        ]
        state = state_of(("ash", 5))
        items.append(to_set(state, payload(state, SIZE), namespace=ASH, parent=state.page_key))
        assert shared.set(items) == [STORED] * 7
        self.flood(shared, BIRCH)
        self.flood(shared, COMMON)
        assert sum(shared.exists([item.key for item in items])) == 5

    def test_an_owner_grows_up_to_its_guarantee(self, shared: StorageBackend) -> None:
        """The owner replaces what others have beyond theirs, and not its own objects, which are colder."""
        self.share(shared, ash=(None, 20), birch=(None, 0))
        assert self.put_one(shared, ASH, 0) is STORED
        self.flood(shared, BIRCH)
        assert self.put_all(shared, ASH, range(1, 15)) == [STORED] * 14
        assert self.held(shared, ASH, range(15)) == list(range(15))

    def test_a_guarantee_counts_more_than_the_values_of_others(self, shared: StorageBackend) -> None:
        self.share(shared, ash=(None, 20), birch=(None, 0))
        self.flood(shared, BIRCH, value=1000.0)
        for name in range(10):
            item = to_set(key((ASH, name)), payload(name, SIZE), namespace=ASH, value=1.0, worker=2)
            assert shared.set([item]) == [STORED]
        assert self.held(shared, ASH, range(10)) == list(range(10))

    def test_a_smaller_quota_evicts(self, shared: StorageBackend) -> None:
        self.share(shared, ash=(None, 0))
        self.put_all(shared, ASH, range(12))
        self.share(shared, ash=(6, 0))
        kept = self.held(shared, ASH, range(12))
        assert 0 < len(kept) <= 6 * self.copies
        assert kept == list(range(12 - len(kept), 12))
        assert shared.usage().owners["ash"].used_bytes <= 6 * TAKEN * self.copies

    def test_guarantees_beyond_the_store_are_refused(self, shared: StorageBackend) -> None:
        self.share(shared, ash=(9, 8))
        half = self.small * 3 // 5
        with pytest.raises(
            ConfigError, match=r"the guarantees of tenants ash, birch add up to .*, more than"
        ):
            shared.share(Shares(owner_of, {"ash": Share(None, half), "birch": Share(None, half)}))
        with pytest.raises(ConfigError, match=r"tenant ash: the guarantee .* is more than the quota"):
            shared.share(Shares(owner_of, {"ash": Share(4, 5)}))
        assert shared.usage().owners["ash"].quota_bytes == 9 * TAKEN * self.copies

    def test_a_store_counts_anew_after_it_was_opened_again(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path / "store", self.small)
        self.need(store, "shares")
        self.need(store, "persistent")
        self.share(store, ash=(10, 5))
        self.put_all(store, ASH, range(30))
        self.put_all(store, COMMON, range(30))
        before = {name: use.used_bytes for name, use in store.usage().owners.items()}
        store = self.kill(store, tmp_path / "store", self.small)
        self.share(store, ash=(10, 5))
        assert {name: use.used_bytes for name, use in store.usage().owners.items()} == before
        assert self.put_all(store, ASH, range(100, 120)) == [STORED] * 20
        assert store.usage().owners["ash"].used_bytes <= 10 * TAKEN * self.copies
        self._finish(store)

    def test_quotas_hold_while_threads_write(self, shared: StorageBackend) -> None:
        self.share(shared, ash=(6, 3), birch=(9, 0))
        done = Event()

        def write(owner: bytes, turn: int) -> None:
            for name in range(30):
                assert self.put_one(shared, owner, (turn, name)) in (STORED, THROTTLED)

        def work() -> None:
            try:
                run_all(*(lambda o=o, t=t: write(o, t) for o in (ASH, BIRCH, COMMON) for t in range(2)))
            finally:
                done.set()

        def watch() -> None:
            while not done.is_set():
                owners = shared.usage().owners
                assert owners["ash"].used_bytes <= 6 * TAKEN * self.copies
                assert owners["birch"].used_bytes <= 9 * TAKEN * self.copies

        run_all(work, watch)

    def test_a_store_that_keeps_no_shares_says_so(self, store: StorageBackend) -> None:
        if store.capabilities.shares:
            pytest.skip("the store keeps shares")
        store.share(Shares(owner_of, {"ash": Share()}))
        with pytest.raises(ConfigError, match="tenant ash has a quota or a guarantee"):
            store.share(Shares(owner_of, {"birch": Share(), "ash": Share(1)}))
        found: Sequence[ObjectKey] = [key((ASH, 0))]
        assert store.exists(found) == [False]
