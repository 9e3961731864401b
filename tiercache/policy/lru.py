"""Policy that evicts the least recently used unit first."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tiercache.policy.base import Policy, Ranks, Units


class Lru(Policy):
    """Policy under which the unit that was hit, or made if never hit, longest ago is evicted first.

    `refresh` of `HybridIndex` decides how far up the tree a hit counts.

    Thread safety: stateless, any thread.
    """

    name: ClassVar[str] = "lru"
    steady: ClassVar[bool] = True

    def rank(self, units: Units) -> Ranks:
        """Return the ticks of the last accesses."""
        return units.last_access.astype(np.float64)
