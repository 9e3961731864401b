"""A chain of a disk and Mooncake's pool below SGLang's controller.

Needs the environment of `make test-engines`, and root.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration
torch = pytest.importorskip("torch")
pytest.importorskip(
    "sglang.srt.mem_cache.hicache_storage", reason="SGLang is not installed: make test-engines"
)

from tests.engines.pool import DiskOverPool, pool  # noqa: E402, F401
from tests.engines.sglang import rig  # noqa: E402
from tests.engines.sglang.test_stores import TOKENS, restored  # noqa: E402
from tests.storage_backends.mooncake.rig import Pool  # noqa: E402


def test_the_pool_serves_without_the_disk_and_a_lost_provider_is_a_miss(
    group: Any,
    tmp_path: Path,
    pool: Pool,  # noqa: F811
) -> None:
    chain = DiskOverPool(tmp_path / "ssd", pool)
    kv, mamba = rig.kv_pool(), rig.mamba_pool()
    made = rig.controller(kv, mamba, group)
    expected, state = [rig.page(kv, i) for i in range(6)], rig.page(mamba, 2)
    key, hashes = rig.hashed(TOKENS)

    def attach() -> None:
        rig.attach(made, chain.urls)

    def arrived() -> int:
        """Pages that come back, all of them compared; a query may still name what a lost provider had."""
        found = rig.query(made, key, rig.any_state())
        pages = found.storage_hit_count // rig.PAGE
        if not pages:
            return 0
        found.pool_transfers[0].host_indices = torch.tensor([7])
        tokens, hits = rig.fetch(made, found, range(20, 20 + pages))
        came = tokens // rig.PAGE
        assert [rig.page(kv, 20 + i) for i in range(came)] == expected[:came]
        assert not hits.get("mamba") or rig.page(mamba, 7) == state
        return came

    attach()
    assert rig.write(made, TOKENS, hashes, range(6), {5: 2}).completed_tokens == len(TOKENS)
    chain.until_in_pool(rig.store_of(made.storage_backend), 7)
    made.detach_storage_backend()
    chain.lose_disk()
    attach()
    assert restored(made, kv, mamba, expected, state) == 6
    made.detach_storage_backend()
    chain.lose_disk()
    attach()
    chain.lose_provider()
    arrived()  # all, some or nothing, with two copies of the state
    chain.lose_provider()
    assert arrived() == 0
    # The master may still name what the providers had, so that a write of the same pages finds them stored.
    others = range(1000, 1000 + len(TOKENS))
    key, hashes = rig.hashed(others)
    assert rig.write(made, others, hashes, range(6), {5: 2}).completed_tokens == len(others)
    assert arrived() == 6
    made.detach_storage_backend()
