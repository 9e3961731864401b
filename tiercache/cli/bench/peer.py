"""The layout that a store is compared with: one file per page, written under a temporary name and renamed.

It keeps no checksums, so that its reads are not verified, and its size is not limited.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tiercache.cli.bench.timing import Crew
from tiercache.errors import StorageError

PEER: Final = "file per page"
"""Name of the side that uses this layout."""


class Page(NamedTuple):
    """A file name and the buffer that is written to the file or filled from it."""

    name: str
    view: memoryview


class PageFiles:
    """Pages as files of one directory. `durable`: each file is synced before its rename, and the directory after all of them.

    Thread safety: pages of different names may be written and read at once.
    """

    def __init__(self, directory: Path, *, durable: bool) -> None:
        directory.mkdir()
        self.directory: Final = directory
        self._prefix = f"{directory}/"
        self._durable = durable

    def put(self, pages: Sequence[Page], crew: Crew) -> None:
        """Write every page; raises OSError."""
        crew.each(self._put, pages)
        if self._durable:
            self._sync_directory()

    def get(self, pages: Sequence[Page], crew: Crew) -> None:
        """Read every page; raises OSError."""
        crew.each(self._get, pages)

    def remove(self, names: Sequence[str]) -> None:
        """Delete the files of pages; raises OSError."""
        for name in names:
            os.unlink(self._prefix + name)

    def _put(self, page: Page) -> None:
        path = self._prefix + page.name
        fd = os.open(f"{path}.tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if os.writev(fd, [page.view]) != page.view.nbytes:
                raise StorageError("the disk took only a part of a page's file; is it full?")
            if self._durable:
                os.fdatasync(fd)
        finally:
            os.close(fd)
        os.rename(f"{path}.tmp", path)

    def _get(self, page: Page) -> None:
        fd = os.open(self._prefix + page.name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.readv(fd, [page.view]) != page.view.nbytes:
                raise StorageError("a page's file came back short; did something else change it?")
        finally:
            os.close(fd)

    def _sync_directory(self) -> None:
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
