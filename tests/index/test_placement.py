"""Placement of checkpoints, against every placement that there is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.index.checkpoints.placement import place_priced

WEIGHTS = st.lists(st.integers(0, 9), min_size=0, max_size=8)
STEPS = st.lists(st.integers(0, 5), min_size=8, max_size=8)


def work(weights: Sequence[int], flops: Sequence[int], states: Sequence[int]) -> int:
    """Work that remains behind these states, by definition."""
    return sum(
        weight * (flops[x] - max((flops[at] for at in states if at <= x), default=0))
        for x, weight in enumerate(weights)
    )


def placements(points: int, most: int) -> list[tuple[int, ...]]:
    return [some for count in range(most + 1) for some in combinations(range(points), count)]


@given(WEIGHTS, STEPS, st.lists(st.integers(0, 30), min_size=8, max_size=8))
def test_no_placement_of_any_number_is_worth_more(weights: list[int], steps: list[int], prices: list[int]):
    flops, prices = list(accumulate(steps))[: len(weights)], prices[: len(weights)]

    def cost(states: Sequence[int]) -> int:
        return work(weights, flops, states) + sum(prices[at] for at in states)

    found = place_priced(weights, flops, prices)
    assert found == sorted(set(found))
    assert cost(found) == min(map(cost, placements(len(weights), len(weights))))


def test_work_that_grows_faster_than_depth_is_placed_exactly():
    flops = [depth + 0.1 * depth * depth for depth in range(1, 41)]
    price = 400.0
    found = place_priced([1.0] * 40, flops, [price] * 40)
    assert len(found) == 2
    best = min(
        placements(40, 2),
        key=lambda some: work([1] * 40, flops, some) + price * len(some),  # type: ignore[arg-type]
    )
    assert found == list(best)


@pytest.mark.parametrize("points", [0, 1])
def test_nothing_to_place(points: int):
    assert place_priced([0.0] * points, [1.0] * points, [0.0] * points) == []
