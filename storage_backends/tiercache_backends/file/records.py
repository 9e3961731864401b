"""Records of the catalog: 192 bytes for each object, processed in arrays.

    bytes  field      type
        8  number     u64, big-endian   counts all objects ever stored. So records are sorted by age, and a
                                        batch is written into one or two LMDB pages
       64  digest                       of the object key
       32  parent                       page key, or zeros
       16  checksum
       16  mac                          or zeros
        8  length     u64               payload bytes
        8  stored_at  u64               nanoseconds since 1970; 0 if the clock was before 1970
        8  start      u64               first block of the first extent
        4  blocks     u32               blocks of the first extent
        2  more       u16               number of further extents
        1  flags      u8                bit 0: the parent is known. bit 1: the depth is known
        1  reserved   u8                0
        4  depth      u32               pages up to the object's end
        4  namespace  u32               id of the namespace
        8  pool       ASCII             name, padded with zeros
        8  guard      u64               weighted sum of the 23 words (of 8 bytes) before it

An extent lies inside one slab. All integers except `number` are little-endian.

The guard is needed because LMDB does not check its pages. Without the guard, a damaged length would stay
unnoticed: every get of the object would be refused, and no set would replace the object.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from tiercache.core import BLOCK_ALIGN, ObjectKey, ObjectMeta, PoolName
from tiercache.storage.base import ScanEntry, SetItem
from tiercache.storage.shares import INDEX_BYTES, Footprint

RECORD: Final = np.dtype([
    ("number", ">u8"), ("digest", "V64"), ("parent", "V32"), ("checksum", "V16"), ("mac", "V16"),
    ("length", "<u8"), ("stored_at", "<u8"),
    ("start", "<u8"), ("blocks", "<u4"), ("more", "<u2"), ("flags", "u1"), ("reserved", "u1"),
    ("depth", "<u4"), ("namespace", "<u4"),
    ("pool", "S8"), ("guard", "<u8"),
])  # fmt: skip
FOOTPRINT: Final = Footprint(fixed=RECORD.itemsize + INDEX_BYTES, unit=BLOCK_ALIGN)
"""Bytes that an object takes: blocks, its record, and memory."""
PARENT_KNOWN: Final = 1
DEPTH_KNOWN: Final = 2
MAX_EXTENTS: Final = 1 + 2**16 - 1
"""Maximum number of extents of an object: the first one, and 2**16 - 1 that the field `more` can count."""
_MAX_NUMBERS: Final = 2**48
"""Limit of record numbers. A record with a larger number counts as damaged."""
_EXTENT: Final = struct.Struct("<QI")
"""Extent after the first: start and number of blocks."""
_POOLS: Final = np.array([pool.encode() for pool in PoolName], "S8")
_WORDS: Final = RECORD.itemsize // 8
_WEIGHTS: Final = np.array(
    [(0x9E3779B97F4A7C15 * (2 * i + 1) | 1) % 2**64 for i in range(_WORDS - 1)], np.uint64
)
"""Weights of the words in the guard. They are odd, so that every flip of a single bit changes the sum."""

Records = npt.NDArray[Any]
"""Array of catalog records, with the dtype RECORD."""
NO_RECORDS: Final[Records] = np.zeros(0, RECORD)


class Extent(NamedTuple):
    """Range of `blocks` adjacent blocks in one slab, from block `start`."""

    start: int
    blocks: int


class Places(NamedTuple):
    """Places of objects, in columns: the first extent of each, and the rest of those that have several."""

    starts: Sequence[int]
    """First block of the first extent."""
    blocks: Sequence[int]
    """Number of blocks of the first extent."""
    further: Mapping[int, tuple[Extent, ...]]
    """Extents after the first, by position in the columns; only for objects that have any."""

    @classmethod
    def of(cls, extents: Sequence[tuple[Extent, ...]]) -> Places:
        """Return the places of objects with these extents."""
        return cls(
            [each[0].start for each in extents],
            [each[0].blocks for each in extents],
            {i: each[1:] for i, each in enumerate(extents) if len(each) > 1},
        )

    def extents(self, position: int) -> tuple[Extent, ...]:
        """Return the extents of one object, in payload order."""
        first = Extent(self.starts[position], self.blocks[position])
        return first, *self.further.get(position, ())


class CatalogContents(NamedTuple):
    """Sound records (see `sound`) of a catalog, with their extents."""

    records: Records
    """Records, oldest first."""
    extents: dict[int, tuple[Extent, ...]]
    """Extents after the first, by record number. Only records with several extents have an entry."""
    damaged: bool = False
    """Whether some records were unsound or out of order.

    If so, LMDB's lookups are unreliable, and the catalog must be rewritten.
    """


def pack(
    items: Sequence[SetItem],
    places: Places,
    checksums: Sequence[bytes],
    macs: Sequence[bytes],
    namespaces: Sequence[int],
    stored_at: int,
) -> Records:
    """Return the records of a batch, not yet numbered; `stored_at` is in nanoseconds since 1970."""
    records = np.zeros(len(items), RECORD)
    metas = [item.meta for item in items]
    records["digest"] = _column([item.key.digest for item in items], 64)
    records["parent"] = _column([m.parent or bytes(32) for m in metas], 32)
    records["checksum"] = _column(checksums, 16)
    records["mac"] = _column(macs, 16)
    records["length"] = [m.length for m in metas]
    records["stored_at"] = stored_at
    records["start"], records["blocks"] = places.starts, places.blocks
    for i, extents in places.further.items():
        records["more"][i] = len(extents)
    records["flags"] = [
        (m.parent is not None) * PARENT_KNOWN | (m.depth is not None) * DEPTH_KNOWN for m in metas
    ]
    records["depth"] = [m.depth or 0 for m in metas]
    records["namespace"] = namespaces
    records["pool"] = [item.key.pool.encode() for item in items]
    return records


def number_and_guard(records: Records, first: int) -> None:
    """Number records from `first` on and set their guards, in place."""
    records["number"] = np.arange(first, first + len(records))
    records["guard"] = _guards(records)


def sound(records: Records) -> npt.NDArray[np.bool_]:
    """Return which records have a right guard and a pool that this version knows."""
    found: npt.NDArray[np.bool_] = _guards(records) == records["guard"]
    return found & np.isin(records["pool"], _POOLS) & (records["number"] < _MAX_NUMBERS)


def entry(record: Any, namespace: bytes) -> ScanEntry:
    """Return the scan entry of a record's object. `namespace` is the name for the record's namespace id."""
    flags = int(record["flags"])
    return ScanEntry(
        ObjectKey(PoolName(record["pool"].decode()), record["digest"].tobytes()),
        ObjectMeta(
            namespace=namespace,
            length=int(record["length"]),
            checksum=record["checksum"].tobytes(),
            parent=record["parent"].tobytes() if flags & PARENT_KNOWN else None,
            depth=int(record["depth"]) if flags & DEPTH_KNOWN else None,
        ),
        int(record["stored_at"]) / 1e9 or None,
    )


def rows(records: Records) -> Iterator[bytes]:
    """Return an iterator over the bytes of each record."""
    raw = records.tobytes()
    return (raw[i : i + RECORD.itemsize] for i in range(0, len(raw), RECORD.itemsize))


def words_of(records: Records, name: str) -> npt.NDArray[np.uint64]:
    """Return a field of byte strings as 64-bit words, without a copy: shape (len(records), words)."""
    dtype, offset = RECORD.fields[name][:2]  # type: ignore[index]
    return _words(records, offset, dtype.itemsize // 8)


def pack_extents(extents: Iterable[Extent]) -> bytes:
    """Return the extents after the first as the catalog stores them."""
    return b"".join(_EXTENT.pack(*extent) for extent in extents)


def unpack_extents(raw: bytes) -> tuple[Extent, ...]:
    """Return the extents that `pack_extents` packed; an incomplete one at the end is ignored."""
    whole = len(raw) // _EXTENT.size * _EXTENT.size
    return tuple(map(Extent._make, _EXTENT.iter_unpack(raw[:whole])))


def _column(values: Sequence[bytes], width: int) -> npt.NDArray[Any]:
    return np.frombuffer(b"".join(values), f"V{width}")


def _guards(records: Records) -> npt.NDArray[np.uint64]:
    return _words(records, 0, _WORDS - 1) @ _WEIGHTS


def _words(records: Records, offset: int, count: int) -> npt.NDArray[np.uint64]:
    """Return a view of `count` words of each record, from byte `offset` of the record."""
    return as_strided(records.getfield(np.uint64, offset), (len(records), count), (records.strides[0], 8))
