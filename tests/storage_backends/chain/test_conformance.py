"""The contract of a store, over chains of one to three tiers of mixed kinds, each of which may be sick."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage.backends import FileHooks, MemoryHooks
from tests.storage_backends.chain.hooks import ChainHooks
from tests.storage_backends.lmdb.hooks import LmdbHooks
from tiercache.storage.base import StorageBackend


class TestTwo(ChainHooks):
    parts = (MemoryHooks, MemoryHooks)
    small = 8 << 20


@pytest.mark.slow
class TestMemoryAboveFile(ChainHooks):
    parts = (MemoryHooks, FileHooks)
    small = 16 << 20


# The rest repeats the proof with other stores: `python -m pytest -m stress tests/storage_backends/chain`.


@pytest.mark.stress
class TestSickBetween(ChainHooks):
    parts = (MemoryHooks, LmdbHooks, FileHooks)
    sick = (1,)
    small = 16 << 20


@pytest.mark.stress
class TestThree(ChainHooks):
    parts = (MemoryHooks, LmdbHooks, FileHooks)
    small = 24 << 20


@pytest.mark.stress
class TestOnlyOneIsWell(ChainHooks):
    parts = (LmdbHooks, MemoryHooks, FileHooks)
    sick = (0, 2)


@pytest.mark.stress
class TestShared(ChainHooks):
    """Tests of two processes that open one chain need to find their hooks in one class."""

    parts = (LmdbHooks, LmdbHooks)
    small = 16 << 20

    def open_store(self, path: Path, capacity: int | None = None) -> StorageBackend:
        return super().open_store(path, capacity)
