from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiercache_kernels import reference

from tests.examples import example_count


@settings(max_examples=example_count(50), deadline=None)
@given(lengths=st.lists(st.integers(0, 300), max_size=20), seed=st.integers(0, 9))
def test_each_segment_goes_to_its_place(lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 256, 512, np.uint8)
    total = sum(lengths)
    target, expected = np.zeros(total + 2, np.uint8), np.zeros(total + 2, np.uint8)
    starts = rng.integers(0, 200, len(lengths))
    places = 1 + np.cumsum([0, *lengths])[:-1]
    for start, place, length in zip(starts, places, lengths, strict=True):
        expected[place : place + length] = source[start : start + length]
    reference.copy_segments(
        (source.ctypes.data + starts).astype(np.uint64),
        (target.ctypes.data + places).astype(np.uint64),
        np.array(lengths, np.int64),
    )
    assert (target == expected).all()


@pytest.mark.parametrize(
    "length", [reference.MIN_RELEASED_BYTES - 1, reference.MIN_RELEASED_BYTES, reference.MAX_HELD_BYTES + 1]
)
def test_with_and_without_the_gil(length: int) -> None:
    source = np.random.default_rng(0).integers(0, 256, 5 * length, np.uint8)
    target = np.zeros_like(source)
    places = np.arange(5, dtype=np.uint64) * np.uint64(length)
    reference.copy_segments(
        places + np.uint64(source.ctypes.data), places + np.uint64(target.ctypes.data), np.full(5, length)
    )
    assert (target == source).all()


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="argument"):
        reference.copy_segments(np.zeros(1, np.uint64), np.zeros(2, np.uint64), np.zeros(1, np.int64))
