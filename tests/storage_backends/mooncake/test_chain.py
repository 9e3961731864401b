"""A pool that cannot list its objects, as a tier of a chain."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tiercache_backends.chain import TierChain
from tiercache_backends.mooncake.settings import read_settings
from tiercache_backends.mooncake.store import MooncakeBackend

from tests.faults import FaultEnv
from tests.storage_backends.mooncake.rig import Pool
from tiercache.config.urls import storage_url
from tiercache.errors import StorageError
from tiercache.storage.registry import open_backend
from tiercache.testing.objects import key, payload, put

SIZE = 20_000


def pool_url(pool: Pool, prefix: str) -> str:
    return storage_url("mooncake", address=pool.address, prefix=prefix, staging="4MiB", tier_name="pool")


def test_a_tier_below_it_is_not_behind_for_ever(pool: Pool, tmp_path: Path) -> None:
    with MooncakeBackend(read_settings(pool.section("above", staging="4MiB"))) as store:
        put(store, key("old"), payload("old", SIZE))
    with open_backend([pool_url(pool, "above"), f"file://{tmp_path}/disk?capacity=32MiB"]) as chain:
        assert isinstance(chain, TierChain)
        put(chain, key("new"), payload("new", SIZE))
        began = time.monotonic()
        chain.flush()
        assert time.monotonic() - began < 20, "it does not wait for a list that never comes"
        assert [tier.health for tier in chain.usage().tiers] == ["serving", "serving"]
        assert chain.usage().tiers[1].objects == 1


def test_what_the_tier_below_did_not_get_is_said(pool: Pool, tmp_path: Path) -> None:
    """An object that could not be copied from a pool without a list cannot be found any more."""
    env = FaultEnv()
    below = f"file://{tmp_path}/disk?capacity=32MiB"
    with open_backend([pool_url(pool, "said"), below], env=env) as chain:
        put(chain, key("before"), payload("before", SIZE))
        chain.flush()
        failing = env.fail("pwritev", times=1000)
        put(chain, key("lost"), payload("lost", SIZE))
        with pytest.raises(StorageError):
            chain.flush()
        assert failing.fired
        env.clear()
        deadline = time.monotonic() + 30
        while chain.usage().tiers[1].health != "serving" and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(StorageError, match=r"tier 'file' lacks .* it has not caught up"):
            chain.flush()
