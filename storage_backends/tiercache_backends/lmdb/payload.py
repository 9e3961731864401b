"""Payloads of objects: their pieces, and how these move between LMDB's map and the caller's buffers.

LMDB gives a value of more than half a page a run of pages of its own, with 16 bytes of header. Pieces of 64 KiB less a little fill sixteen
pages of 4 KiB each: long runs are hard to find in a map that was full once, and glibc maps and unmaps every larger block of memory anew,
which made writing pieces of 256 KiB four times slower (3 against 12 GB/s). A rest of at most 1 KiB that would take one more page is a
piece of its own, which lies in a leaf of the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from errno import EIO
from typing import Any, Final, TypeAlias

import numpy as np

from tiercache_backends.lmdb.records import part_key

PART_PAGES: Final = 16
"""LMDB pages of a full piece, usually."""
_HEADER: Final = 16
"""Bytes of LMDB's header at the beginning of a run."""
_MARGIN: Final = 64
"""Bytes of a run that hold no payload: the header, and as many more that a piece is a whole number of the checksum's strides."""
_PIECES_A_LEAF: Final = 128
"""Pieces for which `pages_for` reckons one page of the tree."""
_INLINE: Final = 1024
"""Bytes of the largest piece that lies in a leaf, beside others."""
_IN_CACHE: Final = 256 << 10
"""Bytes that are copied before they are checked, few enough to be still in the processor's cache."""
_SMALL: Final = 32 << 10
"""Bytes below which letting other threads run during a copy costs more than the copy."""


Add: TypeAlias = Callable[[Sequence[memoryview]], None]


def piece_sizes(length: int, page_bytes: int, part_pages: int = PART_PAGES) -> list[int]:
    """Return the sizes of a payload's pieces in bytes, in order; the payload has `length` bytes."""
    full = part_pages * page_bytes - _MARGIN
    sizes = [full] * (length // full)
    rest = length % full
    cut = (_run(rest, page_bytes) - 1) * page_bytes - _MARGIN
    if cut > 0 and rest - cut <= _INLINE:
        sizes.append(cut)
        rest -= cut
    return [*sizes, rest] if rest else sizes


def pages_for(length: int, page_bytes: int, part_pages: int = PART_PAGES) -> int:
    """Return the LMDB pages that a payload of `length` bytes takes, its share of the trees included."""
    sizes = piece_sizes(length, page_bytes, part_pages)
    return 1 + len(sizes) // _PIECES_A_LEAF + sum(_run(size, page_bytes) for size in sizes if size > _INLINE)


class Strip:
    """The bytes of many buffers as one strip, handed out in order.

    Thread safety: one thread uses it.
    """

    __slots__ = ("_buffers", "_index", "_offset")

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self._index = 0
        self._offset = 0

    def take(self, size: int) -> list[memoryview]:
        """Return views of the next `size` bytes; the caller guarantees that the strip has them."""
        views: list[memoryview] = []
        while size:
            buffer = self._buffers[self._index]
            view = buffer[self._offset : self._offset + size]
            if view.nbytes:
                views.append(view)
            size -= view.nbytes
            self._offset += view.nbytes
            if self._offset == buffer.nbytes:
                self._index += 1
                self._offset = 0
        return views


def write(txn: Any, db: Any, number: int, buffers: Sequence[memoryview], sizes: Iterable[int]) -> None:
    """Put a payload's pieces into LMDB. Raises OSError where the store holds a piece of this or a larger number already.

    `number` is larger than all that were written before. A piece that lies inside one buffer is not copied on the way.
    """
    strip = Strip(buffers)
    for part, size in enumerate(sizes):
        views = strip.take(size)
        if not txn.put(part_key(number, part), views[0] if len(views) == 1 else b"".join(views), db=db, append=True):
            raise OSError(EIO, f"the store holds a part of object {number}, which was never stored")


def read(cursor: Any, number: int, length: int, buffers: Sequence[memoryview], add: Add) -> bool:
    """Copy a payload into the caller's buffers; return False where a piece is missing or too long.

    `add` gets every view of the buffers soon after it was filled, while it is in the processor's cache, so that what is checked is what the
    caller will see.
    """
    if not cursor.set_range(part_key(number, 0)):
        return False
    fill = Whole(buffers[0], add) if len(buffers) == 1 else Scattered(buffers, add)
    for part, (key, piece) in enumerate(cursor.iternext()):
        length -= piece.nbytes
        if length < 0 or key != part_key(number, part):
            return False
        fill.put(piece)
        if not length:
            fill.end()
            return True
    return False


def look(cursor: Any, number: int, length: int, add: Add) -> bool:
    """Show a payload to `add` in the map, which no caller can change; return False where a piece is missing or too long."""
    if not cursor.set_range(part_key(number, 0)):
        return False
    for part, (key, piece) in enumerate(cursor.iternext()):
        length -= piece.nbytes
        if length < 0 or key != part_key(number, part):
            return False
        add((piece,))
        if not length:
            return True
    return False


class Whole:
    """Writer of pieces into one buffer, from its start, which shows what it has filled to `add`.

    Thread safety: one thread uses it.
    """

    __slots__ = ("_add", "_at", "_seen", "_target", "_view")

    def __init__(self, buffer: memoryview, add: Add) -> None:
        self._view = buffer
        self._target = np.frombuffer(buffer, np.uint8)
        self._add = add
        self._at = 0
        self._seen = 0

    def put(self, piece: memoryview) -> None:
        """Copy the next piece."""
        at = self._at
        self._at = end = at + piece.nbytes
        if piece.nbytes < _SMALL:
            self._view[at:end] = piece
        else:
            np.copyto(self._target[at:end], np.frombuffer(piece, np.uint8))
        if end - self._seen >= _IN_CACHE:
            self.end()

    def end(self) -> None:
        """Show what was filled and not shown yet."""
        self._add((self._view[self._seen : self._at],))
        self._seen = self._at


class Scattered:
    """Writer of pieces into many buffers, in order, which shows what it has filled to `add`.

    Thread safety: one thread uses it.
    """

    __slots__ = ("_add", "_strip")

    def __init__(self, buffers: Sequence[memoryview], add: Add) -> None:
        self._strip = Strip(buffers)
        self._add = add

    def put(self, piece: memoryview) -> None:
        """Copy the next piece."""
        views = self._strip.take(piece.nbytes)
        at = 0
        for view in views:
            _copy(view, piece[at : at + view.nbytes])
            at += view.nbytes
        self._add(views)

    def end(self) -> None:
        """Do nothing: everything has been shown."""


def remove(txn: Any, db: Any, number: int) -> None:
    """Delete every piece of an object."""
    with txn.cursor(db) as cursor:
        found = cursor.set_range(part_key(number, 0))
        while found and cursor.key()[:8] == part_key(number, 0)[:8]:
            cursor.delete()
            found = bool(cursor.key())


def _run(size: int, page_bytes: int) -> int:
    """Return the pages of a run that holds a value of `size` bytes."""
    return -(-(size + _HEADER) // page_bytes)


def _copy(target: memoryview, source: memoryview) -> None:
    if target.nbytes < _SMALL and target.format == "B":
        target[:] = source
    else:
        # Unlike an assignment of views, numpy lets other threads run while it copies.
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
