"""Size of the part of a file that is in the page cache, found out without reading anything into it.

`preadv2` with RWF_NOWAIT does not serve: where a page is missing the kernel starts to read it, and pages that were never written become
present. So this uses `cachestat` (Linux 6.5), and on older kernels, or where a sandbox forbids it, `mincore` on a mapping that is never
touched.
"""

from __future__ import annotations

import ctypes
import errno
import os
from mmap import MAP_SHARED, PAGESIZE, PROT_READ, PROT_WRITE, mmap
from typing import Final

_CACHESTAT: Final = 451
"""Number of the system call, the same on x86-64 and on arm64."""
_Range: Final = ctypes.c_uint64 * 2
_Statistics: Final = ctypes.c_uint64 * 5
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def cached_bytes(fd: int, offset: int, length: int) -> int:
    """Return the bytes of a range of whole pages that are in the page cache; raise OSError if the system calls fail."""
    found = _Statistics()
    failed = _libc.syscall(ctypes.c_long(_CACHESTAT), ctypes.c_uint(fd), ctypes.byref(_Range(offset, length)), ctypes.byref(found), 0)
    if not failed:
        return int(found[0]) * PAGESIZE
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP):
        return _resident(fd, offset, length)
    raise OSError(number, os.strerror(number))


def _resident(fd: int, offset: int, length: int) -> int:
    pages = (ctypes.c_ubyte * (length // PAGESIZE))()
    with mmap(fd, length, MAP_SHARED, PROT_READ | PROT_WRITE, offset=offset) as mapping:
        start = ctypes.c_char.from_buffer(mapping)
        try:
            if _libc.mincore(ctypes.byref(start), ctypes.c_size_t(length), pages):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        finally:
            del start  # a mapping cannot be closed while an object is exported from its buffer
    return sum(page & 1 for page in pages) * PAGESIZE
