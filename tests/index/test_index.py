"""Matches and inserts: the rules, one test each (docs: the hybrid prefix index)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.index.harness import INDEXER, KV, MAMBA, Harness
from tests.index.model import PAGE, Path, path_of, tokens_of
from tests.index.states import ONE, publish_state, reserve_state, span_of
from tests.integrity import check_index
from tiercache.core import ABSENT, Locations, PoolName, Tier
from tiercache.errors import AdmissionError, InputError
from tiercache.index import HybridIndex, Inserted
from tiercache.policy import CheckpointKind

# -- match -------------------------------------------------------------------------------------


def test_an_insert_after_a_held_node_looks_at_the_pages_behind_it_only():
    """The edge behind the node is split as by an insert from the root, and a new page gets its slot."""
    h = Harness(MAMBA)
    h.insert((1, 2), 2)
    h.insert((1, 2, 3, 4), 4)
    node = h.match((1, 2)).node
    slots = np.array([100, 101, 202, 300])
    with h.index.pinned(node, Tier.DEVICE):
        answer = h.index.insert(tokens_of((1, 2, 3, 9)), {KV: slots}, {4: {MAMBA: 300}}, after=node)
        check_index(h.index)
    assert (answer.start, answer.depth, answer.node.end) == (2, 4, 4)
    pages = answer.pages[KV]
    assert (pages.table.tolist(), pages.adopted.tolist()) == ([202, 300], [False, True])
    assert not (pages.duplicate | pages.private).any()
    assert h.edges == [(1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 9)]
    assert h.match((1, 2, 3, 9)).depth == 4


def test_matching_changes_nothing():
    h = Harness()
    h.insert((1, 2))
    h.insert((3, 4))
    for _ in range(3):
        h.match((1, 2))
    assert h.edges == [(1, 2), (3, 4)]
    assert h.evict(kv=2) == {KV: [100, 101]}


# -- insert ------------------------------------------------------------------------------------


def test_inserting_refreshes_only_the_last_node():
    h = Harness(MAMBA)
    h.insert((1, 2), 2)
    h.insert((3, 4), 2)
    h.insert((1, 2, 5), 3)
    assert h.evict(mamba=1) == {MAMBA: [10_002]}


@pytest.mark.parametrize(
    ("pages", "states"),
    [
        ({}, {}), ({KV: np.arange(2), INDEXER: np.arange(2)}, {}), ({KV: np.arange(4)}, {}),
        ({KV: np.array([0, ABSENT])}, {}), ({KV: np.arange(2, dtype=np.int32)}, {}),
        ({KV: np.arange(2)}, {3: {MAMBA: 0}}), ({KV: np.arange(2)}, {0: {MAMBA: 0}}),
        ({KV: np.arange(2)}, {2: {MAMBA: -1}}), ({KV: np.arange(2)}, {2: {KV: 1}}),
    ],
)  # fmt: skip
def test_a_bad_insert_changes_nothing(pages, states):
    h = Harness(MAMBA)
    with pytest.raises(InputError):
        h.index.insert(tokens_of((1, 2, 3)), pages, states)
    assert not list(h.index.nodes())


# -- pins --------------------------------------------------------------------------------------


def test_a_pin_is_released_once():
    h = Harness()
    pin = h.index.pin(h.insert((1,)).node, Tier.DEVICE)
    pin.release()
    with pytest.raises(AdmissionError):
        pin.release()
    check_index(h.index)


def test_a_match_that_was_evicted_cannot_be_used():
    h = Harness()
    h.insert((1, 2))
    match = h.match((1, 2))
    h.evict(kv=2)
    with pytest.raises(InputError, match="no longer in the index"):
        h.index.pin(match, Tier.DEVICE)


# -- what is on its way ------------------------------------------------------------------------


@pytest.mark.parametrize("locations", [np.array([1]), np.array([1, 2], np.int32), np.array([1, -5])])
def test_a_span_takes_one_location_a_page(locations: Locations):
    h = Harness()
    h.insert((1, 2))
    with pytest.raises(InputError):
        h.index.residency.reserve(h.span((1, 2)), KV, Tier.HOST, locations)


# -- states alone


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
