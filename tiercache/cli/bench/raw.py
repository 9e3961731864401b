"""The raw limits: the same bytes in the same buffers, moved by system calls alone.

This module calls `os` directly: a store is measured against it, so it must not share code with the store.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, Self

from tiercache.cli.bench.timing import Crew
from tiercache.core import BLOCK_ALIGN
from tiercache.errors import StorageError

DIRECT_THREADS: Final = 8
"""Threads of direct requests: enough for a local disk, which a single thread leaves idle between two requests."""
PIECE: Final = 1 << 20
"""Bytes of one direct request at most, so that even a batch of few large objects keeps all threads busy."""


class Piece(NamedTuple):
    """A part of a buffer, and its offset in the batch in bytes."""

    view: memoryview
    offset: int


def pieces(views: Sequence[memoryview], most: int = 0) -> list[Piece]:
    """Return the views of a batch, laid end to end, as pieces of at most `most` bytes (0: one piece per view)."""
    found: list[Piece] = []
    offset = 0
    for view in views:
        step = most or view.nbytes
        found += [Piece(view[at : at + step], offset + at) for at in range(0, view.nbytes, step)]
        offset += view.nbytes
    return found


class RawFile:
    """One preallocated file, opened for access through the page cache or, with `direct`, around it.

    Thread safety: reads and writes of different places may run at once.
    """

    def __init__(self, path: Path, nbytes: int, *, direct: bool = False) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0), 0o600)
        try:
            os.posix_fallocate(self._fd, 0, nbytes)
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, batch: Sequence[Piece], base: int, crew: Crew) -> None:
        """Write a batch at `base`; raises OSError."""
        fd = self._fd

        def put(piece: Piece) -> None:
            if os.pwritev(fd, [piece.view], base + piece.offset) != piece.view.nbytes:
                raise StorageError("the disk took only a part of a raw write; is it full?")

        crew.each(put, batch)

    def read(self, batch: Sequence[Piece], base: int, crew: Crew) -> None:
        """Read a batch from `base`; raises OSError."""
        fd = self._fd

        def fill(piece: Piece) -> None:
            if os.preadv(fd, [piece.view], base + piece.offset) != piece.view.nbytes:
                raise StorageError("a raw read came back short; did something else change the file?")

        crew.each(fill, batch)

    def sync(self) -> None:
        """Wait until everything written is on the medium."""
        os.fdatasync(self._fd)

    def drop(self) -> None:
        """Write everything to the medium and drop it from the page cache."""
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def cached(self) -> bool:
        """Return whether the first block of the file is in the page cache; True also if the system cannot tell."""
        with mmap.mmap(-1, BLOCK_ALIGN) as page, memoryview(page) as view:
            try:
                return os.preadv(self._fd, [view], 0, os.RWF_NOWAIT) > 0
            except BlockingIOError:
                return False
            except OSError:
                return True

    def map(self, nbytes: int) -> mmap.mmap:
        """Map the first `nbytes` of the file into memory, with all its pages present."""
        return mmap.mmap(self._fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)


class Copier:
    """Copies batches out of a mapped file: the limit of a store that hands out mapped bytes.

    Thread safety: copies to different places may run at once; ctypes releases the interpreter lock meanwhile.
    """

    def __init__(self, source: mmap.mmap) -> None:
        self._source = source
        self._anchor = ctypes.c_char.from_buffer(source)
        self._address = ctypes.addressof(self._anchor)

    def copy(self, batch: Sequence[Piece], crew: Crew) -> None:
        """Copy a batch from the start of the map into its buffers."""

        def fill(piece: Piece) -> None:
            target = ctypes.addressof(ctypes.c_char.from_buffer(piece.view))
            ctypes.memmove(target, self._address + piece.offset, piece.view.nbytes)

        crew.each(fill, batch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        del self._anchor
        self._source.close()


def direct_possible(directory: Path) -> bool:
    """Return whether files in a directory can be written around the page cache, by writing one."""
    path = directory / "direct"
    try:
        with mmap.mmap(-1, BLOCK_ALIGN) as page, memoryview(page) as view, Crew(1) as crew, RawFile(path, BLOCK_ALIGN, direct=True) as file:
            file.write([Piece(view, 0)], 0, crew)
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True
