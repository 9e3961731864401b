"""A disk above a store that hosts share, below SGLang's controller: a pool of Mooncake's, and a bucket.

Needs the environment of `make test-engines`; the pool also needs root.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration
torch = pytest.importorskip("torch")
pytest.importorskip(
    "sglang.srt.mem_cache.hicache_storage", reason="SGLang is not installed: make test-engines"
)

from tests.engines.below import (  # noqa: E402
    DiskOver,
    DiskOverBucket,
    DiskOverPool,
    pool,  # noqa: F401
    service,  # noqa: F401
    until,
)
from tests.engines.sglang import rig  # noqa: E402
from tests.storage_backends.mooncake.rig import Pool  # noqa: E402
from tests.storage_backends.s3.proxy import Proxy  # noqa: E402

PAGES = 6
TOKENS = range(rig.PAGE * PAGES)


class Engine:
    """SGLang's controller over a chain, with pages in its pools."""

    def __init__(self, chain: DiskOver, group: Any) -> None:
        self.chain = chain
        self.kv, self.mamba = rig.kv_pool(), rig.mamba_pool()
        self.made = rig.controller(self.kv, self.mamba, group)
        self.expected = [rig.page(self.kv, i) for i in range(PAGES)]
        self.state = rig.page(self.mamba, 2)

    @property
    def store(self) -> Any:
        return rig.store_of(self.made.storage_backend)

    def attach(self) -> None:
        rig.attach(self.made, self.chain.urls)

    def write(self, tokens: Sequence[int]) -> None:
        _, hashes = rig.hashed(tokens)
        written = rig.write(self.made, tokens, hashes, range(PAGES), {PAGES - 1: 2})
        assert written.completed_tokens == len(tokens)

    def arrived(self, tokens: Sequence[int] = TOKENS) -> int:
        """Pages that come back, all of them compared; a query may still name what was lost."""
        key, _ = rig.hashed(tokens)
        found = rig.query(self.made, key, rig.any_state())
        pages = found.storage_hit_count // rig.PAGE
        if not pages:
            return 0
        found.pool_transfers[0].host_indices = torch.tensor([7])
        rig.wipe(self.kv, *range(20, 20 + pages))
        rig.wipe(self.mamba, 7)
        arrived, hits = rig.fetch(self.made, found, range(20, 20 + pages))
        came = arrived // rig.PAGE
        assert [rig.page(self.kv, 20 + i) for i in range(came)] == self.expected[:came]
        assert not hits.get("mamba") or rig.page(self.mamba, 7) == self.state
        return came

    def fill(self) -> None:
        """Write until all is below, and restore it from there; at the end the disk is empty again."""
        self.attach()
        self.write(TOKENS)
        self.chain.until_below(self.store, PAGES + 1)
        self.restart()
        assert self.arrived() == PAGES
        self.restart()

    def restart(self) -> None:
        """Attach the chain anew, with an empty disk."""
        self.made.detach_storage_backend()
        self.chain.lose_disk()
        self.attach()

    def uses_the_disk(self, first: int) -> None:
        """Write other tokens and restore them, whatever is below."""
        others = range(first, first + len(TOKENS))
        self.write(others)
        assert self.arrived(others) == PAGES


def test_the_pool_serves_without_the_disk_and_a_lost_provider_is_a_miss(
    group: Any,
    tmp_path: Path,
    pool: Pool,  # noqa: F811
) -> None:
    chain = DiskOverPool(tmp_path / "ssd", pool)
    engine = Engine(chain, group)
    engine.fill()
    chain.lose_provider()
    engine.arrived()
    chain.lose_provider()
    assert engine.arrived() == 0
    # The master may still name what the providers had, so that a write of the same pages finds them stored.
    engine.uses_the_disk(1000)
    engine.made.detach_storage_backend()


def test_the_bucket_serves_without_the_disk_and_its_outage_is_a_miss(
    group: Any,
    tmp_path: Path,
    service: Proxy,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain = DiskOverBucket(tmp_path / "ssd", service, monkeypatch)
    engine = Engine(chain, group)
    engine.fill()
    chain.lose_service()
    assert engine.arrived() == 0
    engine.uses_the_disk(1000)
    chain.service_is_back()
    until(lambda: engine.arrived() == PAGES)
    chain.credentials("wrong")
    engine.restart()
    assert "finds the signature wrong" in chain.why(engine.store)
    assert engine.arrived() == 0
    engine.uses_the_disk(2000)
    chain.credentials()
    until(lambda: engine.arrived() == PAGES)
    engine.made.detach_storage_backend()
