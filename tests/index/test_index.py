"""Matches and inserts: the rules, one test each (docs: the hybrid prefix index)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.index.harness import INDEXER, KV, MAMBA, Harness
from tests.index.model import PAGE, tokens_of
from tests.index.states import publish_state, reserve_state
from tiercache.core import ABSENT, Locations, PoolName, Tier, pending
from tiercache.errors import InputError
from tiercache.index import HybridIndex, Span

# -- match -------------------------------------------------------------------------------------


def test_a_hit_is_strictly_shorter_than_the_prompt():
    h = Harness()
    h.insert((1, 2, 3))
    assert h.match((1, 2, 3), tail=0).depth == 2
    assert h.match((1, 2, 3), tail=0).path_depth == 3
    assert h.match((1, 2, 3), tail=1).depth == 3
    assert h.match((1, 2, 3), tail=0, limit=3).depth == 3
    assert h.match((1, 2, 3), limit=1).depth == 1
    assert h.match((), tail=1).depth == 0


def test_without_states_every_page_boundary_is_restorable():
    h = Harness()
    h.insert((1, 2, 3, 4))
    match = h.match((1, 2, 9))
    assert (match.path_depth, match.depth, match.near_depth, match.restorable) == (2, 2, 2, (2,))
    assert h.index.locations(match, 2).pages[KV].device.tolist() == [100, 101]


def test_with_states_only_their_exact_depths_are_restorable():
    h = Harness(MAMBA)
    h.insert((1, 2, 3, 4, 5), 2, 4)
    assert h.match((1, 2, 3, 4, 5)).restorable == (2, 4)
    assert h.match((1, 2, 3)).depth == 2
    assert h.match((1,)).depth == 0


def test_a_deeper_host_state_beats_a_shallower_device_one():
    h = Harness(MAMBA)
    h.insert((1, 2, 3, 4), 2, 4)
    h.copy_to_host((1, 2, 3, 4))
    h.index.touch(h.match((1, 2)))
    assert h.evict(mamba=1) == {MAMBA: [10_004]}
    match = h.match((1, 2, 3, 4))
    assert (match.depth, match.near_depth) == (4, 4)
    states = h.index.locations(match, 4).states[MAMBA]
    assert (states.device, states.host) == (ABSENT, 1_010_004)


def test_near_leaves_out_what_is_only_stored():
    h = Harness(MAMBA)
    h.insert((1, 2, 3, 4), 2, 4)
    h.store((1, 2, 3, 4), state=True)
    h.index.touch(h.match((1, 2)))
    h.evict(mamba=1)
    match = h.match((1, 2, 3, 4))
    assert (match.depth, match.near_depth, match.restorable) == (4, 2, (2, 4))


def test_pending_and_nowhere_else_is_not_present():
    h = Harness(MAMBA)
    h.insert((1, 2), 2)
    node = h.index.extend_path(tokens_of((1, 2, 3)), 3)
    span = Span(node, 2, 3)
    with h.index.pinned(node, Tier.DEVICE):
        h.index.residency.reserve(span, KV, Tier.DEVICE, np.array([7]))
        reserve_state(h.index, node, MAMBA, Tier.DEVICE, 8)
        match = h.match((1, 2, 3))
        assert (match.path_depth, match.depth) == (3, 2)
        where = h.index.locations(match, 3)
        assert where.pages[KV].device.tolist() == [100, 101, int(pending(np.int64(7)))]
        assert where.states[MAMBA].device == -2 - 8
        h.index.residency.publish(span, KV, Tier.DEVICE, np.array([7]))
        assert h.match((1, 2, 3)).depth == 2
        assert publish_state(h.index, node, MAMBA, Tier.DEVICE, 8)
        assert h.match((1, 2, 3)).depth == 3
    assert h.match((1, 2, 3)).depth == 3


def test_a_state_is_of_use_only_with_all_kv_up_to_it():
    h = Harness(MAMBA)
    h.insert((1, 2, 3), 3)
    h.index.residency.drop(h.span((1, 2, 3)), KV, Tier.DEVICE, np.array([False, True, False]))
    assert (h.match((1, 2, 3)).depth, h.match((1, 2, 3)).near_depth) == (0, 0)


def test_a_near_state_is_not_near_when_its_kv_is_only_stored():
    h = Harness(MAMBA)
    h.insert((1, 2), 2)
    h.store((1, 2))
    h.copy_to_host((1, 2), pages=False)
    h.evict(kv=2)
    assert (h.match((1, 2)).depth, h.match((1, 2)).near_depth) == (2, 0)


def test_every_pool_must_be_there():
    index = HybridIndex(page_size=PAGE, namespace=bytes(32), page_pools=[KV, INDEXER])
    index.insert(tokens_of((1, 2, 3)), {KV: np.arange(3), INDEXER: np.arange(3)})
    span = Span(index.match(tokens_of((1, 2, 3))).node, 0, 3)
    index.residency.drop(span, INDEXER, Tier.DEVICE, np.array([False, True, False]))
    assert index.match(tokens_of((1, 2, 3), 1)).depth == 1


def test_an_insert_after_a_held_node_looks_at_the_pages_behind_it_only():
    """The edge behind the node is split as by an insert from the root, and a new page gets its slot."""
    h = Harness(MAMBA)
    h.insert((1, 2), 2)
    h.insert((1, 2, 3, 4), 4)
    node = h.match((1, 2)).node
    slots = np.array([100, 101, 202, 300])
    with h.index.pinned(node, Tier.DEVICE):
        answer = h.index.insert(tokens_of((1, 2, 3, 9)), {KV: slots}, {4: {MAMBA: 300}}, after=node)
        h.index.check_integrity()
    assert (answer.start, answer.depth, answer.node.end) == (2, 4, 4)
    pages = answer.pages[KV]
    assert (pages.table.tolist(), pages.adopted.tolist()) == ([202, 300], [False, True])
    assert not (pages.duplicate | pages.private).any()
    assert h.edges == [(1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 9)]
    assert h.match((1, 2, 3, 9)).depth == 4


def test_extras_do_not_share_and_empty_roots_go():
    h = Harness()
    h.insert((1, 2))
    h.insert((1, 2), extra=b"lora")
    assert h.match((1, 2), extra=b"lora").depth == 2
    assert h.match((1, 2), extra=b"other").depth == 0
    keys = [h.index.page_keys(h.match((1, 2), extra=extra), 2) for extra in (b"", b"lora")]
    assert len({key for chain in keys for key in chain}) == 4
    h.evict(kv=4)
    assert not list(h.index.nodes())


def test_matching_changes_nothing():
    h = Harness()
    h.insert((1, 2))
    h.insert((3, 4))
    for _ in range(3):
        h.match((1, 2))
    assert h.edges == [(1, 2), (3, 4)]
    assert h.evict(kv=1) == {KV: [100, 101]}


# -- insert ------------------------------------------------------------------------------------


def test_duplicates_go_back_to_the_caller():
    h = Harness()
    h.insert((1, 2))
    pages = h.insert((1, 2, 3)).pages[KV]
    assert pages.table.tolist() == [100, 101, 202]
    assert pages.duplicate.tolist() == [True, True, False]
    assert pages.adopted.tolist() == [False, False, True]
    assert not pages.private.any()


def test_the_index_own_slots_are_neither_adopted_nor_duplicates():
    h = Harness()
    table = h.insert((1, 2)).pages[KV].table
    pages = h.index.insert(tokens_of((1, 2)), {KV: table}).pages[KV]
    assert not (pages.adopted | pages.duplicate | pages.private).any()


def test_a_page_that_a_load_is_filling_stays_private():
    h = Harness(MAMBA)
    node = h.index.extend_path(tokens_of((1, 2)), 2)
    h.index.residency.reserve(Span(node, 0, 2), KV, Tier.DEVICE, np.array([7, ABSENT]))
    answer = h.insert((1, 2), 2)
    pages = answer.pages[KV]
    assert pages.private.tolist() == [True, False]
    assert pages.adopted.tolist() == [False, True]
    assert pages.table.tolist() == [100, 101]
    assert answer.rejected_states == ((2, MAMBA, 10_002),), "its KV is not whole"


def test_a_split_keeps_the_state_on_the_lower_node():
    h = Harness(MAMBA)
    h.insert((1, 2, 3, 4), 4)
    keys = h.index.page_keys(h.match((1, 2, 3, 4)), 4)
    h.insert((1, 2, 7), 3)
    assert h.edges == [(1, 2), (1, 2, 3, 4), (1, 2, 7)]
    assert h.match((1, 2, 3, 4)).restorable == (4,)
    assert h.match((1, 2, 7)).restorable == (3,)
    assert h.index.page_keys(h.match((1, 2, 3, 4)), 4) == keys


def test_a_second_copy_of_a_state_is_rejected_and_the_own_one_is_neither():
    h = Harness(MAMBA)
    assert h.insert((1, 2), 2).adopted_states == ((2, MAMBA, 10_002),)
    assert h.insert((1, 2), 2).rejected_states == ((2, MAMBA, 20_002),)
    again = h.index.insert(tokens_of((1, 2)), {KV: np.array([100, 101])}, {2: {MAMBA: 10_002}})
    assert again.adopted_states == again.rejected_states == ()


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
