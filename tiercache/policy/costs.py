"""What it costs to have a unit again: the model's FLOPs where nothing below holds it, the load where the tier below does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tiercache.errors import ConfigError
from tiercache.policy.base import Ranks, Units
from tiercache.policy.profile import ModelProfile

LOAD_FLOPS_PER_BYTE = 5_000.0
"""What loading one byte costs, in FLOPs that are computed meanwhile: 250 TFLOP/s beside 50 GB/s from the host."""


@dataclass(frozen=True, slots=True)
class Costs:
    """A profile, and how a load compares with a computation. Thread safety: immutable."""

    profile: ModelProfile
    load_flops_per_byte: float = LOAD_FLOPS_PER_BYTE

    def __post_init__(self) -> None:
        if not 0.0 <= self.load_flops_per_byte < float("inf"):
            raise ConfigError(f"load_flops_per_byte={self.load_flops_per_byte} is not possible; use a finite number from 0")

    def saved(self, units: Units) -> Ranks:
        """FLOPs that a hit on each unit saves over a hit on the nearest restorable depth above it."""
        end = units.depth * units.page_tokens
        return np.asarray(self.profile.flops(end - np.minimum(units.replay * units.page_tokens, end), end), np.float64)

    def density(self, units: Units) -> Ranks:
        """What a miss costs, in FLOPs, by bytes freed."""
        # Where the tier below has a copy a miss costs its load, which is proportional to the bytes that the eviction frees.
        return np.where(units.covered, self.load_flops_per_byte, self.saved(units) / units.nbytes)
