"""The format of an `lmdb` store's environment, byte by byte.

This is version 3. Integers in keys are big-endian, because LMDB sorts keys as bytes; all others are
little-endian.

    DIR/LOCK, OPENING, format           see local/directory.py
    DIR/state                           {"capacity": bytes, if known,
                                         "database": null while the environment is in use; after a clean
                                                     shutdown [size, mtime_ns] of LMDB's file,
                                         "suspect": true if the environment is damaged and not replaced yet}
    DIR/database/                       the LMDB environment, with six databases, and WRITER, which the
                                        writing process holds with flock

    objects:    digest of the object, 64 bytes      ->  record
    parts:      u64 object's number, u32 part       ->  one piece of the payload (see below)
    ages:       u64 tick                            ->  digest; the object with the smallest tick was used
                                                        least recently
    gone:       u64 tick                            ->  digest of the object that was removed at that tick;
                                                        only the latest removals are kept
    namespaces: namespace, 1 to 64 bytes            ->  msgpack [id, identity, whether it has states]; the
                                                        identity lacks its secret salt, and may be nil
    facts:      "facts"                             ->  the fields of `Facts`, in order: u64 each

    tick   = a counter that stands for time: every change takes the next tick
    record = u64 number     the tick at which the object was stored
             u64 tick       of the last use; the object's key in `ages`
             u64 length     payload bytes
             u32 namespace  id
             u32 depth      pages up to the object's end
             u8  flags      1: parent is known, 2: depth is known
             15 bytes       pool name, ASCII, filled with zeros
             16 bytes       checksum (storage.checksum)
             16 bytes       MAC (storage.checksum), or zeros if the store has no MAC key
             32 bytes       parent, or zeros

Every object has one entry in `ages`, and its payload lies in `parts` in pieces. LMDB stores a value of more
than half an LMDB page in a run of adjacent LMDB pages, behind a header of 16 bytes. A full piece has 64 KiB
less 64 bytes, and so fills sixteen LMDB pages of 4 KiB each. Larger pieces have two drawbacks. First, a map
that was once full has few long runs of free pages. Second, glibc gets the memory for a larger buffer from the
kernel, and gives it back after each piece. In a measurement, pieces of 256 KiB were written at 3 GB/s, and
pieces of 64 KiB at 12 GB/s.

The last run of a payload may end with an LMDB page that holds at most 1 KiB of the payload. These last bytes
become a piece of their own (`rest`), which LMDB stores in a leaf of its tree, beside other small values:

    payload   |------ full piece ------|------ full piece ------|--- cut ---|rest|
    LMDB      |header| 16 LMDB pages   |header| 16 LMDB pages   |header| n  | in a leaf
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from tiercache.core import ObjectKey, ObjectMeta, PoolName
from tiercache.storage.checksum import Checksums
from tiercache.storage.pages import PAGE_KEY_BYTES

RECORD: Final = np.dtype(
    {
        "names": [
            "number",
            "tick",
            "length",
            "namespace",
            "depth",
            "flags",
            "pool",
            "checksum",
            "mac",
            "parent",
        ],
        "formats": ["<u8", "<u8", "<u8", "<u4", "<u4", "u1", "S15", "V16", "V16", f"V{PAGE_KEY_BYTES}"],
    }
)
"""A record as a row of columns, as all records are read at once."""
_RECORD: Final = struct.Struct("<QQQIIB15s16s16s32s")
_PROOF: Final = struct.Struct("<Q8xQ24x16s16s")
_FACTS: Final = struct.Struct("<6Q")
_TICK: Final = struct.Struct(">Q")
_END: Final = 1 << 62
"""Tick that no store reaches."""
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
_INLINE_BYTES: Final = 1024
"""Maximum bytes of a piece that lies in a leaf of LMDB's tree."""
_LENGTHS: Final = 1024
"""Number of payload lengths whose division into pieces is remembered; a model has only few lengths."""
PARENT_KNOWN: Final = 1
_DEPTH_KNOWN: Final = 2

FACTS: Final = b"facts"


def tick_key(tick: int) -> bytes:
    """Return the key in `ages` or `gone` of what happened at `tick`."""
    return _TICK.pack(tick)


def ticks_from(txn: Any, db: Any, since: int) -> Iterator[tuple[int, bytes]]:
    """Yield tick and digest of every entry of `ages` or `gone` from tick `since` on."""
    with txn.cursor(db) as walk:
        if walk.set_range(_TICK.pack(since)):
            for key, digest in walk:
                yield _TICK.unpack(key)[0], bytes(digest)


def proof_of(value: bytes | memoryview) -> tuple[int, int, bytes, bytes]:
    """Return number, length, checksum and MAC from a stored record; raise struct.error if it is none."""
    if len(value) != _RECORD.size:
        raise struct.error(f"a record of {len(value)} bytes")
    found: tuple[int, int, bytes, bytes] = _PROOF.unpack_from(value)
    return found


class Record(NamedTuple):
    """Stored record of one object; the module's docstring explains the fields."""

    number: int
    tick: int
    length: int
    namespace: int
    depth: int
    flags: int
    pool: bytes
    checksum: bytes
    mac: bytes
    parent: bytes

    @classmethod
    def unpack(cls, value: bytes | memoryview) -> Record:
        """Return the record in a stored value; raise struct.error if it has no length of a record."""
        return cls._make(_RECORD.unpack(value))

    def pack(self) -> bytes:
        """Return the bytes that are stored."""
        return _RECORD.pack(*self)

    @property
    def depends_on(self) -> bytes:
        """Key of the page on which the object depends; empty where the parent is not known."""
        return self.parent if self.flags & PARENT_KNOWN else b""

    @property
    def checksums(self) -> Checksums:
        """Checksum and MAC, with which the payload is verified."""
        return Checksums(self.checksum, self.mac)

    def meta(self, namespace: bytes) -> ObjectMeta:
        """Return the metadata of the object, as a scan reports it."""
        return ObjectMeta(
            namespace=namespace,
            length=self.length,
            checksum=self.checksum,
            parent=self.depends_on or None,
            depth=self.depth if self.flags & _DEPTH_KNOWN else None,
        )

    def key(self, digest: bytes) -> ObjectKey | None:
        """Return the key of the object with a digest; None where this release does not know the pool."""
        try:
            return ObjectKey(PoolName(self.pool.rstrip(b"\0").decode()), digest)
        except ValueError:
            return None


def record_of(tick: int, key: ObjectKey, meta: ObjectMeta, namespace: int, checksums: Checksums) -> bytes:
    """Return the record of an object that is stored at this tick."""
    return _RECORD.pack(
        tick,
        tick,
        meta.length,
        namespace,
        meta.depth or 0,
        (meta.parent is not None) * PARENT_KNOWN | (meta.depth is not None) * _DEPTH_KNOWN,
        key.pool.encode(),
        *checksums,
        meta.parent or b"",
    )


class Facts(NamedTuple):
    """Counters and sizes of the store as a whole."""

    next_tick: int = 1
    named_at: int = 0
    """Latest tick at which the database `namespaces` was changed."""
    evicted: int = 0
    """Number of objects evicted since the store was made."""
    corrupt: int = 0
    """Number of objects dropped as damaged since the store was made."""
    capacity: int = 0
    """Bytes that the whole directory may take, as the user set them; 0 in a new store."""
    map_bytes: int = 0
    """Bytes of the capacity that LMDB's map may take."""

    @classmethod
    def unpack(cls, value: bytes | memoryview | None) -> Facts:
        """Return the stored facts, or those of a new store; raise struct.error for impossible ones."""
        facts = cls() if value is None else cls(*_FACTS.unpack(value))
        if not 0 < facts.next_tick < _END:
            raise struct.error(f"a next tick of {facts.next_tick}")
        return facts

    def pack(self) -> bytes:
        """Return the bytes that are stored."""
        return _FACTS.pack(*self)


def part_key(number: int, part: int) -> bytes:
    """Return the key of piece `part` of an object's payload."""
    return _PART.pack(number, part)


def cut(buffers: Sequence[memoryview], sizes: Iterable[int]) -> Iterator[list[memoryview]]:
    """Yield the parts of the buffers, laid end to end, that pieces of these sizes take."""
    start, index, buffer = 0, 0, buffers[0]
    for size in sizes:
        views = [buffer[start : start + size]]
        start += size
        while start > buffer.nbytes:  # the piece goes on in the next buffer
            start -= buffer.nbytes
            index += 1
            buffer = buffers[index]
            views.append(buffer[:start])
        yield [view for view in views if view.nbytes]


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


def _run(size: int, page_bytes: int) -> int:
    """Return the number of LMDB pages of a run that holds a value of `size` bytes."""
    return -(-(size + _HEADER_BYTES) // page_bytes)
