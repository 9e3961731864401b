"""Marconi's policy: recency plus FLOPs saved per byte."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tiercache.policy.base import Costs, Policy, Ranks, Units, last_use
from tiercache_lab.policies.seglen import normalised


class Marconi(Policy):
    """Policy with the rank: `normalised(1 / age) + 0.5 x normalised(FLOPs saved / bytes freed)`.

    Branches (units with two or more continuations) are evicted last. The FLOPs are those of computing from
    the nearest shallower restorable depth to the unit's end.

    Source: Marconi, MLSys 2025. (The artifact of the paper differs: it confuses the parent's MLP FLOPs with
    its attention FLOPs, and it counts the bytes of the whole path.)

    Thread safety: stateless, any thread.
    """

    name: ClassVar[str] = "marconi"
    needs_states: ClassVar[bool] = True

    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    def rank(self, units: Units) -> Ranks:
        """Return the score of each unit; infinite for a branch."""
        recency = normalised(1.0 / np.maximum(units.now - last_use(units), 1))
        score = recency + 0.5 * normalised(self._costs.saved(units) / units.nbytes)
        return np.where(units.children >= 2, np.inf, score)
