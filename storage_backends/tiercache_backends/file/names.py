"""What a `file` store knows of namespaces: a small number for each, which its records bear, and what was registered of it."""

from __future__ import annotations

from tiercache.storage.base import NamespaceRecord
from tiercache_backends.local.names import Name, pack_name


class Names:
    """Namespaces by name and by number.

    Thread safety: none of its own; the catalog calls it under its lock.
    """

    def __init__(self) -> None:
        self.ids: dict[bytes, int] = {}
        self.records: dict[bytes, NamespaceRecord] = {}
        self.last = 0
        """The greatest number that stands for a namespace, also for one whose name cannot be read any more."""
        self._by_id: dict[int, bytes] = {}

    def add(self, namespace: bytes, number: int, record: NamespaceRecord | None = None) -> None:
        """Take in a namespace that has a number already."""
        self.ids[namespace] = number
        self._by_id[number] = namespace
        self.last = max(self.last, number)
        if record is not None:
            self.records[namespace] = record

    def number(self, namespace: bytes) -> int:
        """The number of a namespace, which gets one if it has none."""
        if namespace not in self.ids:
            self.add(namespace, self.last + 1)
        return self.ids[namespace]

    def name(self, number: int) -> bytes:
        """The namespace with a number; empty where there is none."""
        return self._by_id.get(number, b"")

    def packed(self, namespace: bytes) -> bytes:
        """What the catalog keeps under a namespace."""
        return pack_name(Name(self.ids[namespace], self.records.get(namespace)))
