"""LMDB's failures as the OSErrors that they stand for."""

from __future__ import annotations

import os
from contextlib import suppress
from errno import EDQUOT, EFBIG, EIO, ENOSPC
from typing import Any, Final

import lmdb

from tiercache.storage.env import Env, let_go

_FULL: Final = (ENOSPC, EDQUOT, EFBIG)
"""A disk, a quota or a limit of the process that gives no more room."""
_FULL_BYTES: Final = 64 << 10
"""With less than this left, a write that came out short is taken for a full disk."""
DAMAGE: Final = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError, lmdb.BadTxnError)
"""What LMDB raises where its pages contradict themselves, and in a transaction that met such a page before."""


class DamagedError(OSError):
    """LMDB, or what is in it, contradicts itself: the environment must not be trusted any more."""


def is_full(error: OSError) -> bool:
    """Had the disk, or what this user may have of it, no room left?"""
    return error.errno in _FULL


def os_error(error: lmdb.Error, env: Env, path: str) -> OSError:
    """What went wrong in the environment in `path`.

    On a full disk the last write comes out short, which LMDB reports as EIO: so the file system is asked.
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
    """Watches the length of an open environment's file: LMDB maps it, and reading a map behind the end of its file ends the process.

    What is cut between `check` and the end of the transaction is not seen.

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
        """Raise DamagedError where the file has lost what lies in it, and OSError where it cannot be asked."""
        size = self._env.fstat(self._fd).st_size
        if size < self._longest and size < (least := self._least(size)):
            # Another thread or process may have made it longer since it was asked.
            size = self._env.fstat(self._fd).st_size
            if size < least:
                raise DamagedError(EIO, f"{self._path} was cut to {size} bytes while it was open")
        if size > self._longest:
            self._longest = size

    def needed(self) -> int:
        """Bytes up to the end of the last page that the newest transaction knows, when the file was last found long enough to say."""
        self._learn(self._env.fstat(self._fd).st_size)
        return self._needed

    def _least(self, size: int) -> int:
        """Bytes that a file of this size must have. It never shrinks by itself, but may have been longer than what is needed."""
        self._learn(size)
        return min(self._longest, self._needed)

    def _learn(self, size: int) -> None:
        # The head pages, which say how long the file is, are mapped themselves.
        if size >= 2 * self._page_bytes:
            self._needed = (int(self._lmdb.info()["last_pgno"]) + 1) * self._page_bytes

    def same(self) -> bool:
        """Is the open file still the one with this name? Raises OSError where that cannot be found out."""
        named, held = self._env.lstat(self._path), self._env.fstat(self._fd)
        return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)

    def close(self) -> None:
        """Close the descriptor. Twice is harmless."""
        if self._fd >= 0:
            let_go(self._env, self._fd)
            self._fd = -1
