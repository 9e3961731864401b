import numpy as np
import pytest

from tiercache.core import ABSENT, as_tokens, full_pages, pending, reusable_pages
from tiercache.errors import TokenError


@pytest.mark.parametrize(
    "tokens",
    [[0, 2**64 - 1], (5,), range(3), np.array([1, 2], np.int32), np.array([2**64 - 1], np.uint64), []],
)
def test_every_id_from_0_to_2_64_minus_1_is_kept(tokens):
    array = as_tokens(tokens)
    assert array.dtype == np.dtype("<u8")
    assert array.tolist() == [int(t) for t in tokens]


@pytest.mark.parametrize(
    "tokens",
    [
        [-1], [2**64], [2**63, -1], [1.0], [True], ["a"], "abc", [None], np.array([-5]), np.array([1.5]),
        np.array([[1]]), np.array([True]),
    ],
)  # fmt: skip
def test_anything_else_is_refused(tokens):
    with pytest.raises(TokenError):
        as_tokens(tokens)


def test_no_copy_of_what_is_right_already():
    array = np.arange(5, dtype=np.uint64)
    assert np.shares_memory(as_tokens(array), array)


def test_a_hit_is_strictly_shorter_than_the_prompt():
    assert [reusable_pages(n, 4) for n in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]
    assert [full_pages(n, 4) for n in (0, 3, 4, 8)] == [0, 0, 1, 2]


def test_pending_is_its_own_inverse_and_neither_absent_nor_a_location():
    slots = np.arange(5)
    assert (pending(slots) < ABSENT).all()
    assert (pending(pending(slots)) == slots).all()
