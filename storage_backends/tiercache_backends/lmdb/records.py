"""The format of an `lmdb` store's environment, byte by byte.

This is version 2. Integers are little-endian in a `record` and in the values of the keys "facts" and "size".
All other integers are big-endian: those in keys, because LMDB sorts keys as bytes, and those in the values of
the keys "gone", "kept" and "named".

    DIR/LOCK, OPENING, format           see local/directory.py
    DIR/state                           {"capacity": bytes, if known,
                                         "database": null while the environment is in use; after a clean
                                                     shutdown [size, mtime_ns] of LMDB's file,
                                         "suspect": true if the environment is damaged and not replaced yet}
    DIR/database/                       the LMDB environment, with five databases, and WRITER, which the
                                        writing process holds with flock

    objects:    place of the object, 64 bytes       ->  record
    parts:      u64 object's number, u32 part       ->  one piece of the payload (see below)
    ages:       u64 tick                            ->  place; the object with the smallest tick was used
                                                        least recently
    namespaces: namespace, 1 to 64 bytes            ->  msgpack [id, identity, whether it has states]; the
                                                        identity lacks its secret salt, and may be nil
    facts:      "facts"                             ->  the six fields of StoreTotals, in order: u64 each
                "size"                              ->  capacity, map bytes: u64 each
                "gone", u64 tick                    ->  place, u64 number of the object removed at that tick;
                                                        only the latest removals are kept
                "kept"                              ->  u64: the first tick from which all removals are kept
                "named"                             ->  u64: the latest tick at which a namespace was recorded
                                                        as having states

    place  = page key (32 bytes), layout digest (32 bytes): the object key's digest with its halves exchanged.
             Because a place begins with the page key, LMDB sorts the objects of a page next to each other.
    tick   = a counter that stands for time: every change takes the next tick
    record = u64 number     larger than the numbers of all earlier objects; never used again
             u64 tick       of the last use; the object's key in `ages`
             u64 length     payload bytes
             u32 namespace  id
             u32 depth      pages up to the object's end
             u8  flags      1: parent is known, 2: depth is known
             7 bytes        0
             16 bytes       checksum (storage.checksum)
             16 bytes       MAC (storage.checksum), or zeros if the store has no MAC key
             32 bytes       parent, or zeros
             rest           pool name, ASCII

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
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from tiercache.core import ObjectKey, ObjectMeta, PoolName
from tiercache.storage.checksum import Checksums

HALF: Final = 32
"""Bytes of a page key, and of a layout digest."""
_RECORD: Final = struct.Struct("<QQQIIB7x16s16s32s")
_PROOF: Final = struct.Struct("<Q8xQ16x16s16s")
_FACTS: Final = struct.Struct("<6Q")
_SIZE: Final = struct.Struct("<QQ")
_MAX_POOL: Final = 64
"""Maximum bytes of a pool's name; a longer one is damaged, and may be said to end behind the file."""
_TICK: Final = struct.Struct(">Q")
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
_PARENT_KNOWN: Final = 1
_DEPTH_KNOWN: Final = 2

FACTS: Final = b"facts"
SIZE: Final = b"size"
_GONE: Final = b"gone"
_KEPT: Final = b"kept"
NAMED: Final = b"named"


def place_of(digest: bytes) -> bytes:
    """Return the place of the object with this digest.

    The same exchange of halves turns a place into a digest.
    """
    return digest[HALF:] + digest[:HALF]


def tick_key(tick: int) -> bytes:
    """Return the key in `ages` of the object that was last used at `tick`."""
    return _TICK.pack(tick)


def tick_of(key: bytes) -> int:
    """Return the tick in a key of `ages`, the inverse of `tick_key`."""
    return int(_TICK.unpack(key)[0])


def gone_key(tick: int) -> bytes:
    """Return the key in `facts` under which the removal at `tick` is logged."""
    return _GONE + _TICK.pack(tick)


def gone_value(place: bytes, number: int) -> bytes:
    """Return the value that is logged for the removal of an object."""
    return place + number.to_bytes(8)


def removals(txn: Any, facts: Any, since: int = 0) -> Iterator[tuple[int, bytes, int]]:
    """Yield tick, place and number of every logged removal from tick `since` on."""
    with txn.cursor(facts) as walk:
        found = walk.set_range(gone_key(since))
        while found and bytes(walk.key()).startswith(_GONE):
            value = bytes(walk.value())
            yield (
                tick_of(bytes(walk.key())[len(_GONE) :]),
                value[: 2 * HALF],
                int.from_bytes(value[2 * HALF :]),
            )
            found = walk.next()


def log_start(txn: Any, facts: Any) -> int:
    """Return the first tick from which all removals are in the log."""
    return int.from_bytes(txn.get(_KEPT, b"", db=facts))


def forget_removals(txn: Any, facts: Any, before: int) -> None:
    """Delete the logged removals before a tick."""
    old = []  # collected first: a deletion during the walk would move the cursor
    for tick, _, _ in removals(txn, facts):
        if tick >= before:
            break
        old.append(tick)
    for tick in old:
        txn.delete(gone_key(tick), db=facts)
    if old:
        txn.put(_KEPT, before.to_bytes(8), db=facts)


def proof_of(value: bytes | memoryview) -> tuple[int, int, bytes, bytes]:
    """Return number, length, checksum and MAC from a stored record; zeros from a value that is too short."""
    found: tuple[int, int, bytes, bytes] = _PROOF.unpack_from(
        value if len(value) > _RECORD.size else bytes(_PROOF.size)
    )
    return found


class Record(NamedTuple):
    """Stored record of one object; the module's docstring explains the fields."""

    number: int
    tick: int
    length: int
    namespace: int
    depth: int
    flags: int
    checksum: bytes
    mac: bytes
    parent: bytes
    pool: bytes

    @classmethod
    def of(
        cls, number: int, tick: int, key: ObjectKey, meta: ObjectMeta, namespace: int, checksums: Checksums
    ) -> Record:
        """Return the record of an object that is being stored now."""
        known = (meta.parent is not None) * _PARENT_KNOWN | (meta.depth is not None) * _DEPTH_KNOWN
        return cls(
            number,
            tick,
            meta.length,
            namespace,
            meta.depth or 0,
            known,
            checksums.checksum,
            checksums.mac,
            meta.parent or bytes(HALF),
            key.pool.encode(),
        )

    @classmethod
    def unpack(cls, value: bytes | memoryview) -> Record:
        """Return the record in a stored value; raise struct.error if it has no length of a record."""
        if not _RECORD.size < len(value) <= _RECORD.size + _MAX_POOL:
            raise struct.error(f"a record of {len(value)} bytes")
        return cls._make((*_RECORD.unpack_from(value), bytes(value[_RECORD.size :])))

    def pack(self) -> bytes:
        """Return the bytes that are stored."""
        return _RECORD.pack(*self[:-1]) + self.pool

    @property
    def depends_on(self) -> bytes:
        """Key of the page on which the object depends; empty where the parent is not known."""
        return self.parent if self.flags & _PARENT_KNOWN else b""

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

    def key(self, place: bytes) -> ObjectKey | None:
        """Return the key of the object at `place`; None where this release does not know the pool."""
        try:
            return ObjectKey(PoolName(self.pool.decode()), place_of(place))
        except ValueError:
            return None


class StoreTotals(NamedTuple):
    """Counters of the store as a whole."""

    next_number: int = 1
    next_tick: int = 1
    objects: int = 0
    payload_bytes: int = 0
    evicted: int = 0
    """Number of objects evicted since the store was made."""
    corrupt: int = 0
    """Number of objects dropped as damaged since the store was made."""

    @classmethod
    def unpack(cls, value: bytes | memoryview | None) -> StoreTotals:
        """Return the stored totals; zero objects if the value is absent or has a wrong length."""
        return cls(*_FACTS.unpack(value)) if value is not None and len(value) == _FACTS.size else cls()

    def pack(self) -> bytes:
        """Return the bytes that are stored."""
        return _FACTS.pack(*self)


class Size(NamedTuple):
    """Sizes in bytes on which all processes that share the store agree."""

    capacity: int
    """Bytes that the whole directory may take, as the user set them."""
    map_bytes: int
    """Bytes of the capacity that LMDB's map may take."""

    @classmethod
    def unpack(cls, value: bytes | None) -> Size | None:
        """Return the stored size; None in a new store, or where the value has a wrong length."""
        return cls(*_SIZE.unpack(value)) if value is not None and len(value) == _SIZE.size else None

    def pack(self) -> bytes:
        """Return the bytes that are stored."""
        return _SIZE.pack(*self)


def part_key(number: int, part: int) -> bytes:
    """Return the key of piece `part` of an object's payload."""
    return _PART.pack(number, part)


def part_keys(number: int, parts: int) -> list[bytes]:
    """Return the keys of the first `parts` pieces of an object's payload."""
    return [_PART.pack(number, part) for part in range(parts)]


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
