"""Marconi's policy: recency plus FLOPs saved per byte."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tiercache.errors import ConfigError
from tiercache.policy.base import Policy, Ranks, Units, last_use
from tiercache.policy.costs import Costs
from tiercache.policy.seglen import normalised


class Marconi(Policy):
    """Policy with the rank: `normalised(1 / age) + alpha x normalised(FLOPs saved / bytes freed)`.

    Branches (units with two or more continuations) are evicted last. The FLOPs are those of computing from
    the nearest shallower restorable depth to the unit's end.

    Source: Marconi, MLSys 2025. (The artifact of the paper differs: it confuses the parent's MLP FLOPs with
    its attention FLOPs, and it counts the bytes of the whole path.)

    Thread safety: stateless, any thread.
    """

    name: ClassVar[str] = "marconi"
    needs_states: ClassVar[bool] = True

    def __init__(self, costs: Costs, alpha: float = 0.5) -> None:
        if not 0.0 <= alpha < float("inf"):
            raise ConfigError(
                f"marconi's alpha {alpha} is not possible; use a number from 0 (recency alone), such as 0.5"
            )
        self._costs = costs
        self.alpha = alpha

    def rank(self, units: Units) -> Ranks:
        """Return the score of each unit; infinite for a branch."""
        recency = normalised(1.0 / np.maximum(units.now - last_use(units), 1))
        score = recency + self.alpha * normalised(self._costs.saved(units) / units.nbytes)
        return np.where(units.children >= 2, np.inf, score)
