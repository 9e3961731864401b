"""Format of a pack: one S3 object that holds the objects of one set call, with an index in front.

    header   | magic | version | tables, bytes | entries | checksum |     40 bytes, little-endian
    index    | tables: namespaces and pools | entry 0 | entry 1 | ...     the checksum covers header and index
    payload  | bytes of entry 0 | bytes of entry 1 | ...                  each has a checksum in its entry

A pack is written once and never changed. Its name sorts by time, and says how long header and index are, so
that one request of the right length reads them:

    0193f2a1c044-9f86d081884c7d65-00000c-0004d2    milliseconds, writer, number, bytes before the payload
    0193f2a1c1f7-9f86d081884c7d65-00000d-gone      a tombstone: entries of packs that were removed
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from xxhash import xxh3_128_digest

from tiercache.core import ObjectKey, ObjectMeta, PoolName
from tiercache.storage.base import NAMESPACE_BYTES
from tiercache.storage.checksum import CHECKSUM_BYTES
from tiercache.storage.values import is_value

FOLDER: Final = "packs"
"""Folder of all packs and tombstones."""
_MAGIC: Final = b"tcs3pack"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sIII4x16s")  # magic, version, bytes of tables, entries, checksum
_ENTRY: Final = struct.Struct("<64s16s32sHBBBxxxIQQQdQ")
_HAS_PARENT, _HAS_DEPTH, _HAS_VALUE = 1, 2, 4
_TOMB: Final = b"tcs3gone"
_NAME: Final = re.compile(r"([0-9a-f]{12})-([0-9a-f]{16})-([0-9a-f]{6})-(gone|[0-9a-f]{6})")
MAX_ENTRIES: Final = 4096
"""Largest number of objects in a pack; keeps the index of a pack below 1 MiB."""
MAX_HEAD: Final = 2 << 20
"""Largest number of bytes before the payload that a reader takes from a name."""
MAX_TOMBSTONE: Final = 1 << 20
"""Largest number of bytes of a tombstone."""
_MAX_LENGTH: Final = 1 << 40


class PackName(NamedTuple):
    """Parts of the name of a pack or a tombstone."""

    text: str
    milliseconds: int
    """Milliseconds since 1970 on the clock of the writer."""
    writer: str
    head: int | None
    """Bytes before the payload; None for a tombstone."""


class PackEntry(NamedTuple):
    """One object of a pack."""

    key: ObjectKey
    meta: ObjectMeta
    codec: int
    offset: int
    """ObjectPlace of the stored bytes, from the start of the pack."""
    stored: int
    """Number of stored bytes."""


class NewEntry(NamedTuple):
    """One object to put into a pack, whose stored bytes follow those of the entry before it."""

    key: ObjectKey
    meta: ObjectMeta
    codec: int
    stored: int


def make_name(milliseconds: int, writer: str, number: int, head: int | None) -> str:
    """Return the name of a pack, or of a tombstone if `head` is None."""
    end = "gone" if head is None else f"{head:06x}"
    return f"{milliseconds:012x}-{writer}-{number & 0xFFFFFF:06x}-{end}"


def parse_name(text: str) -> PackName | None:
    """Return the parts of a name; None for the name of another thing."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    head = None if match[4] == "gone" else int(match[4], 16)
    if head is not None and not _HEADER.size < head <= MAX_HEAD:
        return None
    return PackName(text, int(match[1], 16), match[2], head)


def pack_head(entries: Sequence[NewEntry]) -> bytes:
    """Return header and index of a pack with these entries."""
    namespaces = {entry.meta.namespace: 0 for entry in entries}
    pools = {entry.key.pool.encode(): 0 for entry in entries}
    tables = _table(namespaces) + _table(pools)
    offset = _HEADER.size + len(tables) + _ENTRY.size * len(entries)
    parts = [tables]
    for key, meta, codec, stored in entries:
        flags = (
            _HAS_PARENT * (meta.parent is not None)
            | _HAS_DEPTH * (meta.depth is not None)
            | _HAS_VALUE * (meta.value is not None)
        )
        parts.append(
            _ENTRY.pack(
                key.digest, meta.checksum, meta.parent or b"", namespaces[meta.namespace], flags,
                pools[key.pool.encode()], codec, meta.depth or 0, offset, stored, meta.length,
                meta.value or 0.0, meta.worker,
            )
        )  # fmt: skip
        offset += stored
    index = b"".join(parts)
    bare = _HEADER.pack(_MAGIC, _VERSION, len(tables), len(entries), bytes(CHECKSUM_BYTES))
    return _HEADER.pack(_MAGIC, _VERSION, len(tables), len(entries), xxh3_128_digest(bare + index)) + index


class PackIndex:
    """Index of one pack, from which its entries are read when they are needed.

    Thread safety: immutable.
    """

    __slots__ = ("_body", "_namespaces", "_pools")

    def __init__(self, namespaces: list[bytes], pools: list[PoolName], body: bytes) -> None:
        self._namespaces = namespaces
        self._pools = pools
        self._body = body

    def __len__(self) -> int:
        return len(self._body) // _ENTRY.size

    def __getitem__(self, number: int) -> PackEntry:
        (digest, checksum, parent, namespace, flags, pool, codec, depth, offset, stored, length, value,
         worker) = _ENTRY.unpack_from(self._body, number * _ENTRY.size)  # fmt: skip
        return PackEntry(
            ObjectKey(self._pools[pool], digest),
            ObjectMeta(
                self._namespaces[namespace],
                length,
                checksum,
                parent if flags & _HAS_PARENT else None,
                depth if flags & _HAS_DEPTH else None,
                value if flags & _HAS_VALUE else None,
                worker,
            ),
            codec,
            offset,
            stored,
        )


def read_head(head: bytes, size: int) -> PackIndex | None:
    """Return the index of a pack of `size` bytes from its header and index.

    Returns None unless the checksum is right and every entry is possible: these bytes are from outside.
    """
    if len(head) < _HEADER.size:
        return None
    magic, version, tables, count, digest = _HEADER.unpack_from(head)
    expected = _HEADER.size + tables + count * _ENTRY.size
    if magic != _MAGIC or version != _VERSION or count > MAX_ENTRIES or expected != len(head):
        return None
    bare = head[: _HEADER.size - CHECKSUM_BYTES] + bytes(CHECKSUM_BYTES)
    if xxh3_128_digest(bare + head[_HEADER.size :]) != digest:
        return None
    try:
        namespaces, at = _read_table(head, _HEADER.size)
        pools, at = _read_table(head, at)
        if at != _HEADER.size + tables:
            return None
        index = PackIndex(namespaces, [PoolName(name.decode()) for name in pools], head[at:])
        sound = all(_is_possible(index[number], len(head), size) for number in range(count))
    except (ValueError, IndexError, struct.error):
        return None
    return index if sound else None


def _is_possible(entry: PackEntry, begin: int, size: int) -> bool:
    meta = entry.meta
    return (
        begin <= entry.offset <= entry.offset + entry.stored <= size
        and 0 < meta.length <= _MAX_LENGTH
        and 0 < len(meta.namespace) <= NAMESPACE_BYTES
        and (meta.value is None or is_value(meta.value))
    )


def tombstone(dead: Mapping[str, Iterable[int]]) -> bytes:
    """Return the content of a tombstone: for names of packs, the numbers of the entries that were removed."""
    lines = [f"{name} {','.join(map(str, sorted(numbers)))}" for name, numbers in dead.items()]
    body = "\n".join(lines).encode()
    return _TOMB + xxh3_128_digest(body) + body


def read_tombstone(data: bytes) -> dict[str, set[int]] | None:
    """Return what `tombstone` was given; None for anything else."""
    body = data[len(_TOMB) + CHECKSUM_BYTES :]
    if data[: len(_TOMB)] != _TOMB or data[len(_TOMB) : len(_TOMB) + CHECKSUM_BYTES] != xxh3_128_digest(body):
        return None
    dead: dict[str, set[int]] = {}
    try:
        for line in body.decode().splitlines():
            name, _, numbers = line.partition(" ")
            if parse_name(name) is None:
                return None
            dead[name] = {int(number) for number in numbers.split(",")}
    except ValueError:
        return None
    return dead


def _table(names: dict[bytes, int]) -> bytes:
    """Number these names, and return them one after the other, each with its length in front."""
    names.update({name: number for number, name in enumerate(names)})
    return struct.pack("<H", len(names)) + b"".join(struct.pack("<B", len(name)) + name for name in names)


def _read_table(data: bytes, at: int) -> tuple[list[bytes], int]:
    (count,) = struct.unpack_from("<H", data, at)
    at += 2
    names = []
    for _ in range(count):
        names.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    return names, at
