"""Confidence intervals of 95 %: over seeds by Student's t, over one recorded trace by a block bootstrap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Final

import numpy as np

T_QUANTILES: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95 % quantiles of Student's t for 1 to 9 degrees of freedom.

Source: NIST/SEMATECH e-Handbook of Statistical Methods, section 1.3.6.7.2.
"""
BLOCK: Final = 10
"""Windows of a block of the bootstrap: a tenth of a run, which has some 100 windows."""
_DRAWS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean with the bounds of its interval; without bounds if there is only one value."""

    mean: float
    low: float = math.nan
    high: float = math.nan

    @property
    def excludes_zero(self) -> bool:
        """Whether zero is outside; False without bounds."""
        return self.low > 0 or self.high < 0

    @property
    def is_known(self) -> bool:
        """Whether there are bounds."""
        return not math.isnan(self.low)


def of_seeds(values: Sequence[float]) -> Interval:
    """Return mean and interval of one value per seed, which are independent of each other.

    Raises ValueError for no value, and for more than ten.
    """
    if not 0 < len(values) <= len(T_QUANTILES) + 1:
        raise ValueError(f"{len(values)} seeds; there are quantiles for 1 to {len(T_QUANTILES) + 1}")
    if len(values) == 1:
        return Interval(values[0])
    half = T_QUANTILES[len(values) - 2] * stdev(values) / math.sqrt(len(values))
    return Interval(mean(values), mean(values) - half, mean(values) + half)


def of_windows(weights: Sequence[float], values: Sequence[float], block: int = BLOCK) -> Interval:
    """Return the weighted mean of consecutive windows, and its interval by a moving-block bootstrap.

    Neighbouring windows depend on each other, so blocks of `block` windows in a row are drawn with
    replacement, until as many windows are drawn as there are (Kuensch 1989). The bounds are the percentiles
    2.5 and 97.5 of 10,000 such means. The same values give the same bounds.
    """
    weighed = np.asarray(weights, np.float64)
    sums = np.stack([weighed * np.asarray(values, np.float64), weighed])
    whole = float(sums[0].sum() / sums[1].sum())
    count, block = len(weighed), min(block, len(weighed))
    if count < 2:
        return Interval(whole)
    starts = np.random.default_rng(0).integers(0, count - block + 1, (_DRAWS, -(-count // block)))
    at = (starts[:, :, None] + np.arange(block)).reshape(_DRAWS, -1)[:, :count]
    drawn = sums[0, at].sum(axis=1) / sums[1, at].sum(axis=1)
    low, high = np.percentile(drawn, (2.5, 97.5)).tolist()
    return Interval(whole, low, high)
