"""What lies in the environment of an `lmdb` store, byte by byte.

The format, version 1. Integers are little-endian unless they are keys, which LMDB sorts as bytes: those are big-endian.

    DIR/LOCK, OPENING, format, state    see local/directory.py
    DIR/database/                       the LMDB environment, with five databases, and WRITER, held with flock by who writes:

    objects:    place of the object, 64 bytes       ->  record
                page key, 32 bytes                  ->  u32: how many stored objects name this page as their parent
    parts:      u64 object's number, u32 part       ->  the payload, in pieces (see payload.py)
    ages:       u64 tick                            ->  place; the smallest tick was used least recently
    namespaces: namespace, 1 to 64 bytes            ->  msgpack [id, identity without its salt, or nil, has it states?]
    facts:      "facts"                             ->  next number, next tick, objects, payload bytes, evicted, corrupt: u64 each
                "size"                              ->  capacity, map bytes: u64 each
                "gone", u64 tick                    ->  place, u64 number of an object that was removed then; the latest ones only
                "kept"                              ->  u64: removals since this tick are all told by those
                "named"                             ->  u64: the tick at which a namespace was last said to have states

    place  = page key (32 bytes), layout digest (32 bytes): the object key's digest with its halves exchanged. The objects of one page and
             the count of those that depend on it are neighbours, so that a set touches one page of the tree and not three.
    record = u64 number     unique and rising; never used again
             u64 tick       recency, see above
             u64 length     payload bytes
             u32 namespace  id
             u32 depth      pages up to the object's end
             u8  flags      1: parent is known, 2: depth is known
             7 bytes        0
             16 bytes       checksum (storage.checksum)
             16 bytes       MAC (storage.checksum), zeros without a key
             32 bytes       parent, or zeros
             rest           pool name, ASCII

Every object has an entry in `ages`; earlier releases took it away where others depend on the object.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from tiercache.core import ObjectKey, ObjectMeta, PoolName
from tiercache.storage.checksum import Sealed

HALF: Final = 32
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
    """Where an object lies in `objects`. Its own inverse."""
    return digest[HALF:] + digest[:HALF]


def part_key(number: int, part: int) -> bytes:
    """The key of a piece of an object's payload."""
    return _PART.pack(number, part)


def number_of(key: bytes) -> int:
    """The object that a piece belongs to."""
    return int(_PART.unpack(key)[0])


def tick_key(tick: int) -> bytes:
    """The key of an age."""
    return _TICK.pack(tick)


def tick_of(key: bytes) -> int:
    """The tick of an age's key."""
    return int(_TICK.unpack(key)[0])


def gone_key(tick: int) -> bytes:
    """The key in `facts` under which a removal is told."""
    return _GONE + _TICK.pack(tick)


def gone_value(place: bytes, number: int) -> bytes:
    """What is told of a removal."""
    return place + number.to_bytes(8)


def removals(txn: Any, facts: Any, since: int = 0) -> Iterator[tuple[int, bytes, int]]:
    """The removals that are told, from a tick on: tick, place and number."""
    with txn.cursor(facts) as walk:
        found = walk.set_range(gone_key(since))
        while found and bytes(walk.key()).startswith(_GONE):
            value = bytes(walk.value())
            yield tick_of(bytes(walk.key())[len(_GONE) :]), value[: 2 * HALF], int.from_bytes(value[2 * HALF :])
            found = walk.next()


def gone_since(txn: Any, facts: Any) -> int:
    """The tick from which on all removals are told."""
    return int.from_bytes(txn.get(_KEPT, b"", db=facts))


def forget_removals(txn: Any, facts: Any, before: int) -> None:
    """Tell no more of removals before a tick."""
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
    """Say that removals before a tick are not all told."""
    txn.put(_KEPT, tick.to_bytes(8), db=facts)


def tell_names(txn: Any, facts: Any, tick: int) -> None:
    """Say that a namespace has states since a tick."""
    txn.put(_NAMED, tick.to_bytes(8), db=facts)


def named_at(txn: Any, facts: Any) -> int:
    """The tick at which that was last said."""
    return int.from_bytes(txn.get(_NAMED, b"", db=facts))


def count_value(count: int) -> bytes:
    """How many objects depend on a page, as it is stored."""
    return _COUNT.pack(count)


def count_of(value: bytes) -> int:
    """The count in a stored value."""
    return int(_COUNT.unpack(value)[0])


class Record(NamedTuple):
    """What the store knows about one object."""

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
        """The record of an object that is stored now."""
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
        """The record in a stored value; None where it is not one."""
        if len(value) <= _RECORD.size:
            return None
        return cls._make((*_RECORD.unpack_from(value), bytes(value[_RECORD.size :])))

    def pack(self) -> bytes:
        """The bytes that are stored."""
        return _RECORD.pack(*self[:-1]) + self.pool

    @property
    def depends_on(self) -> bytes:
        """The page key on which the object depends; empty where that is not known."""
        return self.parent if self.flags & _PARENT_KNOWN else b""

    @property
    def sealed(self) -> Sealed:
        """What proves the payload."""
        return Sealed(self.checksum, self.mac)

    def hangs_on(self, place: bytes) -> bool:
        """Does the object, which lies at `place`, hang on its page rather than be it? Nothing depends on it then."""
        return self.depends_on == place[:HALF]

    def meta(self, namespace: bytes) -> ObjectMeta:
        """What a scan reports."""
        return ObjectMeta(
            namespace=namespace,
            length=self.length,
            checksum=self.checksum,
            parent=self.depends_on or None,
            depth=self.depth if self.flags & _DEPTH_KNOWN else None,
        )

    def key(self, place: bytes) -> ObjectKey | None:
        """The object's key; None where this version does not know its pool."""
        try:
            return ObjectKey(PoolName(self.pool.decode()), place_of(place))
        except ValueError:
            return None


class Facts(NamedTuple):
    """What is true of the store as a whole."""

    next_number: int = 1
    next_tick: int = 1
    objects: int = 0
    payload_bytes: int = 0
    evicted: int = 0
    corrupt: int = 0

    @classmethod
    def unpack(cls, value: bytes | memoryview | None) -> Facts:
        """The stored facts; those of an empty store where there are none."""
        return cls(*_FACTS.unpack(value)) if value is not None and len(value) == _FACTS.size else cls()

    def pack(self) -> bytes:
        """The bytes that are stored."""
        return _FACTS.pack(*self)


class Size(NamedTuple):
    """How large the store may be, as all who share it agreed: `capacity` as it was set, and the map's share of it, in bytes."""

    capacity: int
    map_bytes: int

    @classmethod
    def unpack(cls, value: bytes | None) -> Size | None:
        """The stored size; None in a new store."""
        return cls(*_SIZE.unpack(value)) if value is not None and len(value) == _SIZE.size else None

    def pack(self) -> bytes:
        """The bytes that are stored."""
        return _SIZE.pack(*self)
