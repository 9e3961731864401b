"""Records of the catalog's log: 192 bytes each, processed in arrays.

    bytes  field      type
        8  number     u64     objects count from 1, and no number is used twice. Every other record has the
                              number of the newest object before it, so that numbers never fall
        1  kind       u8      see `RecordKind`
        1  flags      u8      bit 0: the parent is known. bit 1: the depth is known
        2  more       u16     number of further extents
        4  blocks     u32     blocks of the first extent
        8  start      u64     first block of the first extent
        8  length     u64     payload bytes
        8  stored_at  u64     nanoseconds since 1970; 0 if the clock was before 1970
        4  depth      u32     pages up to the object's end
        4  namespace  u32     id of the namespace
        8  pool       ASCII   name, padded with zeros
       64  digest             of the object key
       32  parent             page key, or zeros
       16  checksum
       16  mac                or zeros
        8  guard      u64

An extent lies inside one slab. All integers are little-endian. A record of another kind than STORED has 168
bytes of `data` from `start` on instead; what its fields `more` and `blocks` mean is told at its functions.

The guard is two multilinear hashes of 32 bits (Lemire and Kaser, "Strongly universal string hashing is fast",
2014) over the 46 words of 32 bits before it and the record's position in the log. Their keys are derived from
the store's id and the log's generation. So a record is right only where it was written: damage, a record at
another position, of an older log or of another store passes with a probability of 2**-64. The guard detects
damage, not forgery. A record that passes wrongly costs a miss and never a wrong byte, because `reading.py`
believes no payload whose checksum, and MAC, are not those of its key.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from hashlib import shake_256
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from tiercache.core import BLOCK_ALIGN, ObjectKey, ObjectMeta, PoolName
from tiercache.storage.base import ScanEntry, SetItem
from tiercache.storage.shares import INDEX_BYTES, Footprint

RECORD: Final = np.dtype([
    ("number", "<u8"), ("kind", "u1"), ("flags", "u1"), ("more", "<u2"), ("blocks", "<u4"),
    ("start", "<u8"), ("length", "<u8"), ("stored_at", "<u8"), ("depth", "<u4"), ("namespace", "<u4"),
    ("pool", "S8"), ("digest", "V64"), ("parent", "V32"), ("checksum", "V16"), ("mac", "V16"),
    ("guard", "<u8"),
])  # fmt: skip
NOTE: Final = np.dtype([
    ("number", "<u8"), ("kind", "u1"), ("flags", "u1"), ("more", "<u2"), ("blocks", "<u4"),
    ("data", "V168"), ("guard", "<u8"),
])  # fmt: skip
"""Record of another kind than STORED."""
RECORD_BYTES: Final = RECORD.itemsize
ID_BYTES: Final = 16
"""Bytes of a store's id."""
FOOTPRINT: Final = Footprint(fixed=RECORD_BYTES + INDEX_BYTES, unit=BLOCK_ALIGN)
"""Bytes that an object takes: blocks, its record, and memory."""
PARENT_KNOWN: Final = 1
DEPTH_KNOWN: Final = 2
MAX_EXTENTS: Final = 1 + 2**16 - 1
"""Maximum number of extents of an object: the first one, and 2**16 - 1 that the field `more` can count."""
_EXTENT: Final = struct.Struct("<QI")
"""Extent after the first: start and number of blocks."""
_DATA_BYTES: Final = 168
_GONE: Final = _DATA_BYTES // 8
"""Maximum number of removed objects that one record names."""
_POOLS: Final = np.array([pool.encode() for pool in PoolName], "S8")
_WORDS: Final = RECORD_BYTES // 4 - 2
"""Words of 32 bits before the guard."""
_HALF: Final = np.uint64(32)
_PART: Final = 4096
"""Records whose guards are computed at once, so that the columns stay in the processor's cache."""

Records = npt.NDArray[Any]
"""Array of catalog records, with the dtype RECORD or NOTE."""
Keys = npt.NDArray[np.uint64]
"""Keys of the guards of one log, one column for each of the two hashes."""
NO_RECORDS: Final[Records] = np.zeros(0, RECORD)


class RecordKind(IntEnum):
    """Kind of a record. A record of zeros has none, and is never right."""

    HEAD = 1
    """First record of a log: `data` is a `LogHead`."""
    STORED = 2
    """An object was stored. Its further extents follow in records of the kind EXTENTS."""
    GONE = 3
    """Objects were removed: `data` has `more` of their numbers, each u64."""
    EXTENTS = 4
    """A part of the extents of the object before it (see `pack_value`)."""
    NAME = 5
    """A part of the record of a namespace (see `pack_value`)."""


class LogHead(NamedTuple):
    """Contents of a log's first record."""

    store: bytes
    """Id of the store."""
    last_number: int
    """Number of the newest object that any log of the store has had."""
    last_namespace: int
    """Largest id that any namespace has had."""

    def pack(self) -> Records:
        """Return the record, without its guard."""
        head = np.zeros(1, NOTE)
        head["kind"] = RecordKind.HEAD
        head["data"] = np.void(_HEAD.pack(*self).ljust(_DATA_BYTES, b"\0"))
        return head

    @classmethod
    def unpack(cls, record: Records) -> LogHead:
        """Return the contents of a record of the kind HEAD."""
        return cls(*_HEAD.unpack_from(record.view(NOTE)["data"][0].tobytes()))


_HEAD: Final = struct.Struct("<16sQI")


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
    """Records of the stored objects of a catalog, with their extents."""

    records: Records
    """Records, oldest first."""
    extents: dict[int, tuple[Extent, ...]]
    """Extents after the first, by record number. Only records with several extents have an entry."""


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
    records["kind"] = RecordKind.STORED
    metas = [item.meta for item in items]
    records["digest"] = _column([item.key.digest for item in items], 64)
    records["parent"] = _column([m.parent or bytes(32) for m in metas], 32)
    records["checksum"] = _column(checksums, 16)
    records["mac"] = _column(macs, 16)
    records["length"] = [m.length for m in metas]
    records["stored_at"] = min(max(0, stored_at), 2**63 - 1)  # a wrong clock may be before 1970
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


def keys_of(store: bytes, generation: int) -> Keys:
    """Return the keys of the guards in the log of this generation of a store."""
    raw = shake_256(store + generation.to_bytes(8, "little")).digest((_WORDS + 2) * 2 * 8)
    return np.frombuffer(raw, np.uint64).reshape(_WORDS + 2, 2)


def guards(records: Records, position: int, keys: Keys) -> npt.NDArray[np.uint64]:
    """Return the guards that records must have from this position of their log on."""
    found = np.empty(len(records), np.uint64)
    words = records.view(np.uint32).reshape(-1, RECORD_BYTES // 4)[:, :_WORDS]
    for start in range(0, len(records), _PART):
        part = words[start : start + _PART].astype(np.uint64)
        at = np.arange(position + start, position + start + len(part), dtype=np.uint64)
        # Each sum modulo 2**64 of words times keys, with the position as one more word, gives its upper half.
        high, low = (part @ key[:_WORDS] + at * key[_WORDS] + key[-1] for key in keys.T)
        found[start : start + _PART] = (high >> _HALF << _HALF) | (low >> _HALF)
    return found


def sound(records: Records, position: int, keys: Keys) -> npt.NDArray[np.bool_]:
    """Return which records from this position of their log on have the right guard."""
    found: npt.NDArray[np.bool_] = guards(records, position, keys) == records["guard"]
    return found


def known_pools(records: Records) -> npt.NDArray[np.bool_]:
    """Return which records have a pool that this version knows."""
    return np.isin(records["pool"], _POOLS)


def pack_gone(numbers: Sequence[int]) -> Records:
    """Return records of the kind GONE that name these objects."""
    notes = np.zeros(-(-len(numbers) // _GONE), NOTE)
    flat = np.zeros(len(notes) * _GONE, "<u8")
    flat[: len(numbers)] = numbers
    notes["kind"] = RecordKind.GONE
    notes["data"] = flat.view(f"V{_DATA_BYTES}")
    notes["more"] = np.minimum(_GONE, len(numbers) - np.arange(len(notes)) * _GONE)
    return notes


def unpack_gone(notes: Records) -> npt.NDArray[np.uint64]:
    """Return the numbers of all objects that records of the kind GONE name."""
    flat = np.ascontiguousarray(notes["data"]).view("<u8").reshape(-1, _GONE)
    return flat[np.arange(_GONE) < notes["more"][:, None]]


def pack_value(kind: RecordKind, value: bytes) -> Records:
    """Return the adjacent records that hold a value: `blocks` is its length, `more` counts its parts."""
    notes = np.zeros(notes_for(len(value)), NOTE)
    notes["kind"], notes["blocks"], notes["more"] = kind, len(value), np.arange(len(notes))
    notes["data"] = np.frombuffer(value.ljust(len(notes) * _DATA_BYTES, b"\0"), f"V{_DATA_BYTES}")
    return notes


def unpack_value(notes: Records, kinds: npt.NDArray[Any], at: int) -> bytes | None:
    """Return the value that begins at record `at`; None if one of its records is missing.

    `kinds`: the kinds of the records, 0 for those that are not right.
    """
    if at >= len(notes):
        return None
    end = at + notes_for(length := int(notes["blocks"][at]))
    parts = notes[at:end]
    if (
        end > len(notes)
        or (kinds[at:end] != kinds[at]).any()
        or (parts["more"] != np.arange(end - at)).any()
        or (parts["blocks"] != length).any()
    ):
        return None
    return parts["data"].tobytes()[:length]


def notes_for(length: int) -> int:
    """Return the number of records that a value of `length` bytes takes."""
    return max(1, -(-length // _DATA_BYTES))


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


def words_of(records: Records, name: str) -> npt.NDArray[np.uint64]:
    """Return a field of byte strings as 64-bit words, without a copy: shape (len(records), words)."""
    dtype, offset = RECORD.fields[name][:2]  # type: ignore[index]
    shape, strides = (len(records), dtype.itemsize // 8), (records.strides[0], 8)
    return as_strided(records.getfield(np.uint64, offset), shape, strides)


def pack_extents(extents: Iterable[Extent]) -> bytes:
    """Return the extents after the first as the catalog stores them."""
    return b"".join(_EXTENT.pack(*extent) for extent in extents)


def unpack_extents(raw: bytes) -> tuple[Extent, ...]:
    """Return the extents that `pack_extents` packed."""
    return tuple(map(Extent._make, _EXTENT.iter_unpack(raw)))


def _column(values: Sequence[bytes], width: int) -> npt.NDArray[Any]:
    return np.frombuffer(b"".join(values), f"V{width}")
