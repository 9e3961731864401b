"""A chain of a disk and Mooncake's pool below vLLM's manager.

Needs the environment of `make test-engines`, and root.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
pytest.importorskip("vllm.v1.kv_offload.tiering.base", reason="vLLM is not installed: make test-engines")

from tests.engines.pool import DiskOverPool, pool  # noqa: E402, F401
from tests.engines.vllm.rig import Engine  # noqa: E402
from tests.storage_backends.mooncake.rig import Pool  # noqa: E402


def test_the_pool_serves_without_the_disk_and_a_lost_provider_is_a_miss(
    tmp_path: Path,
    pool: Pool,  # noqa: F811
) -> None:
    chain = DiskOverPool(tmp_path / "ssd", pool)
    tier = {"storage": chain.urls, "revision": "r1"}
    names = [f"block {i}" for i in range(8)]
    with Engine(tier) as engine:
        engine.store(*names)
        # private: the plug-in shows its store to nobody
        chain.until_in_pool(engine.tier._store, len(names))
    chain.lose_disk()
    with Engine(tier) as engine:
        assert engine.found(*names, "none") == [True] * len(names) + [False]  # `found` compares the bytes
    chain.lose_disk()
    with Engine(tier) as engine:
        chain.lose_provider()
        engine.found(*names)  # some; what hits has the right bytes
        engine.evict()
        chain.lose_provider()
        assert engine.found(*names) == [False] * len(names)
        engine.evict()
        engine.store("on the disk")
        engine.evict()
        assert engine.found("on the disk") == [True]
