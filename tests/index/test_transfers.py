"""Pins, and what is on its way: the rules, one test each."""

from __future__ import annotations

import numpy as np
import pytest

from tests.index.harness import COST, KV, MAMBA, Harness
from tests.index.model import tokens_of
from tests.index.states import drop_state, publish_state, reserve_state
from tiercache.core import ABSENT, Locations, Tier
from tiercache.errors import AdmissionError, InputError, PoolFullError
from tiercache.index import Span

# -- pins --------------------------------------------------------------------------------------


def test_a_pinned_path_survives_in_the_pinned_tier_only():
    h = Harness(MAMBA)
    h.insert((1, 2, 3), 2, 3)
    h.copy_to_host((1, 2, 3))
    with h.index.pinned(h.match((1, 2, 3)), Tier.DEVICE):
        assert h.index.evictable(Tier.DEVICE) == {KV: 0, MAMBA: 1}, (
            "the pages and the state at the pin's end stay, an older state may go"
        )
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
    h.index.residency.mark_stored(Span(node, 2, 3), KV, np.ones(1, np.bool_))
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


# -- what is on its way ------------------------------------------------------------------------


def test_only_the_location_that_was_reserved_is_published_or_cancelled():
    h = Harness()
    h.insert((1, 2, 3))
    span = h.span((1, 2, 3))
    assert h.index.residency.reserve(span, KV, Tier.HOST, np.array([5, 6, ABSENT])).tolist() == [
        True,
        True,
        False,
    ]
    assert h.index.residency.reserve(span, KV, Tier.HOST, np.array([7, 8, 9])).tolist() == [
        False,
        False,
        True,
    ]
    assert h.index.residency.publish(span, KV, Tier.HOST, np.array([5, 8, 9])).tolist() == [True, False, True]
    assert h.index.residency.cancel(span, KV, Tier.HOST, np.array([5, 6, 9])).tolist() == [False, True, False]
    assert h.index.locations(span.node, 3).pages[KV].host.tolist() == [5, ABSENT, 9]
    assert h.index.residency.drop(span, KV, Tier.HOST, np.array([True, True, False])).tolist() == [
        5,
        ABSENT,
        ABSENT,
    ]


def test_a_span_stays_right_while_others_split_its_path():
    h = Harness()
    node = h.index.extend_path(tokens_of((1, 2, 3, 4)), 4)
    span = Span(node, 1, 4)
    with h.index.pinned(node, Tier.DEVICE):
        h.index.residency.reserve(span, KV, Tier.DEVICE, np.array([5, 6, 7]))
        h.insert((1, 2, 8))
        assert h.index.residency.publish(span, KV, Tier.DEVICE, np.array([5, 6, 7])).all()
        assert h.index.locations(node, 4).pages[KV].device.tolist() == [100, 5, 6, 7]


def test_an_empty_path_is_pruned():
    h = Harness()
    h.insert((1, 2))
    h.index.pin(h.index.extend_path(tokens_of((1, 2, 3)), 3)).release()
    assert h.edges == [(1, 2)]
    h.index.pin(h.index.extend_path(tokens_of((1, 2)), 1)).release()
    assert h.edges == [(1, 2)]
    pin = h.index.pin(h.index.extend_path(tokens_of((4, 5)), 2))
    assert h.edges == [(1, 2), (4, 5)]
    pin.release()
    assert h.edges == [(1, 2)]


def test_a_state_that_comes_up_keeps_the_depth_it_belongs_to():
    h = Harness(MAMBA)
    h.insert((1, 2, 3, 4), 4)
    node = h.index.extend_path(tokens_of((1, 2)), 2)
    with h.index.pinned(node, Tier.HOST):
        assert reserve_state(h.index, node, MAMBA, Tier.HOST, 5)
        assert not reserve_state(h.index, node, MAMBA, Tier.HOST, 6)
        assert not publish_state(h.index, node, MAMBA, Tier.HOST, 6)
        assert publish_state(h.index, node, MAMBA, Tier.HOST, 5)
    assert h.match((1, 2, 3, 4)).restorable == (2, 4)
    assert drop_state(h.index, node, MAMBA, Tier.HOST) == 5
    assert h.edges == [(1, 2, 3, 4)]


@pytest.mark.parametrize("locations", [np.array([1]), np.array([1, 2], np.int32), np.array([1, -5])])
def test_a_span_takes_one_location_a_page(locations: Locations):
    h = Harness()
    h.insert((1, 2))
    with pytest.raises(InputError):
        h.index.residency.reserve(h.span((1, 2)), KV, Tier.HOST, locations)
