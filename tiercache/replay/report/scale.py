"""Scales of plots: axes with round ticks, and places for labels that do not overlap."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tiercache.replay.report.words import milliseconds, percent, short_count, short_percent, size

_STEPS: Final = 4
"""Approximate number of steps of an axis."""
_NARROWEST: Final = 0.04
"""Smallest span of an axis of rates, so that tiny differences do not look large."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Range from `low` to `high` with ticks. `tick` writes the figures at the ticks, `exact` those beside points."""

    low: float
    high: float
    ticks: tuple[float, ...]
    tick: Callable[[float], str]
    exact: Callable[[float | None], str]

    def place(self, value: float, start: float, end: float) -> float:
        """Return the coordinate of a value between the coordinates `start` (for `low`) and `end` (for `high`)."""
        return start + (value - self.low) / (self.high - self.low) * (end - start)


def rates(values: Iterable[float], zero: bool = False, steps: int = _STEPS) -> Axis:
    """Return an axis for fractions with about `steps` steps; from zero if `zero` is set or the lowest value is at most half the highest."""
    known = list(values) or [0.0]
    low, high = min(known), max(known)
    if zero or low <= high / 2:
        low = min(low, 0.0)
    if high - low < _NARROWEST:
        middle = (low + high) / 2
        low, high = (low, low + _NARROWEST) if low == 0 else (middle - _NARROWEST / 2, middle + _NARROWEST / 2)
    step = _step(high - low, steps)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Rates above 100 % cannot be reached; a tick there would suggest otherwise.
    if high <= 1 < last * step - 1e-9:
        return _axis(first * step, 1.0, [*_multiples(first, math.floor(1 / step + 1e-9), step)], short_percent, percent)
    return _axis(first * step, last * step, _multiples(first, last, step), short_percent, percent)


def amounts(values: Iterable[float], steps: int = _STEPS) -> Axis:
    """Return an axis for bytes, from zero."""
    high = max([*values, 1.0])
    unit = 1024.0 ** min(5, max(0, math.floor(math.log(high * 1.0001, 1024))))
    step = _step(high / unit, steps) * unit
    last = math.ceil(high / step - 1e-9)
    return _axis(0.0, last * step, _multiples(0, last, step), _round_size, size)


def times(values: Iterable[float], steps: int = _STEPS) -> Axis:
    """Return an axis for milliseconds, from zero."""
    high = max([*values, 1e-3])
    step = _step(high, steps)
    last = math.ceil(high / step - 1e-9)
    return _axis(0.0, last * step, _multiples(0, last, step), _round_time, milliseconds)


def counts(values: Iterable[float], exact: Callable[[float | None], str], steps: int = _STEPS) -> Axis:
    """Return an axis for whole numbers, from zero to the highest value; no tick lies above that."""
    high = max([*values, 1.0])
    step = max(1.0, _step(high, steps))
    return _axis(0.0, high, _multiples(0, math.floor(high / step + 1e-9), step), short_count, exact)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places for labels near the wanted ones, in the given order, at least `gap` apart if `low` to `high` has room for that."""
    gap = min(gap, (high - low) / max(1, len(wanted) - 1))
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    clusters: list[list[float]] = []  # [sum of (wanted - offset), members]
    for offset, index in enumerate(order):
        clusters.append([wanted[index] - offset * gap, 1.0])
        # Neighbours that overlap move together, around their common middle.
        while len(clusters) > 1 and clusters[-2][0] / clusters[-2][1] > clusters[-1][0] / clusters[-1][1]:
            total, members = clusters.pop()
            clusters[-1][0] += total
            clusters[-1][1] += members
    starts = [total / members for total, members in clusters for _ in range(int(members))]
    places = [0.0] * len(wanted)
    for offset, (index, start) in enumerate(zip(order, starts, strict=True)):
        above = (len(order) - 1 - offset) * gap
        places[index] = max(low + offset * gap, min(high - above, start + offset * gap))
    return places


def _axis(low: float, high: float, ticks: Iterable[float], tick: Callable[[float], str], exact: Callable[[float | None], str]) -> Axis:
    return Axis(low, high, tuple(ticks), tick, exact)


def _multiples(first: int, last: int, step: float) -> list[float]:
    return [index * step for index in range(first, last + 1)]


def _step(span: float, steps: int) -> float:
    power = 10.0 ** math.floor(math.log10(span / steps))
    return min((choice * power for choice in (1, 2, 5, 10)), key=lambda step: abs(span / step - steps))


def _round_size(value: float) -> str:
    written = size(value)
    head, dot, rest = written.partition(".")
    if not dot:
        return written
    digits = "".join(character for character in rest if character.isdigit())
    unit = rest[len(digits) :]
    return f"{head}.{digits.rstrip('0')}{unit}" if digits.rstrip("0") else head + unit


def _round_time(value: float) -> str:
    return f"{value:,.3g}\u202fms" if value < 1000 else milliseconds(value)
