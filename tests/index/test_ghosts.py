"""The index's memory of evicted pages and units."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.index.seen import copied
from tiercache.index.ghosts import Ghosts
from tiercache.policy import Reuse, UnitKind, Units

WORD = 2**64


def pages(*digests: int) -> np.ndarray:
    return np.array(digests, np.uint64)


def lost(**given: int) -> Reuse:
    """A unit that is lost; all that is known of it differs."""
    return Reuse(**({name: 10 + n for n, name in enumerate(Reuse._fields[:-1])} | given), evicted=False)


def test_pages_are_known_for_so_many_requests():
    ghosts = Ghosts(requests=3, pages=100)
    ghosts.begin()
    ghosts.note_pages(pages(1, 2))
    ghosts.begin()
    ghosts.note_pages(pages(3))
    assert ghosts.repeated(pages(1, 2, 3, 4)) == 3
    ghosts.begin()
    assert (ghosts.repeated(pages(1, 2)), len(ghosts)) == (2, 3)
    ghosts.begin()
    assert (ghosts.repeated(pages(1, 2)), ghosts.repeated(pages(3)), len(ghosts)) == (0, 1, 1)
    ghosts.begin()
    assert len(ghosts) == 0


def test_a_page_that_is_lost_again_is_known_anew():
    ghosts = Ghosts(requests=2)
    ghosts.note_pages(pages(1, 2))
    ghosts.begin()
    ghosts.note_pages(pages(2))
    ghosts.begin()
    assert (ghosts.repeated(pages(1)), ghosts.repeated(pages(2))) == (0, 1)


def test_so_many_pages_are_known_at_most():
    ghosts = Ghosts(requests=1000, pages=10)
    for first in range(0, 100, 4):
        ghosts.note_pages(pages(*range(first, first + 4)))
        ghosts.begin()
        assert len(ghosts) <= 10
        # private: the bound is one of memory, where a page that was lost twice counts twice
        assert ghosts._held == sum(len(edge) for _, edge in ghosts._edges) <= 10
    assert ghosts.repeated(pages(96, 97, 98, 99)) == 4
    ghosts.note_pages(pages(*range(1000, 1050)))
    ghosts.begin()
    assert len(ghosts) <= 10
    assert ghosts.repeated(pages(*range(1000, 1050))) == 10, "a long edge's beginning is known"


def test_a_repetition_is_counted_from_the_first_page_on():
    ghosts = Ghosts()
    assert ghosts.repeated(pages(1)) == 0
    ghosts.note_pages(pages(1, 2, 2**64 - 1, 5))
    asked = [(1,), (1, 2), (1, 2, 2**64 - 1, 5), (1, 9, 2), (9, 1, 2), (), (2, 5)]
    assert [ghosts.repeated(pages(*digests)) for digests in asked] == [1, 2, 4, 1, 0, 0, 2]


def test_a_lost_unit_is_told_once_as_it_was():
    ghosts = Ghosts()
    unit = lost(age=60, digest=-5)
    ghosts.note_unit(WORD - 5, unit, now=100)
    assert ghosts.has_units
    assert ghosts.reuse(WORD - 5, now=130) == unit._replace(age=90, evicted=True)
    assert not ghosts.has_units
    assert ghosts.deepest(pages(WORD - 5)) is None
    ghosts.restored(WORD - 5)


def test_the_deepest_lost_unit_of_a_path():
    ghosts = Ghosts()
    assert ghosts.deepest(pages(1, 2, 3)) is None
    ghosts.note_unit(1, lost(), 0)
    ghosts.note_unit(3, lost(), 0)
    assert [ghosts.deepest(pages(*path)) for path in [(1, 2, 3, 4), (1, 2), (4, 1), (2, 4), ()]] == [
        3, 1, 1, None, None,
    ]  # fmt: skip
    ghosts.restored(3)
    assert ghosts.deepest(pages(1, 2, 3, 4)) == 1
    ghosts.restored(7)
    ghosts.restored(1)
    assert not ghosts.has_units


operations = st.lists(
    st.tuples(st.sampled_from(["note", "note", "restored", "reuse"]), st.integers(0, 7)), max_size=60
)


@settings(deadline=None)
@given(operations=operations, size=st.integers(1, 5))
def test_the_ring_against_a_list(operations: list[tuple[str, int]], size: int):
    ghosts = Ghosts(units=size)
    ring: list[tuple[int, int] | None] = []  # digest and serial number, as noted
    for serial, (what, digest) in enumerate(operations):
        held = {entry[0]: entry[1] for entry in ring[-size:] if entry}
        if what == "note":
            ring = [entry if entry and entry[0] != digest else None for entry in ring]
            ring.append((digest, serial))
            ghosts.note_unit(digest, lost(depth=serial), 0)
        elif digest in held:
            ring = [entry if entry and entry[0] != digest else None for entry in ring]
            if what == "reuse":
                assert ghosts.reuse(digest, 0).depth == held[digest]
            else:
                ghosts.restored(digest)
        elif what == "restored":
            ghosts.restored(digest)
        held = {entry[0]: entry[1] for entry in ring[-size:] if entry}
        assert {d for d in range(8) if ghosts.deepest(pages(d)) is not None} == set(held)
        assert sorted(ghosts.view(0, 64).depth.tolist()) == sorted(held.values())
        assert ghosts.has_units == bool(held)


def test_lost_units_are_units_of_which_nothing_may_go():
    ghosts = Ghosts()
    noted = [lost(digest=n, hits=n) for n in range(3)]
    for n, each in enumerate(noted):
        ghosts.note_unit(n, each, now=70)
    view: Units = ghosts.view(77, 64)
    assert (len(view), view.now, view.page_tokens) == (3, 77, 64)
    for name in set(Reuse._fields) - {"age", "evicted"}:
        assert getattr(view, name).tolist() == [getattr(each, name) for each in noted]
    assert view.last_access.tolist() == [70 - each.age for each in noted]
    assert view.kind.tolist() == [UnitKind.NONE] * 3
    assert view.covered.tolist() == [0] * 3
    assert (view.nbytes >= 1).all()
    assert len(copied(Ghosts().view(0, 64))) == 0
