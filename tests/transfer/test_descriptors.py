from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import example_count
from tiercache.core import ABSENT
from tiercache.pools import SegmentTable
from tiercache.pools.device import allocations
from tiercache.transfer import Descriptors, build_descriptors, join_descriptors


def table(rows: list[tuple[int, int, int, int]]) -> SegmentTable:
    """`rows`: (base, stride, length, layer)."""
    base, stride, length, layer = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return SegmentTable(
        base.astype(np.uint64), stride, length, np.cumsum(length) - length, layer, np.zeros_like(base)
    )


def byte_pairs(d: Descriptors) -> list[tuple[int, int, int]]:
    """Every copied byte as (layer, device address, host address), in order."""
    return [
        (layer, device + i, host + i)
        for layer, device, host, length in zip(
            d.layer.tolist(), d.device.tolist(), d.host.tolist(), d.length.tolist(), strict=True
        )
        for i in range(length)
    ]


def brute_force(
    segments: SegmentTable, slots: list[list[int]], blocks: list[list[int]], block_bytes: int, arena: int
) -> list[tuple[int, int, int]]:
    pairs = []
    for layer in sorted(set(segments.layer.tolist())):
        for places, row in zip(slots, blocks, strict=True):
            for s in np.flatnonzero(segments.layer == layer).tolist():
                slot = places[s]
                for byte in range(int(segments.length[s]) if slot != ABSENT else 0):
                    block, within = divmod(int(segments.offset[s]) + byte, block_bytes)
                    device = int(segments.base[s]) + slot * int(segments.stride[s]) + byte
                    pairs.append((layer, device, arena + row[block] * block_bytes + within))
    return pairs


@settings(max_examples=example_count(150), deadline=None)
@given(data=st.data())
def test_against_byte_by_byte(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))
    layers = sorted(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    gaps = data.draw(st.lists(st.sampled_from([0, 0, 1, 7]), min_size=count, max_size=count))
    bases = np.cumsum([1 << 46, *[12 * (length + gap) for length, gap in zip(lengths, gaps, strict=True)]])[
        :-1
    ].tolist()
    segments = table(
        [
            (b, length + gap, length, layer)
            for b, length, gap, layer in zip(bases, lengths, gaps, layers, strict=True)
        ]
    )
    block_bytes = data.draw(st.integers(3, 64))
    per_object = -(-sum(lengths) // block_bytes)
    n = data.draw(st.integers(0, 6))
    slots = data.draw(st.lists(st.integers(0, 11), min_size=n, max_size=n, unique=True))
    places = [[slot] * count for slot in slots]
    if apart := data.draw(st.booleans()):
        row = st.lists(st.integers(ABSENT, 11), min_size=count, max_size=count)
        places = data.draw(st.lists(row, min_size=n, max_size=n))
    numbers = data.draw(
        st.one_of(st.just(list(range(n * per_object))), st.permutations(range(n * per_object)))
    )
    blocks = np.array(numbers, np.int64).reshape(n, per_object)

    at = np.array(places, np.int64).reshape(n, count) if apart else np.array(slots, np.int64)
    found = build_descriptors(segments, at, blocks, block_bytes, 1 << 40)
    assert byte_pairs(found) == brute_force(segments, places, blocks.tolist(), block_bytes, 1 << 40)
    assert (found.device.dtype, found.host.dtype, found.length.dtype, found.layer.dtype) == (
        np.uint64, np.uint64, np.int64, np.int64,
    )  # fmt: skip
    if not apart:
        assert found.nbytes == n * sum(lengths)
    previous = None
    for row in zip(
        found.layer.tolist(), found.device.tolist(), found.host.tolist(), found.length.tolist(), strict=True
    ):
        assert row[3] > 0
        if previous is not None:
            touching = (
                row[0] == previous[0]
                and row[1] == previous[1] + previous[3]
                and row[2] == previous[2] + previous[3]
            )
            assert not touching, "contiguous neighbours must have been merged"
        previous = row


@settings(max_examples=example_count(150), deadline=None)
@given(ranges=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=8))
def test_memory_that_overlaps_is_one_allocation_and_no_other(ranges: list[tuple[int, int]]) -> None:
    begin = np.array([start for start, _ in ranges])
    end = begin + np.array([length for _, length in ranges])
    found = allocations(begin, end).tolist()
    # from each to the next, within one tensor
    covered = {byte for start, length in ranges for byte in range(start, start + length - 1)}
    for a, first in enumerate(found):
        for b, second in enumerate(found):
            low, high = sorted((int(begin[a]), int(begin[b])))
            assert (first == second) == (low == high or set(range(low, high)) <= covered)


def test_neighbours_of_two_allocations_are_two_copies() -> None:
    segments = table([(16, 8, 8, 0), (0, 8, 8, 0)])
    apart = replace(segments, allocation=np.array([0, 1]))
    slots, blocks = np.array([1, 0]), np.array([[0], [1]])
    # Last slot of the second tensor, first slot of the first: side by side on the device, and in the arena
    # too.
    one = build_descriptors(segments, slots, blocks, 16, 1 << 20)
    two = build_descriptors(apart, slots, blocks, 16, 1 << 20)
    assert byte_pairs(one) == byte_pairs(two)
    assert (one.length.tolist(), two.length.tolist()) == ([8, 16, 8], [8, 8, 8, 8])


def test_adjacent_objects_become_one_copy() -> None:
    segments = table([(4096, 64, 64, 0)])
    found = build_descriptors(segments, np.arange(2, 6), np.arange(3, 7)[:, None], 64, 1 << 20)
    assert (found.device.tolist(), found.host.tolist(), found.length.tolist()) == (
        [4096 + 128],
        [(1 << 20) + 192],
        [256],
    )


def test_pools_are_joined_by_layer() -> None:
    one = build_descriptors(
        table([(0, 8, 8, 0), (100, 8, 8, 4)]), np.array([0]), np.array([[0]]), 16, 1 << 20
    )
    two = build_descriptors(
        table([(200, 8, 8, 2), (300, 8, 8, 4)]), np.array([0]), np.array([[1]]), 16, 1 << 20
    )
    joined = join_descriptors([one, two])
    assert joined.layer.tolist() == [0, 2, 4, 4]
    assert joined.device.tolist() == [0, 200, 100, 300]
    assert list(joined.by_layer()) == [(0, slice(0, 1)), (2, slice(1, 2)), (4, slice(2, 4))]
    assert len(join_descriptors([])) == 0
    assert list(join_descriptors([]).by_layer()) == []


@settings(max_examples=example_count(150), deadline=None)
@given(data=st.data())
def test_a_cut_moves_the_same_bytes_and_crosses_nothing(data: st.DataObject) -> None:
    period, origin = data.draw(st.integers(1, 50)), data.draw(st.integers(0, 1 << 40))
    n = data.draw(st.integers(0, 6))
    lengths = data.draw(st.lists(st.integers(1, 200), min_size=n, max_size=n))
    starts = data.draw(st.lists(st.integers(0, 1000), min_size=n, max_size=n))
    layers = sorted(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    device = np.array([(1 << 46) + 1000 * i for i in range(n)], np.uint64)
    whole = Descriptors(
        device,
        np.array([origin + s for s in starts], np.uint64),
        np.array(lengths, np.int64),
        np.array(layers, np.int64),
    )
    parts = whole.cut(origin, period)
    assert byte_pairs(parts) == byte_pairs(whole)
    assert all(
        (a - origin) // period == (a + n - 1 - origin) // period
        for a, n in zip(parts.host.tolist(), parts.length.tolist(), strict=True)
    )
    assert whole.cut(origin, 1 << 41) is whole
