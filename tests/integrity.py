"""Checks of an index and a controller: every invariant, recomputed from the places, without counters."""

from __future__ import annotations

from collections import Counter

import numpy as np

from tiercache.controller import HybridCacheController
from tiercache.controller.context import ControllerContext
from tiercache.core import ABSENT, Locations, PoolName, Tier, pending
from tiercache.index import HybridIndex
from tiercache.index.eviction_order import EvictionColumns
from tiercache.index.node import ALIVE, BITS, Node
from tiercache.index.radix_tree import RadixTree


def check_controller(controller: HybridCacheController) -> None:
    """Raise AssertionError for a slot, block or pin that is lost or held twice, while no method runs.

    An owner is the index, a request, an operation or a fence; each slot, block and pin has exactly one.
    """
    context, parking = controller._context, controller._parking
    context.drain()
    check_index(context.index)
    quarantined = sum(context.allocator.blocks_of(p, n) for p, n in context.in_flight.quarantined.items())
    _check_in_flight(context, quarantined)
    retired = context.device_work.retired
    operations = [*context.in_flight.operations.values(), *context.in_flight.stranded.values()]
    pins = {
        *(pin for admission in controller._admissions for pin in (admission._pin, admission._prefetch.pin)),
        *(ticket._prefetch.pin for ticket in controller._prefetches._tickets if ticket._prefetch),
        *(pin for pinned in controller._pins._by_key.values() for pin in (pinned.path, pinned.state)),
        *(pin for one in (*retired, *parking.holds._held) for pin in one.pins),
        *(pin for one in operations for pin in getattr(one, "pins", ())),
    }
    assert context.index._tree._pins == pins - {None}, "a pin has no owner"
    private = [
        *(admission.slots.private() for admission in controller._admissions),
        *(one.slots for one in operations if hasattr(one, "slots")),
    ]
    for name, pool in context.device.items():
        held = np.concatenate(
            [
                owned(context.index, Tier.DEVICE, name),
                *(one.slots[name] for one in retired if name in one.slots),
                *(slots[name] for slots in private if name in slots),
            ]
        )
        assert len(np.unique(held)) == len(held), f"a device slot of pool {name} is held twice"
        assert len(held) == pool.capacity - pool.available, f"pool {name}: {len(held)} slots are held"
    blocks, arena = quarantined, context.arena
    for name in context.host:
        parked = [hold.own[name] for hold in parking.holds._held if name in hold.own]
        handles = np.concatenate([owned(context.index, Tier.HOST, name), *parked])
        assert len(np.unique(handles)) == len(handles), f"a host object of pool {name} is held twice"
        blocks += context.allocator.blocks_of(name, len(handles))
    taken = arena.blocks - arena.available - arena.withheld
    assert blocks == taken, f"{blocks} blocks are held, {taken} taken"


def _check_in_flight(context: ControllerContext, quarantined_blocks: int) -> None:
    """Check that each claim, held block and `storing` flag belongs to an operation under way."""
    table = context.in_flight
    operations = [*table.operations.values(), *table.stranded.values()]
    assert not any(o.done for o in operations), "an operation that has landed is still counted"
    claimed = np.unique(np.concatenate([claims.ravel() for claims in table._claims.values()])).tolist()
    assert set(claimed) <= {0, *table.operations}, "an object waits for an operation that is over"
    if not any(o.kind == "write" for o in operations):
        assert not table.writing.held + table.copying.held, "blocks are held for a write that is over"
        assert not any(storing.any() for storing in table.storing.values()), "nothing is being stored"
    if not table.count("fetch"):
        assert table.fetching.held == quarantined_blocks, "blocks are held for a fetch that is over"


def no_pin_is_left(controller: HybridCacheController) -> bool:
    """Return whether nobody holds a pin in the controller's index."""
    return not controller._context.index._tree._pins


def check_index(index: HybridIndex) -> None:
    """Raise AssertionError naming the first invariant of the index that does not hold."""
    tree, columns = index._tree, index._columns
    nodes = list(tree.nodes())
    for node in nodes:
        _check_shape(tree, node)
        _check_contents(tree, node)
    for node in reversed(nodes):  # children before parents
        _check_announcements(node)
    _check_pins(tree, nodes)
    _check_ownership(index)
    _check_totals(tree, nodes)
    _check_columns(tree, columns, nodes)


def owned(index: HybridIndex, tier: Tier, pool: PoolName) -> Locations:
    """Return every location of a pool in a near tier, both present and pending, as plain numbers."""
    tree = index._tree
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
        assert len(node.edge) == node.pages * tree.page_size * 8, f"{name}: an edge of other pages"
        assert node.end == node.parent.end + node.pages, f"{name} does not end where its edge does"
        assert node.extra == node.parent.extra, f"{name} is in the tree of another extra"
    assert node.where.shape == (len(Tier), len(tree.page_pools), node.pages), f"{name}: {node.where.shape}"
    assert node.keys is None or len(node.keys) == node.pages, f"{name}: {len(node.keys or ())} keys"
    for first, child in node.children.items():
        assert child.parent is node, f"{_name(child)} does not know its parent"
        assert child.edge[: tree.page_size * 8] == first, f"{_name(child)} hangs under the wrong page"


def _check_contents(tree: RadixTree, node: Node) -> None:
    name, states = _name(node), node.states or [[ABSENT] * len(tree.state_pools)] * len(Tier)
    assert node.parent or node.states is None, f"{name} is a root with a state"
    assert node.states is None or any(at != ABSENT for tier in states for at in tier), f"{name}: none left"
    assert [len(tier) for tier in states] == [len(tree.state_pools)] * len(Tier), f"{name}: a wrong shape"
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
        assert node.announced_mask == held, f"{_name(node)} announced {node.announced_mask:b}, not {held:b}"


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
        assert node.state_pins == at_end, f"{_name(node)} has {node.state_pins} pins of states, not {at_end}"
        assert node.ends == ends[node], f"{_name(node)} counts {node.ends} ends of pins, not {ends[node]}"


def _check_ownership(index: HybridIndex) -> None:
    """Check that each slot or handle, present or pending, belongs to a single object."""
    for tier in (Tier.DEVICE, Tier.HOST):
        for pool in index.pools:
            unique, count = np.unique(owned(index, tier, pool), return_counts=True)
            assert (count == 1).all(), f"{pool} {unique[count > 1].tolist()} are owned twice in {tier.name}"


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
    """Check each node's digests, nearest state above, and row, unless it is marked as out of date."""
    for node in nodes:
        assert not _is_stale(columns, node), f"the row of {_name(node)} is out of date and it is not marked"
        above = next((at.end for at in node.path() if at is not node and at.is_complete), 0)
        assert node.nearest_state == above, f"{_name(node)} is {node.nearest_state} from a state, not {above}"
        start = tree.prefixes.start(node.extra)
        path = b"".join(at.edge for at in reversed(list(node.path())))
        digests = tree.prefixes.of(np.frombuffer(path, "<u8"), start)
        assert node.digests.tolist() == digests[node.start : node.end].tolist(), f"{_name(node)}: its digests"


def _is_stale(columns: EvictionColumns, node: Node) -> bool:
    """Return whether the row of a node that is not marked is wrong, so that evictions would err."""
    if node in columns._marked or node.parent is None:
        return False
    row, now = node.row, [kind.of(node) for kind in columns.kinds]
    if row < 0:
        return node.can_answer or any(now)
    shared, by_kind = shared_of(columns, row), _by_kind_of(columns, row)
    version = columns._version_of[row]
    columns._write(node)
    columns._version_of[row] = version
    # A row may show more units than the node has: a pin removes or reduces units without a mark, and `take`
    # corrects that. A row must not lack a unit, or describe one wrongly.
    missed = any(
        fresh[0] and (not old[0] or (fresh[0] == old[0] and fresh != old))
        for fresh, old in zip(_by_kind_of(columns, row), by_kind, strict=True)
    )
    return missed or shared != shared_of(columns, row)


def shared_of(columns: EvictionColumns, row: int) -> dict[str, int]:
    """Return the shared columns of a row, by name, without its version."""
    return {name: int(column[row]) for name, column in columns.shared.items() if name != "version"}


def _by_kind_of(columns: EvictionColumns, row: int) -> list[tuple[int, ...]]:
    """Return the columns of a row that depend on the kind, by kind."""
    return [
        tuple(int(column[number, row]) for column in columns.by_kind.values())
        for number in range(len(columns.kinds))
    ]


def _name(node: Node) -> str:
    return f"node [{node.start}, {node.end})" + (f" of extra {node.extra!r}" if node.extra else "")
