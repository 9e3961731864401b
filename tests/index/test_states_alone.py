"""An index without page pools: what it remembers of lost states, and what it drops first."""

from __future__ import annotations

import pytest

from tests.index.harness import MAMBA
from tests.index.model import PAGE, Path, path_of, tokens_of
from tests.index.states import ONE, publish_state, reserve_state, span_of
from tests.integrity import check_index
from tiercache.core import PoolName, Tier
from tiercache.index import HybridIndex, Inserted
from tiercache.policy import CheckpointKind

SWA = PoolName.SWA
FORK = {2: CheckpointKind.GHOST, 4: CheckpointKind.PROMPT}
"""Checkpoints of (1, 2, 4, 5) where (1, 2, 3) is a lost path."""


def index_of(*pools: PoolName) -> HybridIndex:
    return HybridIndex(page_size=PAGE, namespace=bytes(32), page_pools=[], state_pools=pools)


def insert(index: HybridIndex, path: Path, states: dict[int, dict[PoolName, int]]) -> Inserted:
    inserted = index.insert(tokens_of(path), {}, states)
    check_index(index)
    return inserted


def plan(index: HybridIndex) -> dict[int, CheckpointKind]:
    """The checkpoints of a prompt that leaves the path (1, 2, 3) behind its second page."""
    check_index(index)
    tokens = tokens_of((1, 2, 4, 5), 1)
    return dict(index.plan_checkpoints(index.match(tokens), tokens, 0).depths)


def test_a_path_that_never_had_a_state_is_remembered():
    index = index_of(MAMBA)
    assert plan(index) == {4: CheckpointKind.PROMPT}
    index.pin(insert(index, (1, 2, 3), {}).node).release()
    assert not [node for node in index.nodes() if node.pages]
    assert plan(index) == FORK


def test_a_path_whose_state_is_evicted_is_remembered():
    index = index_of(MAMBA)
    insert(index, (1, 2, 3), {3: {MAMBA: 0}})
    assert index.evict_device({MAMBA: 1}).freed[MAMBA].tolist() == [0]
    assert plan(index) == FORK


@pytest.mark.parametrize("below", [False, True])
def test_a_path_whose_stored_state_is_gone_is_remembered(below: bool):
    """The state below it keeps the path, as long as it is there."""
    index = index_of(MAMBA)
    node = insert(index, (1, 2, 3), {3: {MAMBA: 0}}).node
    if below:
        insert(index, (1, 2, 3, 6), {4: {MAMBA: 1}})
    index.residency.mark_stored(span_of(node), MAMBA, ONE)
    index.evict_device({MAMBA: index.evictable(0)[MAMBA] if below else 1})
    index.forget_stored(span_of(node), MAMBA, ONE)
    assert plan(index) == FORK


def test_a_state_that_misses_a_part_is_dropped_first():
    """No restore can end there, and the states below need nothing of it, however new it is."""
    index = index_of(MAMBA, SWA)
    insert(index, (1, 2, 3, 4), {4: {MAMBA: 0, SWA: 1}})
    insert(index, (1, 2), {2: {MAMBA: 2}})
    index.touch(index.match(tokens_of((1, 2), 1)))
    assert index.evict_device({MAMBA: 1}).freed[MAMBA].tolist() == [2]
    check_index(index)
    assert [path_of(node) for node in index.nodes() if node.pages] == [(1, 2, 3, 4)]


def test_a_state_on_the_host_keeps_its_path():
    index = index_of(MAMBA)
    node = insert(index, (1, 2, 3), {3: {MAMBA: 0}}).node
    with index.pinned(node, Tier.DEVICE):
        assert reserve_state(index, node, MAMBA, Tier.HOST, 7)
        assert publish_state(index, node, MAMBA, Tier.HOST, 7)
    index.evict_device({MAMBA: 1})
    assert plan(index) == {2: CheckpointKind.BRANCH, 4: CheckpointKind.PROMPT}
    assert index.match(tokens_of((1, 2, 3), 1)).depth == 3
