"""Names and headers of objects in Mooncake.

    name      tc1/<prefix>/<digest of the key, 128 hex digits>
    object    | header, 256 bytes | payload |

Mooncake keeps bytes under a name and nothing else, so the header has what a store must know of an object.
The header has a checksum of its own, with the name mixed in. The payload's checksum has the key mixed in.
Integers are little-endian.

    offset 0    magic, 8 bytes               offset 48   parent, 32 bytes (zeros: none)
           8    version, 4 bytes                   80    depth, 8 bytes (-1: none)
          12    flags, 4 bytes (1: parent)         88    stored at, 8 bytes (ns since 1970)
          16    length, 8 bytes                    96    pool, 1 + 15 bytes
          24    checksum, 16 bytes                112    namespace, 64 bytes
          40    length of namespace, 8 bytes      240    checksum of the header, 16 bytes
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from xxhash import xxh3_128_digest

from tiercache.core import DIGEST_BYTES, ObjectKey, ObjectMeta, PoolName
from tiercache.storage.base import NAMESPACE_BYTES, ScanEntry, SetItem, checksum_of

HEADER_BYTES: Final = 256
_BEGIN: Final = struct.pack("<8sI", b"tiercach", 1)
"""Magic and version."""
_HAS_PARENT: Final = 1
_FIELDS: Final = struct.Struct("<12sIQ16sQ32sqQ16s64s")
_PAYLOAD: Final = struct.Struct("<Q16s")
_PAYLOAD_AT: Final = 16
"""Length and checksum of the payload."""
_SUM_AT: Final = HEADER_BYTES - 16


def prefix_of(prefix: str) -> str:
    """Return what the names of all objects of a store begin with."""
    return f"tc1/{prefix}/"


class ObjectNames:
    """Names of the objects of one store.

    Thread safety: immutable.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix: Final = prefix_of(prefix)

    def of(self, digest: bytes) -> str:
        """Return the name of the object with this digest."""
        return self.prefix + digest.hex()

    def digest(self, name: str) -> bytes | None:
        """Return the digest in the name of an object; None for any other name."""
        text = name.removeprefix(self.prefix)
        if text == name or len(text) != 2 * DIGEST_BYTES or text != text.lower():
            return None
        try:
            return bytes.fromhex(text)
        except ValueError:
            return None


class Header(NamedTuple):
    """Contents of the header of an object."""

    pool: PoolName
    meta: ObjectMeta
    stored_at: float
    """Seconds since 1970."""

    def entry(self, digest: bytes) -> ScanEntry:
        """Return the entry of the object with this digest."""
        return ScanEntry(ObjectKey(self.pool, digest), self.meta, self.stored_at)


def write_header(target: memoryview, name: str, item: SetItem, now_ns: int) -> None:
    """Write the header of an item into `target`, HEADER_BYTES bytes; the payload is hashed if need be."""
    meta = item.meta
    target[:] = bytes(HEADER_BYTES)
    _FIELDS.pack_into(
        target, 0, _BEGIN, _HAS_PARENT if meta.parent is not None else 0, meta.length,
        checksum_of(item), len(meta.namespace), meta.parent or b"",
        -1 if meta.depth is None else meta.depth, now_ns, item.key.pool.encode(), meta.namespace,
    )  # fmt: skip
    target[_SUM_AT:] = _sum(target, name)


def read_header(source: memoryview, name: str) -> Header | None:
    """Return what a header says; None if it is not a header of this object, or is damaged."""
    if not _is_sound(source, name):
        return None
    _, flags, length, found, size, parent, depth, at, pool, namespace = _FIELDS.unpack_from(source)
    # Whoever can write to the pool can make a header with a good checksum.
    if not 0 < size <= NAMESPACE_BYTES or not -1 <= depth < 2**32:
        return None
    try:
        kind = PoolName(pool.rstrip(b"\0").decode("ascii"))
    except ValueError:
        return None
    meta = ObjectMeta(
        namespace[:size], length, found, parent if flags & _HAS_PARENT else None, None if depth < 0 else depth
    )
    return Header(kind, meta, at / 1e9)


def payload_sum(source: memoryview, name: str, length: int) -> bytes | None:
    """Return the checksum of a payload of `length` bytes by its header; None if the header says otherwise."""
    if not _is_sound(source, name):
        return None
    found: bytes
    size, found = _PAYLOAD.unpack_from(source, _PAYLOAD_AT)
    return found if size == length else None


def _is_sound(source: memoryview, name: str) -> bool:
    return source[: len(_BEGIN)] == _BEGIN and source[_SUM_AT:] == _sum(source, name)


def _sum(header: memoryview, name: str) -> bytes:
    return xxh3_128_digest(b"".join((header[:_SUM_AT], name.encode())))


def is_state(key: ObjectKey, parent: bytes | None) -> bool:
    """Return whether an object is attached to a page, or is a state of a model without pages."""
    return key.pool is PoolName.MAMBA or parent == key.page_key
