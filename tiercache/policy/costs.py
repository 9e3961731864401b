"""Cost of having a unit again: a load if the tier below holds it, the model's FLOPs otherwise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tiercache.errors import ConfigError
from tiercache.policy.base import Ranks, Units
from tiercache.policy.profile import ModelProfile

LOAD_FLOPS_PER_BYTE = 5_000.0
"""Cost of loading one byte, in FLOPs that the device can compute meanwhile: 250 TFLOP/s beside 50 GB/s from the host."""


@dataclass(frozen=True, slots=True)
class Costs:
    """A model profile, and the cost of a load compared with computation."""

    profile: ModelProfile
    load_flops_per_byte: float = LOAD_FLOPS_PER_BYTE

    def __post_init__(self) -> None:
        if not 0.0 <= self.load_flops_per_byte < float("inf"):
            raise ConfigError(f"load_flops_per_byte={self.load_flops_per_byte} is not possible; use a finite number from 0")

    def saved(self, units: Units) -> Ranks:
        """Return the FLOPs that a hit on each unit saves over a hit on the nearest restorable depth above it."""
        end = units.depth * units.page_tokens
        return np.asarray(self.profile.flops(end - np.minimum(units.replay * units.page_tokens, end), end), np.float64)

    def density(self, units: Units) -> Ranks:
        """Return the cost of a miss of each unit, in FLOPs per byte that its eviction frees."""
        # Where the tier below has a copy, a miss costs its load, which is proportional to the bytes that the eviction frees.
        return np.where(units.covered, self.load_flops_per_byte, self.saved(units) / units.nbytes)
