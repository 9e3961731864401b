"""Integrity check of the index: every invariant, recomputed from the locations alone.

It is slow on purpose: it shares no shortcut with the code that it checks.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from tiercache.core import ABSENT, Tier
from tiercache.index.node import ALIVE, BITS, Node

if TYPE_CHECKING:
    from tiercache.index.forest import Forest


def check_integrity(forest: Forest) -> None:
    """Raise AssertionError naming the first invariant of `forest` that does not hold."""
    nodes = list(forest.nodes())
    for node in nodes:
        _check_shape(forest, node)
        _check_contents(forest, node)
    for node in reversed(nodes):  # children before parents
        _check_announcements(node)
    _check_pins(forest, nodes)
    _check_ownership(forest, nodes)
    _check_totals(forest, nodes)
    _check_queues(forest, nodes)


def _check_shape(forest: Forest, node: Node) -> None:
    name = _name(node)
    if node.parent is None:
        assert (node.edge, node.pages) == (b"", 0), f"{name} is linked as a root and has an edge"
        assert forest._roots.get(node.extra) is node, f"{name} is linked under another extra than its own"
        assert node.children or node.ends, f"{name} is an empty root that nobody holds"
    else:
        assert node.edge, f"{name} has an empty edge"
        assert len(node.edge) == node.pages * forest.page_size * 8, f"{name}: its edge is not {node.pages} whole pages"
        assert node.end == node.parent.end + node.pages, f"{name} does not end where its edge does"
        assert node.extra == node.parent.extra, f"{name} is in the tree of another extra"
    assert node.where.shape == (len(Tier), len(forest.page_pools), node.pages), f"{name}: locations of shape {node.where.shape}"
    assert node.keys is None or len(node.keys) == node.pages, f"{name}: {len(node.keys or ())} keys for {node.pages} pages"
    for first, child in node.children.items():
        assert child.parent is node, f"{_name(child)} does not know its parent"
        assert child.edge[: forest.page_size * 8] == first, f"{_name(child)} hangs under the wrong page"


def _check_contents(forest: Forest, node: Node) -> None:
    name, states = _name(node), node.states or [[ABSENT] * len(forest.state_pools)] * len(Tier)
    assert node.parent or node.states is None, f"{name} is a root with a state"
    assert node.states is None or any(at != ABSENT for tier in states for at in tier), f"{name} keeps an empty state"
    assert [len(tier) for tier in states] == [len(forest.state_pools)] * len(Tier), f"{name}: states of a wrong shape"
    rows = [[*map(list, node.where[tier]), *([at] for at in states[tier])] for tier in Tier]
    resident = [[sum(at >= 0 for at in row) for row in tier] for tier in rows]
    assert node.resident == resident, f"{name} counts {node.resident} objects and has {resident}"
    in_flight = sum(at < ABSENT for tier in rows for row in tier for at in row)
    assert node.in_flight == in_flight, f"{name} counts {node.in_flight} in flight and has {in_flight}"
    for counted, tiers in ((node.whole, tuple(Tier)), (node.near, (Tier.DEVICE, Tier.HOST))):
        run = next((page for page in range(node.pages) if (node.where[tiers, :, page] < 0).all(axis=0).any()), node.pages)
        assert counted == run, f"{name}: {counted} whole pages in {tiers} are counted, {run} are there"
    complete = bool(forest.state_pools) and all(any(tier[pool] >= 0 for tier in states) for pool in range(len(forest.state_pools)))
    near = bool(forest.state_pools) and all(max(pair) >= 0 for pair in zip(*states[: Tier.STORAGE], strict=True))
    assert node.state_near == near, f"{name}: its state near is {near}, not {node.state_near}"
    own = sum(1 << tier for tier in Tier if any(resident[tier])) | complete << ALIVE
    assert node.own == own, f"{name} announces {node.own:b} of itself and has {own:b}"


def _check_announcements(node: Node) -> None:
    for bit in BITS:
        below = sum(child.shown >> bit & 1 for child in node.children.values())
        assert node.below[bit] == below, f"{_name(node)} counts {node.below[bit]} children with bit {bit}, {below} announced it"
    if node.parent is not None:
        held = node.own | sum(bool(node.below[bit]) << bit & ~node.own for bit in BITS)
        assert node.shown == held, f"{_name(node)} announced {node.shown:b} and its subtree holds {held:b}"


def _check_pins(forest: Forest, nodes: list[Node]) -> None:
    pins = [Counter[Node]() for _ in Tier]
    for pin in forest._pins:
        assert not pin.node.is_removed, f"{_name(pin.node)} was removed while pinned"
        for tier in pin.tiers:
            pins[tier].update(pin.node.path())
    ends = Counter(pin.node for pin in forest._pins)
    for node in nodes:
        assert node.pins == [pins[tier][node] for tier in Tier], f"{_name(node)} counts pins {node.pins}"
        at_end = [sum(pin.node is node and tier in pin.tiers for pin in forest._pins) for tier in Tier]
        assert node.state_pins == at_end, f"{_name(node)} counts pins {node.state_pins} of its state, there are {at_end}"
        assert node.ends == ends[node], f"{_name(node)} counts {node.ends} ends of pins, there are {ends[node]}"


def _check_ownership(forest: Forest, nodes: list[Node]) -> None:
    """Check that a slot or handle, present or pending, belongs to one object only."""
    for tier in (Tier.DEVICE, Tier.HOST):
        for number, pool in enumerate(forest.pools):
            row = number - len(forest.page_pools)
            at = [node.where[tier, number] if row < 0 else np.array([node.state(tier, row)]) for node in nodes]
            flat = np.concatenate([*at, np.empty(0, np.int64)])
            owned = np.where(flat < ABSENT, -2 - flat, flat)[flat != ABSENT]
            unique, count = np.unique(owned, return_counts=True)
            assert (count == 1).all(), f"{pool} locations {unique[count > 1].tolist()} are owned twice in tier {tier.name}"


def _check_totals(forest: Forest, nodes: list[Node]) -> None:
    for tier in Tier:
        total = [
            sum(node.resident[tier][pool] for node in nodes if not (node.pins if pool < len(forest.page_pools) else node.state_pins)[tier])
            for pool in range(len(forest.pools))
        ]
        assert forest._evictable[tier] == total, f"tier {tier.name}: {forest._evictable[tier]} evictable by count, {total} by sum"
    near = 1 << Tier.DEVICE | 1 << Tier.HOST
    far = sum(node.pages for node in nodes if node.own >> Tier.STORAGE & 1 and not node.own & near)
    assert forest._far_pages == far, f"{forest._far_pages} pages known to be stored only by count, {far} by sum"


def _check_queues(forest: Forest, nodes: list[Node]) -> None:
    """Check what the eviction queues rely on: unit rows that are current or marked, nearest states above, and digests."""
    for node in nodes:
        assert not forest._units.stale(node), f"the row of {_name(node)} is out of date and it is not marked"
        above = next((at.end for at in node.path() if at is not node and at.is_complete), 0)
        assert node.above == above, f"{_name(node)} has its nearest state above at {node.above}, not {above}"
        start = forest._prefixes.start(node.extra)
        path = b"".join(at.edge for at in reversed(list(node.path())))
        digests = forest._prefixes.of(np.frombuffer(path, "<u8"), start)
        assert node.digests.tolist() == digests[node.start : node.end].tolist(), f"{_name(node)} has wrong digests"


def _name(node: Node) -> str:
    return f"node [{node.start}, {node.end})" + (f" of extra {node.extra!r}" if node.extra else "")
