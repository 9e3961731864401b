"""The table of pages, and the order of parents in a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import example_count
from tiercache.storage.pages import NONE, PAGE_KEY_BYTES, PageTable, column_of
from tiercache.storage.residents import parents_first
from tiercache.testing.objects import page_key


@settings(max_examples=example_count(150), deadline=None)
@given(links=st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 12)), max_size=20))
def test_parents_come_first_in_a_batch(links: list[tuple[int, int | None]]) -> None:
    batch = [(page_key(page), None if parent is None else page_key(parent)) for page, parent in links]
    order = list(parents_first(batch))
    assert sorted(order) == list(range(len(batch)))
    place = {item: at for at, item in enumerate(order)}
    follows = {i: _needed(links, i) for i in range(len(links))}
    late = [i for i, above in follows.items() if above is not None and place[above] > place[i]]
    circles = {min(circle) for i in follows if (circle := _circle(follows, i))}
    assert len(late) == len(circles), "of each circle one comes before what it follows, and nothing else does"
    assert all(_circle(follows, i) for i in late)
    if not any(above is not None and above > i for i, above in follows.items()):
        assert order == list(range(len(links))), "what is in order stays so"


def _needed(links: Sequence[tuple[int, int | None]], item: int) -> int | None:
    """The first item of a batch that is the page which this one follows or hangs on."""
    pages = [i for i, (page, parent) in enumerate(links) if page == links[item][1] and parent != page]
    return min(pages, default=None)


def _circle(follows: dict[int, int | None], start: int) -> set[int]:
    """The circle on which an item lies; empty if it lies on none."""
    found: set[int] = set()
    at: int | None = start
    while at is not None and at not in found:
        found.add(at)
        at = follows[at]
    return found if at == start else set()


def test_pages_whose_keys_begin_alike_are_told_apart() -> None:
    alike = [bytes(8) + page_key(n)[8:] for n in range(50)]
    words = column_of(alike, PAGE_KEY_BYTES)
    pages = PageTable()
    nodes = pages.load(words)
    assert len(set(nodes.tolist())) == 50
    assert pages.find_many(words).tolist() == nodes.tolist() == [pages.find(key) for key in alike]
    assert pages.find(bytes(32)) == NONE


@pytest.mark.parametrize("words", [(0, 1, 1, 1), (1, 1, 1, 0), (0, 0, 1, 0)])
@pytest.mark.parametrize("at_once", [True, False])
def test_nobody_can_choose_page_keys_that_lie_in_one_bucket(words: tuple[int, ...], at_once: bool) -> None:
    keys = np.random.default_rng(1).integers(0, 2**62, (3000, 4)).astype(np.uint64) * np.array(
        words, np.uint64
    )
    pages = PageTable()
    if at_once:
        pages.load(keys)
    for key in keys:
        node = pages.obtain(key.tobytes())
        pages.holds[node] += 1
    lengths = []
    # private: long chains cost time, which a test cannot measure surely
    for node in pages._bucket_column.tolist():
        lengths.append(0)
        while node >= 0:
            lengths[-1] += 1
            node = pages.chain[node]
    assert sum(lengths) == 3000
    assert max(lengths) < 30
