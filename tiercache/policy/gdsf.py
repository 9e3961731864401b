"""Greedy-Dual-Size-Frequency: frequency times cost per byte, on a base that rises with each eviction."""

from __future__ import annotations

from bisect import bisect_right
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from tiercache.policy.base import CheckpointKind, Column, Policy, Ranks, Units
from tiercache.policy.costs import Costs

_MOST_STEPS: Final = 4096
"""Most steps of a base that are remembered."""
_MOST_HITS: Final = 7
"""Most hits that count. Up to this number, hits show that a unit is shared; beyond it they only show how long the unit has been there, and
would keep a unit that was popular once for as many generations as it has hits."""
_SUPERSEDED: Final = 0.01
"""Frequency of a state that is superseded by a later one of its session."""


class Gdsf(Policy):
    """Policy with the rank: base at the last access + frequency x cost of a miss / bytes freed.

    The base is the highest rank that was evicted so far, so that a unit that is not used again is overtaken by newer ones, however costly
    it is. The frequency is 1 + hits, of which the first seven count. That of a superseded unit is close to 0, because a later state of its
    session answers instead. A unit is superseded if it has exactly one continuation, unless others are likely: its state was taken at a
    branch or a ghost branch, or it was hit more often than its session has continued.

    A miss of a unit that the tier below holds costs a load, which is proportional to its bytes. Frequency alone ranks such units, on a base
    of their own, and they are evicted before every unit that would have to be computed. (With one base, a small upper tier that changes all
    the time would age the units of the tier below it, where each eviction is a loss.)

    Source: Cherkasova 1998 (Greedy-Dual-Size-Frequency); the rules for superseded states and for units held below are ours.

    Thread safety: as `Policy`.
    """

    name: ClassVar[str] = "gdsf"

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._now = 0
        self._lost, self._demoted = _Base(), _Base()

    def rank(self, units: Units) -> Ranks:
        """Return the priority of each unit: 0 or more if its eviction loses it, below 0 if the tier below holds it."""
        self._now = units.now
        frequency = np.where(_superseded(units), _SUPERSEDED, 1.0 + np.minimum(units.hits, _MOST_HITS))
        lost = self._lost.at(units.last_access) + frequency * self._costs.saved(units) / units.nbytes
        demoted = self._demoted.at(units.last_access) + frequency
        return np.where(units.covered, -1.0 / demoted, lost)

    def evicted(self, rank: float) -> None:
        """Raise the base for lost units, or for those that the tier below holds (rank below 0), to the rank of the evicted unit."""
        if rank < 0:
            self._demoted.rise(self._now, -1.0 / rank)
        else:
            self._lost.rise(self._now, rank)


def _superseded(units: Units) -> npt.NDArray[np.bool_]:
    """Return, for each unit, whether a later state of its session answers in its place."""
    kind = units.checkpoint
    at_branch = (kind == CheckpointKind.BRANCH) | (kind == CheckpointKind.GHOST)
    # Each turn of a session hits the state that the turn before left, and a state takes over the hits of the states that it outlives. A
    # session alone therefore explains lineage + 1 hits; more show that others use the unit, too.
    found: npt.NDArray[np.bool_] = (units.children == 1) & ~at_branch & (units.hits <= units.lineage + 1)
    return found


class _Base:
    """History of the highest rank evicted so far, at each tick up to now, in a bounded number of steps."""

    def __init__(self) -> None:
        self._ticks: list[int] = [0]
        self._bases: list[float] = [0.0]
        self._steps: tuple[Ranks, Ranks] | None = None
        """Both lists as arrays; None since they last changed."""

    def at(self, ticks: Column) -> Ranks:
        """Return the base at each of these ticks."""
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
        if len(self._ticks) > _MOST_STEPS:  # drop every second step of the older half
            del self._ticks[1 : _MOST_STEPS // 2 : 2], self._bases[1 : _MOST_STEPS // 2 : 2]
