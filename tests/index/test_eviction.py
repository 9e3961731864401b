"""Rules by which the index selects what to evict, one test each."""

from __future__ import annotations

import numpy as np
import pytest

from tests.index.harness import COST, KV, MAMBA, Harness
from tests.index.model import tokens_of
from tests.index.states import drop_state
from tests.integrity import check_index
from tiercache.core import PoolName, Tier
from tiercache.errors import PoolFullError
from tiercache.index import Span
from tiercache.policy import Policy, UnitKind, Units


def test_leaves_go_before_their_ancestors_least_recently_used_first():
    h = Harness()
    h.insert((1, 2))
    h.insert((1, 2, 3))
    h.insert((1, 2, 4))
    h.index.touch(h.match((1, 2, 3)))
    assert h.evict(kv=1) == {KV: [302]}
    assert h.evict(kv=2)[KV] == [101, 202], "(1, 2) was merged into its only child"
    assert h.match((1, 2)).depth == 1, "no more was taken than was needed"


def test_a_hit_refreshes_only_the_matched_last_node():
    h = Harness(MAMBA)
    h.insert((1, 2), 2)
    h.insert((1, 2, 3), 3)
    h.insert((7, 8), 2)
    h.index.touch(h.match((1, 2, 3)))
    assert h.evict(mamba=1) == {MAMBA: [10_002]}


def test_a_hit_in_the_middle_of_a_path_refreshes_its_restorable_depth():
    h = Harness(MAMBA)
    h.insert((1, 2, 3, 4), 2, 4)
    h.insert((7, 8), 2)
    h.index.touch(h.match((1, 2, 3)))
    assert [h.evict(mamba=1)[MAMBA] for _ in range(3)] == [[10_004], [20_002], [10_002]]


def test_losing_an_internal_state_merges_its_node_with_the_single_child():
    h = Harness(MAMBA)
    h.insert((1, 2, 3, 4), 2, 4)
    assert h.edges == [(1, 2), (1, 2, 3, 4)]
    h.index.touch(h.match((1, 2, 3, 4)))
    assert h.evict(mamba=1) == {MAMBA: [10_002]}
    assert h.edges == [(1, 2, 3, 4)]
    assert h.match((1, 2, 3, 4)).restorable == (4,)


def test_an_internal_state_with_a_copy_below_keeps_its_node():
    h = Harness(MAMBA)
    h.insert((1, 2, 3, 4), 2, 4)
    h.copy_to_host((1, 2))
    h.index.touch(h.match((1, 2, 3, 4)))
    assert h.evict(mamba=1) == {MAMBA: [10_002]}
    assert h.match((1, 2, 3, 4)).restorable == (2, 4)


def test_a_need_for_kv_frees_no_inner_state():
    h = Harness(MAMBA)
    h.insert((1, 2, 3), 2, 3)
    assert h.evict(kv=1) == {KV: [102], MAMBA: [10_003]}
    assert h.match((1, 2)).depth == 2


def test_a_need_for_one_state_pool_leaves_units_without_it():
    h = Harness(MAMBA, PoolName.SWA)
    h.insert((1,), 1)
    h.index.insert(tokens_of((2,)), {KV: np.array([7])}, {1: {MAMBA: 8, PoolName.SWA: 9}})
    assert h.evict(swa=1) == {MAMBA: [8], PoolName.SWA: [9]}, "a state goes as a whole"
    assert h.evict(mamba=1) == {MAMBA: [10_001]}


def test_a_merged_edge_is_as_recent_as_its_most_recent_part():
    h = Harness(MAMBA)
    h.insert((1, 2, 3, 4), 2, 4)
    h.insert((9,), 1)
    h.index.touch(h.match((1, 2)))
    assert drop_state(h.index, h.index.node_at(h.match((1, 2)), 2), MAMBA, Tier.DEVICE) == 10_002
    assert h.edges == [(1, 2, 3, 4), (9,)]
    assert h.evict(kv=1)[KV] == [200]


def test_a_state_taken_at_a_branch_of_an_old_edge_is_new():
    h = Harness(MAMBA)
    h.insert((1, 2, 3, 4), 4)
    h.insert((9,), 1)
    h.insert((1, 2, 5), 2, 3)
    h.index.touch(h.match((1, 2, 3, 4)))
    assert h.evict(mamba=1) == {MAMBA: [20_001]}


def test_the_host_has_one_budget_for_leaves_and_inner_states():
    h = Harness(MAMBA)
    h.insert((1, 2, 3), 2, 3)
    h.copy_to_host((1, 2))
    h.copy_to_host((1, 2, 3))
    h.index.touch(h.match((1, 2, 3)))
    eviction = h.index.evict_host(5, COST)
    assert {pool: at.tolist() for pool, at in eviction.freed.items()} == {MAMBA: [1_010_002]}, "the older one"
    eviction = h.index.evict_host(1, COST)
    assert {pool: len(at) for pool, at in eviction.freed.items()} == {KV: 1, MAMBA: 1}, "then the whole leaf"
    with pytest.raises(PoolFullError):
        h.index.evict_host(3, COST)


def test_what_the_host_evicts_next_is_told_before():
    h = Harness(MAMBA)
    h.insert((1, 2, 3), 2, 3)
    h.copy_to_host((1, 2))
    h.copy_to_host((1, 2, 3))
    h.insert((4, 5), 2)
    h.copy_to_host((4, 5))
    h.insert((6, 7), 2)  # not on the host
    h.index.touch(h.match((1, 2, 3)))

    def told() -> list[tuple[int, UnitKind]]:
        return [(node.end, kind) for node, kind in h.index.coldest_on_host()]

    leaves = [(2, UnitKind.LEAF), (3, UnitKind.LEAF)]
    assert told() == [(2, UnitKind.STATE), *leaves], "the inner state, then the older of the leaves"
    assert list(h.index.evict_host(5, COST).freed) == [MAMBA]
    assert told() == leaves
    pin = h.index.pin(h.match((4, 5)).node, Tier.HOST)
    assert told() == leaves[1:]
    pin.release()
    assert told() == leaves


def test_what_is_known_of_stored_pages_is_bounded():
    h = Harness(max_stored_pages=4)
    for path in ((1, 2), (3, 4), (5, 6)):
        h.insert(path)
        h.store(path)
    h.evict(kv=6)
    assert [h.match(path).depth for path in ((1, 2), (3, 4), (5, 6))] == [0, 2, 2]
    with h.index.pinned(h.match((3, 4)), Tier.STORAGE):
        node = h.index.extend_path(tokens_of((7, 8)), 2)
        h.index.residency.mark_stored(Span(node, 0, 2), KV, np.ones(2, np.bool_))
        h.index.residency.mark_stored(
            Span(h.index.extend_path(tokens_of((9,)), 1), 0, 1), KV, np.ones(1, np.bool_)
        )
        assert [h.match(path).depth for path in ((3, 4), (5, 6), (7, 8), (9,))] == [2, 0, 0, 1]
    check_index(h.index)


class Shallowest(Policy):
    """Ranks by replay length, and notes what it saw."""

    name = "shallowest"

    def __init__(self) -> None:
        self.seen: list[tuple[UnitKind, int, int, int, int]] = []

    def rank(self, units: Units) -> np.ndarray:
        columns = (units.kind, units.depth, units.children, units.hits, units.replay)
        self.seen += zip(*(column.tolist() for column in columns), strict=True)
        return units.replay.astype(float)


def test_a_policy_ranks_what_may_go():
    policy = Shallowest()
    h = Harness(MAMBA, policy=policy)
    h.insert((1, 2, 3, 4, 5), 1, 5)
    h.insert((1, 7, 8), 3)
    h.index.touch(h.match((1, 7, 8)))
    policy.seen.clear()
    assert h.evict(mamba=1) == {MAMBA: [10_001]}
    assert (UnitKind.STATE, 1, 2, 0, 1) in policy.seen
    assert h.evict(kv=1) == {KV: [201, 202], MAMBA: [20_003]}
    assert (UnitKind.LEAF, 3, 0, 1, 3) in policy.seen, "the state above is gone, and more would be replayed"
    assert h.evict(kv=1)[KV] == [100, 101, 102, 103, 104]
