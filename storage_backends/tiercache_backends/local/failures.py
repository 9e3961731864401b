"""Conversion of LMDB's failures to OSErrors, and a check of the length of LMDB's file."""

from __future__ import annotations

import os
from contextlib import suppress
from errno import EDQUOT, EFBIG, EIO, ENOSPC, ESTALE
from stat import S_IWUSR
from typing import Any, Final

import lmdb

from tiercache.storage.env import Env, close_quietly

_FULL: Final = (ENOSPC, EDQUOT, EFBIG)
"""Error numbers of a full disk, an exhausted quota, or the process's limit on the size of a file."""
_FULL_BYTES: Final = 64 << 10
"""Number of free bytes of a file system below which a short write is attributed to a full disk."""
DAMAGE: Final = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.InvalidError,
    lmdb.BadTxnError,
    lmdb.BadDbiError,
    lmdb.BadValsizeError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.PageFullError,
    lmdb.ProblemError,
    SystemError,
)
"""Exceptions of LMDB and its binding for a damaged page, and for later calls in the same transaction."""


class DamagedError(OSError):
    """The LMDB environment or its content is damaged and must not be trusted any more."""


class PutAsideError(OSError):
    """Another process put the LMDB environment aside, and another one may be in its place."""


def is_full(error: OSError) -> bool:
    """Return whether an error says that a disk, a quota or the maximum size of a file is used up."""
    return error.errno in _FULL


def os_error(error: lmdb.Error | SystemError, env: Env, path: str) -> OSError:
    """Return the OSError for a failure of LMDB in `path`.

    Damage gives a DamagedError. A full disk or map gives the errno ENOSPC, and anything else EIO.

    On a full disk the last write is short, and LMDB reports a short write as EIO. So for EIO this function
    looks up the free space of the file system.
    """
    text = str(error)
    if isinstance(error, DAMAGE):
        return DamagedError(EIO, text)
    full = isinstance(error, lmdb.MapFullError | lmdb.DiskError) or any(
        os.strerror(number) in text for number in _FULL
    )
    if not full and os.strerror(EIO) in text:
        with suppress(OSError):
            found = env.statvfs(path)
            full = found.f_bavail * found.f_frsize < _FULL_BYTES
    return OSError(ENOSPC if full else EIO, text)


class FileLength:
    """Check that the file of an open environment was neither truncated nor put aside.

    A file that is put aside loses the right of its owner to write (`lmdb/opening.py`).

    LMDB maps the file, and a read of the map behind the end of the file kills the process. A truncation
    between `check` and the end of the transaction is not detected.

    Thread safety: any thread may call `check`.
    """

    def __init__(self, env: Env, path: str, environment: Any) -> None:
        self._env = env
        self._path = path
        self._lmdb = environment
        self._page_bytes = int(environment.stat()["psize"])
        self._longest = self._needed = 2 * self._page_bytes
        """Greatest length seen, and end of the last page in the newest transaction, in bytes."""
        self._fd = env.open(path, os.O_RDONLY)
        try:
            self._writable = env.fstat(self._fd).st_mode & S_IWUSR
        except BaseException:  # whatever it is, nothing stays open, and it is raised again
            self.close()
            raise

    def check(self) -> None:
        """Raise DamagedError if the file was truncated so far that pages of its content are missing.

        Raises PutAsideError, and OSError if the length cannot be read.
        """
        found = self._env.fstat(self._fd)
        if found.st_mode & S_IWUSR != self._writable:
            raise PutAsideError(ESTALE, f"{self._path} was put aside while it was open")
        size = found.st_size
        if size < self._longest and size < (needed := self._min_length(size)):
            # Another thread or process may have extended the file since its length was read.
            size = self._env.fstat(self._fd).st_size
            if size < needed:
                raise DamagedError(EIO, f"{self._path} was cut to {size} bytes while it was open")
        if size > self._longest:
            self._longest = size

    def needed(self) -> int:
        """Return the bytes up to the end of the newest transaction's last page.

        If the file is too short for both head pages now, the result is from an earlier call.
        """
        self._learn(self._env.fstat(self._fd).st_size)
        return self._needed

    def _min_length(self, size: int) -> int:
        """Return the minimum length of the file, which now has `size` bytes.

        This is the end of the last page. But if the last pages are free, LMDB may never have written them.
        Then the minimum is the greatest length seen, because LMDB never shrinks its file.
        """
        self._learn(size)
        return min(self._longest, self._needed)

    def _learn(self, size: int) -> None:
        # LMDB reads the needed length from the mapped head pages. If the file is too short for these pages,
        # the read would kill the process.
        if size >= 2 * self._page_bytes:
            self._needed = (int(self._lmdb.info()["last_pgno"]) + 1) * self._page_bytes

    def same(self) -> bool:
        """Return whether the path still names the open file.

        Raises OSError if the path cannot be looked up.
        """
        named, held = self._env.lstat(self._path), self._env.fstat(self._fd)
        return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)

    def close(self) -> None:
        """Close the descriptor. A second call does nothing."""
        if self._fd >= 0:
            close_quietly(self._env, self._fd)
            self._fd = -1
