"""The table of objects that every store shares: what it knows of each, however the objects came."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import example_count
from tests.storage.integrity import check_residents, nodes_of
from tests.storage.resident_model import HYBRID, KV, MORE_STATE, PLAIN, STATE, Everything, digest, put, remove
from tiercache.storage.eviction import EvictionOrder
from tiercache.storage.pages import column_of
from tiercache.storage.residents import ObjectColumns, Residents
from tiercache.storage.restorable import Worth
from tiercache.testing.objects import page_key


def test_an_object_that_comes_back_is_what_it_was() -> None:
    """Its page may lie elsewhere by then, where another namespace's was before."""
    residents = Residents()
    residents.pages.require_states(HYBRID)
    row = put(residents, 0, namespace_id=HYBRID, depth=3)
    left = residents.leave(row)
    remove(residents, put(residents, 1, namespace_id=PLAIN))
    kept = put(residents, 2, namespace_id=PLAIN)
    residents.enter(row, *left)
    node = residents.pages.find(page_key(0))
    assert (
        residents.pages.namespace_id[node],
        residents.pages.depth[node],
        residents.pages.number[node],
    ) == (HYBRID, 3, 1)
    assert residents.pages.worth() == Worth(1, 1, 0)
    remove(residents, kept)
    check_residents(residents)


@st.composite
def batches(draw: st.DrawFn, most: int = 40) -> list[tuple[int, int, int | None]]:
    """Distinct objects as (page, layout, page before it), in any order and with any contradiction."""
    found = draw(
        st.lists(
            st.tuples(st.integers(0, 14), st.integers(KV, MORE_STATE), st.none() | st.integers(0, 18)),
            max_size=most,
        )
    )
    told = {(page, layout): page if layout >= STATE else above for page, layout, above in found}
    return [(page, layout, above) for (page, layout), above in told.items()]


def loaded(
    batch: Sequence[tuple[int, int, int | None]], namespace_ids: Sequence[int], depths: Sequence[int]
) -> Residents:
    """Residents that took in the batch at once; object n has number n + 1 and 10 + n bytes."""
    n = len(batch)
    words = (
        np.zeros((0, 8), np.uint64)
        if not n
        else column_of([digest(page, layout) for page, layout, _ in batch], 64)
    )
    parents = (
        column_of([page_key(above) if above is not None else bytes(32) for *_, above in batch] or [b""], 32)
        if n
        else words[:, :4]
    )
    known = np.array([i for i, (*_, above) in enumerate(batch) if above is not None], np.int64)
    residents = Residents()
    residents.load(
        ObjectColumns(
            words, parents, known, np.arange(1, n + 1), np.arange(10, n + 10), np.array(depths),
            np.array(namespace_ids, np.uint32),
        )
    )  # fmt: skip
    return residents


def seen(residents: Residents) -> list[tuple[object, ...]]:
    """All that is known of each object, whatever its row."""
    pages, facts = residents.pages, []
    for row in residents.residents().tolist():
        node = residents.page[row]
        up = None if pages.parent_node[node] < 0 else pages.key(pages.parent_node[node])
        columns = [
            column[node]
            for column in (
                pages.kv, pages.states, pages.live, pages.depth, pages.tick, pages.number, pages.nbytes,
            )
        ]  # fmt: skip
        place = (pages.namespace_id[node], residents.pages.is_leaf(node), residents.pages.is_useless(node))
        facts.append(
            (
                residents.digest(row), residents.number[row], residents.length[row],
                bool(residents.attached[row]), up, *columns, *place,
            )
        )  # fmt: skip
    return sorted(facts)


@settings(max_examples=example_count(60), deadline=None)
@given(batch=batches(), data=st.data())
def test_loading_all_at_once_is_adding_one_by_one(batch, data):
    """The objects are a forest: every page follows one with a smaller number, of its own namespace."""
    batch = [
        (page, layout, above if layout >= STATE or above is None or above < page else None)
        for page, layout, above in batch
    ]
    namespace_ids = [page % 2 if data.draw(st.booleans(), "mixed") else PLAIN for page in range(15)]
    depths = [data.draw(st.sampled_from([0, page + 1]), "depth") for page, *_ in batch]
    at_once, one_by_one = loaded(batch, [namespace_ids[page] for page, *_ in batch], depths), Residents()
    for i, ((page, layout, above), depth) in enumerate(zip(batch, depths, strict=True)):
        put(
            one_by_one, page, above, layout=layout, length=10 + i, namespace_id=namespace_ids[page],
            depth=depth,
        )  # fmt: skip
    for residents in (at_once, one_by_one):
        check_residents(residents)
    assert seen(at_once) == seen(one_by_one)
    assert at_once.pages.worth() == one_by_one.pages.worth()
    keys = [digest(page, layout) for page, layout, _ in batch]
    assert all(at_once.find(d) == row >= 0 for d, row in zip(keys, at_once.find_many(keys), strict=True))
    for d in keys:
        remove(at_once, at_once.find(d))
        check_residents(at_once)
    assert len(at_once) == at_once.payload == 0


@settings(max_examples=example_count(80), deadline=None)
@given(batch=batches(), at_once=st.booleans(), data=st.data())
def test_circles_and_contradictions_are_harmless(batch, at_once, data):
    namespace_ids = data.draw(st.lists(st.integers(PLAIN, HYBRID), min_size=len(batch), max_size=len(batch)))
    depths = data.draw(st.lists(st.integers(0, 9), min_size=len(batch), max_size=len(batch)))
    residents = loaded(batch, namespace_ids, depths) if at_once else Residents()
    for (page, layout, above), namespace_id, depth in zip(batch, namespace_ids, depths, strict=True):
        if not at_once:
            put(residents, page, above, layout=layout, namespace_id=namespace_id, depth=depth)
    check_residents(residents)
    worth = residents.pages.worth()
    assert worth.restorable_bytes + worth.dead_bytes <= residents.payload
    for page, layout, _ in batch[:: data.draw(st.integers(1, 4))]:
        remove(residents, residents.find(digest(page, layout)))
    check_residents(residents)
    order = EvictionOrder(residents)
    while residents:
        before = len(residents)
        order.evict(Everything(residents, 1))
        assert len(residents) < before, "everything can be given up"
        check_residents(residents)
    assert list(nodes_of(residents.pages)) == []


def test_a_long_circle_is_cut_and_what_hangs_on_it_is_an_orphan() -> None:
    batch: list[tuple[int, int, int | None]] = [(n, KV, (n + 1) % 40) for n in range(40)] + [
        (50, KV, 3),
        (51, KV, None),
    ]
    residents = loaded(batch, [PLAIN] * 42, [0] * 42)
    check_residents(residents)
    assert residents.pages.worth().orphans == 41
    EvictionOrder(residents).evict(taker := Everything(residents, 41))
    assert digest(51) not in taker.gone
