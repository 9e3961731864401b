"""Rank by how much would be replayed, and by recency."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tiercache.errors import ConfigError
from tiercache.policy.base import Policy, Ranks, Units


class SegLen(Policy):
    """`weight` x replay length + (1 - `weight`) x recency, each normalised over what is compared; `additive`: + recency, in full.

    The replay length is that to the nearest restorable depth above: states that many tokens depend on stay. It has no meaning without
    states.

    The formula is inferred from the public description of SGLang's `seglen` (pull request 22172, closed without a merge), which says that
    a weight of 0.85 controls the balance of the two, and not how they are added. So there are two readings of it. The convex one is the
    default: a weight that runs from recency alone to replay length alone is a balance. The additive one is how Marconi adds its terms,
    after which `seglen` is modelled.

    Thread safety: stateless, any thread.
    """

    name: ClassVar[str] = "seglen"
    needs_states: ClassVar[bool] = True

    def __init__(self, weight: float = 0.85, *, additive: bool = False) -> None:
        if not 0.0 <= weight <= 1.0:
            raise ConfigError(f"seglen's weight {weight} is not possible; use a number from 0 (recency alone) to 1 (replay length alone)")
        self._replay = weight
        self._recency = 1.0 if additive else 1.0 - weight

    def rank(self, units: Units) -> Ranks:
        """The weighted sum, from 0."""
        return self._replay * normalised(units.replay) + self._recency * normalised(units.last_access)


def normalised(values: np.ndarray) -> Ranks:
    """`values` moved and scaled to [0, 1]; all 0 where they are equal."""
    out = values.astype(np.float64)
    out -= out.min()
    most = out.max()
    return out / most if most > 0 else out
