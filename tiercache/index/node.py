"""Node of the tree: an edge of whole pages, the locations of each page's objects, and the state at the edge's end.

A node knows its own contents and what its subtree announced to it; `forest.py` adds, splits, merges and removes nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Self

import numpy as np

from tiercache.core import ABSENT, Locations, Mask, Tier
from tiercache.index.prefixes import Digests, Prefixes
from tiercache.policy import CheckpointKind

TIERS: Final = tuple(Tier)
"""All tiers as a tuple: iterating over an enum class is slow, and it is done at every change of a node."""
ALIVE: Final = len(Tier)
"""Number of the bit after those of the tiers: a complete state (every state pool, each in any tier) is here."""
BITS: Final = range(len(Tier) + 1)
"""Numbers of all bits: one per tier, and `ALIVE`."""
NEAR: Final = 1 << Tier.DEVICE | 1 << Tier.HOST
"""Bit mask of the device and the host tier."""
FAR: Final = 1 << Tier.STORAGE
"""Bit mask of the storage tier."""
STORED: Final = 0
"""Location of everything that is known to be stored: a store finds objects by key."""


class Node:
    """Edge and what is known about it. A root has no parent and no pages; a node without a parent that has pages was removed.

    `edge`: the tokens as little-endian u64, a whole number of pages. `digests`: one per page, of the path to the page's end (see
    `prefixes`). `children`: by the bytes of their first page. `end`: depth of the last page. `where[tier, page pool, page]` and
    `states[tier][state pool]` are locations (`ABSENT`, pending, or present), with `STORED` in the storage tier; `states` is None where no
    state is present or pending.
    Thread safety: the index's thread only.
    """

    __slots__ = (
        "above",
        "below",
        "checkpoint",
        "children",
        "digests",
        "edge",
        "end",
        "ends",
        "extra",
        "grown",
        "hits",
        "in_flight",
        "keys",
        "last_access",
        "lineage",
        "near",
        "own",
        "pages",
        "pages_in_flight",
        "parent",
        "pins",
        "resident",
        "row",
        "shown",
        "state_near",
        "state_pins",
        "state_pools",
        "states",
        "surplus",
        "where",
        "whole",
    )

    def __init__(self, parent: Node | None, edge: bytes, digests: Digests, where: Locations, state_pools: int, extra: bytes) -> None:
        self.parent = parent
        self.edge = edge
        self.digests = digests
        self.where = where
        self.extra = extra
        self.pages = int(where.shape[2])
        self.end: int = self.pages + (parent.end if parent else 0)
        self.children: dict[bytes, Node] = {}
        self.keys: list[bytes] | None = None
        self.state_pools = state_pools
        self.states: list[list[int]] | None = None
        self.last_access = 0
        self.hits = 0
        self.checkpoint = CheckpointKind.NONE
        self.lineage = 0
        self.grown = 0
        """Pages up to the node's end that were new with the request that took its state; see `Units`, also for the two before."""
        self.above = 0 if parent is None else parent.restorable
        """Nearest depth above the node at which a complete state is; 0 if there is none."""
        self.row = -1
        """Row of the `UnitTable` that describes the node; -1: none yet."""
        self.surplus = False
        """Whether the path has more states than it may keep and this is one too many; ignored while the node is a branch."""
        self.pins = [0] * len(Tier)
        """Pins that end on or below this node, by tier: they hold its pages."""
        self.state_pins = [0] * len(Tier)
        """Pins that end on this node, by tier: they hold its state as well."""
        self.ends = 0
        """Pins that end here: while there are any, the node keeps its end and its identity."""
        self.below = [0] * len(BITS)
        """Number of children whose subtree holds something of the tier, or a complete state, by bit."""
        self.shown = 0
        """Bits that the node announced to its parent."""
        # What `recount` would find for a node without objects; a caller that passes other locations calls `recount`.
        self.resident: list[list[int]] = [[0] * (where.shape[1] + state_pools) for _ in TIERS]
        """Objects present, by tier and pool."""
        self.whole = 0
        """Leading pages of the edge that every page pool has in some tier."""
        self.near = 0
        """Leading pages of the edge that every page pool has on the device or the host."""
        self.pages_in_flight = 0
        self.in_flight = 0
        """Pending locations of pages and states; `pages_in_flight` counts those of pages alone."""
        self.state_near = False
        """Whether every state pool has a state here on the device or the host."""
        self.own = 0
        """Bits of the node itself: the tiers in which it has something, and `ALIVE`."""

    @classmethod
    def root(cls, page_pools: int, state_pools: int, extra: bytes) -> Self:
        """Return a new root, the start of all sequences with this `extra`."""
        return cls(None, b"", np.empty(0, np.uint64), np.empty((len(Tier), page_pools, 0), np.int64), state_pools, extra)

    def recount(self) -> None:
        """Recompute from the locations: the objects present by tier and pool, what is in flight, and how much of the edge is whole."""
        held = self.where >= 0
        self.resident = held.sum(axis=2).tolist()
        self.whole = _leading(held, self.resident)
        self.near = _leading(held[: Tier.STORAGE], self.resident[: Tier.STORAGE])
        self.pages_in_flight = int(np.count_nonzero(self.where < ABSENT))
        for counts in self.resident:
            counts += [0] * self.state_pools
        self.recount_states()

    def recount_states(self) -> None:
        """Recompute the same where no page's location changed."""
        first = self.where.shape[1]
        if self.states is None:
            for counts in self.resident:
                counts[first:] = [0] * self.state_pools
            self.in_flight, self.state_near = self.pages_in_flight, False
            self.own = sum(1 << tier for tier, counts in enumerate(self.resident) if any(counts))
            return
        states = self.states
        by_pool = list(zip(*states, strict=True))
        for counts, tier in zip(self.resident, states, strict=True):
            counts[first:] = [int(at >= 0) for at in tier]
        self.in_flight = self.pages_in_flight + sum(at < ABSENT for tier in states for at in tier)
        self.state_near = bool(by_pool) and all(max(tiers[: Tier.STORAGE]) >= 0 for tiers in by_pool)
        alive = bool(by_pool) and all(max(tiers) >= 0 for tiers in by_pool)
        self.own = sum(1 << tier for tier, counts in enumerate(self.resident) if any(counts)) | alive << ALIVE

    def expect(self, *, pages: int = 0, states: int = 0) -> None:
        """Count more objects in flight at this node: what `recount` would find, without looking."""
        self.pages_in_flight += pages
        self.in_flight += pages + states

    def clear(self, tier: Tier) -> None:
        """Reset the counts after all that was held was taken from `tier`: what `recount` would find, without looking.

        The caller guarantees that no other tier held anything.
        """
        self.resident[tier] = [0] * len(self.resident[tier])
        self.own = self.whole = self.near = 0
        self.state_near = False

    @property
    def digest(self) -> int:
        """Digest of the path to the node's end."""
        return int(self.digests[-1]) if self.pages else Prefixes.start(self.extra)

    @property
    def signature(self) -> int:
        """Digest as a signed 64-bit number, the form in which columns hold it."""
        digest = int(self.digests[-1])
        return digest - (1 << 64) if digest >> 63 else digest

    @property
    def branches(self) -> int:
        """Number of continuations: 0, 1, or 2 for any more."""
        return min(2, len(self.children))

    @property
    def start(self) -> int:
        """Depth before the first page of the edge."""
        return self.end - self.pages

    @property
    def is_removed(self) -> bool:
        """Whether the node was evicted, or merged into its child."""
        return self.parent is None and self.pages > 0

    @property
    def is_spare(self) -> bool:
        """Whether nothing is here or on its way, no pin ends here, and nothing follows the node."""
        return not (self.own or self.in_flight or self.children or self.ends)

    @property
    def is_needless(self) -> bool:
        """Whether the node marks neither a branch, nor a state, nor the end of a pin: its edge could be one with its only child's."""
        return self.parent is not None and len(self.children) == 1 and self.states is None and not self.ends

    @property
    def is_alive(self) -> bool:
        """Whether a complete state is at the node's end or below it."""
        return bool(self.own >> ALIVE or self.below[ALIVE])

    @property
    def is_complete(self) -> bool:
        """Whether every state pool has a state here, each in some tier."""
        return bool(self.own >> ALIVE)

    @property
    def can_answer(self) -> bool:
        """Whether a hit could end here: a complete state is here or, without state pools, all of the edge is in some tier."""
        return bool(self.own >> ALIVE) if self.state_pools else self.whole == self.pages

    @property
    def restorable(self) -> int:
        """Deepest depth on the path to here at which a complete state is; 0 if there is none."""
        return self.end if self.own >> ALIVE else self.above

    @property
    def replay(self) -> int:
        """Pages to compute to have the node's end again, at least 1; the edge alone without state pools, where every page is restorable."""
        return max(1, self.end - self.above if self.state_pools else self.pages)

    def holds(self, tier: Tier) -> bool:
        """Return whether anything of the node itself is present in `tier`."""
        return bool(self.own >> tier & 1)

    def path(self) -> Iterator[Node]:
        """Yield the node and its ancestors, upwards, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def covering(self, depth: int) -> Node:
        """Return the node on the path to here whose edge holds page `depth - 1`; the root for depth 0."""
        node = self
        while node.parent is not None and node.start >= depth:
            node = node.parent
        return node

    def set_state(self, tier: Tier, pool: int, location: int) -> None:
        """Write one state's location; the caller settles the node afterwards."""
        if self.states is None:
            self.states = [[ABSENT] * self.state_pools for _ in TIERS]
        self.states[tier][pool] = location
        if self.states == [[ABSENT] * self.state_pools] * len(TIERS):
            self.states = None

    def state(self, tier: Tier, pool: int) -> int:
        """Return one state's location."""
        return ABSENT if self.states is None else self.states[tier][pool]

    def detach(self) -> None:
        """Mark the node as removed, so that code that still refers to it can tell."""
        self.parent = None
        self.children = {}
        self.own = 0


def _leading(held: Mask, counts: list[list[int]]) -> int:
    """Return how many leading pages each pool has in some tier; mostly all or none.

    `held` has the shape [tier, pool, page]; `counts[tier][pool]` are its sums over the pages.
    """
    pages = int(held.shape[2])
    most = [max(by_tier) for by_tier in zip(*counts, strict=True)]
    if min(most) == pages:
        return pages
    if min(most) == 0:
        return 0
    run = held.any(axis=0).all(axis=0)
    return int(run.argmin()) if not run.all() else pages
