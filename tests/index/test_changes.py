"""Changes that are followed: whoever looks at the nodes now and then knows what lies where, through all
splits and merges of nodes.
"""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from tests.controller.told import Told
from tests.examples import slow_after
from tests.index.model import PAGE, Path, tokens_of
from tests.index.states import ONE, drop_state, publish_state, reserve_state, span_of
from tiercache.core import PoolName, Tier
from tiercache.index import HybridIndex, Span

KV, MAMBA = PoolName.KV, PoolName.MAMBA
STEPS = 40


class History:
    """A small index whose nodes are split and merged all the time, and a subscriber of its changes."""

    def __init__(self, draw: Random) -> None:
        self.draw, self.next = draw, 0
        self.index = HybridIndex(
            page_size=PAGE, namespace=bytes(32), page_pools=[KV], state_pools=[MAMBA], refresh="path"
        )
        self.told = Told(
            SimpleNamespace(index=self.index, pools=self.index.pools, namespace=bytes(32), page_size=PAGE)
        )

    def live(self) -> None:
        """Take some steps; the subscriber looks after some of them."""
        for _ in range(STEPS):
            looks = 0.3
            self.draw.choice((self.insert, self.copy, self.drop, self.drop, self.mark, self.store))()
            if self.draw.random() < looks:
                self.told.check()
            elif self.draw.random() < looks:
                self.told.source.post(0.0, everything=self.draw.random() < 0.5)
        self.told.check()
        self.index.check_integrity()

    def path(self) -> Path:
        return tuple(self.draw.randrange(2) for _ in range(self.draw.randrange(1, 6)))

    def fresh(self) -> int:
        self.next += 1
        return self.next

    def insert(self, path: Path = ()) -> None:
        """Insert a path with states at some depths: this splits nodes."""
        path = path or self.path()
        slots = np.array([self.fresh() for _ in path])
        depths = [depth for depth in range(1, len(path) + 1) if self.draw.random() < 0.3]
        self.index.insert(tokens_of(path), {KV: slots}, {depth: {MAMBA: self.fresh()} for depth in depths})

    def copy(self) -> None:
        """Copy a path and its state to the host."""
        match = self.index.match(tokens_of(self.path()))
        with self.index.pinned(match):
            span = Span(match.node, 0, match.path_depth)
            blocks = np.array([self.fresh() for _ in range(len(span))], np.int64)
            self.index.residency.reserve(span, KV, Tier.HOST, blocks)
            self.index.residency.publish(span, KV, Tier.HOST, blocks)
            if match.node.pages and reserve_state(
                self.index, match.node, MAMBA, Tier.HOST, block := self.fresh()
            ):
                publish_state(self.index, match.node, MAMBA, Tier.HOST, block)

    def drop(self) -> None:
        """Drop some pages, or only the state, of a path from a tier: this merges nodes."""
        match, tier = self.index.match(tokens_of(self.path())), self.draw.choice((Tier.DEVICE, Tier.HOST))
        with self.index.pinned(match):
            if self.draw.random() < 0.5:
                span = Span(match.node, 0, match.path_depth)
                mask = np.array([self.draw.random() < 0.7 for _ in range(len(span))], np.bool_)
                self.index.residency.drop(span, KV, tier, mask)
            if match.node.pages:
                drop_state(self.index, match.node, MAMBA, tier)

    def mark(self, path: Path = (), *, stored: bool = False) -> None:
        """Note that a path and its state are in storage, or not."""
        match = self.index.match(tokens_of(path or self.path()))
        note = self.index.residency.mark_stored if stored else self.index.forget_stored
        with self.index.pinned(match):
            span = Span(match.node, 0, match.path_depth)
            note(span, KV, np.ones(len(span), np.bool_))
            if match.node.pages:
                note(span_of(match.node), MAMBA, ONE)

    def store(self) -> None:
        """Leave the end of a new path in storage alone: nothing is told of it."""
        self.insert(path := self.path())
        self.mark(path, stored=True)
        match = self.index.match(tokens_of(path))
        with self.index.pinned(match):
            tail = Span(match.node, self.draw.randrange(match.path_depth), match.path_depth)
            self.index.residency.drop(tail, KV, Tier.DEVICE, np.ones(len(tail), np.bool_))
            drop_state(self.index, match.node, MAMBA, Tier.DEVICE)


@pytest.mark.parametrize("seeds", slow_after(1, [range(60), range(60, 600)]), ids=["few", "more"])
def test_changes_of_nodes_add_up_to_what_the_index_holds(seeds):
    for seed in seeds:
        History(Random(seed)).live()
