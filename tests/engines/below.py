"""A pool of Mooncake's that hosts share, below a disk of the engine's own. This needs root."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

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
