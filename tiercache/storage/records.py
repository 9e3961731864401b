"""Records of namespaces as stores keep them, in msgpack: what is read is bounded and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgpack

MAX_RECORD_BYTES: Final = 64 << 10
"""Length of the longest record that is read from where others write too."""
_MAX_FIELDS: Final = 256
"""Maximum number of fields of an identity."""
_MAX_PARTS: Final = 3
"""Maximum length of an array. Without these bounds, nested arrays announce gigabytes."""


def pack_record(record: Any) -> bytes:
    """Return the bytes of what a store keeps of a namespace: an identity, or an array with one."""
    packed: bytes = msgpack.packb(record)
    return packed


def unpack_record(data: bytes) -> Any:
    """Return what was packed; raises ValueError for bytes that are no record."""
    try:
        return msgpack.unpackb(data, max_array_len=_MAX_PARTS, max_map_len=_MAX_FIELDS, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"no record of a namespace: {error}") from error


def identity_in(found: Any) -> Mapping[str, str | int]:
    """Return a part of a record if it is an identity; raises ValueError otherwise."""
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, str | int) for name, value in found.items()
    ):
        raise ValueError(f"no identity of a namespace: {found!r:.200}")
    return found
