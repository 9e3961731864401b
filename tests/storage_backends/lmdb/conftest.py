"""Stores of LMDB lie in memory here: no test of them reads what a disk has kept over a power cut."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

_MEMORY = Path("/dev/shm")
_NEEDED = 2 << 30
"""Bytes that must be free there, several times what the largest of these stores takes."""


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where a sync takes no time, or on the disk if there is no room."""
    if not _MEMORY.is_dir() or shutil.disk_usage(_MEMORY).free < _NEEDED:
        yield tmp_path
        return
    with TemporaryDirectory(prefix="tiercache-tests-", dir=_MEMORY) as directory:
        yield Path(directory)
