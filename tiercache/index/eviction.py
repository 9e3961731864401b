"""Eviction of units until enough slots, bytes or blocks are free.

A unit is what one eviction takes from a node: a leaf or a state (see `UnitKind`). `EvictionQueue` has the
order of the units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from tiercache.core import ABSENT, Locations, PoolName, Tier
from tiercache.errors import InputError, PoolFullError
from tiercache.index.base import Eviction
from tiercache.index.eviction_order import EvictionColumns, EvictionQueue, Kind, Victim
from tiercache.index.ghosts import Ghosts
from tiercache.index.node import ALIVE, IN_STORAGE, LOCAL, TIERS, Node
from tiercache.index.radix_tree import RadixTree
from tiercache.policy import Reuse, UnitKind


def leaf(node: Node, tier: Tier) -> bool:
    """Return whether the node has unpinned objects in `tier`, and no node below has objects there."""
    return bool(node.resident_mask >> tier & 1) and not node.subtree_counts[tier] and not node.pins[tier]


def device_pages(node: Node) -> UnitKind:
    """Return LEAF for a leaf on the device, whose eviction frees slots of pages."""
    return UnitKind.LEAF if leaf(node, Tier.DEVICE) else UnitKind.NONE


def device_state(node: Node) -> UnitKind:
    """Return STATE for a node whose device state can be evicted alone; the node need not be a leaf."""
    return UnitKind.STATE if _has_state(node, Tier.DEVICE) else UnitKind.NONE


def host_unit(node: Node) -> UnitKind:
    """Return LEAF for a leaf on the host, and STATE for any other node whose host state can be evicted.

    All objects on the host share one budget, so leaves and states of inner nodes compete in one queue.
    """
    if leaf(node, Tier.HOST):
        return UnitKind.LEAF
    return UnitKind.STATE if _has_state(node, Tier.HOST) else UnitKind.NONE


def stored_leaf(node: Node) -> UnitKind:
    """Return LEAF for a node whose objects are in storage only, without children, pins or transfers."""
    bare = node.resident_mask & (LOCAL | IN_STORAGE) == IN_STORAGE and not (
        node.children or node.ends or node.in_flight
    )
    return UnitKind.LEAF if bare else UnitKind.NONE


def _has_state(node: Node, tier: Tier) -> bool:
    return node.states is not None and not node.state_pins[tier] and max(node.states[tier]) >= 0


UNIT_KINDS: Final = (
    Kind(device_pages, Tier.DEVICE),
    Kind(device_state, Tier.DEVICE),
    Kind(host_unit, Tier.HOST),
    Kind(stored_leaf, Tier.STORAGE),
)
"""Kinds of units, in the order of the queues that `Evictor` takes."""


class Evictor:
    """Evictor of units, which stops when enough is free. Thread safety: the index's thread only."""

    def __init__(
        self, tree: RadixTree, columns: EvictionColumns, ghosts: Ghosts, queues: Sequence[EvictionQueue]
    ) -> None:
        self._tree = tree
        self._columns = columns
        self._ghosts = ghosts
        self._device_pages, self._device_states, self._host_units, _ = queues

    def device(self, need: Mapping[PoolName, int]) -> Eviction:
        """Free slots of the device; see `HybridIndex.evict_device`."""
        tree = self._tree
        wanted = [need.get(pool, 0) for pool in tree.pools]
        if unknown := set(need) - set(tree.pools):
            raise InputError(
                f"{', '.join(unknown)}: no such pool in this index; it has {', '.join(tree.pools)}"
            )
        for pool, want, there in zip(tree.pools, wanted, tree.counters.evictable[Tier.DEVICE], strict=True):
            if want > there:
                raise PoolFullError(
                    f"{want} {pool} slots are needed and {there} can be evicted; release admissions or make"
                    " the pool larger"
                )
        sweep = Sweep(Tier.DEVICE, tree.pools, len(tree.page_pools))
        # Pages come first, because the eviction of a leaf also frees its state. If this does not free enough
        # states, states alone are evicted after that.
        self._sweep(sweep, self._device_pages, range(len(tree.page_pools)), wanted)
        self._sweep(sweep, self._device_states, range(len(tree.page_pools), len(tree.pools)), wanted)
        return sweep.result()

    def host(self, blocks: int, cost: Mapping[PoolName, int]) -> Eviction:
        """Free arena blocks of the host; see `HybridIndex.evict_host`."""
        tree = self._tree
        if missing := set(tree.pools) - set(cost):
            raise InputError(f"{', '.join(missing)}: the cost of an object is missing")
        each = [cost[pool] for pool in tree.pools]
        there = _total(tree.counters.evictable[Tier.HOST], each)
        if blocks > there:
            raise PoolFullError(
                f"{blocks} host units are needed and {there} can be evicted; release admissions or make the"
                " host tier larger"
            )
        sweep = Sweep(Tier.HOST, tree.pools, len(tree.page_pools))
        while _total(sweep.counts, each) < blocks:
            self._evict(sweep, self._host_units.pop())
        return sweep.result()

    def coldest_on_host(self) -> Iterator[tuple[Node, UnitKind]]:
        """Yield the host's units in the order of eviction; see `HybridIndex.coldest_on_host`."""
        return self._host_units.coldest()

    def _sweep(self, sweep: Sweep, queue: EvictionQueue, wanting: range, wanted: Sequence[int]) -> None:
        """Evict from `queue` until each pool in `wanting` has freed `wanted[pool]` objects.

        A state is not evicted if none of its pools is short of slots.
        """
        passed: list[Node] = []  # nodes with states of other pools only, which go back into the queue
        while short := [pool for pool in wanting if sweep.counts[pool] < wanted[pool]]:
            victim = queue.pop()
            # A node can have states of several pools. They are evicted only if one of these pools is short.
            if (
                queue is self._device_states
                and victim
                and not any(victim.node.resident[Tier.DEVICE][pool] for pool in short)
            ):
                passed.append(victim.node)
            else:
                if queue is self._device_pages:
                    self._trim(victim, max(wanted[pool] - sweep.counts[pool] for pool in short))
                self._evict(sweep, victim)
        for node in passed:
            self._columns.mark(node)

    def _trim(self, victim: Victim | None, pages: int) -> None:
        """Cut a leaf of an index without states, so that only the last `pages` pages of it are evicted.

        The pages before them stay of use, because any number of leading pages can be restored.
        """
        if victim is None or self._tree.state_pools:
            return
        held = np.flatnonzero((victim.node.where[Tier.DEVICE] >= 0).any(axis=0))
        if len(held) > pages:
            self._tree.split(victim.node, victim.node.start + int(held[-pages]))

    def _evict(self, sweep: Sweep, victim: Victim | None) -> None:
        assert victim is not None, "the queue is empty although the counters say that there is more to evict"
        node, counters = victim.node, self._tree.counters
        # The description is made before the node's objects are taken, because it depends on them.
        unit = reuse_of(node, self._columns.now) if node.can_answer else None
        sweep.take(victim)
        if victim.kind is UnitKind.STATE:
            counters.states_changed(node)
        elif not node.in_flight and node.resident_mask & ~(1 << ALIVE) == 1 << sweep.tier:
            counters.emptied(node, sweep.tier)  # the usual case, and fast: no object is left to count
        else:
            for pool, count in enumerate(node.resident[sweep.tier][: len(self._tree.page_pools)]):
                counters.shift(node, sweep.tier, pool, -count)
            counters.states_changed(node)
        # Ghosts remember losses. A unit is lost if no hit can end here any more. The pages of a leaf are lost
        # if the node has no objects left in any tier. Without page pools, the pages are lost with the last
        # state at their end, unless states below keep them in the tree.
        if unit is not None and not node.can_answer:
            self._ghosts.note_unit(node.digest, unit, self._columns.now)
        is_end = victim.kind is UnitKind.LEAF if self._tree.page_pools else not node.children
        if is_end and not node.resident_mask:
            self._ghosts.note_pages(node.digests)
        self._tree.tidy(node)


class Sweep:
    """Collector of the objects that one eviction takes. Thread safety: the index's thread only."""

    def __init__(self, tier: Tier, pools: Sequence[PoolName], page_pools: int) -> None:
        self.tier = tier
        self._pools = pools
        self._page_pools = page_pools
        self._freed: list[list[Locations]] = [[] for _ in pools[:page_pools]]
        self._states: list[list[int]] = [[] for _ in pools[page_pools:]]
        self._demoted = 0
        self.counts = [0] * len(pools)
        """Objects freed so far, by pool."""

    def take(self, victim: Victim) -> None:
        """Take the unit's objects out of the node. The caller updates the node's counts afterwards."""
        if victim.kind is UnitKind.LEAF:
            for pool in range(self._page_pools):
                if victim.node.resident[self.tier][pool]:
                    self._take_pages(victim.node, pool)
        if victim.node.states is not None:
            self._take_state(victim.node)

    def result(self) -> Eviction:
        """Return the answer of the eviction."""
        parts = [*self._freed, *([np.array(slots)] if slots else [] for slots in self._states)]
        freed = {name: np.concatenate(part) for name, part in zip(self._pools, parts, strict=True) if part}
        return Eviction(freed, self._demoted, sum(self.counts) - self._demoted)

    def _take_pages(self, node: Node, pool: int) -> None:
        row, count = node.where[self.tier, pool], node.resident[self.tier][pool]
        held = slice(None) if count == node.pages else row >= 0
        self._freed[pool].append(row[held].copy())
        self.counts[pool] += count
        row[held] = ABSENT
        # A page that another tier has, too, is demoted. Any other page is lost.
        if elsewhere := [tier for tier in TIERS if tier is not self.tier and node.resident[tier][pool]]:
            self._demoted += int(np.count_nonzero((node.where[elsewhere, pool][:, held] >= 0).any(axis=0)))

    def _take_state(self, node: Node) -> None:
        for pool in range(node.state_pools):
            location = node.state(self.tier, pool)
            if location >= 0:
                node.set_state(self.tier, pool, ABSENT)
                self._states[pool].append(location)
                self.counts[self._page_pools + pool] += 1
                self._demoted += node.states is not None and max(tier[pool] for tier in node.states) >= 0


def reuse_of(node: Node, now: int) -> Reuse:
    """Return the description of a hit on the node's end at the tick `now`."""
    return Reuse(
        node.end, node.replay, node.branches, node.hits, node.checkpoint, node.lineage, node.new_pages,
        node.ending, now - node.last_access, node.signature, evicted=False,
    )  # fmt: skip


def _total(counts: Sequence[int], cost: Sequence[int]) -> int:
    return sum(count * each for count, each in zip(counts, cost, strict=True))
