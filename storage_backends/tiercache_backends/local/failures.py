"""Conversion of LMDB's failures to OSErrors, and the watch on the length of LMDB's file."""

from __future__ import annotations

import os
from contextlib import suppress
from errno import EDQUOT, EFBIG, EIO, ENOSPC
from typing import Any, Final

import lmdb

from tiercache.storage.env import Env, let_go

_FULL: Final = (ENOSPC, EDQUOT, EFBIG)
"""Error numbers of a full disk, an exhausted quota, or the process's limit on the size of a file."""
_FULL_BYTES: Final = 64 << 10
"""Free bytes of the file system below which a short write is attributed to a full disk."""
DAMAGE: Final = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError, lmdb.BadTxnError)
"""Exceptions that LMDB raises where its pages contradict themselves, and later in a transaction that met such a page."""


class DamagedError(OSError):
    """The LMDB environment, or its content, contradicts itself: it must not be trusted any more."""


def is_full(error: OSError) -> bool:
    """Return whether an error says that the disk, the quota or the process's limit leaves no room."""
    return error.errno in _FULL


def os_error(error: lmdb.Error, env: Env, path: str) -> OSError:
    """Return the OSError for a failure in the environment in `path`: DamagedError, ENOSPC for a full disk or map, else EIO.

    On a full disk the last write is short, which LMDB reports as EIO, so for EIO the free space of the file system is looked up.
    """
    text = str(error)
    if isinstance(error, DAMAGE):
        return DamagedError(EIO, text)
    full = isinstance(error, lmdb.MapFullError | lmdb.DiskError) or any(os.strerror(number) in text for number in _FULL)
    if not full and os.strerror(EIO) in text:
        with suppress(OSError):
            found = env.statvfs(path)
            full = found.f_bavail * found.f_frsize < _FULL_BYTES
    return OSError(ENOSPC if full else EIO, text)


class FileLength:
    """Watch on the length of an open environment's file: LMDB maps it, and reading the map behind the end of the file ends the process.

    A truncation between `check` and the end of the transaction is not seen.

    Thread safety: any thread may call `check`.
    """

    def __init__(self, env: Env, path: str, environment: Any) -> None:
        self._env = env
        self._path = path
        self._lmdb = environment
        self._page_bytes = int(environment.stat()["psize"])
        self._longest = self._needed = 2 * self._page_bytes
        self._fd = env.open(path, os.O_RDONLY)

    def check(self) -> None:
        """Raise DamagedError if the file was truncated below what is needed; raises OSError if its length cannot be read."""
        size = self._env.fstat(self._fd).st_size
        if size < self._longest and size < (least := self._least(size)):
            # Another thread or process may have extended the file since its length was read.
            size = self._env.fstat(self._fd).st_size
            if size < least:
                raise DamagedError(EIO, f"{self._path} was cut to {size} bytes while it was open")
        if size > self._longest:
            self._longest = size

    def needed(self) -> int:
        """Return the bytes up to the end of the newest transaction's last page, as of the last time the file held both head pages."""
        self._learn(self._env.fstat(self._fd).st_size)
        return self._needed

    def _least(self, size: int) -> int:
        """Return the bytes that the file, now of `size` bytes, must have. LMDB never shrinks it, but it may have been longer than that."""
        self._learn(size)
        return min(self._longest, self._needed)

    def _learn(self, size: int) -> None:
        # The head pages, which tell the length that is needed, are mapped too: reading them from a shorter file would end the process.
        if size >= 2 * self._page_bytes:
            self._needed = (int(self._lmdb.info()["last_pgno"]) + 1) * self._page_bytes

    def same(self) -> bool:
        """Return whether the open file is still the one with this name. Raises OSError if that cannot be found out."""
        named, held = self._env.lstat(self._path), self._env.fstat(self._fd)
        return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)

    def close(self) -> None:
        """Close the descriptor. A second call does nothing."""
        if self._fd >= 0:
            let_go(self._env, self._fd)
            self._fd = -1
