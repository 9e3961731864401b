"""LMDB's failures as the OSErrors that they stand for."""

from __future__ import annotations

import os
from contextlib import suppress
from errno import EDQUOT, EIO, ENOSPC
from typing import Final

import lmdb

from tiercache.storage.env import Env

_FULL_BYTES: Final = 64 << 10
"""With less than this left, a write that came out short is taken for a full disk."""


_DAMAGE: Final = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError)


class DamagedError(OSError):
    """LMDB, or what is in it, contradicts itself: the environment must not be trusted any more."""


def os_error(error: lmdb.Error, env: Env, path: str) -> OSError:
    """What went wrong in the environment in `path`.

    On a full disk the last write comes out short, which LMDB reports as EIO: so the file system is asked.
    """
    text = str(error)
    if isinstance(error, _DAMAGE):
        return DamagedError(EIO, text)
    full = isinstance(error, lmdb.MapFullError | lmdb.DiskError) or any(os.strerror(number) in text for number in (ENOSPC, EDQUOT))
    if not full and os.strerror(EIO) in text:
        with suppress(OSError):
            found = env.statvfs(path)
            full = found.f_bavail * found.f_frsize < _FULL_BYTES
    return OSError(ENOSPC if full else EIO, text)
