"""One state of an index, changed as transfers change it: as a span of one page."""

from __future__ import annotations

import numpy as np

from tiercache.core import ABSENT, PoolName, Tier
from tiercache.index import HybridIndex, Node, Span

ONE = np.ones(1, np.bool_)


def span_of(node: Node) -> Span:
    """The last page of the node."""
    return Span(node, node.end - 1, node.end)


def reserve_state(index: HybridIndex, node: Node, pool: PoolName, tier: Tier, location: int) -> bool:
    return bool(index.residency.reserve(span_of(node), pool, tier, np.array([location]))[0])


def publish_state(index: HybridIndex, node: Node, pool: PoolName, tier: Tier, location: int) -> bool:
    return bool(index.residency.publish(span_of(node), pool, tier, np.array([location]))[0])


def cancel_state(index: HybridIndex, node: Node, pool: PoolName, tier: Tier, location: int) -> bool:
    return bool(index.residency.cancel(span_of(node), pool, tier, np.array([location]))[0])


def drop_state(index: HybridIndex, node: Node, pool: PoolName, tier: Tier) -> int:
    """Take a present state out of a tier, as its eviction does; return its place."""
    number, tree = index.state_pools.index(pool), index._tree  # private: an eviction chooses its own state
    place = node.state(tier, number)
    node.set_state(tier, number, ABSENT)
    tree.counters.states_changed(node)
    tree.tidy(node)
    return place
