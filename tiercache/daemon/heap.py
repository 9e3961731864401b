"""Gives memory back that the C library keeps for later: what clients made the daemon hold for a moment is not held for ever."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_LARGE_BYTES: Final = 16 << 20
"""Blocks from here on are mappings of their own. Messages must not be: to fault their pages in anew costs as much as to copy them."""
_KEPT_BYTES: Final = 8 << 20
"""At the end of a heap, until the next trim."""
_ARENAS: Final = 1
"""Of others than the first, glibc trims what is free in between and never the end: megabytes of each, for good."""
_SECONDS: Final = 2.0
_libc = ctypes.CDLL(None)


def keep_little() -> None:
    """Of the whole process: messages reuse the memory of those before them, in one heap that can be trimmed. Only with glibc.

    To be called before there are threads: one that runs already may have a heap of its own, which later ones then share.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        _libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        _libc.mallopt(_M_ARENA_MAX, _ARENAS)


async def trim_now_and_then() -> None:
    """Give back what is free, until cancelled; a few milliseconds in a thread. To be called when the start is over."""
    gc.collect()
    gc.freeze()  # what the start made stays, and need not be looked at again
    while True:
        await asyncio.sleep(_SECONDS)
        await asyncio.to_thread(_tidy)


def _tidy() -> None:
    # gRPC leaves a circle of every call, with its metadata. Only among what is new: to look through a large store's objects takes long.
    gc.collect(1)
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
