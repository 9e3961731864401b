"""Counts of objects, updated with every change of a node.

There are counts of evictable objects, of pages in storage alone, and of subtrees with objects. After writing
locations of pages, call `shift` and then `announce`. After writing a state's location, call `states_changed`.
To change many nodes at once, call `shift` or `recount_states` for each node, and then `announce` for each.
"""

from __future__ import annotations

from collections.abc import Callable

from tiercache.core import Tier
from tiercache.index.node import BITS, IN_STORAGE, LOCAL, TIERS, Node


class Counters:
    """Totals over all nodes, and the bits that each node announces to its parent.

    The bits say in which tiers the node's subtree has objects, and whether it has a complete state (`ALIVE`).

    The counters call `mark` with every node whose units (what one eviction takes) may have changed. They call
    `restored` with the digest of every node that becomes able to answer a hit. Thread safety: the index's
    thread only.
    """

    def __init__(
        self, page_pools: int, state_pools: int, mark: Callable[[Node], None], restored: Callable[[int], None]
    ) -> None:
        self.generation = 0
        """Counter that increases with every change that could alter the result of a match."""
        self.reservations = 0
        """Counter that increases when locations become pending, which no match can see."""
        self.evictable = [[0] * (page_pools + state_pools) for _ in Tier]
        """Number of present objects that no pin holds, by tier and pool."""
        self.stored_only_pages = 0
        """Number of pages of those nodes that have objects in the storage tier and in no other."""
        self.changed: dict[Node, None] | None = None
        """Nodes whose locations have changed, the longest ago first; None while nobody follows them."""
        self._pages = range(page_pools)
        self._states = range(page_pools, page_pools + state_pools)
        self._mark = mark
        self._restored = restored

    def states_changed(self, node: Node) -> None:
        """Update everything that depends on the node's states. No location of its pages may have changed."""
        self.recount_states(node)
        self.announce(node)

    def emptied(self, node: Node, tier: Tier) -> None:
        """Record that all objects of the node were taken, and that all of them were in `tier`.

        The caller guarantees that no other tier holds anything and that nothing is in flight.
        """
        before = node.restorable
        if self.changed is not None:
            self.changed[node] = None
        self.add(node, -1)
        node.clear(tier)
        self._update_nearest_state(node, before)
        self.announce(node)

    def shift(self, node: Node, tier: Tier, pool: int, present: int, in_flight: int = 0) -> None:
        """Count more pages of one page pool as present and in flight, without announcing the node."""
        could_answer, before = node.can_answer, _stored_only(node)
        if self.changed is not None:
            self.changed[node] = None
        self.generation += 1
        node.shift(tier, pool, present, in_flight)
        if not node.pins[tier]:
            self.evictable[tier][pool] += present
        self.stored_only_pages += _stored_only(node) - before
        if node.can_answer and not could_answer:
            self._restored(node.digest)

    def recount_states(self, node: Node) -> None:
        """Recount the states of a node without announcing it: the first half of `states_changed`."""
        before, could_answer = node.restorable, node.can_answer
        if self.changed is not None:
            self.changed[node] = None
        self.add(node, -1)
        node.recount_states()
        self.add(node, +1)
        self._update_nearest_state(node, before)
        if node.can_answer and not could_answer:
            self._restored(node.digest)

    def _update_nearest_state(self, node: Node, before: int) -> None:
        """Update `nearest_state` of the nodes below, after this node gained or lost a complete state.

        On each path downwards, the update stops at the next node that has a complete state:

            node --- a --- b [state] --- c        a, b: the nearest state is at the end of node
                                                  c:    the nearest state is at the end of b
        """
        now = node.restorable
        if now == before:
            return
        stack = list(node.children.values())
        while stack:
            below = stack.pop()
            below.nearest_state = now
            self._mark(below)
            if not below.is_complete:
                stack += below.children.values()

    def add(self, node: Node, sign: int) -> None:
        """Add the node's contribution to the totals (`sign` +1), or subtract it (-1)."""
        self.generation += 1
        mask = node.resident_mask
        for tier in TIERS:
            if mask >> tier & 1:
                total, counts = self.evictable[tier], node.resident[tier]
                if not node.pins[tier]:
                    for pool in self._pages:
                        total[pool] += sign * counts[pool]
                if not node.state_pins[tier]:
                    for pool in self._states:
                        total[pool] += sign * counts[pool]
        self.stored_only_pages += sign * _stored_only(node)

    def announce(self, node: Node) -> None:
        """Propagate the bits of the subtree (tiers with objects, `ALIVE`) to the ancestors.

        Marks the node, and every ancestor where an entry of `subtree_counts` rises from 0 or falls to 0.
        """
        self._mark(node)
        while (parent := node.parent) is not None:
            held = node.resident_mask
            for bit, count in enumerate(node.subtree_counts):
                if count:
                    held |= 1 << bit
            changed = held ^ node.announced_mask
            if not changed:
                return
            # `came` is 1 for a bit that the subtree has gained, and 0 for a bit that it has lost. `crossed`
            # says whether the parent's count of a bit rose from 0 to 1, or fell from 1 to 0.
            crossed = False
            for bit in BITS:
                if changed >> bit & 1:
                    came = held >> bit & 1
                    parent.subtree_counts[bit] += 1 if came else -1
                    crossed |= parent.subtree_counts[bit] == came
            node.announced_mask = held
            node = parent
            # The parent's units depend on whether any child announced a bit, not on how many did.
            if not crossed:
                return
            self._mark(node)

    # A node counts the pins that end on it, and its children that are pinned themselves. So a pin below a
    # pinned node, or a pin that moves along a path, changes only the nodes on which the path differs:
    #   a --- b --- c        pins end on b and c:  a 1, b 2, c 1
    #   a --- b --- c        the pin on c ends:    a 1, b 1, c 0

    def pin(self, node: Node, tier: Tier) -> None:
        """Hold the pages of the path to `node` in `tier`, and the state of `node`."""
        # Nothing is marked: the queue checks each unit before it returns the unit.
        total, pages = self.evictable[tier], self._pages
        if not node.state_pins[tier]:
            for pool in self._states:
                total[pool] -= node.resident[tier][pool]
        node.state_pins[tier] += 1
        at, held = node, 0
        while not held and (parent := at.parent) is not None:
            pins = at.pins
            held = pins[tier]
            pins[tier] = held + 1
            if not held:
                counts = at.resident[tier]
                for pool in pages:
                    total[pool] -= counts[pool]
            at = parent

    def unpin(self, node: Node, tier: Tier) -> None:
        """End one hold of `pin`. Marks the nodes whose pages can be evicted again as leaves."""
        total, pages = self.evictable[tier], self._pages
        node.state_pins[tier] -= 1
        if not node.state_pins[tier]:
            for pool in self._states:
                total[pool] += node.resident[tier][pool]
        at, held = node, 0
        while not held and (parent := at.parent) is not None:
            pins = at.pins
            held = pins[tier] - 1
            pins[tier] = held
            if not held:
                counts = at.resident[tier]
                for pool in pages:
                    total[pool] += counts[pool]
                if not at.subtree_counts[tier]:
                    self._mark(at)
            at = parent


def _stored_only(node: Node) -> int:
    return node.pages if node.resident_mask & (LOCAL | IN_STORAGE) == IN_STORAGE else 0
