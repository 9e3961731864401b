"""Matches and inserts: the rules, one test each (docs: the hybrid prefix index)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.index.harness import INDEXER, KV, MAMBA, Harness
from tests.index.model import tokens_of
from tests.integrity import check_index
from tiercache.core import ABSENT, Locations, PoolName, Tier
from tiercache.errors import InputError

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
    assert h.evict(kv=1) == {KV: [100, 101]}


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
        ({}, {}),
        ({KV: np.arange(2), INDEXER: np.arange(2)}, {}),
        ({KV: np.arange(4)}, {}),
        ({KV: np.array([0, ABSENT])}, {}),
        ({KV: np.arange(2, dtype=np.int32)}, {}),
        ({KV: np.arange(2)}, {3: {MAMBA: 0}}),
        ({KV: np.arange(2)}, {0: {MAMBA: 0}}),
        ({KV: np.arange(2)}, {2: {MAMBA: -1}}),
        ({KV: np.arange(2)}, {2: {KV: 1}}),
    ],
)
def test_a_bad_insert_changes_nothing(
    pages: dict[PoolName, Locations], states: dict[int, dict[PoolName, int]]
):
    h = Harness(MAMBA)
    with pytest.raises(InputError):
        h.index.insert(tokens_of((1, 2, 3)), pages, states)
    assert not list(h.index.nodes())


def test_inserting_no_whole_page_leaves_nothing():
    h = Harness()
    answer = h.index.insert(tokens_of((), tail=1), {KV: np.empty(0, np.int64)})
    assert answer.depth == 0
    assert not list(h.index.nodes())
