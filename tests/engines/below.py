"""Stores that hosts share, below a disk of the engine's own: a pool of Mooncake's, and a bucket."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.storage_backends.mooncake.rig import Pool, own_network, require
from tests.storage_backends.s3 import server
from tests.storage_backends.s3.hooks import prefix_of
from tests.storage_backends.s3.proxy import Proxy
from tiercache.config.urls import storage_url
from tiercache.storage.base import StorageBackend, TierReport


class DiskOver:
    """Chain of a disk and a store below it, and the loss of the disk."""

    def __init__(self, directory: Path, below: str) -> None:
        self.directory = directory
        self.urls = [f"file://{directory}?capacity=64MiB&tier_name=ssd", f"{below}&tier_name=below"]

    def lose_disk(self) -> None:
        shutil.rmtree(self.directory)

    @staticmethod
    def until_below(store: StorageBackend, objects: int) -> None:
        """Wait until so many objects are below."""

        until(lambda: _below(store).objects >= objects)

    @staticmethod
    def why(store: StorageBackend) -> str:
        """The reason why what is below does not serve."""
        return _below(store).why


class DiskOverPool(DiskOver):
    """A disk above a pool whose providers are lost."""

    def __init__(self, directory: Path, pool: Pool) -> None:
        super().__init__(directory, pool.url("engine", deadline="1s"))
        self._pool = pool

    def lose_provider(self) -> None:
        self._pool.providers.pop().kill()


class DiskOverBucket(DiskOver):
    """A disk above a bucket whose service fails, or refuses the credentials."""

    def __init__(self, directory: Path, service: Proxy, environment: pytest.MonkeyPatch) -> None:
        below = storage_url(
            "s3", f"/{prefix_of(directory)}", address=server.BUCKET, endpoint=service.url, deadline="1s"
        )
        super().__init__(directory, below)
        self._service, self._environment = service, environment

    def lose_service(self) -> None:
        self._service.before = lambda _: False

    def service_is_back(self) -> None:
        self._service.well()

    def credentials(self, secret: str = server.SECRET) -> None:
        """Give this process other credentials."""
        self._environment.setenv("AWS_SECRET_ACCESS_KEY", secret)


def _below(store: StorageBackend) -> TierReport:
    return {tier.name: tier for tier in store.usage().tiers}["below"]


@pytest.fixture
def pool() -> Iterator[Pool]:
    """A master and two providers, in a network namespace that this thread is in, too."""
    require()
    with own_network(), Pool() as started:
        yield started


@pytest.fixture
def service() -> Iterator[Proxy]:
    """A proxy before an S3 service."""
    if reason := server.why_not():
        pytest.skip(reason)
    with Proxy() as started:
        yield started


def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so; the longest wait is a guard, not a measure."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)
