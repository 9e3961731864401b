"""Checks whether LMDB can open an environment without a crash of the process.

LMDB maps its file, so a read of a damaged file may kill the process by a signal.
"""

from __future__ import annotations

import logging
import os
import struct
import sys
from contextlib import closing
from typing import Final

from tiercache.storage.env import Env, close_quietly
from tiercache.storage.vectors import read_all
from tiercache_backends.local import check
from tiercache_backends.local.lmdb_file import LmdbFile, UnsoundError

_log = logging.getLogger(__name__)

CHECK_SECONDS: Final = 120.0
"""Seconds that the check of a small environment in a child process may take before it counts as damaged."""
_CHECKED_PER_SECOND: Final = 64 << 20
"""Bytes of an environment for which the check gets one more second."""
_LMDB_MAGIC: Final = 0xBEEFC0DE
_LMDB_META: Final = struct.Struct("<16xIIQQI92xQQ")
"""Head page of LMDB: magic, version, address, map size, page size, last page, transaction.

The page header (16 bytes) is skipped. The roots of two trees are skipped too: 92 bytes after the page size,
which LMDB stores in a field of the first root.
"""


def is_whole(env: Env, database: str) -> bool:
    """Return whether head pages, free list and all pages in use have the form that LMDB gives them."""
    try:
        with closing(LmdbFile(env, os.path.join(database, "data.mdb"))) as file:
            file.check()
    except UnsoundError as error:
        _log.error("the database in %s is damaged: %s", database, error)
        return False
    return True


def is_plausible(env: Env, database: str, size: int) -> bool:
    """Return whether LMDB's two head pages look right and the file is as long as the newer head page says.

    A result of False is no proof of damage, because an intact file may be shorter if its last pages are free.
    It means that a closer check is needed.
    """
    fd = env.open(os.path.join(database, "data.mdb"), os.O_RDONLY)
    try:
        heads = []
        page = 0
        # Page 0 tells the page size, which is the byte offset of page 1.
        for _ in range(2):
            raw = bytearray(_LMDB_META.size)
            read_all(env, fd, [memoryview(raw)], page)
            magic, _, _, _, page, last, txn = _LMDB_META.unpack(raw)
            heads.append((magic == _LMDB_MAGIC, txn, (last + 1) * page))
        return all(right for right, _, _ in heads) and size >= max(heads, key=lambda h: h[1])[2]
    finally:
        close_quietly(env, fd)


def is_damaged(env: Env, database: str, size: int) -> bool:
    """Let a child process read an environment of `size` bytes; return whether it finds damage or dies."""
    seconds = CHECK_SECONDS + size / _CHECKED_PER_SECOND
    status = env.run([sys.executable, "-P", check.__file__, database], seconds)
    if status:
        _log.error("the database in %s is damaged (its check ended with status %d)", database, status)
    return status != 0
