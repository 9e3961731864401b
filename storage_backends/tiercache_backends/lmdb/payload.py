"""Payloads of objects: their division into pieces, and the copies between LMDB's map and a caller's buffers.

LMDB stores a value of more than half an LMDB page in a run of adjacent LMDB pages, behind a header of 16
bytes. A full piece has 64 KiB less 64 bytes, and so fills sixteen LMDB pages of 4 KiB each. Larger pieces
have two drawbacks. First, a map that was once full has few long runs of free pages. Second, glibc gets the
memory for a larger buffer from the kernel, and gives it back after each piece. In a measurement, pieces of
256 KiB were written at 3 GB/s, and pieces of 64 KiB at 12 GB/s.

The last run of a payload may end with an LMDB page that holds at most 1 KiB of the payload. These last bytes
become a piece of their own (`rest`), which LMDB stores in a leaf of its tree, beside other small values:

    payload   |------ full piece ------|------ full piece ------|--- cut ---|rest|
    LMDB      |header| 16 LMDB pages   |header| 16 LMDB pages   |header| n  | in a leaf
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from errno import EIO
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np

from tiercache.storage.shares import INDEX_BYTES, Footprint
from tiercache_backends.local.failures import DamagedError

PART_PAGES: Final = 16
"""Number of LMDB pages of a full piece, unless the file has too few long runs of free pages."""
_PART: Final = struct.Struct(">QI")
"""Key of a piece: number of the object, index of the piece in the payload."""
_HEADER_BYTES: Final = 16
"""Bytes of LMDB's header at the beginning of a run."""
_MARGIN_BYTES: Final = 64
"""Bytes of a full run that hold no payload: the header and padding.

The padding makes the payload of a run a multiple of 64 bytes, the stride of the checksum.
"""
_PIECES_PER_LEAF: Final = 128
"""Number of pieces for which `pages_for` counts one leaf page of LMDB's tree."""
_TREE_BYTES: Final = 640
"""Bytes that the entries of an object take in LMDB's trees, which are half full at worst."""
_INLINE_BYTES: Final = 1024
"""Maximum bytes of a piece that lies in a leaf of LMDB's tree."""
_CACHED_BYTES: Final = 256 << 10
"""Number of bytes that are copied before they are checked. The processor's cache still holds all of them."""
_SMALL_BYTES: Final = 32 << 10
"""Size of a copy in bytes below which the GIL is kept, because releasing the GIL costs more than the copy."""
_LENGTHS: Final = 1024
"""Number of payload lengths whose division into pieces is remembered; a model has only few lengths."""

Verify: TypeAlias = Callable[[Sequence[memoryview]], None]
"""A function that takes the next bytes of a payload, such as the checksum's `add`."""


def part_key(number: int, part: int) -> bytes:
    """Return the key of piece `part` of an object's payload."""
    return _PART.pack(number, part)


def part_keys(number: int, parts: int) -> list[bytes]:
    """Return the keys of the first `parts` pieces of an object's payload."""
    return [_PART.pack(number, part) for part in range(parts)]


def number_of(key: bytes) -> int:
    """Return the number of the object to which the piece with this key belongs."""
    return int(_PART.unpack(key)[0])


@lru_cache(_LENGTHS)
def piece_sizes(length: int, page_bytes: int, part_pages: int = PART_PAGES) -> Sequence[int]:
    """Return the sizes of a payload's pieces in bytes, in order; the payload has `length` bytes."""
    full = part_pages * page_bytes - _MARGIN_BYTES
    sizes = [full] * (length // full)
    rest = length % full
    # `cut` is the payload that fits into the last run without its last page. If that page would hold only
    # few bytes (`_INLINE_BYTES`), these become a piece of their own.
    cut = (_run(rest, page_bytes) - 1) * page_bytes - _MARGIN_BYTES
    if cut > 0 and rest - cut <= _INLINE_BYTES:
        sizes.append(cut)
        rest -= cut
    return (*sizes, rest) if rest else tuple(sizes)


@lru_cache(_LENGTHS)
def pages_for(length: int, page_bytes: int, part_pages: int = PART_PAGES) -> int:
    """Estimate the LMDB pages that a payload of `length` bytes takes, with its share of LMDB's trees."""
    sizes = piece_sizes(length, page_bytes, part_pages)
    # Sum of: one page for small pieces and tree entries, the leaf pages for the keys of pieces, the runs.
    return (
        1
        + len(sizes) // _PIECES_PER_LEAF
        + sum(_run(size, page_bytes) for size in sizes if size > _INLINE_BYTES)
    )


def footprint(page_bytes: int) -> Footprint:
    """Return what an object takes: LMDB pages, entries in the trees, and memory."""
    return Footprint(_TREE_BYTES + INDEX_BYTES, page_bytes, _MARGIN_BYTES // PART_PAGES)


class BufferCursor:
    """Cursor that hands out the bytes of many buffers in order.

    Thread safety: one thread uses it.
    """

    __slots__ = ("_buffers", "_index", "_offset")

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self._index = 0
        self._offset = 0

    def take(self, size: int) -> list[memoryview]:
        """Return views of the next `size` bytes; the caller guarantees that `size` bytes are left."""
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


def pieces(
    number: int, buffers: Sequence[memoryview], sizes: Iterable[int]
) -> Iterator[tuple[bytes, memoryview | bytes]]:
    """Yield key and bytes of each piece of the payload of object `number`."""
    if len(buffers) == 1:
        at, buffer = 0, buffers[0]
        for part, size in enumerate(sizes):
            yield _PART.pack(number, part), buffer[at : at + size]
            at += size
        return
    cursor = BufferCursor(buffers)
    for part, size in enumerate(sizes):
        views = cursor.take(size)
        # Join a piece only if it lies in several buffers, because joining costs a copy.
        yield _PART.pack(number, part), views[0] if len(views) == 1 else b"".join(views)


def write(txn: Any, db: Any, entries: Iterable[tuple[bytes, memoryview | bytes]]) -> None:
    """Put pieces into LMDB, in order; their numbers are larger than those of all stored objects.

    Raises DamagedError where the store already holds a piece with one of these numbers or a larger number.
    """
    # `append` puts a key behind all others without a search of the tree, and skips a key that is not larger.
    with txn.cursor(db) as cursor:
        taken, added = cursor.putmulti(entries, append=True)
    if added < taken:
        raise DamagedError(EIO, "the store holds a part of an object that was never stored")


def read(cursor: Any, number: int, length: int, buffers: Sequence[memoryview], verify: Verify) -> bool:
    """Copy a payload into the caller's buffers; return False where a piece is missing or too long.

    Each part of the buffers is passed to `verify` soon after the copy, while its bytes are in the processor's
    cache. `verify` gets views of the buffers and not of the map, because the caller will use the bytes in the
    buffers.
    """
    target = BufferWriter(buffers[0], verify) if len(buffers) == 1 else ScatterWriter(buffers, verify)
    whole = _walk(cursor, number, length, target.put)
    if whole:
        target.end()
    return whole


def copy_whole(pieces: Sequence[tuple[memoryview, memoryview]], length: int, buffer: memoryview) -> bool:
    """Copy the pieces of a small payload, (key, bytes) each, into one buffer; verify nothing.

    Returns False, and may have copied some of the pieces, unless they have `length` bytes together.
    """
    at = 0
    for _, piece in pieces:
        end = at + len(piece)
        if end > length:
            return False
        if end - at < _SMALL_BYTES:
            buffer[at:end] = piece
        else:
            _copy(buffer[at:end], piece)
        at = end
    return at == length


def verify_in_map(cursor: Any, number: int, length: int, verify: Verify) -> bool:
    """Pass views of a payload in the map to `verify`; return False where a piece is missing or too long.

    A caller can change its buffers at any time, but not the map.
    """
    return _walk(cursor, number, length, lambda piece: verify((piece,)))


def stored_bytes(cursor: Any, number: int) -> int:
    """Return the bytes of all pieces of a payload that are found."""
    found, nbytes, part = cursor.set_range(part_key(number, 0)), 0, 0
    while found and cursor.key() == part_key(number, part):
        nbytes += len(cursor.value())
        part += 1
        found = cursor.next()
    return nbytes


class BufferWriter:
    """Writer that copies pieces into one buffer, from its start, and passes the filled bytes to `verify`.

    Thread safety: one thread uses it.
    """

    __slots__ = ("_filled", "_target", "_verified", "_verify", "_view")

    def __init__(self, buffer: memoryview, verify: Verify) -> None:
        self._view = buffer
        self._target = np.frombuffer(buffer, np.uint8)
        self._verify = verify
        self._filled = 0
        self._verified = 0

    def put(self, piece: memoryview) -> None:
        """Copy the next piece."""
        at = self._filled
        self._filled = end = at + piece.nbytes
        if piece.nbytes < _SMALL_BYTES:
            self._view[at:end] = piece
        else:
            np.copyto(self._target[at:end], np.frombuffer(piece, np.uint8))
        if end - self._verified >= _CACHED_BYTES:
            self.end()

    def end(self) -> None:
        """Pass the bytes that were filled since the last call to `verify`."""
        self._verify((self._view[self._verified : self._filled],))
        self._verified = self._filled


class ScatterWriter:
    """Writer that copies pieces into many buffers, in order, and passes the filled bytes to `verify`.

    Thread safety: one thread uses it.
    """

    __slots__ = ("_cursor", "_verify")

    def __init__(self, buffers: Sequence[memoryview], verify: Verify) -> None:
        self._cursor = BufferCursor(buffers)
        self._verify = verify

    def put(self, piece: memoryview) -> None:
        """Copy the next piece."""
        views = self._cursor.take(piece.nbytes)
        at = 0
        for view in views:
            _copy(view, piece[at : at + view.nbytes])
            at += view.nbytes
        self._verify(views)

    def end(self) -> None:
        """Do nothing: `put` has passed every view to `verify`."""


def remove(txn: Any, db: Any, number: int) -> None:
    """Delete every piece of an object."""
    prefix = part_key(number, 0)[:8]  # the object's number, with which the keys of all its pieces begin
    with txn.cursor(db) as cursor:
        found = cursor.set_range(part_key(number, 0))
        while found and cursor.key()[:8] == prefix:
            cursor.delete()
            found = bool(cursor.key())


def _walk(cursor: Any, number: int, length: int, use: Callable[[memoryview], None]) -> bool:
    """Pass the pieces of a payload to `use`; return False where a piece is missing or too long."""
    if not cursor.set_range(part_key(number, 0)):
        return False
    for part, (key, piece) in enumerate(cursor.iternext()):
        length -= piece.nbytes
        if length < 0 or key != part_key(number, part):
            return False
        use(piece)
        if not length:
            return True
    return False


def _run(size: int, page_bytes: int) -> int:
    """Return the number of LMDB pages of a run that holds a value of `size` bytes."""
    return -(-(size + _HEADER_BYTES) // page_bytes)


def _copy(target: memoryview, source: memoryview) -> None:
    if target.nbytes < _SMALL_BYTES and target.format == "B":
        target[:] = source
    else:
        # numpy releases the GIL while it copies; an assignment of views does not.
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
