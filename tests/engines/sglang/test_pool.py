"""SGLang's controller over a disk and a pool of Mooncake's that hosts share below it. This needs root."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.sglang import rig
from tests.storage_backends.mooncake.rig import Pool, own_network, require
from tests.waiting import until
from tiercache.storage.base import StorageBackend


class DiskOverPool:
    """Chain of a disk and a pool below it, and the loss of the disk and of providers."""

    def __init__(self, directory: Path, pool: Pool) -> None:
        self.directory, self._pool = directory, pool
        below = pool.url("engine", deadline="1s")
        self.urls = [f"file://{directory}?capacity=64MiB&tier_name=ssd", f"{below}&tier_name=below"]

    def lose_disk(self) -> None:
        shutil.rmtree(self.directory)

    def lose_provider(self) -> None:
        self._pool.providers.pop().kill()

    @staticmethod
    def until_below(store: StorageBackend, objects: int) -> None:
        """Wait until so many objects are below."""
        until(lambda: next(t for t in store.usage().tiers if t.name == "below").objects >= objects)


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[DiskOverPool]:
    """The chain over a master and two providers, in a network namespace that this thread is in, too."""
    require()
    with own_network(), Pool() as pool:
        yield DiskOverPool(tmp_path / "ssd", pool)


def test_a_pool_serves_without_the_disk_above_it_and_a_lost_provider_is_a_miss(
    engine: rig.Engine, chain: DiskOverPool
) -> None:
    def restart() -> None:
        engine.detach()
        chain.lose_disk()
        engine.attach(chain.urls)

    engine.attach(chain.urls)
    assert engine.write() == len(rig.TOKENS)
    chain.until_below(engine.store, len(engine.expected) + 1)
    restart()
    assert engine.restored() == (6, 1)
    restart()
    chain.lose_provider()
    engine.restored()
    chain.lose_provider()
    assert engine.restored() == (0, 0)
    # The master may still name what the providers had, so that a write of the same pages finds them stored.
    others = range(1000, 1000 + len(rig.TOKENS))
    assert engine.write(others) == len(others)
    assert engine.restored(others) == (6, 1)
    engine.detach()
