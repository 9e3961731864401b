"""Records of the catalog: 192 bytes for each object, processed in arrays.

    record = u64 number, big-endian: counts every object ever stored, so that a batch is written into one or two pages, and records lie
                         in the order of their age; 64 digest of the object key; 32 parent or zeros; 16 checksum; 16 MAC or zeros;
             u64 length  payload bytes; u64 stored_at, nanoseconds since 1970, 0 where the clock did not know;
             u64 first block and u32 blocks of the first extent; u16 further extents; u8 flags: 1 parent is known, 2 depth is known; u8 0;
             u32 depth   pages up to the object's end; u32 namespace id; 8 pool name, ASCII, zero-padded; u64 guard

An extent lies inside one slab. The guard is a weighted sum of the record's other words. It is needed because LMDB does not check its pages,
and an object whose record has a wrong length would be refused for ever.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from tiercache.core import ObjectKey, ObjectMeta, PoolName
from tiercache.storage.base import ScanEntry, SetItem
from tiercache.storage.checksum import Sealed
from tiercache_backends.file.space import Extent

RECORD: Final = np.dtype([
    ("number", ">u8"), ("digest", "V64"), ("parent", "V32"), ("checksum", "V16"), ("mac", "V16"), ("length", "<u8"), ("stored_at", "<u8"),
    ("start", "<u8"), ("blocks", "<u4"), ("more", "<u2"), ("flags", "u1"), ("reserved", "u1"), ("depth", "<u4"), ("namespace", "<u4"),
    ("pool", "S8"), ("guard", "<u8"),
])  # fmt: skip
PARENT_KNOWN: Final = 1
DEPTH_KNOWN: Final = 2
MAX_EXTENTS: Final = 1 + 2**16 - 1
_MOST_NUMBERS: Final = 2**48
_EXTENT: Final = struct.Struct("<QI")
_POOLS: Final = np.array([pool.encode() for pool in PoolName], "S8")
_WORDS: Final = RECORD.itemsize // 8
_WEIGHTS: Final = np.array([(0x9E3779B97F4A7C15 * (2 * i + 1) | 1) % 2**64 for i in range(_WORDS - 1)], np.uint64)
"""Weights of the guard: odd, so that every flip of a single bit changes the sum."""

Records = npt.NDArray[Any]
"""Array of dtype RECORD."""


def pack(
    items: Sequence[SetItem], places: Sequence[tuple[Extent, ...]], seals: Sequence[Sealed], namespaces: Sequence[int], stored_at: int
) -> Records:
    """Return the records of a batch, not yet numbered; `stored_at` is in nanoseconds since 1970."""
    records = np.zeros(len(items), RECORD)
    metas = [item.meta for item in items]
    records["digest"] = _column([item.key.digest for item in items], 64)
    records["parent"] = _column([m.parent or bytes(32) for m in metas], 32)
    records["checksum"] = _column([sealed.checksum for sealed in seals], 16)
    records["mac"] = _column([sealed.mac for sealed in seals], 16)
    records["length"] = [m.length for m in metas]
    records["stored_at"] = stored_at
    records["start"] = [place[0].start for place in places]
    records["blocks"] = [place[0].blocks for place in places]
    records["more"] = [len(place) - 1 for place in places]
    records["flags"] = [(m.parent is not None) * PARENT_KNOWN | (m.depth is not None) * DEPTH_KNOWN for m in metas]
    records["depth"] = [m.depth or 0 for m in metas]
    records["namespace"] = namespaces
    records["pool"] = [item.key.pool.encode() for item in items]
    return records


def seal(records: Records, first: int) -> None:
    """Number records from `first` on and set their guards, in place."""
    records["number"] = np.arange(first, first + len(records))
    records["guard"] = _guards(records)


def sound(records: Records) -> npt.NDArray[np.bool_]:
    """Return which records are as they were written, by a version that knew no pools that this one does not know."""
    found: npt.NDArray[np.bool_] = _guards(records) == records["guard"]
    return found & np.isin(records["pool"], _POOLS) & (records["number"] < _MOST_NUMBERS)


def entry(record: Any, namespace: bytes) -> ScanEntry:
    """Return what a record says about its object; `namespace` is the name behind its namespace id."""
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
    """Return a view of a field of byte strings as rows of 64-bit words, without a copy: shape (len(records), words)."""
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
    return as_strided(records.getfield(np.uint64, offset), (len(records), count), (records.strides[0], 8))
