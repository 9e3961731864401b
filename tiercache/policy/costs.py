"""Cost of bringing a unit back: a load if a lower tier has the unit, otherwise the FLOPs to recompute it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tiercache.models.profile import ModelProfile
from tiercache.policy.base import Ranks, Units

LOAD_FLOPS_PER_BYTE: Final = 5_000.0
"""Cost of loading one byte, in FLOPs.

A device that computes 250 TFLOP/s and loads 50 GB/s from the host computes 5,000 FLOPs while it loads a byte.
"""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of bringing units of one model back."""

    profile: ModelProfile

    def saved(self, units: Units) -> Ranks:
        """Return the FLOPs that a hit on each unit saves.

        Without the unit, the hit would be at the nearest shallower restorable depth.
        """
        end = units.depth * units.page_tokens
        return np.asarray(
            self.profile.flops(end - np.minimum(units.replay * units.page_tokens, end), end), np.float64
        )

    def density(self, units: Units) -> Ranks:
        """Return the cost of a miss of each unit, in FLOPs per byte that its eviction frees."""
        # If a lower tier has a copy, a miss costs a load. A load is proportional to the bytes that the
        # eviction frees, so its cost per byte is the same for all units.
        return np.where(units.covered, LOAD_FLOPS_PER_BYTE, self.saved(units) / units.nbytes)
