"""Ranks by the values that callers give: hints, their mean, their age and what is kept of them.

Whether each eviction takes the unit of the lowest rank is shown beside a model, in `test_eviction_order`.
"""

from __future__ import annotations

from math import inf

import numpy as np

from tests.storage.resident_model import HYBRID, PLAIN, STATE, Clock, Everything, digest, put, remove
from tiercache.storage.eviction import EvictionOrder
from tiercache.storage.residents import Residents
from tiercache.storage.values import usable_hints
from tiercache.testing.objects import page_key

NUMBERS = {digest(n): n for n in range(5000)}


def filled(count: int) -> tuple[Residents, EvictionOrder, Clock]:
    clock = Clock()
    residents = Residents(clock=clock)
    for n in range(count):
        put(residents, n)
    return residents, EvictionOrder(residents), clock


def evicted(residents: Residents, order: EvictionOrder, count: int) -> list[int]:
    taker = Everything(residents, count)
    order.evict(taker)
    return [NUMBERS[d] for d in taker.gone]


def test_before_the_first_hint_nothing_is_kept() -> None:
    residents, order, _ = filled(50)
    before = residents.memory_bytes()
    assert evicted(residents, order, 10) == list(range(10))
    residents.advise([digest(999)], [1.0], 0)
    assert not residents.pages.hinted, "an unknown object makes no difference"
    assert residents.memory_bytes() == before
    residents.advise([digest(20)], [1.0], 0)
    assert residents.memory_bytes() > before


def test_the_first_values_rank_anew_what_was_queued_by_its_last_use() -> None:
    residents, order, _ = filled(5000)
    assert evicted(residents, order, 1) == [0]
    residents.advise([digest(n) for n in range(5000)], [1.0 / (1 + n) for n in range(5000)], 1)
    assert evicted(residents, order, 40) == list(range(4999, 4959, -1))


def test_thousands_of_values_that_change_are_obeyed_in_order() -> None:
    """More than the front holds, and more than are noted one by one."""
    count = 5000
    residents, order, _ = filled(count)
    digests = [digest(n) for n in range(count)]
    values = np.random.default_rng(1).permutation(count) + 1.0
    residents.advise(digests, values, 7)  # type: ignore[arg-type]
    assert evicted(residents, order, 1000) == np.argsort(values)[:1000].tolist()
    values = count + 1.0 - values
    residents.advise(digests, values, 7)  # type: ignore[arg-type]
    left = [n for n in np.argsort(values).tolist() if values[n] <= count - 1000]
    found = []
    while residents:
        found += evicted(residents, order, 700)
    assert found == left


def test_changing_values_for_ever_does_not_grow() -> None:
    residents, order, _ = filled(100)
    for n in range(200):
        residents.advise([digest(i) for i in range(50)], [2.0 ** -(n + i) for i in range(50)], 1)
        put(residents, 1000 + n)
        evicted(residents, order, 1)
    assert len(order) <= 3 * len(residents) + 1024


def test_the_mean_follows_the_hints_and_bounds_each() -> None:
    residents, _, _ = filled(2000)
    values = residents.pages.values
    residents.advise([digest(0)], [16.0], 0)
    assert values.mean == 4.0
    residents.advise([digest(1), digest(2), digest(3)], [0.0, 4.0, 0.0], 0)
    assert values.mean == 3.0, "a value of 0 says nothing of the others"
    for _ in range(10):
        residents.advise([digest(n) for n in range(2000)], [1024.0] * 2000, 0)
    assert abs(values.mean - 10) < 0.01
    residents.advise([digest(0)], [1e308], 0)
    assert values.mean < 10 + 64 / 1024


def test_objects_without_a_hint_stay_in_the_order_of_use_across_hours_and_many_samples() -> None:
    residents, order, clock = filled(300)
    residents.advise([digest(0)], [1e9], 0)
    for n in range(10_000):
        clock.now += 2.0
        residents.touch(residents.find(digest(1 + n % 299)))
    expected = [1 + n % 299 for n in range(10_000 - 299, 10_000)]
    assert evicted(residents, order, 300) == [0, *expected], "the only hint is the mean, and has aged"


def test_an_object_that_comes_back_has_its_hint() -> None:
    residents, order, _ = filled(3)
    residents.advise([digest(n) for n in range(3)], [1.0, 100.0, 10.0], 5)
    row = residents.find(digest(1))
    left = residents.leave(row)
    residents.enter(row, *left)
    assert evicted(residents, order, 3) == [0, 2, 1]


def test_a_node_that_is_used_again_has_no_hint_of_the_page_before() -> None:
    residents, _, _ = filled(2)
    residents.advise([digest(0)], [1e9], 5)
    remove(residents, residents.find(digest(0)))
    row = put(residents, 7)
    assert not residents.pages.rank[residents.page[row]]
    state = put(residents, 7, layout=STATE, namespace_id=PLAIN)
    residents.advise([digest(7, STATE)], [1e9], 5)
    remove(residents, state)
    assert not residents.pages.state_rank[residents.page[row]]


def test_a_page_gets_the_rank_of_the_state_behind_it() -> None:
    residents, order, _ = filled(1)
    put(residents, 1, 0)
    for page in (0, 1):
        put(residents, page, layout=STATE)
    residents.advise([digest(1, STATE), digest(0)], [16.0, 2.0**-40], 5)
    order.evict(taker := Everything(residents, 1))
    assert set(taker.gone) == {digest(1), digest(1, STATE)}
    put(residents, 2)
    put(residents, 2, layout=STATE)
    residents.advise([digest(2)], [1.0], 5)
    order.evict(taker := Everything(residents, 1))
    assert set(taker.gone) == {digest(2), digest(2, STATE)}


def test_the_state_that_a_write_needs_stays_whatever_its_value() -> None:
    clock = Clock()
    residents = Residents(clock=clock)
    order = EvictionOrder(residents)
    for n in range(4):
        put(residents, n, n - 1 if n else None, namespace_id=HYBRID)
    for n in (1, 3):
        put(residents, n, layout=STATE, namespace_id=HYBRID)
    residents.advise([digest(1, STATE)], [0.0], 0)
    residents.advise([*(digest(n) for n in range(4)), digest(3, STATE)], [5.0] * 5, 0)
    node = residents.pages.find(page_key(2))
    order.evict(taker := Everything(residents, 1), [node])
    assert digest(3, STATE) in taker.gone
    assert digest(1, STATE) not in taker.gone


def test_hints_that_are_possible() -> None:
    values, which = usable_hints([1.0, -1.0, float("nan"), 0.0, inf, 3.0], 5, 6)
    assert (values.tolist(), which.tolist()) == ([1.0, 0.0, 3.0], [0, 3, 5])
    assert usable_hints([1.0, 2.0, 3.0], 5, 2)[1].tolist() == [0, 1]
    assert usable_hints([1.0], -1, 1)[1].tolist() == []
