"""A disk above a pool of Mooncake's, below vLLM's manager.

Needs the environment of `make test-engines`, and root.
"""

from __future__ import annotations

from pathlib import Path

from tests.engines.below import (
    DiskOverPool,
    pool,  # noqa: F401
)
from tests.engines.vllm.rig import Engine
from tests.storage_backends.mooncake.rig import Pool
from tiercache.storage.base import StorageBackend

NAMES = [f"block {i}" for i in range(8)]


def fill(chain: DiskOverPool) -> dict[str, object]:
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
