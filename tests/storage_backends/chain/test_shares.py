"""Quotas and guarantees of a chain: each tier keeps its part, also when tiers come, go and are copied to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage_backends.chain.hooks import add, remove
from tests.waiting import until
from tiercache.errors import ConfigError
from tiercache.storage import open_backend
from tiercache.storage.base import StorageBackend
from tiercache.storage.shares import OwnerUse, Share, Shares
from tiercache.testing.conformance.hooks import STORED
from tiercache.testing.objects import fetch, key, payload, to_set

MIB = 1 << 20
SIZE = 40_960
ASH = b"ash"


def url(path: Path, name: str, capacity: str, more: str = "") -> str:
    return f"file://{path / name}?capacity={capacity}&tier_name={name}{more}"


def owner_of(namespace: bytes) -> str:
    return namespace.decode() if namespace in (ASH, b"birch") else ""


def share(store: StorageBackend, **limits: Share) -> None:
    store.share(Shares(owner_of, limits))


def put_all(store: StorageBackend, names: range) -> None:
    for name in names:
        assert store.set([to_set(key(name), payload(name, SIZE), namespace=ASH)]) == [STORED]


def parts(store: StorageBackend) -> dict[str, OwnerUse]:
    """Return what the owner "ash" has in each tier."""
    return {
        one.name: one.store.usage().owners["ash"]
        for one in store.observed_tiers()  # type: ignore[attr-defined]
    }


def test_what_a_quota_evicts_has_come_down_before(tmp_path: Path) -> None:
    """The upper tier has room for everything, but its part of the quota is small."""
    tiers = ["memory://?capacity=16MiB", url(tmp_path, "disk", "64MiB", "&tier_write=write_back")]
    with open_backend(tiers) as store:
        share(store, ash=Share(quota=10 * MIB))
        below = store.observed_tiers()[1].store  # type: ignore[attr-defined]
        for name in range(150):
            put_all(store, range(name, name + 1))
            # The mover looks after each step; a test that stores faster would only show how slow it is.
            until(lambda name=name: below.usage().objects >= name - 45)
        assert parts(store)["memory"].used_bytes <= 2 * MIB
        lost = [name for name in range(150) if fetch(store, key(name), SIZE) != payload(name, SIZE)]
        assert not lost


def test_tiers_that_come_and_go_get_their_parts(tmp_path: Path) -> None:
    with open_backend([url(tmp_path, "a", "16MiB")]) as store:
        share(store, ash=Share(quota=8 * MIB, guarantee=4 * MIB))
        put_all(store, range(100))
        add(store, url(tmp_path, "b", "48MiB", "&tier_promote=never"))
        found = parts(store)
        assert {name: one.quota_bytes for name, one in found.items()} == {"a": 2 * MIB, "b": 6 * MIB}
        assert {name: one.guarantee_bytes for name, one in found.items()} == {"a": MIB, "b": 3 * MIB}
        assert found["a"].used_bytes <= 2 * MIB
        remove(store, "a")
        assert parts(store)["b"].quota_bytes == 8 * MIB
        use = store.usage().owners["ash"]
        assert (use.quota_bytes, use.guarantee_bytes) == (8 * MIB, 4 * MIB)
        assert use.used_bytes == parts(store)["b"].used_bytes


def test_a_chain_too_small_for_its_guarantees_is_not_made(tmp_path: Path) -> None:
    with open_backend([url(tmp_path, "a", "16MiB"), url(tmp_path, "b", "16MiB")]) as store:
        share(store, ash=Share(guarantee=20 * MIB))
        put_all(store, range(10))
        with pytest.raises(ConfigError, match="the guarantees of tenants ash add up to"):
            remove(store, "b")
        assert [tier.health for tier in store.usage().tiers] == ["serving", "serving"]
        assert {one.guarantee_bytes for one in parts(store).values()} == {10 * MIB}


def test_all_tiers_take_new_shares_or_none(tmp_path: Path) -> None:
    """The first tier could keep them, but the second one needs a part of its capacity for its catalog."""
    tiers = ["memory://?capacity=16MiB&tier_name=a", url(tmp_path, "b", "16MiB", "&tier_write=write_back")]
    with open_backend(tiers) as store:
        share(store, ash=Share(quota=30 * MIB))
        put_all(store, range(50))  # in the first tier alone
        before = parts(store)
        with pytest.raises(ConfigError, match="the guarantees of tenants ash add up to"):
            share(store, ash=Share(guarantee=32 * MIB - (150 << 10)))
        assert parts(store) == before
        assert [tier.health for tier in store.usage().tiers] == ["serving", "serving"]
        share(store, ash=Share(quota=2 * MIB))
        assert parts(store)["a"].used_bytes <= MIB
