"""The rules of the index, one test each (docs: the hybrid prefix index)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.index.model import PAGE, Path, path_of, tokens_of
from tiercache.core import ABSENT, Locations, PoolName, Tier, pending
from tiercache.errors import AdmissionError, InputError, PoolFullError
from tiercache.index import HybridIndex, Inserted, Match, Span, checkpoint_depths
from tiercache.policy import Policy, UnitKind, Units

KV, INDEXER, MAMBA = PoolName.KV, PoolName.INDEXER, PoolName.MAMBA
COST = {KV: 1, MAMBA: 5}


class Harness:
    """An index with fresh slots: the slot of page i of the n-th insert is 100 * n + i, its states are 10_000 * n + depth."""

    def __init__(self, *state_pools: PoolName, **options) -> None:
        self.index = HybridIndex(page_size=PAGE, namespace=bytes(32), page_pools=[KV], state_pools=state_pools, **options)
        self.inserts = 0

    def insert(self, path: Path, *depths: int, extra: bytes = b"") -> Inserted:
        self.inserts += 1
        slots = np.arange(len(path)) + 100 * self.inserts
        states = {depth: {MAMBA: 10_000 * self.inserts + depth} for depth in depths}
        answer = self.index.insert(tokens_of(path), {KV: slots}, states, extra)
        self.index.check_integrity()
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
                self.index.reserve_pages(span, KV, Tier.HOST, handles)
                self.index.publish_pages(span, KV, Tier.HOST, handles)
            if state:
                slot = self.index.locations(span.node, span.end)[1][MAMBA].device
                assert self.index.reserve_state(span.node, MAMBA, Tier.HOST, slot + 1_000_000)
                assert self.index.publish_state(span.node, MAMBA, Tier.HOST, slot + 1_000_000)
        self.index.check_integrity()

    def store(self, path: Path, *, state: bool = False) -> None:
        span = self.span(path)
        self.index.mark_stored(span, KV, np.ones(len(span), np.bool_))
        if state:
            self.index.mark_state_stored(span.node, MAMBA)

    def evict(self, **need: int) -> dict[PoolName, list[int]]:
        eviction = self.index.evict_device({PoolName(name): count for name, count in need.items()})
        self.index.check_integrity()
        return {pool: locations.tolist() for pool, locations in eviction.freed.items()}

    @property
    def edges(self) -> list[Path]:
        """The path to the end of every node."""
        return sorted(path_of(node) for node in self.index.nodes() if node.pages)


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
        h.index.reserve_pages(span, KV, Tier.DEVICE, np.array([7]))
        h.index.reserve_state(node, MAMBA, Tier.DEVICE, 8)
        match = h.match((1, 2, 3))
        assert (match.path_depth, match.depth) == (3, 2)
        where = h.index.locations(match, 3)
        assert where.pages[KV].device.tolist() == [100, 101, int(pending(np.int64(7)))]
        assert where.states[MAMBA].device == -2 - 8
        h.index.publish_pages(span, KV, Tier.DEVICE, np.array([7]))
        assert h.match((1, 2, 3)).depth == 2
        assert h.index.publish_state(node, MAMBA, Tier.DEVICE, 8)
        assert h.match((1, 2, 3)).depth == 3
    assert h.match((1, 2, 3)).depth == 3


def test_a_state_is_of_use_only_with_all_kv_up_to_it():
    h = Harness(MAMBA)
    h.insert((1, 2, 3), 3)
    h.index.drop_pages(h.span((1, 2, 3)), KV, Tier.DEVICE, np.array([False, True, False]))
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
    index.drop_pages(span, INDEXER, Tier.DEVICE, np.array([False, True, False]))
    assert index.match(tokens_of((1, 2, 3), 1)).depth == 1


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
    h.index.reserve_pages(Span(node, 0, 2), KV, Tier.DEVICE, np.array([7, ABSENT]))
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
def test_a_bad_insert_changes_nothing(pages: dict[PoolName, Locations], states: dict[int, dict[PoolName, int]]):
    h = Harness(MAMBA)
    with pytest.raises(InputError):
        h.index.insert(tokens_of((1, 2, 3)), pages, states)
    assert not list(h.index.nodes())


def test_inserting_no_whole_page_leaves_nothing():
    h = Harness()
    answer = h.index.insert(tokens_of((), tail=1), {KV: np.empty(0, np.int64)})
    assert answer.depth == 0
    assert not list(h.index.nodes())


# -- eviction ----------------------------------------------------------------------------------


def test_leaves_go_before_their_ancestors_least_recently_used_first():
    h = Harness()
    h.insert((1, 2))
    h.insert((1, 2, 3))
    h.insert((1, 2, 4))
    h.index.touch(h.match((1, 2, 3)))
    assert h.evict(kv=1) == {KV: [302]}
    assert h.evict(kv=1)[KV] == [100, 101, 202], "(1, 2) was merged into its only child"


def test_a_hit_refreshes_only_the_matched_last_node():
    h = Harness(MAMBA)
    h.insert((1, 2), 2)
    h.insert((1, 2, 3), 3)
    h.insert((7, 8), 2)
    h.index.touch(h.match((1, 2, 3)))
    assert h.evict(mamba=1) == {MAMBA: [10_002]}


def test_a_hit_refreshes_the_path_where_that_is_selected():
    h = Harness(MAMBA, refresh="path")
    h.insert((1, 2), 2)
    h.insert((1, 2, 3), 3)
    h.insert((7, 8), 2)
    h.index.touch(h.match((1, 2, 3)))
    assert h.evict(mamba=1) == {MAMBA: [30_002]}


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


def test_a_branch_keeps_its_node_when_its_state_goes():
    h = Harness(MAMBA)
    h.insert((1, 2, 3), 2, 3)
    h.insert((1, 2, 4), 3)
    assert h.evict(mamba=1) == {MAMBA: [10_002]}
    assert h.edges == [(1, 2), (1, 2, 3), (1, 2, 4)]


def test_dead_kv_goes_first():
    h = Harness(MAMBA)
    h.insert((1, 2), 2)
    h.insert((3, 4, 5), 2)
    h.insert((6, 7))
    h.index.touch(h.match((3, 4)))
    assert h.evict(kv=1) == {KV: [202]}, "deeper than the deepest state"
    assert h.evict(kv=1) == {KV: [300, 301]}, "no state at all, though newer than the next"
    assert h.evict(kv=1) == {KV: [100, 101], MAMBA: [10_002]}


def test_kv_is_not_dead_while_a_state_survives_in_any_tier():
    h = Harness(MAMBA)
    h.insert((1, 2), 2)
    h.insert((3, 4), 2)
    h.copy_to_host((3, 4), pages=False)
    assert h.evict(mamba=2) == {MAMBA: [10_002, 20_002]}
    h.index.touch(h.match((3, 4)))
    assert h.evict(kv=1) == {KV: [100, 101]}
    assert h.match((3, 4)).depth == 2


def test_a_need_for_states_frees_no_kv_and_takes_inner_and_leaf_states_alike():
    h = Harness(MAMBA)
    h.insert((1, 2, 3), 2, 3)
    h.insert((4,), 1)
    assert h.evict(mamba=3) == {MAMBA: [10_002, 10_003, 20_001]}
    assert h.index.evictable(Tier.DEVICE) == {KV: 4, MAMBA: 0}


def test_a_need_for_kv_frees_no_inner_state():
    h = Harness(MAMBA)
    h.insert((1, 2, 3), 2, 3)
    assert h.evict(kv=1) == {KV: [102], MAMBA: [10_003]}
    assert h.match((1, 2)).depth == 2


def test_what_the_host_or_the_store_has_is_demoted_not_lost():
    h = Harness(MAMBA)
    h.insert((1, 2), 2)
    h.insert((3, 4), 2)
    h.insert((5, 6), 2)
    h.copy_to_host((1, 2))
    h.store((3, 4))
    eviction = h.index.evict_device({KV: 6})
    assert (eviction.demoted, eviction.lost) == (5, 4)
    assert (h.match((1, 2)).near_depth, h.match((5, 6)).path_depth) == (2, 0)
    eviction = h.index.evict_host(7, COST)
    assert (eviction.demoted, eviction.lost) == (0, 3)


def test_another_page_of_the_edge_in_another_tier_demotes_nothing():
    h = Harness()
    h.insert((1, 2, 3))
    span, first = h.span((1, 2, 3)), np.array([True, False, False])
    h.index.mark_stored(span, KV, first)
    h.index.drop_pages(span, KV, Tier.DEVICE, first)
    eviction = h.index.evict_device({KV: 2})
    assert (eviction.demoted, eviction.lost) == (0, 2)


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
    assert h.index.drop_state(h.index.node_at(h.match((1, 2)), 2), MAMBA, Tier.DEVICE) == 10_002
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
    assert {pool: at.tolist() for pool, at in eviction.freed.items()} == {MAMBA: [1_010_002]}, "the older inner state is enough"
    eviction = h.index.evict_host(1, COST)
    assert {pool: len(at) for pool, at in eviction.freed.items()} == {KV: 1, MAMBA: 1}, "then the leaf, as a whole"
    with pytest.raises(PoolFullError):
        h.index.evict_host(3, COST)


def test_a_need_beyond_what_is_evictable_changes_nothing():
    h = Harness(MAMBA)
    h.insert((1, 2), 2)
    h.insert((3, 4), 2)
    with h.index.pinned(h.match((1, 2)), Tier.DEVICE):
        assert h.index.evictable(Tier.DEVICE) == {KV: 2, MAMBA: 1}
        with pytest.raises(PoolFullError):
            h.index.evict_device({MAMBA: 1, KV: 3})
        assert h.match((3, 4)).depth == 2
        assert h.evict(kv=2, mamba=1) == {KV: [200, 201], MAMBA: [20_002]}


def test_what_is_in_flight_is_not_evicted():
    h = Harness()
    h.insert((1, 2))
    span = h.span((1, 2))
    h.index.reserve_pages(span, KV, Tier.HOST, np.array([7, 8]))
    assert h.index.evictable(Tier.HOST) == {KV: 0}
    h.evict(kv=2)
    assert h.index.locations(span.node, 2).pages[KV].host.tolist() == [-9, -10]
    assert h.index.cancel_pages(span, KV, Tier.HOST, np.array([7, 8])).all()
    assert not list(h.index.nodes())


def test_what_is_known_of_stored_pages_is_bounded():
    h = Harness(max_stored_pages=4)
    for path in ((1, 2), (3, 4), (5, 6)):
        h.insert(path)
        h.store(path)
    h.evict(kv=6)
    assert [h.match(path).depth for path in ((1, 2), (3, 4), (5, 6))] == [0, 2, 2]
    with h.index.pinned(h.match((3, 4)), Tier.STORAGE):
        node = h.index.extend_path(tokens_of((7, 8)), 2)
        h.index.mark_stored(Span(node, 0, 2), KV, np.ones(2, np.bool_))
        h.index.mark_stored(Span(h.index.extend_path(tokens_of((9,)), 1), 0, 1), KV, np.ones(1, np.bool_))
        assert [h.match(path).depth for path in ((3, 4), (5, 6), (7, 8), (9,))] == [2, 0, 0, 1]
    h.index.check_integrity()


# -- pins --------------------------------------------------------------------------------------


def test_a_pinned_path_survives_in_the_pinned_tier_only():
    h = Harness(MAMBA)
    h.insert((1, 2, 3), 2, 3)
    h.copy_to_host((1, 2, 3))
    with h.index.pinned(h.match((1, 2, 3)), Tier.DEVICE):
        assert h.index.evictable(Tier.DEVICE) == {KV: 0, MAMBA: 1}, "the pages and the state at the pin's end stay, an older state may go"
        assert h.index.evict_host(8, COST).demoted == 4
    assert h.index.evictable(Tier.DEVICE) == {KV: 3, MAMBA: 2}


def test_what_came_up_for_eviction_while_it_was_pinned_comes_up_again():
    h = Harness(MAMBA)
    h.insert((1, 2), 2)
    h.insert((3,), 1)
    with h.index.pinned(h.match((1, 2)), Tier.DEVICE):
        assert h.evict(kv=1, mamba=1) == {KV: [200], MAMBA: [20_001]}
    h.index.check_integrity()
    assert h.evict(kv=2) == {KV: [100, 101], MAMBA: [10_002]}


def test_so_does_a_leaf_that_was_pinned_through_what_follows_it():
    h = Harness()
    h.insert((1, 2))
    node = h.index.extend_path(tokens_of((1, 2, 3)), 3)
    h.insert((7,))
    h.index.mark_stored(Span(node, 2, 3), KV, np.ones(1, np.bool_))
    with h.index.pinned(node, Tier.DEVICE):
        assert h.evict(kv=1) == {KV: [200]}
    h.index.check_integrity()
    assert h.evict(kv=2) == {KV: [100, 101]}


def test_of_the_states_on_a_pinned_path_only_the_last_one_is_held():
    h = Harness(MAMBA)
    h.insert((1, 2, 3), 2, 3)
    with h.index.pinned(h.match((1, 2, 3)), Tier.DEVICE):
        assert h.evict(mamba=1) == {MAMBA: [10_002]}
        with pytest.raises(PoolFullError):
            h.evict(mamba=1)
        assert h.match((1, 2, 3)).restorable == (3,)


def test_a_pin_holds_both_parts_of_a_split_and_its_node_keeps_its_end():
    h = Harness()
    node = h.insert((1, 2, 3, 4)).node
    pin = h.index.pin(node, Tier.DEVICE)
    h.insert((1, 2, 9))
    assert h.evict(kv=1) == {KV: [202]}
    assert (node.end, node.pages) == (4, 4), "the upper part came back to its only child"
    with pytest.raises(PoolFullError):
        h.evict(kv=1)
    pin.release()
    assert h.evict(kv=1) == {KV: [100, 101, 102, 103]}


def test_a_merge_never_swallows_a_node_at_which_a_pin_ends():
    h = Harness(MAMBA)
    h.insert((1, 2, 3), 2, 3)
    pin = h.index.pin(h.index.node_at(h.match((1, 2)), 2), Tier.HOST)
    h.index.touch(h.match((1, 2, 3)))
    assert h.evict(mamba=1) == {MAMBA: [10_002]}
    assert h.edges == [(1, 2), (1, 2, 3)]
    pin.release()
    assert h.edges == [(1, 2, 3)]


def test_a_pin_is_released_once():
    h = Harness()
    pin = h.index.pin(h.insert((1,)).node, Tier.DEVICE)
    pin.release()
    with pytest.raises(AdmissionError):
        pin.release()
    h.index.check_integrity()


def test_a_match_that_was_evicted_cannot_be_used():
    h = Harness()
    h.insert((1, 2))
    match = h.match((1, 2))
    h.evict(kv=2)
    with pytest.raises(InputError, match="no longer in the index"):
        h.index.pin(match, Tier.DEVICE)
    h.index.prune(match.node)


# -- what is on its way ------------------------------------------------------------------------


def test_only_the_location_that_was_reserved_is_published_or_cancelled():
    h = Harness()
    h.insert((1, 2, 3))
    span = h.span((1, 2, 3))
    assert h.index.reserve_pages(span, KV, Tier.HOST, np.array([5, 6, ABSENT])).tolist() == [True, True, False]
    assert h.index.reserve_pages(span, KV, Tier.HOST, np.array([7, 8, 9])).tolist() == [False, False, True]
    assert h.index.publish_pages(span, KV, Tier.HOST, np.array([5, 8, 9])).tolist() == [True, False, True]
    assert h.index.cancel_pages(span, KV, Tier.HOST, np.array([5, 6, 9])).tolist() == [False, True, False]
    assert h.index.locations(span.node, 3).pages[KV].host.tolist() == [5, ABSENT, 9]
    assert h.index.drop_pages(span, KV, Tier.HOST, np.array([True, True, False])).tolist() == [5, ABSENT, ABSENT]


def test_a_span_stays_right_while_others_split_its_path():
    h = Harness()
    node = h.index.extend_path(tokens_of((1, 2, 3, 4)), 4)
    span = Span(node, 1, 4)
    with h.index.pinned(node, Tier.DEVICE):
        h.index.reserve_pages(span, KV, Tier.DEVICE, np.array([5, 6, 7]))
        h.insert((1, 2, 8))
        assert h.index.publish_pages(span, KV, Tier.DEVICE, np.array([5, 6, 7])).all()
        assert h.index.locations(node, 4).pages[KV].device.tolist() == [100, 5, 6, 7]


def test_an_empty_path_is_pruned():
    h = Harness()
    h.insert((1, 2))
    h.index.prune(h.index.extend_path(tokens_of((1, 2, 3)), 3))
    assert h.edges == [(1, 2)]
    h.index.prune(h.index.extend_path(tokens_of((1, 2)), 1))
    assert h.edges == [(1, 2)]
    pin = h.index.pin(h.index.extend_path(tokens_of((4, 5)), 2))
    h.index.prune(pin.node)
    assert h.edges == [(1, 2), (4, 5)]
    pin.release()
    assert h.edges == [(1, 2)]


def test_a_state_that_comes_up_keeps_the_depth_it_belongs_to():
    h = Harness(MAMBA)
    h.insert((1, 2, 3, 4), 4)
    node = h.index.extend_path(tokens_of((1, 2)), 2)
    with h.index.pinned(node, Tier.HOST):
        assert h.index.reserve_state(node, MAMBA, Tier.HOST, 5)
        assert not h.index.reserve_state(node, MAMBA, Tier.HOST, 6)
        assert not h.index.publish_state(node, MAMBA, Tier.HOST, 6)
        assert h.index.publish_state(node, MAMBA, Tier.HOST, 5)
    assert h.match((1, 2, 3, 4)).restorable == (2, 4)
    assert h.index.drop_state(node, MAMBA, Tier.HOST) == 5
    assert h.edges == [(1, 2, 3, 4)]


@pytest.mark.parametrize("locations", [np.array([1]), np.array([1, 2], np.int32), np.array([1, -5])])
def test_a_span_takes_one_location_a_page(locations: Locations):
    h = Harness()
    h.insert((1, 2))
    with pytest.raises(InputError):
        h.index.reserve_pages(h.span((1, 2)), KV, Tier.HOST, locations)


# -- policy and checkpoints --------------------------------------------------------------------


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
    assert (UnitKind.LEAF, 3, 0, 1, 3) in policy.seen, "the state above is gone, so that more would be replayed"
    assert h.evict(kv=1)[KV] == [100, 101, 102, 103, 104]


@pytest.mark.parametrize(
    ("depth", "path_depth", "tokens", "expected"),
    [
        (0, 0, 25, (6,)),
        (0, 3, 25, (3, 6)),
        (3, 3, 25, (6,)),
        (0, 3, 24, (3, 5, 6)),
        (5, 6, 24, (6,)),
        (6, 6, 25, ()),
        (0, 6, 25, (6,)),
        (0, 6, 24, (5, 6)),
        (0, 0, 3, ()),
        (0, 0, 4, (1,)),
        (0, 0, 0, ()),
    ],
)
def test_checkpoints(depth: int, path_depth: int, tokens: int, expected: tuple[int, ...]):
    assert tuple(checkpoint_depths(depth, path_depth, tokens, page_size=4)) == expected


def test_the_branch_point_is_where_a_prompt_leaves_kv_that_has_no_state():
    h = Harness(MAMBA)
    h.insert((1, 2, 3, 4), 4)
    match = h.match((1, 2, 9, 9))
    assert tuple(checkpoint_depths(match.depth, match.path_depth, 4 * PAGE + 1, PAGE)) == (2, 4)
