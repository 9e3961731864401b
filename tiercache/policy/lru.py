"""Least recently used."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tiercache.policy.base import Policy, Ranks, Units


class Lru(Policy):
    """The unit that was hit, or made, longest ago goes first.

    How far up a hit counts is not decided here: see `refresh` of `HybridIndex`. Thread safety: stateless, any thread.
    """

    name: ClassVar[str] = "lru"
    steady: ClassVar[bool] = True

    def rank(self, units: Units) -> Ranks:
        """The times of the last accesses."""
        return units.last_access.astype(np.float64)
