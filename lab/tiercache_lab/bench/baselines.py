"""Baselines for a store: plain system calls that move the same bytes.

This module calls `os` directly, because a baseline must share no code with the stores.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, Self

from tiercache.core import BLOCK_ALIGN
from tiercache.errors import StorageError
from tiercache_lab.bench.timing import Crew

DIRECT_THREADS: Final = 8
"""Number of threads for direct requests, enough to keep a local disk busy. A single thread would leave the
disk idle between two requests."""
PIECE: Final = 1 << 20
"""Maximum size of a direct request in bytes. Even a batch of few large objects has enough pieces of this size
for all threads."""


class Piece(NamedTuple):
    """Part of a buffer, and its offset in bytes from the start of the batch."""

    view: memoryview
    offset: int


def pieces(views: Sequence[memoryview], max_bytes: int = 0) -> list[Piece]:
    """Cut the views of a batch into pieces of at most `max_bytes` bytes (0: one piece per view).

    In the batch the views follow each other without gaps.
    """
    found: list[Piece] = []
    offset = 0
    for view in views:
        step = max_bytes or view.nbytes
        found += [Piece(view[at : at + step], offset + at) for at in range(0, view.nbytes, step)]
        offset += view.nbytes
    return found


class RawFile:
    """Preallocated file that is read and written by plain system calls.

    If `direct` is set, reads and writes bypass the page cache (O_DIRECT).

    Thread safety: reads and writes of different places may run at once.
    """

    def __init__(self, path: Path, nbytes: int, *, direct: bool = False) -> None:
        self._fd = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0), 0o600
        )
        try:
            os.posix_fallocate(self._fd, 0, nbytes)
        except BaseException:  # whatever it is, the file does not stay open, and it is raised again
            os.close(self._fd)
            raise

    def write(self, batch: Sequence[Piece], base: int, crew: Crew) -> None:
        """Write a batch at offset `base`. Raises OSError if a write fails."""
        fd = self._fd

        def put(piece: Piece) -> None:
            if os.pwritev(fd, [piece.view], base + piece.offset) != piece.view.nbytes:
                raise StorageError("the disk accepted only a part of a raw write; is it full?")

        crew.each(put, batch)

    def read(self, batch: Sequence[Piece], base: int, crew: Crew) -> None:
        """Read a batch from offset `base`. Raises OSError if a read fails."""
        fd = self._fd

        def fill(piece: Piece) -> None:
            if os.preadv(fd, [piece.view], base + piece.offset) != piece.view.nbytes:
                raise StorageError("a raw read returned too few bytes; did another program change the file?")

        crew.each(fill, batch)

    def sync(self) -> None:
        """Wait until all written bytes are on the disk."""
        os.fdatasync(self._fd)

    def drop(self) -> None:
        """Write all bytes to the disk and drop them from the page cache."""
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)


def direct_possible(directory: Path) -> bool:
    """Try to write a file with O_DIRECT in a directory, and return whether that succeeds."""
    path = directory / "direct"
    try:
        with (
            mmap.mmap(-1, BLOCK_ALIGN) as page,
            memoryview(page) as view,
            RawFile(path, BLOCK_ALIGN, direct=True) as file,
        ):
            file.write([Piece(view, 0)], 0, Crew(1))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True
