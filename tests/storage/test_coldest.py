"""The objects that a store says are coldest, beside those that an eviction takes."""

from __future__ import annotations

from random import Random

import pytest

from tests.storage.integrity import check_residents
from tests.storage.resident_model import HYBRID, KV, PLAIN, STATE, Everything, digest, page_of, put, remove
from tiercache.storage.eviction import EvictionOrder
from tiercache.storage.residents import Residents

LENGTH = 10


def forest(seed: int, namespace_id: int) -> Residents:
    """Some 40 pages in trees, in use at random, with states on some pages and on all leaves of HYBRID."""
    random, residents = Random(seed), Residents()
    if namespace_id == HYBRID:
        residents.pages.require_states(HYBRID)
    inner: set[int] = set()
    for name in range(40):
        above = random.choice([None, *range(max(0, name - 6), name)]) if name else None
        inner.add(-1 if above is None else above)
        put(residents, name, above, namespace_id=namespace_id, length=LENGTH)
    if namespace_id == HYBRID:
        for name in range(40):
            if name not in inner or random.random() < 0.2:
                put(residents, name, layout=STATE, namespace_id=HYBRID, length=LENGTH)
    for name in random.choices(range(40), k=60):
        residents.touch(residents.find(digest(name)))
    return residents


def said(residents: Residents, order: EvictionOrder, nbytes: int) -> list[bytes]:
    rows = residents.still_there(*order.survey().coldest(nbytes))
    return [residents.digest(row) for row in rows.tolist()]


def ancestors(residents: Residents, row: int) -> set[bytes]:
    """The digests of the pages at and before the page of an object."""
    found, node = set(), residents.page[row]
    while node >= 0:
        found.add(digest(page_of(residents, residents.rows_of(node)[0]), KV))
        node = residents.pages.parent_node[node]
    return found


@pytest.mark.parametrize("namespace_id", [PLAIN, HYBRID])
@pytest.mark.parametrize("seed", range(30))
def test_it_is_what_goes_next_and_the_pages_before_it(seed: int, namespace_id: int) -> None:
    residents = forest(seed, namespace_id)
    order = EvictionOrder(residents)
    count = 1 + seed % 12
    found = said(residents, order, count * LENGTH)
    paths = {d: ancestors(residents, residents.find(d)) for d in found}
    before: set[bytes] = set()
    gone: set[bytes] = set()
    # Evict unit by unit, up to the first unit that was not said.
    while gone <= set(found) and residents:
        taker = Everything(residents, 1)
        order.evict(taker)
        before, gone = gone, gone | set(taker.gone)
    assert len(before) >= min(count, len(found))
    left = set(found) - gone
    assert left <= set[bytes]().union(*(paths[d] for d in before)), "what stays is there for what goes"
    assert len(found) == len(set(found))
    seen: set[bytes] = set()
    for d in found:
        seen.add(d)
        assert paths[d] <= seen, "the pages before an object come first"


@pytest.mark.parametrize("by_value", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_question_changes_no_order(seed: int, by_value: bool) -> None:
    gone = []
    for asks in (False, True):
        residents = forest(seed, HYBRID)
        order = EvictionOrder(residents)
        if by_value:
            digests = [digest(name, layout) for name in range(40) for layout in (KV, STATE)]
            residents.advise(digests, [Random(seed + n).random() for n in range(80)], 1)
        gone.append([])
        while residents:
            if asks:
                said(residents, order, 5 * LENGTH)
            taker = Everything(residents, 2)
            order.evict(taker)
            gone[-1] += taker.gone
        check_residents(residents)
    assert gone[0] == gone[1]


def test_a_state_that_goes_alone_is_said_with_its_page() -> None:
    residents = Residents()
    for name in range(6):
        put(residents, name, name - 1 if name else None, namespace_id=HYBRID, depth=name + 1)
    for name in (1, 5):
        put(residents, name, layout=STATE, namespace_id=HYBRID)
    residents.advise([digest(1, STATE), *map(digest, range(6))], [0.5] + [5.0] * 6, 1)
    order = EvictionOrder(residents)
    assert said(residents, order, 1) == [digest(0), digest(1), digest(1, STATE)]
    order.evict(taker := Everything(residents, 1))
    assert taker.gone == [digest(1, STATE)]


def test_orphans_are_left_out_before_anyone_has_counted_them() -> None:
    residents = Residents()
    for name in range(4):
        put(residents, name, name - 1 if name else None)
    put(residents, 9)
    order = EvictionOrder(residents)
    remove(residents, residents.find(digest(1)))
    assert set(said(residents, order, 100)) == {digest(0), digest(9)}
    assert residents.pages.orphans_changed, "whoever evicts next still has to count them"


def test_a_row_with_another_object_is_not_meant() -> None:
    residents = Residents()
    rows = [put(residents, name) for name in range(3)]
    order = EvictionOrder(residents)
    found = order.survey().coldest(100)
    remove(residents, rows[1])
    remove(residents, rows[2])
    assert put(residents, 7) in rows
    assert residents.still_there(*found).tolist() == [rows[0]]


def test_nothing_is_coldest_in_an_empty_store() -> None:
    residents = Residents()
    assert said(residents, EvictionOrder(residents), 100) == []
