"""Integrity check of the index: every invariant, recomputed from the locations alone.

The check is slow, because it uses none of the counters that it checks.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from tiercache.core import ABSENT, Locations, PoolName, Tier, pending
from tiercache.index.node import ALIVE, BITS, Node

if TYPE_CHECKING:
    from tiercache.index.eviction_order import EvictionColumns
    from tiercache.index.radix_tree import RadixTree


def check_integrity(tree: RadixTree, columns: EvictionColumns) -> None:
    """Raise AssertionError naming the first invariant of `tree` that does not hold."""
    nodes = list(tree.nodes())
    for node in nodes:
        _check_shape(tree, node)
        _check_contents(tree, node)
    for node in reversed(nodes):  # children before parents
        _check_announcements(node)
    _check_pins(tree, nodes)
    _check_ownership(tree)
    _check_totals(tree, nodes)
    _check_columns(tree, columns, nodes)


def owned(tree: RadixTree, tier: Tier, pool: PoolName) -> Locations:
    """Return every location of a pool in a near tier, both present and pending, as plain numbers."""
    number = tree.number[pool]
    state = number - len(tree.page_pools)
    parts = [
        node.where[tier, number] if state < 0 else np.array([node.state(tier, state)])
        for node in tree.nodes()
    ]
    held = np.concatenate([*parts, np.empty(0, np.int64)])
    found: Locations = np.where(held < ABSENT, pending(held), held)[held != ABSENT]
    return found


def _check_shape(tree: RadixTree, node: Node) -> None:
    name = _name(node)
    if node.parent is None:
        assert (node.edge, node.pages) == (b"", 0), f"{name} is linked as a root and has an edge"
        assert tree._roots.get(node.extra) is node, f"{name} is linked under another extra than its own"
        assert node.children or node.ends, f"{name} is an empty root that no pin holds"
    else:
        assert node.edge, f"{name} has an empty edge"
        assert len(node.edge) == node.pages * tree.page_size * 8, (
            f"{name}: its edge is not {node.pages} whole pages"
        )
        assert node.end == node.parent.end + node.pages, f"{name} does not end where its edge does"
        assert node.extra == node.parent.extra, f"{name} is in the tree of another extra"
    assert node.where.shape == (len(Tier), len(tree.page_pools), node.pages), (
        f"{name}: locations of shape {node.where.shape}"
    )
    assert node.keys is None or len(node.keys) == node.pages, (
        f"{name}: {len(node.keys or ())} keys for {node.pages} pages"
    )
    for first, child in node.children.items():
        assert child.parent is node, f"{_name(child)} does not know its parent"
        assert child.edge[: tree.page_size * 8] == first, f"{_name(child)} hangs under the wrong page"


def _check_contents(tree: RadixTree, node: Node) -> None:
    name, states = _name(node), node.states or [[ABSENT] * len(tree.state_pools)] * len(Tier)
    assert node.parent or node.states is None, f"{name} is a root with a state"
    assert node.states is None or any(at != ABSENT for tier in states for at in tier), (
        f"{name} keeps an empty state"
    )
    assert [len(tier) for tier in states] == [len(tree.state_pools)] * len(Tier), (
        f"{name}: states of a wrong shape"
    )
    rows = [[*map(list, node.where[tier]), *([at] for at in states[tier])] for tier in Tier]
    resident = [[sum(at >= 0 for at in row) for row in tier] for tier in rows]
    assert node.resident == resident, f"{name} counts {node.resident} objects and has {resident}"
    in_flight = sum(at < ABSENT for tier in rows for row in tier for at in row)
    assert node.in_flight == in_flight, f"{name} counts {node.in_flight} in flight and has {in_flight}"
    for counted, tiers in ((node.complete_pages, tuple(Tier)), (node.local_pages, (Tier.DEVICE, Tier.HOST))):
        run = next(
            (page for page in range(node.pages) if (node.where[tiers, :, page] < 0).all(axis=0).any()),
            node.pages,
        )
        assert counted == run, f"{name}: {counted} whole pages in {tiers} are counted, {run} are there"
    complete = bool(tree.state_pools) and all(
        any(tier[pool] >= 0 for tier in states) for pool in range(len(tree.state_pools))
    )
    near = bool(tree.state_pools) and all(
        max(pair) >= 0 for pair in zip(*states[: Tier.STORAGE], strict=True)
    )
    assert node.state_local == near, f"{name}: its state near is {near}, not {node.state_local}"
    own = sum(1 << tier for tier in Tier if any(resident[tier])) | complete << ALIVE
    assert node.resident_mask == own, f"{name} announces {node.resident_mask:b} of itself and has {own:b}"


def _check_announcements(node: Node) -> None:
    for bit in BITS:
        below = sum(child.announced_mask >> bit & 1 for child in node.children.values())
        assert node.subtree_counts[bit] == below, (
            f"{_name(node)} counts {node.subtree_counts[bit]} children with bit {bit}, {below} announced it"
        )
    if node.parent is not None:
        # The node's own bits, and those that its children announced.
        held = node.resident_mask | sum(
            bool(node.subtree_counts[bit]) << bit & ~node.resident_mask for bit in BITS
        )
        assert node.announced_mask == held, (
            f"{_name(node)} announced {node.announced_mask:b} and its subtree holds {held:b}"
        )


def _check_pins(tree: RadixTree, nodes: list[Node]) -> None:
    held = [set[Node]() for _ in Tier]
    for pin in tree._pins:
        assert not pin.node.is_removed, f"{_name(pin.node)} was removed while pinned"
        for tier in pin.tiers:
            held[tier].update(pin.node.path())
    ends = Counter(pin.node for pin in tree._pins)
    for node in nodes:
        at_end = [sum(pin.node is node and tier in pin.tiers for pin in tree._pins) for tier in Tier]
        below = [sum(child in held[tier] for child in node.children.values()) for tier in Tier]
        pins = [here + under if node.parent else 0 for here, under in zip(at_end, below, strict=True)]
        assert node.pins == pins, f"{_name(node)} counts pins {node.pins}, there are {pins}"
        assert node.state_pins == at_end, (
            f"{_name(node)} counts pins {node.state_pins} of its state, there are {at_end}"
        )
        assert node.ends == ends[node], (
            f"{_name(node)} counts {node.ends} ends of pins, there are {ends[node]}"
        )


def _check_ownership(tree: RadixTree) -> None:
    """Check that each slot or handle, present or pending, belongs to a single object."""
    for tier in (Tier.DEVICE, Tier.HOST):
        for pool in tree.pools:
            unique, count = np.unique(owned(tree, tier, pool), return_counts=True)
            assert (count == 1).all(), (
                f"{pool} locations {unique[count > 1].tolist()} are owned twice in tier {tier.name}"
            )


def _check_totals(tree: RadixTree, nodes: list[Node]) -> None:
    for tier in Tier:
        total = [
            sum(
                node.resident[tier][pool]
                for node in nodes
                if not (node.pins if pool < len(tree.page_pools) else node.state_pins)[tier]
            )
            for pool in range(len(tree.pools))
        ]
        assert tree.counters.evictable[tier] == total, (
            f"tier {tier.name}: {tree.counters.evictable[tier]} evictable by count, {total} by sum"
        )
    near = 1 << Tier.DEVICE | 1 << Tier.HOST
    far = sum(
        node.pages
        for node in nodes
        if node.resident_mask >> Tier.STORAGE & 1 and not node.resident_mask & near
    )
    assert tree.counters.stored_only_pages == far, (
        f"{tree.counters.stored_only_pages} pages known to be stored only by count, {far} by sum"
    )


def _check_columns(tree: RadixTree, columns: EvictionColumns, nodes: list[Node]) -> None:
    """Check the row, the nearest state above, and the digests of each node.

    The row of a marked node may be out of date.
    """
    for node in nodes:
        assert not columns.stale(node), f"the row of {_name(node)} is out of date and it is not marked"
        above = next((at.end for at in node.path() if at is not node and at.is_complete), 0)
        assert node.nearest_state == above, (
            f"{_name(node)} has its nearest state above at {node.nearest_state}, not {above}"
        )
        start = tree.prefixes.start(node.extra)
        path = b"".join(at.edge for at in reversed(list(node.path())))
        digests = tree.prefixes.of(np.frombuffer(path, "<u8"), start)
        assert node.digests.tolist() == digests[node.start : node.end].tolist(), (
            f"{_name(node)} has wrong digests"
        )


def _name(node: Node) -> str:
    return f"node [{node.start}, {node.end})" + (f" of extra {node.extra!r}" if node.extra else "")
