"""Policy that evicts the least recently used unit first."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tiercache.policy.base import Policy, Ranks, Units, last_use


class Lru(Policy):
    """Policy that first evicts the unit whose last hit is longest ago.

    A unit without a hit counts from its creation. In the index, the argument `refresh` of `HybridIndex` says
    whether a hit also counts for the nodes above.

    Thread safety: stateless, any thread.
    """

    name: ClassVar[str] = "lru"
    steady: ClassVar[bool] = True

    def rank(self, units: Units) -> Ranks:
        """Return the tick of each unit's last access, or of the hit that is expected of it."""
        return last_use(units).astype(np.float64)
