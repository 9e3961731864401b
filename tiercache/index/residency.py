"""Changes of locations: by the insertion of what was computed, and by transfers.

A computed page or state is *adopted* where the device lacks it, and its slot is the index's from then on.

A destination of a transfer is first *reserved*: its location is pending, so that nobody reads it and no other
transfer fills it. Then the destination is *published* when its bytes are there, or *cancelled*:

    absent --reserve--> pending --publish--> present
                           '-----cancel-----> absent

A caller that publishes or cancels names the location that it reserved. An entry that is no longer pending at
this location stays as it is. The caller keeps the node pinned in the tiers that the transfer reads and
writes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tiercache.core import ABSENT, Locations, Mask, PoolName, Tier, full_pages, leading, pending
from tiercache.errors import InputError
from tiercache.index.base import InsertedPages, PlacedState, Span
from tiercache.index.eviction_order import EvictionQueue
from tiercache.index.node import STORED, Node
from tiercache.index.radix_tree import RadixTree

States = Mapping[int, Mapping[PoolName, int]]
"""Device slots of states, by depth (in pages) and then by pool."""


def check_pages(tree: RadixTree, tokens: int, pages: Mapping[PoolName, Locations]) -> int:
    """Return the number of pages that the slots in `pages` cover, for a request of `tokens` tokens.

    Without page pools, these are all whole pages. Raises InputError for arrays that do not fit.
    """
    if not tree.page_pools:
        if pages:
            raise InputError(
                f"slots came for pages of {', '.join(pages)}, and this index has only states; pass states"
            )
        return full_pages(tokens, tree.page_size)
    if set(pages) != set(tree.page_pools):
        raise InputError(
            f"slots came for {', '.join(pages) or 'no pool'}; pass them for {', '.join(tree.page_pools)}"
        )
    depth = len(next(iter(pages.values())))
    for pool, slots in pages.items():
        if slots.shape != (depth,) or slots.dtype != np.int64 or np.count_nonzero(slots < 0):
            raise InputError(
                f"{pool}: every page pool needs {depth} int64 slots >= 0, one per page, not {slots!r}"
            )
    if depth > full_pages(tokens, tree.page_size):
        raise InputError(
            f"{depth} pages of {tree.page_size} tokens are more than {tokens} tokens; pass whole pages only"
        )
    return depth


def check_states(tree: RadixTree, states: States, depth: int) -> None:
    """Raise InputError for a state outside the first `depth` pages, an unknown pool, or a negative slot."""
    for at, slots in states.items():
        if not 1 <= at <= depth:
            raise InputError(
                f"a state at depth {at} is outside the {depth} pages that came with it; depths are in pages"
            )
        for pool, slot in slots.items():
            tree.check_state_pool(pool)
            if slot < 0:
                raise InputError(f"{pool}: {slot} is not a slot")


def adopt_pages(
    tree: RadixTree, node: Node, start: int, depth: int, pages: Mapping[PoolName, Locations]
) -> tuple[dict[PoolName, InsertedPages], list[Node]]:
    """Enter the given slots for those pages [start, depth) of the path to `node` that the device lacks.

    `pages` has slots from page 0 on. Returns the result for every slot from page `start` on, and the changed
    nodes, which the caller announces (see `Counters`).

        page on the device      given slot
        absent                  adopted
        present in that slot    nothing to do: the index has it already
        present in another      duplicate
        pending                 private: a transfer is filling another slot with the page
    """
    if not tree.page_pools:
        return {}, []
    is_new = start < depth and (node.start, node.end) == (start, depth)
    if is_new and not (node.pages_in_flight or node.holds(Tier.DEVICE)):
        # The usual case, and fast: the pages are those of a new node.
        for row, pool in enumerate(tree.page_pools):
            node.where[Tier.DEVICE, row] = pages[pool][start:]
            tree.counters.shift(node, Tier.DEVICE, row, node.pages)
        every, none = np.ones(node.pages, np.bool_), np.zeros(node.pages, np.bool_)
        return {p: InsertedPages(slots[start:], every, none, none) for p, slots in pages.items()}, [node]
    answers, changed = dict[PoolName, InsertedPages](), list[Node]()
    located = tree.gather(node, depth, start)[Tier.DEVICE]
    for row, pool in enumerate(tree.page_pools):
        held, given = located[row], pages[pool][start:]
        absent, present = held == ABSENT, held >= 0
        table, duplicate = np.where(present, held, given), present & (held != given)
        answers[pool] = InsertedPages(table, absent, duplicate, held < ABSENT)
        # Usually only the last pages of a deep path are absent.
        first = leading(~absent)
        for at, edge, part in tree.edge_slices(Span(node, start + first, depth)):
            here = absent[first:][part]
            if came := int(np.count_nonzero(here)):
                np.copyto(at.where[Tier.DEVICE, row, edge], given[first:][part], where=here)
                tree.counters.shift(at, Tier.DEVICE, row, came)
                changed.append(at)
    return answers, changed


def adopt_states(
    tree: RadixTree, node: Node, states: States, now: int, changed: list[Node]
) -> tuple[list[PlacedState], list[PlacedState]]:
    """Enter the states that the device lacks; return the adopted and the rejected states.

    A state is rejected if a page before its depth is in no tier, or if the index has the state in another
    slot, present or pending. A state that the index has in the same slot already is in neither list.

    `now` is the tick of the insert. Adds the changed nodes to `changed`.
    """
    adopted: list[PlacedState] = []
    rejected: list[PlacedState] = []
    complete = _complete_depth(node) if states else 0
    for depth in sorted(states):
        for pool, slot in states[depth].items():
            at, number = node.covering(depth), tree.number[pool] - len(tree.page_pools)
            held = at.state(Tier.DEVICE, number) if at.end == depth else ABSENT
            if depth > complete or held not in (ABSENT, slot):
                rejected.append(PlacedState(depth, pool, slot))
            elif held == ABSENT:
                adopted.append(PlacedState(depth, pool, slot))
                at = at if at.end == depth else tree.split(at, depth)
                if at.states is None:
                    at.created = now
                at.set_state(Tier.DEVICE, number, slot)
                at.last_access = now
                tree.counters.recount_states(at)
                changed.append(at)
    return adopted, rejected


def _complete_depth(node: Node) -> int:
    """Return how many leading pages of the path to `node` every page pool has in some tier."""
    depth, at = node.end, node
    while (parent := at.parent) is not None:
        if at.complete_pages < at.pages:
            depth = parent.end + at.complete_pages
        at = parent
    return depth


class Residency:
    """Locations of the index's objects, read and changed by span and pool.

    A state is named by a state pool and a span of one page, the last page of its node.

    `stored_leaves` is the queue of the leaves whose objects are in storage only. The index keeps at most
    `max_stored_pages` pages that only storage has.
    """

    def __init__(self, tree: RadixTree, stored_leaves: EvictionQueue, max_stored_pages: int) -> None:
        self._tree = tree
        self._stored_leaves = stored_leaves
        self._max_stored_pages = max_stored_pages

    def reserve(self, span: Span, pool: PoolName, tier: Tier, locations: Locations) -> Mask:
        """Enter `locations` as pending wherever the tier has nothing; return which were entered.

        `locations` has one entry per page of the span. An entry that is ABSENT offers no location. The caller
        keeps the locations that were not entered.
        """
        places = pending(_offered(span, locations))
        absent = np.full(len(span), ABSENT)
        return self._write(span, pool, _local(tier), absent, places, locations >= 0, 0, 1)

    def publish(self, span: Span, pool: PoolName, tier: Tier, locations: Locations) -> Mask:
        """Make present those entries that are pending at exactly these locations; return which changed."""
        places = pending(_offered(span, locations))
        return self._move(span, pool, _local(tier), places, locations, locations >= 0, 1)

    def cancel(self, span: Span, pool: PoolName, tier: Tier, locations: Locations) -> Mask:
        """Make absent those entries that are pending at exactly these locations; return which changed.

        The caller has the locations of these entries back.
        """
        places = pending(_offered(span, locations))
        return self._move(span, pool, _local(tier), places, np.full(len(span), ABSENT), locations >= 0, 0)

    def mark_stored(self, span: Span, pool: PoolName, mask: Mask) -> None:
        """Record that the objects under `mask` are in the store."""
        absent, stored = np.full(len(span), ABSENT), np.full(len(span), STORED)
        self._write(span, pool, Tier.STORAGE, absent, stored, mask, 1, 0)
        self.forget_excess()

    def forget_stored(self, span: Span, pool: PoolName, mask: Mask) -> int:
        """Record that the objects under `mask` are not in the store; return how many were thought to be."""
        absent, stored = np.full(len(span), ABSENT), np.full(len(span), STORED)
        changed = self._write(span, pool, Tier.STORAGE, stored, absent, mask, -1, 0)
        self._tree.tidy(span.node)
        return int(np.count_nonzero(changed))

    def forget_excess(self) -> None:
        """Forget pages that only the store has, lowest rank first, until the limit is met."""
        counters = self._tree.counters
        while counters.stored_only_pages > self._max_stored_pages:
            victim = self._stored_leaves.pop()
            if victim is None:  # the other pages are pinned, or have children
                return
            victim.node.where[Tier.STORAGE] = ABSENT
            victim.node.states = None
            counters.emptied(victim.node, Tier.STORAGE)
            self._tree.tidy(victim.node)

    def _move(
        self, span: Span, pool: PoolName, tier: Tier, old: Locations, new: Locations, mask: Mask, present: int
    ) -> Mask:
        """Change pending entries under `mask` from `old` to `new`, and remove nodes that become empty."""
        changed = self._write(span, pool, tier, old, new, mask, present, -1)
        self._tree.tidy(span.node)
        self.forget_excess()
        return changed

    def _write(
        self,
        span: Span,
        pool: PoolName,
        tier: Tier,
        old: Locations,
        new: Locations,
        mask: Mask,
        present: int,
        in_flight: int,
    ) -> Mask:
        """Change those entries under `mask` that equal `old` to `new`; return which changed.

        With each, there are `present` more objects that are present, and `in_flight` more that are pending.
        """
        if mask.shape != (len(span),):
            raise InputError(
                f"a span of {len(span)} pages needs as many entries, not an array of shape {mask.shape}"
            )
        state = self._state_number(pool)
        if state is not None:
            return self._write_state(self._state_node(span), state, tier, old, new, mask, in_flight)
        # Compare and exchange, entry by entry; 7' stands for "pending at location 7":
        #   entry   absent   7'   7   9'
        #   old     7'       7'   7'  7'       publish at location 7: `new` is 7
        #   after   absent   7    7   9'       only the second entry changes
        changed = np.zeros(len(span), np.bool_)
        row = self._tree.number[pool]
        for node, edge, part in self._tree.edge_slices(span):
            now, here = node.where[tier, row, edge], changed[part]
            np.logical_and(now == old[part], mask[part], out=here)
            if count := int(np.count_nonzero(here)):
                np.copyto(now, new[part], where=here)
                if in_flight > 0:  # nothing that is present changes
                    self._tree.counters.reservations += 1
                    node.expect(pages=count)
                else:
                    self._tree.counters.shift(node, tier, row, present * count, in_flight * count)
                    self._tree.counters.announce(node)
        return changed

    def _write_state(
        self, node: Node, state: int, tier: Tier, old: Locations, new: Locations, mask: Mask, in_flight: int
    ) -> Mask:
        changed: Mask = (old == node.state(tier, state)) & mask
        if changed[0]:
            node.set_state(tier, state, int(new[0]))
            if in_flight > 0:
                self._tree.counters.reservations += 1
                node.expect(states=1)
            else:
                self._tree.counters.states_changed(node)
        return changed

    def _state_number(self, pool: PoolName) -> int | None:
        """Return the number of a state pool among the state pools, or None for a page pool."""
        tree = self._tree
        if pool not in tree.number:
            raise InputError(f"{pool} is not a pool of this index; it has {', '.join(tree.pools)}")
        number = tree.number[pool] - len(tree.page_pools)
        return number if number >= 0 else None

    def _state_node(self, span: Span) -> Node:
        node = self._tree.node(span.node)
        if not node.pages:
            raise InputError("a root carries no state; name the node that ends where the state does")
        if (span.start, span.end) != (node.end - 1, node.end):
            raise InputError(
                f"pages [{span.start}, {span.end}) are no state's; a state's span is the last page before the"
                f" depth {node.end} at which its node ends"
            )
        return node


def _local(tier: Tier) -> Tier:
    if tier is Tier.STORAGE:
        raise InputError("storage has no locations; use mark_stored and forget_stored")
    return tier


def _offered(span: Span, locations: Locations) -> Locations:
    if locations.shape != (len(span),) or locations.dtype != np.int64 or np.count_nonzero(locations < ABSENT):
        raise InputError(
            f"a span of {len(span)} pages needs as many int64 slots or handles (or ABSENT), not {locations!r}"
        )
    return locations
