from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiercache_kernels.kernel import CHUNK_BYTES, COLUMNS, THREADS, fill_table, source
from tiercache_kernels.reference import copy_table

LENGTHS = st.one_of(
    st.integers(1, 40),
    st.builds(lambda chunks, off: chunks * CHUNK_BYTES + off, st.integers(1, 3), st.integers(-20, 20)),
    st.integers(1, 1 << 40),
)


def filled(lengths: list[int]) -> tuple[np.ndarray, int]:
    n = len(lengths)
    table = np.full((n + 1, COLUMNS), 77, np.uint64)
    sources = np.arange(n, dtype=np.uint64) + np.uint64(1000)
    chunks = fill_table(table, sources, sources + np.uint64(1 << 40), np.array(lengths, np.int64))
    return table, chunks


def sizes(table: np.ndarray) -> dict[int, list[int]]:
    """The chunks of each segment as the kernel finds them, counted from the first row's."""
    first = table[:, 3].astype(np.int64)
    found: dict[int, list[int]] = {}
    for chunk in range(int(first[0]), int(first[-1])):
        row = int(np.searchsorted(first[:-1], chunk, side="right")) - 1
        found.setdefault(row, []).append(
            min(CHUNK_BYTES, int(table[row, 2]) - (chunk - int(first[row])) * CHUNK_BYTES)
        )
    return found


@given(st.lists(LENGTHS, max_size=30))
def test_rows_are_the_segments_and_an_end(lengths: list[int]) -> None:
    table, chunks = filled(lengths)
    n = len(lengths)
    assert table[:n, 0].tolist() == list(range(1000, 1000 + n))
    assert table[:n, 1].tolist() == list(range(1000 + (1 << 40), 1000 + (1 << 40) + n))
    assert table[:n, 2].tolist() == lengths
    assert table[n].tolist() == [0, 0, 0, chunks]
    assert chunks == sum(-(-length // CHUNK_BYTES) for length in lengths)


@settings(deadline=None)
@given(st.lists(st.integers(1, 4 * CHUNK_BYTES), max_size=12), st.data())
def test_the_chunks_of_any_rows_cover_their_segments_once(lengths: list[int], data: st.DataObject) -> None:
    table, _ = filled(lengths)
    start = data.draw(st.integers(0, len(lengths)))
    stop = data.draw(st.integers(start, len(lengths)))
    found = sizes(table[start : stop + 1])
    assert [sum(found[row]) for row in range(stop - start)] == lengths[start:stop]
    assert all(size == CHUNK_BYTES for parts in found.values() for size in parts[:-1])
    assert all(0 < parts[-1] <= CHUNK_BYTES for parts in found.values())


@pytest.mark.parametrize("shapes", [(4, 4, 4), (5, 3, 4), (5, 4, 3), (6, 4, 4)])
def test_shapes_that_do_not_match_are_refused(shapes: tuple[int, int, int]) -> None:
    rows, sources, lengths = shapes
    with pytest.raises(ValueError, match="cannot take columns"):
        fill_table(
            np.zeros((rows, 4), np.uint64),
            np.zeros(sources, np.uint64),
            np.zeros(4, np.uint64),
            np.ones(lengths, np.int64),
        )


def test_the_twin_copies_any_rows_of_a_table() -> None:
    memory = np.random.default_rng(0).integers(0, 256, 60, np.uint8)
    target = np.zeros(60, np.uint8)
    starts = np.array([0, 20, 40], np.uint64)
    table = np.empty((4, COLUMNS), np.uint64)
    fill_table(
        table,
        starts + np.uint64(memory.ctypes.data),
        starts + np.uint64(target.ctypes.data + 5),
        np.array([3, 9, 7]),
    )
    copy_table(table[1:3])
    assert (target[25:34] == memory[20:29]).all()
    assert not target[:25].any()
    assert not target[34:].any()


def test_the_kernel_s_source_has_the_same_numbers_and_nothing_to_include() -> None:
    text = source()
    assert f"constexpr unsigned CHUNK_BYTES = {CHUNK_BYTES};" in text
    assert f"constexpr unsigned THREADS = {THREADS};" in text
    assert "#include" not in text
    assert "#pragma once" not in text
    assert text.count('extern "C" __global__') == 1
