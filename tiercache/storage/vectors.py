"""Byte arithmetic over lists of buffers: an object is scattered over host blocks and over extents of a file, and never copied between.

Buffers are C-contiguous memoryviews of format "B".
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from tiercache.storage.env import Env

IOV_MAX: Final = os.sysconf("SC_IOV_MAX")
"""Largest number of buffers that one vectored call takes (Linux: 1024)."""


def total(buffers: Sequence[memoryview]) -> int:
    """Return the bytes of all buffers together."""
    return sum(b.nbytes for b in buffers)


def usable(buffers: Sequence[memoryview], length: int, *, writable: bool) -> bool:
    """Return whether a store can move `length` bytes, at least 1, through these buffers."""
    there = 0
    for buffer in buffers:
        if not (buffer.c_contiguous and buffer.ndim == 1 and buffer.format == "B") or (writable and buffer.readonly):
            return False
        there += buffer.nbytes
    return there >= length > 0


def take(buffers: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """Return the views of bytes [start, stop) of all buffers laid end to end."""
    if not start and len(buffers) == 1 and stop == buffers[0].nbytes:
        return [buffers[0]] if stop else []
    views: list[memoryview] = []
    for buffer in buffers:
        size = buffer.nbytes
        if stop <= 0:
            break
        if start < size:
            low, high = max(start, 0), min(stop, size)
            views.append(buffer if high - low == size else buffer[low:high])
        start -= size
        stop -= size
    return views


def zero_tail(buffers: Sequence[memoryview], length: int) -> None:
    """Overwrite with zeros all bytes behind the first `length`."""
    for view in take(buffers, length, total(buffers)):
        view[:] = bytes(view.nbytes)


def write_all(env: Env, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Write every byte of `buffers` at `offset`; return how many those were. Raises OSError."""
    left = list(buffers)
    start = offset
    while left:
        done = env.pwritev(fd, left[:IOV_MAX], offset)
        if done <= 0:
            raise OSError(5, "the disk took no bytes")
        offset += done
        left = _after(left, done)
    return offset - start


def read_all(env: Env, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill `buffers` from `offset` on; return the bytes read, fewer than asked only at the end of the file. Raises OSError."""
    left = list(buffers)
    start = offset
    while left:
        done = env.preadv(fd, left[:IOV_MAX], offset)
        if done <= 0:
            break
        offset += done
        left = _after(left, done)
    return offset - start


def _after(buffers: list[memoryview], done: int) -> list[memoryview]:
    """Return what is left of `buffers` behind their first `done` bytes."""
    for index, buffer in enumerate(buffers):
        if done < buffer.nbytes:
            return [buffer[done:], *buffers[index + 1 :]] if done else buffers[index:]
        done -= buffer.nbytes
    return []
