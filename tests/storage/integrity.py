"""Checks of the tables of stores: every sum and every link, counted anew, while no other call is running."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from tiercache_backends.file import FileBackend
from tiercache_backends.file.extents import ExtentAllocator
from tiercache_backends.file.state import StoreState
from tiercache_backends.memory import MemoryBackend

from tiercache.storage.base import StorageBackend
from tiercache.storage.pages import BROKEN, PageTable
from tiercache.storage.residents import LEAVING, Residents
from tiercache.storage.wrappers import unwrap


def check_tables(store: StorageBackend) -> None:
    """Raise AssertionError unless all counts of a store add up; other stores than these have no tables."""
    inner = unwrap(store)
    if isinstance(inner, FileBackend):
        check_state(inner._state)
    elif isinstance(inner, MemoryBackend):
        objects = inner._objects.values()
        assert inner._used == sum(inner.footprint.of(item.meta.length) for item in objects)
        check_residents(inner._residents)


def check_state(state: StoreState) -> None:
    """Raise AssertionError unless free + used = capacity and no two objects share a block."""
    objects = state._objects
    check_extents(state._allocator)
    check_residents(objects)
    rows = objects.residents().tolist()
    assert not state._busy, "no object is being stored or removed"
    assert not state._leaving, "no removed object is being read"
    assert not any(objects.pins[row] for row in rows), "no pin is held"
    held = sorted(extent for row in rows for extent in objects.extents(row))
    assert all(a.start + a.blocks <= b.start for a, b in pairwise(held)), "no two objects share a block"
    used = sum(extent.blocks for extent in held) + state._abandoned
    assert used + state._allocator.free == state._allocator.size, "free + used = capacity"


def check_extents(space: ExtentAllocator) -> None:
    """Raise AssertionError unless free extents are disjoint, in one slab each, joined and counted."""
    by_start, slab = space._by_start, space.slab_blocks
    assert space.free == sum(by_start.values()) <= space.size, "free blocks are counted right"
    assert space._by_end == {s + c: s for s, c in by_start.items()}, "both views name the same extents"
    assert {s for b in space._bins for s in b} == set(by_start), "every free extent is in one bin"
    ordered = sorted(by_start.items())
    for (start, count), (following, _) in pairwise(ordered):
        assert start + count <= following, "free extents are disjoint"
        assert start + count < following or following % slab == 0, "free neighbours are joined"
    assert all(s // slab == (s + c - 1) // slab for s, c in ordered), "an extent lies in one slab"


def check_residents(residents: Residents) -> None:
    """Raise AssertionError unless keys, links and sums agree with a fresh count."""
    pages, length = residents.pages, residents.length
    check_pages(pages)
    rows = residents.residents().tolist()
    assert len(rows) == residents.count, "objects are counted right"
    assert sum(length[row] for row in rows) == residents.payload, "payload bytes are counted right"
    _check_owners(residents, rows)
    assert all(residents.find(residents.digest(row)) == row for row in rows), "an object is found by its key"
    kv, states = Counter[int](), Counter[int]()
    for row in rows:
        (states if residents.attached[row] else kv)[residents.page[row]] += 1
    every = list(nodes_of(pages))
    assert all(pages.kv[n] == kv[n] and pages.states[n] == states[n] for n in every), "objects by kind"
    pages.recount_orphans()
    nodes = [node for node in every if pages.first[node] >= 0]
    assert all(pages.nbytes[node] == sum(length[row] for row in residents.rows_of(node)) for node in nodes)
    before = [(pages.live[node], pages.flags[node] & BROKEN) for node in nodes]
    unproven_bytes = pages.unproven_bytes
    pages.recount_worth()
    assert unproven_bytes == pages.unproven_bytes, "bytes that never helped are counted right"
    after = [(pages.live[node], pages.flags[node] & BROKEN) for node in nodes]
    assert before == after, "what is live and what is broken"


def _check_owners(residents: Residents, rows: Sequence[int]) -> None:
    owners, bytes_of = residents.owners, residents.footprint.of
    if not owners.active:
        return
    used = Counter[int]()
    for row in rows:
        used[owners.of(residents.namespace[row])] += bytes_of(residents.length[row])
    assert owners.used == [used[owner] for owner in range(len(owners.names))], "each owner's bytes"
    columns: dict[str, Any] = residents.columns
    leaving = np.flatnonzero(columns["state"][: residents.used] == LEAVING)
    found = int(bytes_of(columns["length"][leaving]).sum())
    assert sum(owners.extra) == found, "what is leaving counts, and nothing else that is not found"


def check_pages(pages: PageTable) -> None:
    """Raise AssertionError unless every node is found by its key, is needed, and is counted right."""
    children = np.zeros(len(pages.columns["parent_node"]), np.int64)
    nodes = list(nodes_of(pages))
    for node in nodes:
        assert pages.find(pages.key(node)) == node, "a page is found by its key"
        needed = pages.first[node] >= 0 or pages.children[node] or pages.holds[node]
        assert needed, "a page that nothing needs is freed"
        assert pages.parent_node[node] < 0 or pages.kv[node], "only a page that is stored follows another"
        if pages.parent_node[node] >= 0:
            children[pages.parent_node[node]] += 1
    assert (children == pages.columns["children"])[nodes].all(), "children are counted right"


def nodes_of(pages: PageTable) -> Iterator[int]:
    """Return the nodes of a table that are in use."""
    free = set()
    node = pages._free
    while node >= 0:
        free.add(node)
        node = pages.chain[node]
    return (node for node in range(pages.used) if node not in free)
