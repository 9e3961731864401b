"""Least recently used."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from tiercache.policy.base import Policy, Unit, Units


class Lru(Policy):
    """The unit that was hit, or made, longest ago goes first.

    How far up a hit counts is not decided here: see `refresh` of `HybridIndex`. Thread rule: stateless, any thread.
    """

    name: ClassVar[str] = "lru"

    def rank(self, unit: Unit) -> float:
        """The time of the last access."""
        return unit.last_access

    def rank_all(self, units: Units) -> npt.NDArray[np.float64]:
        """The times of the last accesses."""
        return units.last_access.astype(np.float64)
