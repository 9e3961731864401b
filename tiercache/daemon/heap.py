"""Return of free memory from the C library to the system, so that the daemon does not keep for ever what it held for a moment."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_LARGE_BYTES: Final = 16 << 20
"""Size in bytes from which glibc gives an allocation a mapping of its own.

Messages must stay below it: to fault their pages in anew costs as much as to copy them."""
_KEPT_BYTES: Final = 8 << 20
"""Free bytes that may stay at the end of the heap until the next trim."""
_ARENAS: Final = 1
"""Number of glibc's arenas: of any but the first, glibc trims free pages in between and never the end, and keeps megabytes of each."""
_SECONDS: Final = 2.0
"""Seconds between two trims."""
_libc = ctypes.CDLL(None)


def keep_little() -> None:
    """Make the whole process allocate from one heap that can be trimmed, where messages reuse the memory of earlier ones; glibc only.

    To be called before threads are started: a thread that runs already may have a heap of its own, which later threads would share.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        _libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        _libc.mallopt(_M_ARENA_MAX, _ARENAS)


async def trim_now_and_then() -> None:
    """Give free memory back every _SECONDS until cancelled, in a thread, for a few milliseconds; to be called when the start is over."""
    gc.collect()
    gc.freeze()  # the objects of the start stay, and need not be examined again
    while True:
        await asyncio.sleep(_SECONDS)
        await asyncio.to_thread(_tidy)


def _tidy() -> None:
    # gRPC leaves a reference cycle of every call, with its metadata. Only the young generations: a full collection examines all objects of
    # a large store, which takes long.
    gc.collect(1)
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
