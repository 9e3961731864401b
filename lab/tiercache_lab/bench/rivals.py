"""Other stores, which move the same batches through the same buffers as the store that is measured.

    files        one file per page, written under a temporary name and renamed
    lmcache      the native file system connector of LMCache (`fs_native`)

A rival is called as its own project calls it, from one thread, except `files`, which has no threads of its
own and uses those of the benchmark. `about` says what a rival verifies and syncs, because that is part of
what its figures mean.
"""

from __future__ import annotations

import os
import select
from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import sha256
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from tiercache.errors import ConfigError, StorageError
from tiercache_lab.bench.timing import Crew

_LMCACHE_THREADS: Final = 4
"""Number of threads of LMCache's connector; its own default."""


class Page(NamedTuple):
    """Name of a page, and the buffer that is stored under the name or filled from it."""

    name: str
    view: memoryview


class Rival(ABC):
    """Store of pages in a directory of its own. Each method raises OSError or StorageError if it fails.

    Thread safety: one thread.
    """

    title: str
    """Name and version."""
    about: str
    """Half sentence that says what a set syncs, what a get verifies, and what bounds the disk space."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory: Final = directory

    @abstractmethod
    def put(self, batch: Sequence[Page]) -> None:
        """Store the pages of a batch, which follow each other in one sequence."""

    @abstractmethod
    def get(self, batch: Sequence[Page]) -> None:
        """Fill the buffers of a batch that was stored as a whole."""

    @abstractmethod
    def count(self, batch: Sequence[Page]) -> int:
        """Return how many pages of a batch are stored."""

    @abstractmethod
    def remove(self, batch: Sequence[Page]) -> None:
        """Remove the pages of a batch."""

    @abstractmethod
    def close(self) -> None:
        """End the rival's threads and close its files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class PageFiles(Rival):
    """Directory with one file for each page.

    If `durable` is set, each file is synced before its rename, and the directory after all renames.
    """

    title = "file per page"

    def __init__(self, directory: Path, crew: Crew, *, durable: bool) -> None:
        super().__init__(directory)
        self.about = (
            f"one file per page; a set syncs {'every file' if durable else 'nothing'}, a get verifies"
            " nothing, and nothing bounds the space"
        )
        self._crew = crew
        self._durable = durable

    def put(self, batch: Sequence[Page]) -> None:
        """Write all pages, each to a file of its own."""
        self._crew.each(self._put, batch)
        if self._durable:
            fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def get(self, batch: Sequence[Page]) -> None:
        """Read all pages."""
        self._crew.each(self._get, batch)

    def count(self, batch: Sequence[Page]) -> int:
        """Return how many pages have a file."""
        return sum(os.path.exists(self._path(page)) for page in batch)

    def remove(self, batch: Sequence[Page]) -> None:
        """Delete the files of all pages."""
        for page in batch:
            os.unlink(self._path(page))

    def close(self) -> None:
        """Do nothing, because no file stays open."""

    def _path(self, page: Page) -> str:
        return f"{self.directory}/{page.name}"

    def _put(self, page: Page) -> None:
        path = self._path(page)
        fd = os.open(f"{path}.tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if os.writev(fd, [page.view]) != page.view.nbytes:
                raise StorageError("the disk accepted only a part of a page's file; is it full?")
            if self._durable:
                os.fdatasync(fd)
        finally:
            os.close(fd)
        os.rename(f"{path}.tmp", path)

    def _get(self, page: Page) -> None:
        fd = os.open(self._path(page), os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.readv(fd, [page.view]) != page.view.nbytes:
                raise StorageError("a page's file is too short; did another program change it?")
        finally:
            os.close(fd)


class LmCache(Rival):
    """LMCache's connector `fs_native`: C++ threads that write and read one file per page."""

    about = (
        f"fs_native, one file per page, {_LMCACHE_THREADS} C++ threads; a set syncs nothing, a get verifies"
        " nothing, and nothing bounds the space"
    )

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.title = f"LMCache {version('lmcache')}"
        self._client: Any = _lmcache().LMCacheFSClient(str(directory), _LMCACHE_THREADS)

    def put(self, batch: Sequence[Page]) -> None:
        """Store all pages by one call."""
        self._wait(self._client.submit_batch_set(self._keys(batch), [page.view for page in batch]))

    def get(self, batch: Sequence[Page]) -> None:
        """Read all pages by one call."""
        found = self._wait(self._client.submit_batch_get(self._keys(batch), [page.view for page in batch]))
        if not all(found):
            raise StorageError(
                "LMCache does not have pages that it has stored, so its speed was not measured"
            )

    def count(self, batch: Sequence[Page]) -> int:
        """Return how many pages exist, by one call."""
        return sum(self._wait(self._client.submit_batch_exists(self._keys(batch))))

    def remove(self, batch: Sequence[Page]) -> None:
        """Delete all pages by one call."""
        self._wait(self._client.submit_batch_delete(self._keys(batch)))

    def close(self) -> None:
        """End the connector's threads."""
        self._client.close()

    @staticmethod
    def _keys(batch: Sequence[Page]) -> list[str]:
        # The connector accepts keys of the form model@rank@group@hash only.
        return [f"bench@00000000@0@{_digest(page)}" for page in batch]

    def _wait(self, number: int) -> list[bool]:
        """Return the outcomes of call `number`, the only one in progress."""
        while True:
            select.select([self._client.event_fd()], [], [])
            os.eventfd_read(self._client.event_fd())
            for done, is_well, error, outcomes in self._client.drain_completions():
                if not is_well:
                    raise StorageError(f"LMCache failed: {error}")
                if done == number:
                    return outcomes or []


RIVALS: Final = ("files", "lmcache")
"""Values of --beside."""


def check_rival(name: str) -> None:
    """Raise ConfigError unless the package of a rival is installed and can be loaded."""
    if name == "lmcache":
        _lmcache()


def open_rival(name: str, directory: Path, crew: Crew, *, durable: bool) -> Rival:
    """Open a new store of a rival in a new directory."""
    if name == "lmcache":
        return LmCache(directory)
    return PageFiles(directory, crew, durable=durable)


def _lmcache() -> Any:
    try:
        return import_module("lmcache.lmcache_fs")
    except ImportError as error:
        raise ConfigError(
            f"--beside lmcache cannot load the package lmcache ({error}); install it with pip install"
            " lmcache, or leave it out of --beside"
        ) from error


def _digest(page: Page) -> str:
    return sha256(page.name.encode()).hexdigest()
