"""A pool of Mooncake's for the tests of an engine, below a disk."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage_backends.mooncake.rig import Pool, own_network, require
from tiercache.storage.base import StorageBackend


@pytest.fixture
def pool() -> Iterator[Pool]:
    """A master and two providers, in a network namespace that this thread is in, too."""
    require()
    with own_network(), Pool() as started:
        yield started


class DiskOverPool:
    """Chain of a disk and a pool, and the loss of either."""

    def __init__(self, directory: Path, pool: Pool) -> None:
        self.directory = directory
        self.pool = pool
        self.urls = [
            f"file://{directory}?capacity=64MiB&tier_name=ssd",
            f"{pool.url('engine', deadline='1s')}&tier_name=pool",
        ]

    def lose_disk(self) -> None:
        shutil.rmtree(self.directory)

    def lose_provider(self) -> None:
        self.pool.providers.pop().kill()

    @staticmethod
    def until_in_pool(store: StorageBackend, objects: int) -> None:
        deadline = time.monotonic() + 60
        while (found := {tier.name: tier for tier in store.usage().tiers}["pool"].objects) < objects:
            assert time.monotonic() < deadline, f"the pool has {found} objects"
            time.sleep(0.02)
