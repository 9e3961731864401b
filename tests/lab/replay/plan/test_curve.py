"""The knee of curves made by hand, and the search for the sizes that tell most."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache_lab.replay.plan.search import HOST_RUNS, Curve, rounded

GIB = 1 << 30


def step(size: float) -> float:
    """Nothing below 8 GiB, and everything above."""
    return 0.8 if size >= 8 * GIB else 0.0


def bend(size: float) -> float:
    """A straight rise to 0.6 at 10 GiB, and a slow one to 0.7 at 100 GiB."""
    return 0.06 * size / GIB if size <= 10 * GIB else 0.6 + (size / GIB - 10) / 900


def line(size: float) -> float:
    return 0.007 * size / GIB


def flat(size: float) -> float:
    return 0.5


def searched(saves: Callable[[float], float], largest: int, most: int = 30) -> tuple[Curve, int]:
    """Measure what the search asks for; return the curve and the number of runs."""
    measured = {largest: saves(largest)}
    for count in range(most):
        size = Curve(measured).next_size(largest // 2048)
        if size is None:
            return Curve(measured), count
        assert size not in measured
        measured[size] = saves(size)
    return Curve(measured), most


def test_the_knee_of_a_bend_is_the_bend() -> None:
    sizes = [GIB * n for n in (1, 2, 5, 8, 10, 13, 20, 50, 100)]
    curve = Curve({size: bend(size) for size in sizes})
    assert curve.knee() == 10 * GIB
    assert curve.enough(0.9) == 50 * GIB
    assert curve.enough(1.0) == 100 * GIB
    # Between 10 and 20 GiB the savings rise by a ninetieth of a point per GiB.
    assert curve.doubling(10 * GIB) == pytest.approx(10 / 900)


def test_a_straight_line_has_no_knee_and_a_step_has_its_edge() -> None:
    sizes = [GIB * n for n in (1, 2, 4, 7, 8, 16, 50, 100)]
    assert Curve({size: line(size) for size in sizes}).knee() is None
    assert Curve({size: step(size) for size in sizes}).knee() == 8 * GIB
    assert Curve({size: flat(size) for size in sizes}).knee() == GIB
    assert Curve(dict.fromkeys(sizes, 0.0)).knee() is None
    assert Curve({GIB: 0.4}).knee() is None


def test_between_sizes_savings_follow_the_logarithm() -> None:
    curve = Curve({4: 0.2, 16: 0.4})
    assert [curve.at(size) for size in (0, 2, 4, 8, 16, 99)] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.4])


@pytest.mark.parametrize(("saves", "most"), [(step, 10), (bend, 20), (line, 20), (flat, 6)])
def test_the_search_ends_and_finds_the_knee_with_few_runs(saves: Callable[[float], float], most: int) -> None:
    assert searched(saves, 100 * GIB)[1] <= most
    curve, _ = searched(saves, 100 * GIB, HOST_RUNS)
    knee = curve.knee()
    if saves is step:
        assert knee is not None
        assert 8 * GIB <= knee <= 8 * GIB * 1.35
    elif saves is bend:
        assert knee is not None
        assert 7 * GIB <= knee <= 14 * GIB
    elif saves is flat:
        assert knee == curve.sizes[0]
    else:
        assert knee is None


def test_a_curve_without_savings_needs_no_run() -> None:
    assert searched(lambda size: 0.0, 100 * GIB)[1] == 0


rates = st.floats(0, 1)
curves = st.dictionaries(st.integers(1, 1 << 44), rates, min_size=1, max_size=12).map(Curve)


@given(curves, st.floats(0, 1 << 45), st.floats(1, 8))
def test_more_bytes_never_save_less(curve: Curve, size: float, factor: float) -> None:
    """Noise makes measured savings fall here and there; what is told of them never does."""
    assert 0 <= curve.at(size) <= curve.at(size * factor) + 1e-9
    assert curve.at(curve.largest) == curve.top
    assert curve.doubling(max(size, 1)) >= -1e-9


@given(curves)
def test_a_knee_is_measured_and_beats_every_other_size(curve: Curve) -> None:
    knee = curve.knee()
    if knee is None:
        return
    assert knee in curve.measured

    def above(size: int) -> float:
        return curve.at(size) / curve.top - size / curve.largest

    assert above(knee) >= 0.05 - 1e-9
    assert all(above(size) <= above(knee) + 1e-9 for size in curve.sizes)


@given(curves, rates)
def test_enough_is_the_smallest_that_suffices(curve: Curve, share: float) -> None:
    size = curve.enough(share)
    assert curve.at(size) >= share * curve.top - 1e-9
    smaller = [one for one in curve.sizes if one < size]
    assert not smaller or curve.at(smaller[-1]) < share * curve.top


@given(st.floats(1e6, 1e12), st.floats(0.3, 12), st.floats(0, 0.05), st.randoms(use_true_random=False))
def test_the_search_ends_on_noisy_curves(middle: float, steepness: float, noise: float, chance) -> None:
    def saves(size: float) -> float:
        clean = 1 / (1 + (middle / size) ** steepness)
        return min(1.0, max(0.0, clean + chance.uniform(-noise, noise)))

    curve, runs = searched(saves, int(middle * 50), most=60)
    assert runs < 40
    gaps = [
        curve.at(high) - curve.at(low)
        for low, high in zip(curve.sizes, curve.sizes[1:], strict=False)
        if high > 1.4 * low
    ]
    assert all(gap <= 0.07 * curve.top for gap in gaps)


@given(st.integers(1, 1 << 50))
def test_rounded_sizes_have_two_digits_and_are_near(nbytes: int) -> None:
    found = rounded(nbytes)
    assert math.isclose(found, nbytes, rel_tol=0.06, abs_tol=1)
