"""A `file` store for tests, and what its directory takes on the disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tiercache_backends.file import FileBackend
from tiercache_backends.file.catalog import Catalog

from tiercache.storage.env import Env

CAPACITY = 16 << 20


def opened(
    path: Path, capacity: int = CAPACITY, env: Env | None = None, durability: str = "process"
) -> FileBackend:
    return FileBackend(str(path), capacity, durability, env)


def catalog_of(store: FileBackend) -> Catalog:
    """The catalog of a store, as it is on the disk."""
    # private: records are read, and damaged, behind the store's calls
    return store._catalog


def child_of(path: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start `tests.storage.owner` on a store in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.storage.owner", str(path), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
