"""Namespaces of a `file` store: the small number by which its records name each one, and what was registered of it."""

from __future__ import annotations

from tiercache.storage.base import NamespaceRecord
from tiercache_backends.local.names import Name, pack_name


class Names:
    """Namespaces by name and by number.

    Thread safety: none of its own; the catalog changes it under its writer lock.
    """

    def __init__(self) -> None:
        self.ids: dict[bytes, int] = {}
        self.records: dict[bytes, NamespaceRecord] = {}
        self.last = 0
        """Greatest number that stands for a namespace, including one whose name cannot be read any more."""
        self._by_id: dict[int, bytes] = {}

    def add(self, namespace: bytes, number: int, record: NamespaceRecord | None = None) -> None:
        """Add a namespace that already has a number."""
        self.ids[namespace] = number
        self._by_id[number] = namespace
        self.last = max(self.last, number)
        if record is not None:
            self.records[namespace] = record

    def number(self, namespace: bytes) -> int:
        """Return the number of a namespace; give it the next one if it has none."""
        if namespace not in self.ids:
            self.add(namespace, self.last + 1)
        return self.ids[namespace]

    def name(self, number: int) -> bytes:
        """Return the namespace with this number; empty where there is none."""
        return self._by_id.get(number, b"")

    def packed(self, namespace: bytes) -> bytes:
        """Return the value that the catalog stores under a namespace."""
        return pack_name(Name(self.ids[namespace], self.records.get(namespace)))
