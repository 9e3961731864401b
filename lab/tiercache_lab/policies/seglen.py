"""Two readings of SGLang's `seglen`, which ranks by replay length and recency."""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np

from tiercache.policy.base import Policy, Ranks, Units, last_use

_WEIGHT: Final = 0.85
"""Weight of the replay length."""


class SegLen(Policy):
    """Policy with the rank: 0.85 x replay length + 0.15 x recency.

    Both are normalised over the units that are compared. The replay length is the number of pages that must
    be computed again if the unit is lost: those from the nearest shallower restorable depth to the unit's
    end. The policy has no meaning without states.

    The formula is inferred from the public description of SGLang's `seglen` (pull request 22172, closed
    without a merge). The description says that a weight of 0.85 controls the balance of the two, but not how
    they are added. This is a convex sum, because a balance suggests a weight from 0 (recency alone) to 1
    (replay length alone).

    Thread safety: stateless, any thread.
    """

    name: ClassVar[str] = "seglen"
    needs_states: ClassVar[bool] = True
    recency: ClassVar[float] = 1.0 - _WEIGHT
    """Weight of the recency."""

    def rank(self, units: Units) -> Ranks:
        """Return the weighted sum of replay length and recency of each unit, at least 0."""
        return _WEIGHT * normalised(units.replay) + self.recency * normalised(last_use(units))


class SegLenAdditive(SegLen):
    """Policy with the rank: 0.85 x replay length + recency. That is Marconi's sum.

    Thread safety: stateless, any thread.
    """

    name: ClassVar[str] = "seglen:additive"
    recency: ClassVar[float] = 1.0


def normalised(values: np.ndarray) -> Ranks:
    """Return `values` shifted and scaled to [0, 1]; all 0 if they are equal."""
    out = values.astype(np.float64)
    out -= out.min()
    most = out.max()
    return out / most if most > 0 else out
