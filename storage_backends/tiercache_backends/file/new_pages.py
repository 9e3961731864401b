"""Batches of new pages, which a table of pages takes in by column and not page by page.

Most writes are of this kind: the pages of one sequence, none of them known. Whatever is not so plain is left
to the methods of `RestorablePages`, and the result is the same either way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tiercache.storage.pages import BROKEN, NONE, Ints
from tiercache.storage.restorable import RestorablePages


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
