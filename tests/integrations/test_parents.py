"""Pages' parents as concluded from the order of an engine's calls: right, or None."""

from __future__ import annotations

from itertools import pairwise
from threading import Thread

from hypothesis import given
from hypothesis import strategies as st

from tiercache.integrations.parents import Once, PageOrder
from tiercache.testing.objects import page_key


def path(*names: object) -> list[bytes]:
    """Page keys of a sequence: each stands for all pages up to it."""
    return [page_key(names[: i + 1]) for i in range(len(names))]


def test_a_page_of_a_call_follows_the_page_before_it() -> None:
    pages = path(*range(5))
    known = PageOrder()
    assert known.parents(pages) == [None, *pages[:-1]]
    assert known.parents(pages[2:]) == pages[1:4]
    assert known.parents([pages[3]]) == [pages[2]]


def test_what_a_query_tells_is_remembered_for_the_writes() -> None:
    pages = path(*range(300))
    known = PageOrder()
    known.note(pages)
    for start in range(0, 300, 128):
        part = pages[start : start + 128]
        assert known.parents(part) == [pages[start - 1] if start else None, *part[:-1]]


def test_calls_that_follow_each_other_in_time_prove_nothing() -> None:
    one, other = path(*"abc"), path(*"xyz")
    known = PageOrder()
    for pages in (one, other, one):
        assert known.parents(pages) == [None, *pages[:-1]]


def test_what_is_said_to_follow_two_pages_follows_none() -> None:
    a, b, c, d = path(*"abcd")
    known = PageOrder()
    known.note([a, c, d])
    known.note([b, c])
    assert known.parents([a, c, d]) == [None, None, c]
    known.note([d, c])
    assert known.before(d) == c
    known.note([c, d])
    assert [known.before(page) for page in (c, d)] == [None, c], (
        "one page is not both before and behind another"
    )


def test_what_names_a_page_twice_is_no_sequence() -> None:
    a, b, c = path(*"abc")
    known = PageOrder()
    for pages in ([a, a], [a, b, a], [c, a, b, c]):
        assert known.parents(pages) == [None] * len(pages)
    assert known.parents([]) == []


def test_what_nobody_named_for_long_is_forgotten() -> None:
    known = PageOrder(most=100)
    pages = path(*range(1000))
    hot = path(*"hot")
    for start in range(0, 1000, 10):
        known.note(pages[start : start + 11])
        known.note(hot)
        assert sum(known.before(page) is not None for page in (*pages, *hot)) <= 200
    assert known.before(hot[2]) == hot[1]
    assert known.before(pages[1]) is None
    assert known.before(pages[999]) == pages[998]
    assert sum(known.before(page) is not None for page in pages) >= 90


# conversation, first page, pages, pages of a batch, is it a query
CALLS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 30), st.integers(1, 7), st.booleans()),
    max_size=40,
)


def conversation(number: int) -> list[bytes]:
    """The pages of one of four conversations: 40 pages, of which 1 and 2 share the first 12 and 25 with 0,
    and 3 shares none.
    """
    shared = (0, 12, 25, 0)[number]
    return path(*(i if i < shared else (number, i) for i in range(40)))


CONVERSATIONS = [conversation(n) for n in range(4)]


@given(CALLS, st.sampled_from([1, 5, 30, 1000]))
def test_a_conclusion_is_true(calls: list[tuple[int, int, int, int, bool]], most: int) -> None:
    """Queries and writes of four conversations, three of which share pages, in any order, writes in
    batches.
    """
    truth = {page: parent for sequence in CONVERSATIONS for parent, page in pairwise(sequence)}
    said: set[bytes] = set()
    known = PageOrder(most)
    for number, first, count, batch, is_query in calls:
        pages = CONVERSATIONS[number][first : first + count]
        if is_query:
            known.note(pages)
            said.update(pages[1:])
            continue
        for start in range(0, len(pages), batch):
            part = pages[start : start + batch]
            said.update(part[1:])
            for page, parent in zip(part, known.parents(part), strict=True):
                assert parent in (None, truth.get(page))
                assert parent is None or page in said
                if most == 1000:
                    assert (parent is not None) == (page in said)


def test_threads_may_share_it() -> None:
    known = PageOrder(most=500)
    sequences = [path(n, *range(200)) for n in range(4)]
    wrong: list[bytes | None] = []

    def work(pages: list[bytes]) -> None:
        for start in range(0, 190, 3):
            part = pages[start : start + 10]
            wrong.extend(
                parent
                for parent, page in zip(known.parents(part)[1:], part, strict=False)
                if parent not in (None, page)
            )

    threads = [Thread(target=work, args=(pages,)) for pages in sequences]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_once_is_once() -> None:
    once = Once()
    assert [once.first() for _ in range(3)] == [True, False, False]
