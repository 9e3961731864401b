"""In-memory table of the objects of a `file` store, with the extents in which each lies.

Most writes bring the pages of one sequence, none of them known. The tables take in such a batch by column and
not page by page (`hold_new`, `are_plain`). Whatever is not so plain is left to the methods of `Residents` and
`RestorablePages`, and the result is the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from tiercache.storage.checksum import CHECKSUM_BYTES, MAC_BYTES, NO_MAC
from tiercache.storage.layouts import LAYOUT_BYTES
from tiercache.storage.pages import BROKEN, NONE, Ints
from tiercache.storage.residents import RESIDENT, ObjectColumns, Residents
from tiercache.storage.restorable import RestorablePages
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

_FEW: Final = 8
"""If a batch has fewer pages than this, adding them one by one is faster than using NumPy."""


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
        rows = [self._take() for _ in digests]
        at = np.array(rows, np.int64)
        for name in self.columns.keys() & {"number", "length", "start", "blocks", "more", "checksum", "mac"}:
            self.columns[name][at] = records[name]
        self.columns["hits"][at] = self.columns["pins"][at] = 0
        if not self._add_plain(at, records, digests, nodes, parents):
            facts = (records[name].tolist() for name in ("number", "namespace", "depth"))
            for row, digest, node, parent, *known in zip(rows, digests, nodes, parents, *facts, strict=True):
                self._add(row, digest, node, parent, *known)
        self._further.update((rows[i], extents) for i, extents in further.items())
        return rows

    def _add_plain(
        self,
        rows: Ints,
        records: Records,
        digests: Sequence[bytes],
        nodes: Sequence[int],
        parents: Sequence[int | None],
    ) -> bool:
        """Let new pages be found, in columns; return False, with nothing changed, if they are not plain.

        This does the same as `_add` for each of them, if they have one layout and one namespace (see also
        `are_plain`).
        """
        n, layout = len(rows), digests[0][:LAYOUT_BYTES] if digests else b""
        if n < _FEW or not all(digest.startswith(layout) for digest in digests):
            return False
        pages, namespace_id = self.pages, int(records["namespace"][0])
        at, above = np.array(nodes), np.array([NONE if up is None else up for up in parents])
        if (records["namespace"] != namespace_id).any() or not are_plain(pages, at, above, namespace_id):
            return False
        mine, lengths, depths = self.columns, records["length"], records["depth"]
        numbers = np.maximum(records["number"], np.uint64(self.newest))
        mine["page"][rows], mine["next"][rows] = at, NONE
        mine["attached"][rows], mine["state"][rows], mine["namespace"][rows] = 0, RESIDENT, namespace_id
        mine["layout"][rows] = self._layouts.obtain(layout, n)
        columns = pages.columns
        columns["first"][at], columns["number"][at] = rows, numbers
        columns["namespace_id"][at] = namespace_id
        columns["depth"][at[depths > 0]] = depths[depths > 0]
        columns["tick"][at] = np.arange(self.clock + 1, self.clock + n + 1)
        if pages.hinted:
            pages.values.used(self.clock + 1)
        self.clock += n
        self.newest = int(numbers[-1])
        self.count += n
        self.payload += int(lengths.sum())
        if self.owners.active:
            self.owners.used[self.owners.of(namespace_id)] += int(FOOTPRINT.of(lengths).sum())
        pages.pages_added(at, above, lengths, namespace_id)
        if self.note is not None:
            self.note(digests, True)
        return True

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


def hold_new(
    table: RestorablePages,
    pages: Sequence[bytes],
    parents: Sequence[bytes | None],
    depths: Sequence[int],
    namespace_id: int,
) -> dict[bytes, int] | None:
    """Do `hold`, `admissibility` and `expect` for page objects that are to be written in this order.

    A depth of 0 is not known. Returns the nodes of all pages and parents, which are held once each. Returns
    None, with nothing changed, if a page is known already, given twice or given before its parent, or if one
    of them may not be stored.
    """
    position = {page: i for i, page in enumerate(pages)}
    if len(position) < len(pages):
        return None
    before = [NONE if parent is None else position.get(parent, NONE) for parent in parents]
    told, above = np.array(depths, np.int64), np.array(before, np.int64)
    known = (above >= 0) & (told > 0) & (told[above] > 0)
    if (above >= np.arange(len(pages))).any() or (told[known] != told[above[known]] + 1).any():
        return None
    held: dict[bytes, int] = {}
    for i in np.flatnonzero(above < 0).tolist():
        parent = parents[i]
        if parent is not None:
            held[parent] = node = table.find(parent)
            if node < 0 or not _may_follow(table, node, depths[i], namespace_id):
                return None
    nodes = [table.obtain(page) for page in pages]
    at = np.array(nodes)
    columns = table.columns
    # A node of a page that is not stored may exist, because a call holds it or a page follows it.
    if any(columns[name][at].any() for name in ("holds", "children", "coming")) or (
        (columns["first"][at] >= 0).any()
    ):
        for node in nodes:
            table.tidy(node)
        return None
    table.admit(pages)
    columns["holds"][at] = columns["coming"][at] = 1
    columns["namespace_id"][at] = namespace_id
    columns["depth"][at] = told
    for node in held.values():
        table.holds[node] += 1
    held.update(zip(pages, nodes, strict=True))
    return held


def expected_all(table: RestorablePages, nodes: Sequence[int]) -> None:
    """Undo one `expect` of each of these nodes; a node may be given several times."""
    at = np.array(nodes, np.int64)
    columns = table.columns
    np.subtract.at(columns["coming"], at, 1)
    columns["depth"][at[(columns["coming"][at] == 0) & (columns["first"][at] < 0)]] = 0


def are_plain(table: RestorablePages, nodes: Ints, parents: Ints, namespace_id: int) -> bool:
    """Return whether `pages_added` can add the first page objects of these distinct nodes, in this order.

    A plain page follows the page before it in the order, a page that is stored and not broken, or no known
    page (NONE). Nothing is stored on it or follows it.
    """
    columns = table.columns
    if (
        (columns["first"][nodes] >= 0).any()
        or columns["children"][nodes].any()
        or columns["flags"][nodes].any()
    ):
        return False
    chained = np.zeros(len(nodes), np.bool_)
    chained[1:] = parents[1:] == nodes[:-1]
    above = parents[~chained & (parents >= 0)]
    return bool(
        (columns["kv"][above] > 0).all()
        and not (columns["flags"][above] & BROKEN).any()
        and (columns["namespace_id"][above] == namespace_id).all()
    )


def _may_follow(table: RestorablePages, parent: int, depth: int, namespace_id: int) -> bool:
    """Return whether a new page of this depth (0: not known) may follow the page of `parent`."""
    return bool(
        (table.kv[parent] or table.coming[parent])
        and table.namespace_id[parent] == namespace_id
        and (not depth or not table.depth[parent] or depth == table.depth[parent] + 1)
    )
