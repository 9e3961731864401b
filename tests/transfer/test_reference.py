from __future__ import annotations

import numpy as np
import pytest
from tiercache_kernels import reference


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
