"""A disk above a pool of Mooncake's, below SGLang's controller.

Needs the environment of `make test-engines`, and root.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engines.below import (
    DiskOverPool,
    pool,  # noqa: F401
)
from tests.engines.sglang import rig
from tests.storage_backends.mooncake.rig import Pool


class Engine(rig.Engine):
    """SGLang's controller over a chain, whose disk can be lost."""

    def __init__(self, chain: DiskOverPool, group: Any) -> None:
        super().__init__(group)
        self.chain = chain

    def fill(self) -> None:
        """Write until all is below, and restore it from there; at the end the disk is empty again."""
        self.attach(self.chain.urls)
        assert self.write() == len(rig.TOKENS)
        self.chain.until_below(self.store, len(self.expected) + 1)
        self.restart()
        assert self.restored() == (6, 1)
        self.restart()

    def restart(self) -> None:
        """Attach the chain anew, with an empty disk."""
        self.detach()
        self.chain.lose_disk()
        self.attach(self.chain.urls)

    def uses_the_disk(self, first: int) -> None:
        """Write other tokens and restore them, whatever is below."""
        others = range(first, first + len(rig.TOKENS))
        assert self.write(others) == len(others)
        assert self.restored(others) == (6, 1)


def test_the_pool_serves_without_the_disk_and_a_lost_provider_is_a_miss(
    group: Any,
    tmp_path: Path,
    pool: Pool,  # noqa: F811
) -> None:
    chain = DiskOverPool(tmp_path / "ssd", pool)
    engine = Engine(chain, group)
    engine.fill()
    chain.lose_provider()
    engine.restored()
    chain.lose_provider()
    assert engine.restored() == (0, 0)
    # The master may still name what the providers had, so that a write of the same pages finds them stored.
    engine.uses_the_disk(1000)
    engine.detach()
