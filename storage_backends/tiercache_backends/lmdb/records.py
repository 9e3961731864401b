"""The format of an `lmdb` store's environment, byte by byte.

This is version 1. Integers are little-endian in `record`, in the values "facts" and "size" and in counts. Keys are big-endian, because LMDB
sorts them as bytes, and so are the integers of the values under "gone", "kept" and "named".

    DIR/LOCK, OPENING, format, state    see local/directory.py
    DIR/database/                       the LMDB environment, with five databases, and WRITER, which the writing process holds with flock:

    objects:    place of the object, 64 bytes       ->  record
                page key, 32 bytes                  ->  u32: how many stored objects name this page as their parent
    parts:      u64 object's number, u32 part       ->  the payload, in pieces (see payload.py)
    ages:       u64 tick                            ->  place; the smallest tick was used least recently
    namespaces: namespace, 1 to 64 bytes            ->  msgpack [id, identity without its salt, or nil, whether it has states]
    facts:      "facts"                             ->  next number, next tick, objects, payload bytes, evicted, corrupt: u64 each
                "size"                              ->  capacity, map bytes: u64 each
                "gone", u64 tick                    ->  place, u64 number of the object removed at that tick; the latest ones only
                "kept"                              ->  u64: the tick from which on the "gone" entries tell all removals
                "named"                             ->  u64: the tick at which a namespace was last said to have states

    place  = page key (32 bytes), layout digest (32 bytes): the object key's digest with its halves exchanged. The objects of one page and
             the count of those that depend on it are neighbours, so that a set touches one LMDB page of the tree and not three.
    record = u64 number     unique and rising; never used again
             u64 tick       recency, the key in `ages`
             u64 length     payload bytes
             u32 namespace  id
             u32 depth      pages up to the object's end
             u8  flags      1: parent is known, 2: depth is known
             7 bytes        0
             16 bytes       checksum (storage.checksum)
             16 bytes       MAC (storage.checksum), zeros without a key
             32 bytes       parent, or zeros
             rest           pool name, ASCII

Every object has an entry in `ages`; earlier releases removed it where others depend on the object.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from tiercache.core import ObjectKey, ObjectMeta, PoolName
from tiercache.storage.checksum import Sealed

HALF: Final = 32
"""Bytes of a page key, and of a layout digest."""
_RECORD: Final = struct.Struct("<QQQIIB7x16s16s32s")
_FACTS: Final = struct.Struct("<6Q")
_SIZE: Final = struct.Struct("<QQ")
_TICK: Final = struct.Struct(">Q")
_PART: Final = struct.Struct(">QI")
_COUNT: Final = struct.Struct("<I")
_PARENT_KNOWN: Final = 1
_DEPTH_KNOWN: Final = 2

FACTS: Final = b"facts"
SIZE: Final = b"size"
_GONE: Final = b"gone"
_KEPT: Final = b"kept"
_NAMED: Final = b"named"


def place_of(digest: bytes) -> bytes:
    """Return an object's key in `objects` for its digest. The function is its own inverse."""
    return digest[HALF:] + digest[:HALF]


def part_key(number: int, part: int) -> bytes:
    """Return the key of piece `part` of an object's payload."""
    return _PART.pack(number, part)


def number_of(key: bytes) -> int:
    """Return the number of the object to which the piece with this key belongs."""
    return int(_PART.unpack(key)[0])


def tick_key(tick: int) -> bytes:
    """Return the key of an age."""
    return _TICK.pack(tick)


def tick_of(key: bytes) -> int:
    """Return the tick of an age's key."""
    return int(_TICK.unpack(key)[0])


def gone_key(tick: int) -> bytes:
    """Return the key in `facts` of the removal at `tick`."""
    return _GONE + _TICK.pack(tick)


def gone_value(place: bytes, number: int) -> bytes:
    """Return the value that is stored for a removal."""
    return place + number.to_bytes(8)


def removals(txn: Any, facts: Any, since: int = 0) -> Iterator[tuple[int, bytes, int]]:
    """Yield tick, place and number of every logged removal from tick `since` on."""
    with txn.cursor(facts) as walk:
        found = walk.set_range(gone_key(since))
        while found and bytes(walk.key()).startswith(_GONE):
            value = bytes(walk.value())
            yield tick_of(bytes(walk.key())[len(_GONE) :]), value[: 2 * HALF], int.from_bytes(value[2 * HALF :])
            found = walk.next()


def gone_since(txn: Any, facts: Any) -> int:
    """Return the tick from which on all removals are logged."""
    return int.from_bytes(txn.get(_KEPT, b"", db=facts))


def forget_removals(txn: Any, facts: Any, before: int) -> None:
    """Delete the logged removals before a tick."""
    old = []
    for tick, _, _ in removals(txn, facts):
        if tick >= before:
            break
        old.append(tick)
    for tick in old:
        txn.delete(gone_key(tick), db=facts)
    if old:
        tell_none(txn, facts, before)


def tell_none(txn: Any, facts: Any, tick: int) -> None:
    """Note that removals before a tick are not all logged."""
    txn.put(_KEPT, tick.to_bytes(8), db=facts)


def tell_names(txn: Any, facts: Any, tick: int) -> None:
    """Note that at this tick a namespace was said to have states."""
    txn.put(_NAMED, tick.to_bytes(8), db=facts)


def named_at(txn: Any, facts: Any) -> int:
    """Return the tick at which a namespace was last said to have states; 0 if none was."""
    return int.from_bytes(txn.get(_NAMED, b"", db=facts))


def count_value(count: int) -> bytes:
    """Return the stored value for the number of objects that depend on a page."""
    return _COUNT.pack(count)


def count_of(value: bytes) -> int:
    """Return the count in a stored value, the inverse of `count_value`."""
    return int(_COUNT.unpack(value)[0])


class Record(NamedTuple):
    """The stored record of one object; the module's docstring explains the fields."""

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
    def of(cls, number: int, tick: int, key: ObjectKey, meta: ObjectMeta, namespace: int, sealed: Sealed) -> Record:
        """Return the record of an object that is being stored now."""
        known = (meta.parent is not None) * _PARENT_KNOWN | (meta.depth is not None) * _DEPTH_KNOWN
        return cls(
            number,
            tick,
            meta.length,
            namespace,
            meta.depth or 0,
            known,
            sealed.checksum,
            sealed.mac,
            meta.parent or bytes(HALF),
            key.pool.encode(),
        )

    @classmethod
    def unpack(cls, value: bytes | memoryview) -> Record | None:
        """Return the record in a stored value; None where the value is too short to be one."""
        if len(value) <= _RECORD.size:
            return None
        return cls._make((*_RECORD.unpack_from(value), bytes(value[_RECORD.size :])))

    def pack(self) -> bytes:
        """Return the bytes that are stored."""
        return _RECORD.pack(*self[:-1]) + self.pool

    @property
    def depends_on(self) -> bytes:
        """Key of the page on which the object depends; empty where that is not known."""
        return self.parent if self.flags & _PARENT_KNOWN else b""

    @property
    def sealed(self) -> Sealed:
        """Checksum and MAC, which prove the payload."""
        return Sealed(self.checksum, self.mac)

    def hangs_on(self, place: bytes) -> bool:
        """Return whether the object at `place` hangs on its page instead of being that page; no object depends on it then."""
        return self.depends_on == place[:HALF]

    def meta(self, namespace: bytes) -> ObjectMeta:
        """Return the description of the object that a scan reports."""
        return ObjectMeta(
            namespace=namespace,
            length=self.length,
            checksum=self.checksum,
            parent=self.depends_on or None,
            depth=self.depth if self.flags & _DEPTH_KNOWN else None,
        )

    def key(self, place: bytes) -> ObjectKey | None:
        """Return the key of the object at `place`; None where this version does not know its pool."""
        try:
            return ObjectKey(PoolName(self.pool.decode()), place_of(place))
        except ValueError:
            return None


class Facts(NamedTuple):
    """Counters of the store as a whole.

    `evicted` and `corrupt`: objects evicted, and dropped as damaged, in the life of the store.
    """

    next_number: int = 1
    next_tick: int = 1
    objects: int = 0
    payload_bytes: int = 0
    evicted: int = 0
    corrupt: int = 0

    @classmethod
    def unpack(cls, value: bytes | memoryview | None) -> Facts:
        """Return the stored facts; those of an empty store where the value is missing or has another length."""
        return cls(*_FACTS.unpack(value)) if value is not None and len(value) == _FACTS.size else cls()

    def pack(self) -> bytes:
        """Return the bytes that are stored."""
        return _FACTS.pack(*self)


class Size(NamedTuple):
    """The size on which all processes that share the store agree, in bytes: `capacity` as it was set, and the map's share of it."""

    capacity: int
    map_bytes: int

    @classmethod
    def unpack(cls, value: bytes | None) -> Size | None:
        """Return the stored size; None in a new store, or where the value has another length."""
        return cls(*_SIZE.unpack(value)) if value is not None and len(value) == _SIZE.size else None

    def pack(self) -> bytes:
        """Return the bytes that are stored."""
        return _SIZE.pack(*self)
