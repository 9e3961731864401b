"""Greedy-Dual-Size-Frequency: frequency times cost per byte, on a base that rises with each eviction."""

from __future__ import annotations

from bisect import bisect_right
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from tiercache.policy.base import CheckpointKind, Column, Policy, Ranks, Units, last_use
from tiercache.policy.costs import Costs

_MAX_STEPS: Final = 4096
"""Maximum number of remembered rises of a base (see `Gdsf`)."""
_MAX_HITS: Final = 7
"""Maximum number of hits that count.

The first hits show that requests share a unit. Further hits only show that the unit is old; if they counted,
the unit would stay for long after its last hit.
"""
_SUPERSEDED: Final = 0.01
"""Frequency of a superseded unit (see `Gdsf`)."""


class Gdsf(Policy):
    """Policy with the rank: base at the last access + frequency x cost of a miss / bytes freed.

    The base at a tick is the highest rank of all units that were evicted until that tick. The base rises with
    evictions, so that newer units overtake a unit that is not used again, even a costly one. The frequency is
    1 + hits; at most seven hits count.

    A *session* is a chain of requests, each continuing the one before. A unit counts as *superseded* if a
    later state of its session will answer in its place. Such a unit has exactly one continuation, and its
    state was not taken at a branch or a ghost branch. It has no more hits than its session alone explains.
    The frequency of a superseded unit is close to 0.

    If a lower tier has a copy of a unit, a miss costs a load, which is proportional to the unit's bytes. Such
    units are ranked by frequency alone, with a base of their own. They are evicted before every unit that
    would have to be computed again. (A small upper tier evicts often. With a common base, its evictions would
    raise the base fast, and units whose loss costs computation would soon rank lowest.)

    Source: Cherkasova 1998 (Greedy-Dual-Size-Frequency). The rules for superseded units, and for units of
    which a lower tier has a copy, are ours.

    Thread safety: as `Policy`.
    """

    name: ClassVar[str] = "gdsf"

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._now = 0
        self._lost, self._demoted = _Base(), _Base()

    def rank(self, units: Units) -> Ranks:
        """Return the rank of each unit; it is below 0 if a lower tier holds the unit."""
        self._now = units.now
        frequency = np.where(_superseded(units), _SUPERSEDED, 1.0 + np.minimum(units.hits, _MAX_HITS))
        used = last_use(units)
        lost = self._lost.at(used) + frequency * self._costs.saved(units) / units.nbytes
        demoted = self._demoted.at(used) + frequency
        # `demoted` is above 0. Its negative inverse is below 0 and has the same order.
        return np.where(units.covered, -1.0 / demoted, lost)

    def evicted(self, rank: float) -> None:
        """Raise a base to this rank.

        A rank below 0 belongs to a unit that a lower tier holds, and raises the base of such units.
        """
        if rank < 0:
            self._demoted.rise(self._now, -1.0 / rank)
        else:
            self._lost.rise(self._now, rank)


def _superseded(units: Units) -> npt.NDArray[np.bool_]:
    """Return, for each unit, whether it is superseded (see `Gdsf`)."""
    kind = units.checkpoint
    at_branch = (kind == CheckpointKind.BRANCH) | (kind == CheckpointKind.GHOST)
    # Each request of a session hits the state that the previous request left. When the index merges two
    # edges, it keeps the higher number of hits. A session alone therefore explains up to lineage + 1 hits.
    # More hits show that other sessions use the unit, too.
    found: npt.NDArray[np.bool_] = (units.children == 1) & ~at_branch & (units.hits <= units.lineage + 1)
    return found


class _Base:
    """History of a base: for each tick, the highest rank of all units that were evicted until then.

    The history is a list of at most `_MAX_STEPS` rises.
    """

    def __init__(self) -> None:
        # Entry i holds from tick `_ticks[i]` up to the next entry's tick:
        #   _ticks   0     10    25       at tick 17 the base is 1.5
        #   _bases   0.0   1.5   4.0
        self._ticks: list[int] = [0]
        self._bases: list[float] = [0.0]
        self._steps: tuple[Ranks, Ranks] | None = None
        """Both lists as arrays; None if the lists have changed since they were converted."""

    def at(self, ticks: Column) -> Ranks:
        """Return the base at each of these ticks."""
        if self._steps is None:
            self._steps = np.array(self._ticks), np.array(self._bases)
        known, bases = self._steps
        then: Ranks = bases[np.searchsorted(known, ticks, "right") - 1]
        return then

    def rise(self, now: int, rank: float) -> None:
        """Raise the base to `rank` from the tick `now` on, if the base is lower."""
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
        if len(self._ticks) > _MAX_STEPS:  # drop every second step of the older half
            del self._ticks[1 : _MAX_STEPS // 2 : 2], self._bases[1 : _MAX_STEPS // 2 : 2]
