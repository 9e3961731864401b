"""Byte arithmetic over lists of buffers, and batches of bounded size.

An object may lie in several host blocks and in several extents of a file. With these functions, a store moves
the bytes directly between blocks and extents, and never collects them in one buffer in between.

Buffers are C-contiguous memoryviews of format "B".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import addressof, c_char
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def total(buffers: Sequence[memoryview]) -> int:
    """Return the bytes of all buffers together."""
    return sum(b.nbytes for b in buffers)


def usable(buffers: Sequence[memoryview], length: int, *, writable: bool) -> bool:
    """Return whether a store can move `length` bytes, at least 1, through these buffers."""
    room = 0
    for buffer in buffers:
        if not (buffer.c_contiguous and buffer.ndim == 1 and buffer.format == "B") or (
            writable and buffer.readonly
        ):
            return False
        room += buffer.nbytes
    return room >= length > 0


def address_of(view: memoryview) -> int:
    """Return the address of a view's first byte in this process; 0 for an empty or scattered view."""
    if not view.nbytes or not view.c_contiguous:
        return 0
    if view.readonly:
        return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
    return addressof(c_char.from_buffer(view))


def take(buffers: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """Return views of the bytes [start, stop), counted over all buffers laid end to end."""
    if not start and len(buffers) == 1 and stop == buffers[0].nbytes:
        return [buffers[0]] if stop else []
    views: list[memoryview] = []
    for buffer in buffers:
        size = buffer.nbytes
        if stop <= 0:
            break
        #   buffers         |   0   |     1     |   2   |
        #   [start, stop)       |-----------------|          views: the end of 0, all of 1, the start of 2
        # `start` and `stop` are relative to this buffer, whose bytes are [0, size).
        if start < size:
            low, high = max(start, 0), min(stop, size)
            views.append(buffer if high - low == size else buffer[low:high])
        start -= size
        stop -= size
    return views


def copy_in(target: memoryview, buffers: Sequence[memoryview]) -> None:
    """Fill `target` with the first bytes of `buffers`, which has at least as many."""
    at = 0
    for view in take(buffers, 0, target.nbytes):
        target[at : at + view.nbytes] = view
        at += view.nbytes


def copy_out(source: memoryview, buffers: Sequence[memoryview], start: int = 0) -> None:
    """Copy all bytes of `source` into `buffers`, from the byte `start` of them on."""
    at = 0
    for view in take(buffers, start, start + source.nbytes):
        view[:] = source[at : at + view.nbytes]
        at += view.nbytes


def parts(buffers: Sequence[memoryview], nbytes: int) -> Iterator[bytes]:
    """Yield the bytes of all buffers laid end to end, in parts of `nbytes`; the last may be shorter.

    Of no bytes, one empty part.
    """
    part: list[memoryview] = []
    room = nbytes
    for buffer in buffers:
        at = 0
        while buffer.nbytes - at > room:
            yield b"".join([*part, buffer[at : at + room]])
            part, at, room = [], at + room, nbytes
        part.append(buffer[at:])
        room -= buffer.nbytes - at
    yield b"".join(part)


def zero_tail(buffers: Sequence[memoryview], length: int) -> None:
    """Overwrite all bytes after the first `length` with zeros."""
    for view in take(buffers, length, total(buffers)):
        view[:] = bytes(view.nbytes)


def batches(
    items: Iterable[T], nbytes: Callable[[T], int], max_items: int, max_bytes: int
) -> Iterator[list[T]]:
    """Yield the items in order, in lists of at most `max_items` items and `max_bytes` bytes.

    An item of more than `max_bytes` bytes gets a list of its own.
    """
    batch: list[T] = []
    held = 0
    for item in items:
        size = nbytes(item)
        if batch and (held + size > max_bytes or len(batch) >= max_items):
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += size
    if batch:
        yield batch
