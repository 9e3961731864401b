"""In-memory table of the objects of a `file` store, with the extents in which each lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tiercache.storage.checksum import CHECKSUM_BYTES, MAC_BYTES, NO_MAC
from tiercache.storage.pages import Ints
from tiercache.storage.residents import ObjectColumns, Residents, add_all
from tiercache_backends.file.records import (
    DEPTH_KNOWN,
    FOOTPRINT,
    PARENT_KNOWN,
    CatalogContents,
    Extent,
    Places,
    Records,
    words_of,
)


class ObjectTable(Residents):
    """Table of the objects that can be read, with their place, checksum and MAC.

    A namespace is identified by its id in the catalog.

    Thread safety: none of its own; the store calls it under its mutex.
    """

    start: memoryview
    """First block of the first extent, by row."""
    first_blocks: memoryview
    """Number of blocks of the first extent, by row."""
    more: memoryview
    """Number of further extents, by row."""

    def __init__(self, *, with_macs: bool, clock: Callable[[], float] | None = None) -> None:
        self._further: dict[int, tuple[Extent, ...]] = {}
        """Extents after the first, by row; only for objects that have any."""
        macs = {"mac": f"V{MAC_BYTES}"} if with_macs else {}
        super().__init__(
            {"start": "i8", "blocks": "u4", "more": "u2", "checksum": f"V{CHECKSUM_BYTES}", **macs},
            clock,
            FOOTPRINT,
        )

    def load_catalog(self, loaded: CatalogContents) -> None:
        """Fill an empty table with all records of a catalog at once, oldest first.

        No digest may occur twice.
        """
        records = loaded.records
        known = np.flatnonzero(records["flags"] & PARENT_KNOWN)
        depths = np.where(records["flags"] & DEPTH_KNOWN, records["depth"], 0)
        digests, parents = words_of(records, "digest"), words_of(records, "parent")
        self.load(
            ObjectColumns(
                digests, parents, known, records["number"], records["length"], depths, records["namespace"]
            )
        )
        for name in self.columns.keys() & {"start", "blocks", "more", "checksum", "mac"}:
            self.columns[name][: len(records)] = records[name]
        rows = np.flatnonzero(records["more"]).tolist()
        self._further = {row: loaded.extents[int(records["number"][row])] for row in rows}

    def store(
        self,
        records: Records,
        digests: Sequence[bytes],
        nodes: Sequence[int],
        parents: Sequence[int | None],
        further: Mapping[int, tuple[Extent, ...]],
    ) -> Sequence[int]:
        """Add the new objects of these records; return their rows.

        `nodes` and `parents`: see `Residents.add`. `further`: extents after the first, by position.
        """
        facts = (records[name] for name in ("number", "length", "namespace", "depth"))
        rows = add_all(self, digests, nodes, parents, *facts)
        for name in self.columns.keys() & {"start", "blocks", "more", "checksum", "mac"}:
            self.columns[name][rows] = records[name]
        self._further.update((rows[i], extents) for i, extents in further.items())
        return rows

    def drop(self, row: int) -> None:
        """Free the row of an object that was taken out, so that another object may use it."""
        self._further.pop(row, None)
        super().drop(row)

    def places(self, rows: Ints) -> Places:
        """Return the places of these objects."""
        columns, further = self.columns, self._further
        several = columns["more"][rows].nonzero()[0].tolist() if further else ()
        return Places(
            columns["start"][rows].tolist(),
            columns["blocks"][rows].tolist(),
            {i: further[int(rows[i])] for i in several},
        )

    def checksums(self, rows: Ints | list[int]) -> tuple[list[bytes], list[bytes]]:
        """Return the checksums and the MACs of these objects."""
        macs = self.columns["mac"][rows].tolist() if "mac" in self.columns else [NO_MAC] * len(rows)
        return self.columns["checksum"][rows].tolist(), macs

    def extents(self, row: int) -> tuple[Extent, ...]:
        """Return the extents of an object, in payload order."""
        first = (Extent(self.start[row], self.first_blocks[row]),)
        return first + self._further[row] if self.more[row] else first

    def blocks(self, row: int) -> int:
        """Return how many blocks an object takes."""
        return (
            sum(extent.blocks for extent in self.extents(row)) if self.more[row] else self.first_blocks[row]
        )

    def _bind(self) -> None:
        """Make the views of the columns again, after the columns were replaced by longer ones."""
        super()._bind()
        self.start, self.first_blocks, self.more = (
            self.columns[name].data for name in ("start", "blocks", "more")
        )
