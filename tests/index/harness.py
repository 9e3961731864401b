"""An index that is handed fresh slots, and checked after every change."""

from __future__ import annotations

import numpy as np

from tests.index.model import PAGE, Path, path_of, tokens_of
from tests.index.states import ONE, publish_state, reserve_state, span_of
from tests.integrity import check_index
from tiercache.core import PoolName, Tier
from tiercache.index import HybridIndex, Inserted, Match, Span

KV, INDEXER, MAMBA = PoolName.KV, PoolName.INDEXER, PoolName.MAMBA
COST = {KV: 1, MAMBA: 5}


class Harness:
    """An index with slots 100 * n + i for page i of the n-th insert, and states 10_000 * n + depth."""

    def __init__(self, *state_pools: PoolName, **options) -> None:
        self.index = HybridIndex(
            page_size=PAGE, namespace=bytes(32), page_pools=[KV], state_pools=state_pools, **options
        )
        self.inserts = 0

    def insert(self, path: Path, *depths: int, extra: bytes = b"") -> Inserted:
        self.inserts += 1
        slots = np.arange(len(path)) + 100 * self.inserts
        states = {depth: {MAMBA: 10_000 * self.inserts + depth} for depth in depths}
        answer = self.index.insert(tokens_of(path), {KV: slots}, states, extra)
        check_index(self.index)
        return answer

    def match(self, path: Path, tail: int = 1, **options) -> Match:
        return self.index.match(tokens_of(path, tail), **options)

    def span(self, path: Path) -> Span:
        match = self.match(path)
        assert match.path_depth == len(path)
        return Span(match.node, 0, len(path))

    def copy_to_host(self, path: Path, *, pages: bool = True, state: bool = True) -> None:
        """Write through: handles are the slots plus a million."""
        span = self.span(path)
        with self.index.pinned(span.node, Tier.DEVICE):
            if pages:
                handles = self.index.locations(span.node, span.end)[0][KV].device + 1_000_000
                self.index.residency.reserve(span, KV, Tier.HOST, handles)
                self.index.residency.publish(span, KV, Tier.HOST, handles)
            if state:
                slot = self.index.locations(span.node, span.end)[1][MAMBA].device
                assert reserve_state(self.index, span.node, MAMBA, Tier.HOST, slot + 1_000_000)
                assert publish_state(self.index, span.node, MAMBA, Tier.HOST, slot + 1_000_000)
        check_index(self.index)

    def store(self, path: Path, *, state: bool = False) -> None:
        span = self.span(path)
        self.index.residency.mark_stored(span, KV, np.ones(len(span), np.bool_))
        if state:
            self.index.residency.mark_stored(span_of(span.node), MAMBA, ONE)

    def evict(self, **need: int) -> dict[PoolName, list[int]]:
        eviction = self.index.evict_device({PoolName(name): count for name, count in need.items()})
        check_index(self.index)
        return {pool: locations.tolist() for pool, locations in eviction.freed.items()}

    @property
    def edges(self) -> list[Path]:
        """The path to the end of every node."""
        return sorted(path_of(node) for node in self.index.nodes() if node.pages)
