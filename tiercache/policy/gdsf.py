"""Greedy dual: cost by size by frequency, on a base that rises with what is evicted."""

from __future__ import annotations

from bisect import bisect_right
from typing import ClassVar

import numpy as np

from tiercache.policy.base import Policy, Ranks, Units
from tiercache.policy.costs import Costs

_MOST_STEPS = 4096


class Gdsf(Policy):
    """base at the last access + (1 + hits) x cost of a miss / bytes freed. The base is the highest rank that was evicted so far.

    So a unit that is not used again is overtaken by newer ones, however dear it is. A unit that has exactly one continuation and is no
    branch is superseded: a later state of its session answers instead, and its frequency counts for nothing.
    Source: Cherkasova 1998 (Greedy-Dual-Size-Frequency); the rule for superseded states is ours.

    Thread rule: as `Policy`.
    """

    name: ClassVar[str] = "gdsf"

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._now = 0
        self._base = 0.0
        self._ticks: list[int] = [0]
        self._bases: list[float] = [0.0]
        self._steps: tuple[Ranks, Ranks] | None = None
        """Both as arrays, until they change."""

    def rank(self, units: Units) -> Ranks:
        """The priority."""
        self._now = units.now
        if self._steps is None:
            self._steps = np.array(self._ticks), np.array(self._bases)
        ticks, bases = self._steps
        base = bases[np.searchsorted(ticks, units.last_access, "right") - 1]
        frequency = np.where(units.children == 1, 0.01, 1.0 + units.hits)
        return base + frequency * self._costs.density(units)

    def evicted(self, rank: float) -> None:
        """The base rises."""
        if rank <= self._base:
            return
        self._base, self._steps = rank, None
        at = bisect_right(self._ticks, self._now)
        del self._ticks[at:], self._bases[at:]
        if self._ticks[-1] == self._now:
            self._bases[-1] = rank
        else:
            self._ticks.append(self._now)
            self._bases.append(rank)
        if len(self._ticks) > _MOST_STEPS:  # older steps are told apart less well
            del self._ticks[1 : _MOST_STEPS // 2 : 2], self._bases[1 : _MOST_STEPS // 2 : 2]
