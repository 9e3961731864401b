"""A disk above a store that hosts share, below vLLM's manager: a pool of Mooncake's, and a bucket.

Needs the environment of `make test-engines`; the pool also needs root.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.below import (
    DiskOver,
    DiskOverBucket,
    DiskOverPool,
    pool,  # noqa: F401
    service,  # noqa: F401
    until,
)
from tests.engines.vllm.rig import Engine
from tests.storage_backends.mooncake.rig import Pool
from tests.storage_backends.s3.proxy import Proxy
from tiercache.storage.base import StorageBackend

NAMES = [f"block {i}" for i in range(8)]


def fill(chain: DiskOver) -> dict[str, object]:
    """Store blocks until they are below, and let another engine find them there; return its settings."""
    tier = {"storage": chain.urls, "revision": "r1"}
    with Engine(tier) as engine:
        engine.store(*NAMES)
        chain.until_below(store_of(engine), len(NAMES))
    chain.lose_disk()
    with Engine(tier) as engine:
        assert engine.found(*NAMES, "none") == [True] * len(NAMES) + [False]  # `found` compares the bytes
    chain.lose_disk()
    return tier


def store_of(engine: Engine) -> StorageBackend:
    # private: the plug-in shows its store to nobody
    return engine.tier._store


def uses_the_disk(engine: Engine, name: str) -> None:
    """Store a block and find it, whatever is below."""
    engine.evict()
    engine.store(name)
    engine.evict()
    assert engine.found(name) == [True]


def finds_all(engine: Engine) -> bool:
    """Whether every block is found again."""
    engine.evict()
    return engine.found(*NAMES) == [True] * len(NAMES)


def test_the_pool_serves_without_the_disk_and_a_lost_provider_is_a_miss(
    tmp_path: Path,
    pool: Pool,  # noqa: F811
) -> None:
    chain = DiskOverPool(tmp_path / "ssd", pool)
    with Engine(fill(chain)) as engine:
        chain.lose_provider()
        engine.found(*NAMES)  # some; what hits has the right bytes
        engine.evict()
        chain.lose_provider()
        assert engine.found(*NAMES) == [False] * len(NAMES)
        uses_the_disk(engine, "on the disk")


def test_the_bucket_serves_without_the_disk_and_its_outage_is_a_miss(
    tmp_path: Path,
    service: Proxy,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain = DiskOverBucket(tmp_path / "ssd", service, monkeypatch)
    tier = fill(chain)
    with Engine(tier) as engine:
        chain.lose_service()
        assert engine.found(*NAMES) == [False] * len(NAMES)
        uses_the_disk(engine, "on the disk")
        chain.service_is_back()
        until(lambda: finds_all(engine))
    chain.lose_disk()
    chain.credentials("wrong")
    with Engine(tier) as engine:
        assert "finds the signature wrong" in chain.why(store_of(engine))
        assert engine.found(*NAMES) == [False] * len(NAMES)
        uses_the_disk(engine, "on the disk")
        chain.credentials()
        until(lambda: finds_all(engine))
