"""Digests of every prefix of a sequence."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.index.node import BASE, MIX, Prefixes

WORD = 2**64


tokens = st.lists(st.integers(0, WORD - 1) | st.integers(0, 3), max_size=40).map(
    lambda values: np.array(values, np.uint64)
)


def recurrence(prefixes: Prefixes, sequence: np.ndarray, before: int) -> list[int]:
    """The digests one page after the other, with Python's integers."""
    size = prefixes.page_size
    weights = [int(weight) for weight in prefixes.weights]
    out = []
    for page in range(len(sequence) // size):
        own = (
            sum(int(t) * w for t, w in zip(sequence[page * size : (page + 1) * size], weights, strict=True))
            % WORD
        )
        own = (own ^ own >> 32) * MIX % WORD
        before = (before * BASE + own) % WORD
        out.append(before)
    return out


@settings(deadline=None)
@given(sequence=tokens, size=st.integers(1, 5), before=st.integers(0, WORD - 1))
def test_a_digest_is_its_predecessor_s_times_the_base_plus_its_page(sequence, size, before):
    prefixes = Prefixes(size)
    assert prefixes.of(sequence, before).tolist() == recurrence(prefixes, sequence, before)
    assert prefixes.of(sequence, before).dtype == np.uint64


def test_digests_of_large_arrays():
    """A long sequence makes the table of powers grow, in an object that knew few of them or more."""
    sequence = np.random.default_rng(1).integers(0, WORD, 4 * 100_001 + 3, np.uint64)
    whole = Prefixes(4).of(sequence, 7)
    assert len(whole) == 100_001
    prefixes, parts, before = Prefixes(4), [], 7
    for start in range(0, len(sequence), 4 * 7919):
        parts.append(prefixes.of(sequence[start : start + 4 * 7919], before))
        before = int(parts[-1][-1])
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert whole[-3:].tolist() == recurrence(prefixes, sequence[-15:-3], int(whole[-4]))
    assert len(np.unique(whole)) == len(whole)


def test_other_sequences_have_other_digests():
    prefixes = Prefixes(2)
    base = np.arange(12, dtype=np.uint64)
    digests = {tuple(prefixes.of(base, prefixes.start(extra)).tolist()) for extra in (b"", b"a", b"b", b"\0")}
    assert len(digests) == 4
    plain = prefixes.of(base, prefixes.start(b""))
    for at in range(12):
        for by in (1, 2**32, 2**63):
            other = base.copy()
            other[at] ^= np.uint64(by)
            found = prefixes.of(other, prefixes.start(b""))
            assert ((found == plain) == (np.arange(6) < at // 2)).all(), "the same up to the change only"
    swapped = base.reshape(6, 2)[[0, 2, 1, 3, 4, 5]].ravel()
    assert prefixes.of(swapped, prefixes.start(b""))[2] != plain[2]


def test_a_change_in_one_page_cannot_be_taken_back_in_the_next():
    """In a polynomial alone, a page more by 1 and a next one less by the base give the same."""
    prefixes = Prefixes(2)
    plain = np.full(4, 2**63, np.uint64)
    other = plain + np.array([1, 0, -BASE % WORD, 0], np.uint64)
    assert (prefixes.of(other, 3) != prefixes.of(plain, 3)).all()
