"""Units that may be evicted, and the objects that an eviction frees. `queue` has the order in which units go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from tiercache.core import ABSENT, Locations, PoolName, Tier
from tiercache.index.base import Eviction
from tiercache.index.node import FAR, NEAR, TIERS, Node
from tiercache.index.queue import Victim
from tiercache.index.units import Kind
from tiercache.policy import UnitKind


def leaf(node: Node, tier: Tier) -> bool:
    """Return whether the node holds something in `tier`, nothing below it does, and no pin holds its pages there."""
    return bool(node.own >> tier & 1) and not node.below[tier] and not node.pins[tier]


def device_pages(node: Node) -> UnitKind:
    """Return LEAF for a device leaf, a unit that frees page slots."""
    return UnitKind.LEAF if leaf(node, Tier.DEVICE) else UnitKind.NONE


def device_state(node: Node) -> UnitKind:
    """Return STATE for a node, leaf or not, whose device state can go, a unit that frees state slots and nothing else."""
    return UnitKind.STATE if _has_state(node, Tier.DEVICE) else UnitKind.NONE


def host_unit(node: Node) -> UnitKind:
    """Return LEAF for a host leaf, and STATE for any other node whose host state can go.

    All host objects share one budget, so that leaves and the states of internal nodes compete in one queue.
    """
    return _unit(node, Tier.HOST)


def device_unit(node: Node) -> UnitKind:
    """Return the same as `host_unit` for a device whose pools share one budget."""
    return _unit(node, Tier.DEVICE)


def _unit(node: Node, tier: Tier) -> UnitKind:
    if leaf(node, tier):
        return UnitKind.LEAF
    return UnitKind.STATE if _has_state(node, tier) else UnitKind.NONE


def stored_leaf(node: Node) -> UnitKind:
    """Return LEAF for a node that holds nothing but marks of what is stored, and on which nothing depends."""
    bare = node.own & (NEAR | FAR) == FAR and not (node.children or node.ends or node.in_flight)
    return UnitKind.LEAF if bare else UnitKind.NONE


def _has_state(node: Node, tier: Tier) -> bool:
    return node.states is not None and not node.state_pins[tier] and max(node.states[tier]) >= 0


UNIT_KINDS: Final = (
    Kind(device_pages, Tier.DEVICE),
    Kind(device_state, Tier.DEVICE),
    Kind(host_unit, Tier.HOST),
    Kind(stored_leaf, Tier.STORAGE),
)
"""Kinds of units, in the order in which `Forest` names their queues."""
ONE_BUDGET_KINDS: Final = (Kind(device_unit, Tier.DEVICE), *UNIT_KINDS[1:])
"""Kinds of units where the device's pools share one budget, in the same order."""


class Sweep:
    """Collector of the objects that one eviction takes. Thread safety: the index's thread only."""

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
        """Return the answer of the eviction."""
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
