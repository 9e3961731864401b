"""Table of the namespaces of a store on a disk, and the LMDB value of each.

A value is msgpack [number, identity (without its salt) or nil, whether the namespace has states].
"""

from __future__ import annotations

from collections.abc import Iterable

from tiercache.storage.base import NamespaceRecord
from tiercache.storage.records import identity_in, pack_record, unpack_record


def pack_name(number: int, record: NamespaceRecord | None) -> bytes:
    """Return the value of a namespace with this number, whose record may not be known."""
    return pack_record([number, dict(record.identity) if record else None, bool(record and record.states)])


class Names:
    """Table of namespaces, by name and by number.

    Thread safety: none of its own; the catalog changes the table under its writer lock.
    """

    def __init__(self) -> None:
        self.ids: dict[bytes, int] = {}
        """Number of each namespace."""
        self.records: dict[bytes, NamespaceRecord] = {}
        """Record of each namespace whose identity is known."""
        self.last = 0
        """Largest number of any namespace, including those whose names cannot be read any more."""
        self._by_id: dict[int, bytes] = {}

    def add(self, namespace: bytes, number: int, record: NamespaceRecord | None = None) -> None:
        """Add a namespace that already has a number."""
        self.ids[namespace] = number
        self._by_id[number] = namespace
        self.last = max(self.last, number)
        if record is not None:
            self.records[namespace] = record

    def add_packed(self, namespace: bytes, value: bytes) -> None:
        """Add a namespace that a value describes; raise ValueError for a malformed value."""
        try:
            number, identity, states = unpack_record(value)
            if type(number) is not int or not 0 < number < 2**31:
                raise ValueError(f"no number of a namespace: {number!r}")
            record = (
                None if identity is None else NamespaceRecord(namespace, identity_in(identity), bool(states))
            )
        except (ValueError, TypeError) as error:
            raise ValueError(f"the record of namespace {namespace.hex()} is not readable: {error}") from error
        self.add(namespace, number, record)

    def number(self, namespace: bytes) -> int:
        """Return the number of a namespace; a namespace without one gets the next number."""
        if namespace not in self.ids:
            self.add(namespace, self.last + 1)
        return self.ids[namespace]

    def forget(self, namespaces: Iterable[bytes]) -> None:
        """Remove these namespaces."""
        for namespace in namespaces:
            del self._by_id[self.ids.pop(namespace)]

    def name(self, number: int) -> bytes:
        """Return the namespace with this number, or b"" if there is none."""
        return self._by_id.get(number, b"")

    def packed(self, namespace: bytes) -> bytes:
        """Return the value that the catalog stores under a namespace."""
        return pack_name(self.ids[namespace], self.records.get(namespace))
