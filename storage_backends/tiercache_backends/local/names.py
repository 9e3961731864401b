"""What a store on a disk keeps of a namespace, as one value of LMDB's: msgpack [id, identity without its salt, or nil, states].

Values of two members, without `states`, are of earlier releases: theirs have none.
"""

from __future__ import annotations

from typing import NamedTuple

import msgpack

from tiercache.storage.base import NamespaceRecord


class Name(NamedTuple):
    """A namespace's `number`, which stands for it in records of objects, and its `record`; None until somebody registers it."""

    number: int
    record: NamespaceRecord | None

    @property
    def states(self) -> bool:
        """Is it known to have states?"""
        return self.record is not None and self.record.states


def pack_name(name: Name) -> bytes:
    """The value."""
    identity = None if name.record is None else dict(name.record.identity)
    packed: bytes = msgpack.packb([name.number, identity, name.states])
    return packed


def unpack_name(namespace: bytes, value: bytes) -> Name:
    """Back from that; raises ValueError for a value that is none."""
    try:
        number, identity, states = (*msgpack.unpackb(value), False)[:3]
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"what is known of namespace {namespace.hex()} is not readable: {error}") from error
    if type(number) is not int or not 0 < number < 2**31 or not (identity is None or isinstance(identity, dict)):
        raise ValueError(f"what is known of namespace {namespace.hex()} is not readable: {number!r}, {identity!r}")
    return Name(number, None if identity is None else NamespaceRecord(namespace, identity, bool(states)))
