"""What may be evicted, in which order, and what became of it.

Each queue holds the nodes that have a unit of its kind. A node is offered whenever that may have become true, and looked at again when it
comes to the front, so that neither a hit nor a pin has to search a heap.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from tiercache.core import ABSENT, Locations, PoolName, Tier
from tiercache.index.base import Eviction
from tiercache.index.node import FAR, NEAR, TIERS, Node
from tiercache.policy import Policy, UnitKind

KindOf: TypeAlias = Callable[[Node], UnitKind | None]
Key: TypeAlias = tuple[bool, float]
"""Dead weight (False) sorts before everything that a surviving state can use; then the policy's rank."""


def leaf(node: Node, tier: Tier) -> bool:
    """Nothing below holds anything of `tier`, and nobody counts on what is here."""
    return bool(node.own >> tier & 1) and not node.below[tier] and not node.pins[tier]


def device_pages(node: Node) -> UnitKind | None:
    """Units that free page slots: leaves."""
    return UnitKind.LEAF if leaf(node, Tier.DEVICE) else None


def device_state(node: Node) -> UnitKind | None:
    """Units that free state slots and nothing else: the state of any node, leaf or not."""
    return UnitKind.STATE if _has_state(node, Tier.DEVICE) else None


def host_unit(node: Node) -> UnitKind | None:
    """All host objects come out of one budget, so leaves and the states of internal nodes compete in one queue."""
    if leaf(node, Tier.HOST):
        return UnitKind.LEAF
    return UnitKind.STATE if _has_state(node, Tier.HOST) else None


def stored_leaf(node: Node) -> UnitKind | None:
    """Units of mere knowledge: nodes that hold nothing but marks of what is stored, and on which nothing depends."""
    bare = node.own & (NEAR | FAR) == FAR and not (node.children or node.ends or node.in_flight)
    return UnitKind.LEAF if bare else None


def _has_state(node: Node, tier: Tier) -> bool:
    return node.states is not None and not node.state_pins[tier] and max(node.states[tier]) >= 0


@dataclass(frozen=True, slots=True)
class UnitView:
    """A node's unit as a policy sees it. Thread rule: the index's thread, during one call of the policy."""

    node: Node
    kind: UnitKind

    @property
    def last_access(self) -> int:
        """See `Unit`."""
        return self.node.last_access

    @property
    def hits(self) -> int:
        """See `Unit`."""
        return self.node.hits

    @property
    def depth(self) -> int:
        """See `Unit`."""
        return self.node.end

    @property
    def children(self) -> int:
        """See `Unit`."""
        return len(self.node.children)

    @property
    def replay_pages(self) -> int:
        """See `Unit`. Without state pools every page is restorable, so that the edge alone is replayed."""
        above = self.node.parent
        while above is not None and above.parent is not None and above.state_pools and not above.is_complete:
            above = above.parent
        return self.node.end - (above.end if above else 0)


class Victim(NamedTuple):
    """A node, and what of it may go."""

    node: Node
    kind: UnitKind


class UnitQueue:
    """Nodes with an evictable unit of one kind, least worth first.

    A heap whose entries may be out of date: `_entries` has the one valid key of each node, which is never above its current key, so that
    the true least always comes to the front. Cost: O(log n) per offer and pop, amortised. Thread rule: the index's thread only.
    """

    def __init__(self, kind_of: KindOf, policy: Policy) -> None:
        self._kind_of = kind_of
        self._policy = policy
        self._heap: list[tuple[Key, int, Node]] = []
        self._entries: dict[Node, Key] = {}
        self._offers = 0

    def offer(self, node: Node) -> None:
        """Queue `node` if it has a unit, ahead of where it was if it is worth less now."""
        kind = self._kind_of(node)
        if kind is not None:
            key = self._key(node, kind)
            queued = self._entries.get(node)
            if queued is None or key < queued:
                self._push(node, key)

    def front(self) -> Key | None:
        """The key of what `pop` would return, or None when nothing is evictable."""
        while self._heap:
            key, _, node = self._heap[0]
            if self._entries.get(node) is key:
                kind = self._kind_of(node)
                current = None if kind is None else self._key(node, kind)
                if current is not None and current <= key:
                    return key
                del self._entries[node]
                heapq.heappop(self._heap)
                if current is not None:
                    self._push(node, current)
            else:
                heapq.heappop(self._heap)
        return None

    def pop(self) -> Victim | None:
        """Take out the unit that is worth least, or None when nothing is evictable."""
        if self.front() is None:
            return None
        _, _, node = heapq.heappop(self._heap)
        del self._entries[node]
        kind = self._kind_of(node)
        assert kind is not None, "the front was looked at just now"
        return Victim(node, kind)

    def is_due(self, node: Node) -> bool:
        """Would `node` come up in time? For integrity checks: True when it has no unit, or is queued at or before its current key."""
        kind = self._kind_of(node)
        queued = self._entries.get(node)
        return kind is None or (queued is not None and queued <= self._key(node, kind))

    def forget(self, node: Node) -> None:
        """`node` was removed."""
        self._entries.pop(node, None)

    def _key(self, node: Node, kind: UnitKind) -> Key:
        return (not node.state_pools or node.is_alive, self._policy.rank(UnitView(node, kind)))

    def _push(self, node: Node, key: Key) -> None:
        if len(self._heap) > 2 * len(self._entries) + 1024:  # mostly leftovers of removed nodes, which the heap would keep alive
            self._heap = [entry for entry in self._heap if self._entries.get(entry[2]) is entry[0]]
            heapq.heapify(self._heap)
        self._entries[node] = key
        self._offers += 1
        heapq.heappush(self._heap, (key, self._offers, node))


class Sweep:
    """Collects what one eviction takes. Thread rule: the index's thread only."""

    def __init__(self, tier: Tier, pools: Sequence[PoolName], page_pools: int) -> None:
        self.tier = tier
        self._pools = pools
        self._page_pools = page_pools
        self._freed: list[list[Locations]] = [[] for _ in pools]
        self._demoted = 0
        self.counts = [0] * len(pools)
        """Objects freed so far, by pool."""

    def take(self, victim: Victim) -> None:
        """Take the unit's objects out of the node, which the caller settles afterwards."""
        if victim.kind is UnitKind.LEAF:
            for pool in range(self._page_pools):
                if victim.node.resident[self.tier][pool]:
                    self._take_pages(victim.node, pool)
        if victim.node.states is not None:
            self._take_state(victim.node)

    def result(self) -> Eviction:
        """The answer of the eviction."""
        freed = {name: np.concatenate(parts) for name, parts in zip(self._pools, self._freed, strict=True) if parts}
        return Eviction(freed, self._demoted, sum(self.counts) - self._demoted)

    def _take_pages(self, node: Node, pool: int) -> None:
        row = node.where[self.tier, pool]
        held = row >= 0
        self._take_locations(pool, row[held])
        row[held] = ABSENT
        if elsewhere := [tier for tier in TIERS if tier is not self.tier and node.resident[tier][pool]]:
            self._demoted += int(np.count_nonzero((node.where[elsewhere, pool] >= 0).any(axis=0) & held))

    def _take_state(self, node: Node) -> None:
        for pool in range(node.state_pools):
            location = node.state(self.tier, pool)
            if location >= 0:
                node.set_state(self.tier, pool, ABSENT)
                self._take_locations(self._page_pools + pool, np.array([location], np.int64))
                self._demoted += node.states is not None and max(tier[pool] for tier in node.states) >= 0

    def _take_locations(self, pool: int, locations: Locations) -> None:
        self._freed[pool].append(locations)
        self.counts[pool] += len(locations)
