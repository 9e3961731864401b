"""Hit-value density: how soon a unit is likely to be hit, by what that saves, by what it takes to keep it."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tiercache.policy.base import CheckpointKind, Policy, Ranks, Reuse, Units
from tiercache.policy.costs import Costs
from tiercache.policy.hazard import Hazard

_FEW = 3
"""Own hits and continuations of a session are told apart up to here."""
_SIZES = 4
"""Classes by replay length, each 4 times the one before, from one page on."""


class HitValueDensity(Policy):
    """hazard(class, age) x cost of a miss / bytes freed.

    The hazard is the rate at which units of a class are hit at an age, learned from the hits of live and of lost units (see `Hazard`).
    class = why the state was taken x number of continuations (0, 1, more) x own hits, or else how many requests in a row led to it x
    replay length. So states that a later state of their session has superseded, ends of sessions that nobody continues, and branches that
    many share each get the rate that they earn, and there is no weight to set.

    Thread rule: as `Policy`.
    """

    name: ClassVar[str] = "hvd"

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._hazard = Hazard(structures=len(CheckpointKind) * 3, parts=(2 * _FEW + 1) * _SIZES)
        self._reused: list[Reuse] = []

    def rank(self, units: Units) -> Ranks:
        """The density."""
        rate = self._hazard.rate(*_classes(units), units.now - units.last_access)
        return rate * self._costs.density(units)

    def reused(self, reuse: Reuse) -> None:
        """A hit, of a unit that was held or of one that should have been."""
        self._reused.append(reuse)

    def learn(self, live: Units, gone: Units) -> None:
        """Add what happened since the last time: how long units of each class were waited for, and how often they were hit."""
        hits = np.array(self._reused, np.int64).reshape(-1, len(Reuse._fields))
        self._reused.clear()
        _, replay, children, own, checkpoint, lineage, age, _, _ = hits.T
        self._hazard.begin(live.now)
        self._hazard.hit(*_classes_of(children, own, checkpoint, lineage, replay), age)
        for units in (live, gone):
            if len(units):
                self._hazard.wait(*_classes(units), units.now - units.last_access)
        self._hazard.derive()


def _classes(units: Units) -> tuple[np.ndarray, np.ndarray]:
    return _classes_of(units.children, units.hits, units.checkpoint, units.lineage, units.replay)


def _classes_of(
    children: np.ndarray, hits: np.ndarray, checkpoint: np.ndarray, lineage: np.ndarray, replay: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The structural class of each unit, and the part of it."""
    structure = checkpoint * 3 + np.minimum(children, 2)
    past = np.where(hits > 0, _FEW + np.minimum(hits, _FEW), np.minimum(lineage, _FEW))
    size = np.minimum(np.log2(np.maximum(replay, 1)).astype(np.int64) // 2, _SIZES - 1)
    return structure, past * _SIZES + size
