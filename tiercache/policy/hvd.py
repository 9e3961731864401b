"""Hit-value density: how soon a unit is likely to be hit, by what that saves, by what it takes to keep it."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tiercache.policy.base import CheckpointKind, Column, Policy, Ranks, Reuse, Units
from tiercache.policy.costs import Costs
from tiercache.policy.hazard import Hazard

_LINEAGES = 5
"""0, 1 to 2, 3 to 6, 7 to 14, 15 and more requests in a row."""
_HITS = 6
"""Own hits: 1, 2 to 3, and so on up to 32 and more."""
_SIZES = 6
"""Classes of new tokens: below 1,024, and by powers of two up to 16,384 and more."""


class HitValueDensity(Policy):
    """hazard(class, age) x cost of a miss / bytes freed.

    The hazard is the rate at which units of a class are hit at an age, learned from the hits of live and of lost units (see `Hazard`).
    class = why the state was taken x number of continuations (0, 1, more), of that: own hits, or else how many requests in a row led to it,
    of that: how many tokens were new with it. So states that a later state of their session has superseded, ends of sessions that nobody
    continues, and branches that many share each get the rate that they earn, and there is no weight to set.

    Thread safety: as `Policy`.
    """

    name: ClassVar[str] = "hvd"

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._hazard = Hazard((len(CheckpointKind) * 3, _LINEAGES + _HITS, _SIZES))
        self._reused: list[Reuse] = []

    def rank(self, units: Units) -> Ranks:
        """The density."""
        rate = self._hazard.rate(_classes(units), units.now - units.last_access)
        return rate * self._costs.density(units)

    def reused(self, reuse: Reuse) -> None:
        """A hit, of a unit that was held or of one that should have been."""
        self._reused.append(reuse)

    def learn(self, live: Units, gone: Units) -> None:
        """Add what happened since the last time: how long units of each class were waited for, and how often they were hit."""
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
    """The class of each unit, its part of that, and its part of that."""
    kind = checkpoint * 3 + np.minimum(children, 2)
    past = np.where(hits > 0, _LINEAGES + np.minimum(_log2(np.maximum(hits, 1)), _HITS - 1), np.minimum(_log2(lineage + 1), _LINEAGES - 1))
    size = np.clip(_log2(np.maximum(new_tokens, 1)) - 9, 0, _SIZES - 1)
    return kind, past, size


def _log2(values: Column) -> Column:
    """Rounded down; of numbers from 1."""
    exponents: Column = np.frexp(values.astype(np.float64))[1] - 1
    return exponents
