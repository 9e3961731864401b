"""Hit-value density: the rate at which a unit is likely to be hit, times the cost that a hit saves, per byte that the unit takes."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tiercache.policy.base import CheckpointKind, Column, Policy, Ranks, Reuse, Units
from tiercache.policy.costs import Costs
from tiercache.policy.hazard import Hazard

_LINEAGES = 5
"""Number of classes by requests in a row: 0, 1 to 2, 3 to 6, 7 to 14, 15 and more."""
_HITS = 6
"""Number of classes by a unit's own hits: 1, 2 to 3, and so on up to 32 and more."""
_SIZES = 6
"""Number of classes by new tokens: below 1,024, and by powers of two up to 16,384 and more."""


class HitValueDensity(Policy):
    """Policy with the rank: hazard(class, age) x cost of a miss / bytes freed.

    The hazard comes from the rate at which units of a class are hit at an age, learned from the hits of live and of lost units (see
    `Hazard`). Classes are nested in three levels: the reason why the state was taken x the number of continuations (0, 1, more); the unit's
    own hits, or without any the number of requests in a row that led to it; the number of tokens that were new with it. Superseded states,
    ends of sessions that are not continued, and branches that many requests share thus each get a rate of their own, and there is no weight
    to set.

    Thread safety: as `Policy`.
    """

    name: ClassVar[str] = "hvd"

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._hazard = Hazard((len(CheckpointKind) * 3, _LINEAGES + _HITS, _SIZES))
        self._reused: list[Reuse] = []

    def rank(self, units: Units) -> Ranks:
        """Return the hit-value density of each unit."""
        rate = self._hazard.rate(_classes(units), units.now - units.last_access)
        return rate * self._costs.density(units)

    def reused(self, reuse: Reuse) -> None:
        """Note a hit, or a miss of an evicted unit, for the next `learn`."""
        self._reused.append(reuse)

    def learn(self, live: Units, gone: Units) -> None:
        """Learn from the time since the last call: how long units of each class went without a hit, and how often they were hit."""
        hits = np.array(self._reused, np.int64).reshape(-1, len(Reuse._fields))
        self._reused.clear()
        _, _, children, own, checkpoint, lineage, grown, age, _, _ = hits.T
        self._hazard.begin(live.now)
        self._hazard.hit(_classes_of(checkpoint, children, own, lineage, grown * live.page_tokens), age)
        for units in (live, gone):
            if len(units):
                self._hazard.wait(_classes(units), units.now - units.last_access)
        self._hazard.derive()


def _classes(units: Units) -> tuple[Column, Column, Column]:
    return _classes_of(units.checkpoint, units.children, units.hits, units.lineage, units.grown * units.page_tokens)


def _classes_of(checkpoint: Column, children: Column, hits: Column, lineage: Column, new_tokens: Column) -> tuple[Column, Column, Column]:
    """Return the class of each unit on the three levels, outermost first."""
    kind = checkpoint * 3 + np.minimum(children, 2)
    past = np.where(hits > 0, _LINEAGES + np.minimum(_log2(np.maximum(hits, 1)), _HITS - 1), np.minimum(_log2(lineage + 1), _LINEAGES - 1))
    size = np.clip(_log2(np.maximum(new_tokens, 1)) - 9, 0, _SIZES - 1)
    return kind, past, size


def _log2(values: Column) -> Column:
    """Return the binary logarithm, rounded down, of integers from 1."""
    exponents: Column = np.frexp(values.astype(np.float64))[1] - 1
    return exponents
