"""Record of a namespace in a store on a disk, as one LMDB value: msgpack [number, identity without its salt or nil, states].

Values of two members, without `states`, come from earlier releases; they are read as `states` = false.
"""

from __future__ import annotations

from typing import NamedTuple

import msgpack

from tiercache.storage.base import NamespaceRecord


class Name(NamedTuple):
    """A namespace's `number`, which stands for it in records of objects, and its `record`, None until the namespace is registered."""

    number: int
    record: NamespaceRecord | None

    @property
    def states(self) -> bool:
        """Whether the namespace is known to have states."""
        return self.record is not None and self.record.states


def pack_name(name: Name) -> bytes:
    """Return the LMDB value of a name."""
    identity = None if name.record is None else dict(name.record.identity)
    packed: bytes = msgpack.packb([name.number, identity, name.states])
    return packed


def unpack_name(namespace: bytes, value: bytes) -> Name:
    """Return the name that an LMDB value describes; raises ValueError for a malformed value."""
    try:
        number, identity, states = (*msgpack.unpackb(value), False)[:3]
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"what is known of namespace {namespace.hex()} is not readable: {error}") from error
    if type(number) is not int or not 0 < number < 2**31 or not (identity is None or isinstance(identity, dict)):
        raise ValueError(f"what is known of namespace {namespace.hex()} is not readable: {number!r}, {identity!r}")
    return Name(number, None if identity is None else NamespaceRecord(namespace, identity, bool(states)))
