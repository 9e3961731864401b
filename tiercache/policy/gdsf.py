"""Greedy dual: cost by size by frequency, on a base that rises with what is evicted."""

from __future__ import annotations

from bisect import bisect_right
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from tiercache.policy.base import CheckpointKind, Column, Policy, Ranks, Units
from tiercache.policy.costs import Costs

_MOST_STEPS: Final = 4096
_MOST_HITS: Final = 7
"""Hits that count. Within this many a unit shows that it is shared; beyond it a count says how long the unit has been there, and would
keep what was popular once for as many generations as it has hits."""
_SUPERSEDED: Final = 0.01
"""The frequency of a state that a later one of its session answers for."""


class Gdsf(Policy):
    """base at the last access + frequency x cost of a miss / bytes freed. The base is the highest rank that was evicted so far.

    So a unit that is not used again is overtaken by newer ones, however dear it is. The frequency is 1 + hits, of which the first seven
    count; that of a superseded state is next to nothing, for a later state of its session answers instead. Superseded is what has exactly
    one continuation, unless others are likely: the state was taken at a branch or a ghost branch, or was hit more often than its session
    has gone on.

    What the tier below holds costs a load, which is proportional to its bytes, so that frequency alone ranks it, on a base of its own, and
    it goes before everything that would have to be computed. (With one base, a small upper tier that changes all the time would age what
    is below it, where each eviction is a loss.)

    Source: Cherkasova 1998 (Greedy-Dual-Size-Frequency); the rules for superseded states and for what lies below are ours.

    Thread safety: as `Policy`.
    """

    name: ClassVar[str] = "gdsf"

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._now = 0
        self._lost, self._demoted = _Base(), _Base()

    def rank(self, units: Units) -> Ranks:
        """The priority: from 0 for what would be lost, below 0 for what the tier below holds."""
        self._now = units.now
        frequency = np.where(_superseded(units), _SUPERSEDED, 1.0 + np.minimum(units.hits, _MOST_HITS))
        lost = self._lost.at(units.last_access) + frequency * self._costs.saved(units) / units.nbytes
        demoted = self._demoted.at(units.last_access) + frequency
        return np.where(units.covered, -1.0 / demoted, lost)

    def evicted(self, rank: float) -> None:
        """The base rises of what would be lost, or of what the tier below holds."""
        if rank < 0:
            self._demoted.rise(self._now, -1.0 / rank)
        else:
            self._lost.rise(self._now, rank)


def _superseded(units: Units) -> npt.NDArray[np.bool_]:
    """Does a later state of its session answer for the unit?"""
    kind = units.checkpoint
    at_branch = (kind == CheckpointKind.BRANCH) | (kind == CheckpointKind.GHOST)
    # Each turn of a session hits the state that the one before left, and a state takes over the hits of those that it outlives.
    found: npt.NDArray[np.bool_] = (units.children == 1) & ~at_branch & (units.hits <= units.lineage + 1)
    return found


class _Base:
    """The highest rank that was evicted so far, now and at earlier ticks. It remembers a bounded number of steps."""

    def __init__(self) -> None:
        self._ticks: list[int] = [0]
        self._bases: list[float] = [0.0]
        self._steps: tuple[Ranks, Ranks] | None = None
        """Both as arrays, until they change."""

    def at(self, ticks: Column) -> Ranks:
        """What it was at each of these ticks."""
        if self._steps is None:
            self._steps = np.array(self._ticks), np.array(self._bases)
        known, bases = self._steps
        then: Ranks = bases[np.searchsorted(known, ticks, "right") - 1]
        return then

    def rise(self, now: int, rank: float) -> None:
        """Raise the base to `rank` from the tick `now` on, if that is more."""
        if rank <= self._bases[-1]:
            return
        self._steps = None
        at = bisect_right(self._ticks, now)
        del self._ticks[at:], self._bases[at:]
        if self._ticks[-1] == now:
            self._bases[-1] = rank
        else:
            self._ticks.append(now)
            self._bases.append(rank)
        if len(self._ticks) > _MOST_STEPS:  # older steps are told apart less well
            del self._ticks[1 : _MOST_STEPS // 2 : 2], self._bases[1 : _MOST_STEPS // 2 : 2]
