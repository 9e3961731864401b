"""In-memory table of the objects of a `file` store: what every store knows of them, and where each lies."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tiercache.storage.checksum import CHECKSUM_BYTES, MAC_BYTES, NO_MAC, Sealed
from tiercache.storage.residents import Loaded, Residents
from tiercache_backends.file import catalog
from tiercache_backends.file.records import DEPTH_KNOWN, PARENT_KNOWN, words_of
from tiercache_backends.file.space import Extent


class Placement(NamedTuple):
    """Everything needed to read an object: its payload bytes, its seal, and its extents in payload order."""

    length: int
    sealed: Sealed
    extents: tuple[Extent, ...]


class Facts(NamedTuple):
    """Contents of an object's catalog record, apart from its keys and its place. `space`: the namespace's id."""

    number: int
    length: int
    depth: int
    space: int
    sealed: Sealed


class Objects(Residents):
    """Residents with their place and their seal. A namespace is identified by its id in the catalog.

    Thread safety: none of its own; the store calls it under its mutex.
    """

    start: memoryview
    first_blocks: memoryview
    more: memoryview

    def __init__(self, *, with_macs: bool) -> None:
        self._further: dict[int, tuple[Extent, ...]] = {}
        macs = {"mac": f"V{MAC_BYTES}"} if with_macs else {}
        super().__init__({"start": "i8", "blocks": "u4", "more": "u2", "checksum": f"V{CHECKSUM_BYTES}", **macs})

    def load_catalog(self, loaded: catalog.Loaded) -> None:
        """Take in all records of a catalog at once, oldest first, into an empty table; no digest may occur twice."""
        records = loaded.records
        known = np.flatnonzero(records["flags"] & PARENT_KNOWN)
        depths = np.where(records["flags"] & DEPTH_KNOWN, records["depth"], 0)
        digests, parents = words_of(records, "digest"), words_of(records, "parent")
        self.load(Loaded(digests, parents, known, records["number"], records["length"], depths, records["namespace"]))
        for name in self.columns.keys() & {"start", "blocks", "more", "checksum", "mac"}:
            self.columns[name][: len(records)] = records[name]
        rows = np.flatnonzero(records["more"]).tolist()
        self._further = {row: loaded.extents[int(records["number"][row])] for row in rows}

    def store(self, facts: Facts, digest: bytes, node: int, parent: int | None, extents: tuple[Extent, ...]) -> int:
        """Take in a new object, as `add` does, with its place and seal; return its row."""
        row = self.add(digest, node, parent, facts.number, facts.length, facts.space, facts.depth)
        at = row * CHECKSUM_BYTES  # a MAC is as long
        self._checksum[at : at + CHECKSUM_BYTES] = facts.sealed.checksum
        if self._mac is not None:
            self._mac[at : at + MAC_BYTES] = facts.sealed.mac
        self.start[row], self.first_blocks[row], self.more[row] = extents[0].start, extents[0].blocks, len(extents) - 1
        if len(extents) > 1:
            self._further[row] = extents[1:]
        return row

    def drop(self, row: int) -> None:
        """Free the row of an object that left, so that another object may take it."""
        self._further.pop(row, None)
        super().drop(row)

    def placement(self, row: int) -> Placement:
        """Return where an object lies and how it is verified."""
        at = row * CHECKSUM_BYTES
        mac = NO_MAC if self._mac is None else bytes(self._mac[at : at + MAC_BYTES])
        return Placement(self.length[row], Sealed(bytes(self._checksum[at : at + CHECKSUM_BYTES]), mac), self.extents(row))

    def extents(self, row: int) -> tuple[Extent, ...]:
        """Return the extents of an object, in payload order."""
        first = (Extent(self.start[row], self.first_blocks[row]),)
        return first + self._further[row] if self.more[row] else first

    def blocks(self, row: int) -> int:
        """Return how many blocks an object takes."""
        return sum(extent.blocks for extent in self.extents(row)) if self.more[row] else self.first_blocks[row]

    def _bind(self) -> None:
        super()._bind()
        self.start, self.first_blocks, self.more = (self.columns[name].data for name in ("start", "blocks", "more"))
        raw = {name: self.columns[name].view(np.uint8).data for name in ("checksum", "mac") if name in self.columns}
        self._checksum, self._mac = raw["checksum"], raw.get("mac")
