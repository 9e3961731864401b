"""Tests of quotas and guarantees: an owner never has more, and others do not take what is guaranteed."""

# ruff: noqa: D102 (a test is named for what it checks)

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tiercache.core import ObjectKey, Outcome
from tiercache.errors import ConfigError
from tiercache.storage.base import NamespaceRecord, StorageBackend
from tiercache.storage.shares import Share, Shares
from tiercache.testing.conformance.hooks import HIT, STORED, THROTTLED, BackendHooks
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

    def flood(self, store: StorageBackend, owner: bytes) -> None:
        """Store more than the store has room for, in batches."""
        for first in range(0, self.small * 4 // 3 // SIZE, 16):
            names = [("flood", first + n) for n in range(16)]
            items = [to_set(key((owner, n)), payload(n, SIZE), namespace=owner) for n in names]
            assert store.set(items) == [STORED] * 16

    def held(self, store: StorageBackend, owner: bytes, names: Sequence[int]) -> list[int]:
        found = store.exists([key((owner, name)) for name in names])
        return [name for name, there in zip(names, found, strict=True) if there]

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

    def test_a_store_that_keeps_no_shares_says_so(self, store: StorageBackend) -> None:
        if store.capabilities.shares:
            pytest.skip("the store keeps shares")
        store.share(Shares(owner_of, {"ash": Share()}))
        with pytest.raises(ConfigError, match="tenant ash has a quota or a guarantee"):
            store.share(Shares(owner_of, {"birch": Share(), "ash": Share(1)}))
        found: Sequence[ObjectKey] = [key((ASH, 0))]
        assert store.exists(found) == [False]
