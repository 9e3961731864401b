"""A pool of Mooncake's that hosts share, below a disk of the engine's own."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.storage_backends.mooncake.rig import Pool, own_network, require
from tiercache.storage.base import StorageBackend, TierReport


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
        until(lambda: _below(store).objects >= objects)


def _below(store: StorageBackend) -> TierReport:
    return {tier.name: tier for tier in store.usage().tiers}["below"]


@pytest.fixture
def pool() -> Iterator[Pool]:
    """A master and two providers, in a network namespace that this thread is in, too."""
    require()
    with own_network(), Pool() as started:
        yield started


def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so; the longest wait is a guard, not a measure."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)
