"""Pins, and what is on its way: the rules, one test each."""

from __future__ import annotations

import numpy as np
import pytest

from tests.index.harness import KV, Harness
from tests.index.model import tokens_of
from tests.integrity import check_index
from tiercache.core import ABSENT, Locations, Tier
from tiercache.errors import AdmissionError, InputError

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


@pytest.mark.parametrize("locations", [np.array([1]), np.array([1, 2], np.int32), np.array([1, -5])])
def test_a_span_takes_one_location_a_page(locations: Locations):
    h = Harness()
    h.insert((1, 2))
    with pytest.raises(InputError):
        h.index.residency.reserve(h.span((1, 2)), KV, Tier.HOST, locations)
