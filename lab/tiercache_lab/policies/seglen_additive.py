"""The other reading of `seglen`, whose formula is inferred: recency counts in full."""

from __future__ import annotations

from typing import ClassVar, Final

from tiercache.policy.base import Policy, Ranks, Units, last_use
from tiercache.policy.seglen import normalised

_WEIGHT: Final = 0.85
"""Weight of the replay length: the default of `seglen`."""


class SegLenAdditive(Policy):
    """Policy with the rank: 0.85 x replay length + recency, both normalised.

    That is Marconi's sum, on which `seglen` is modelled.

    Thread safety: stateless, any thread.
    """

    name: ClassVar[str] = "seglen:additive"
    needs_states: ClassVar[bool] = True

    def rank(self, units: Units) -> Ranks:
        """Return the sum of weighted replay length and recency of each unit, at least 0."""
        return _WEIGHT * normalised(units.replay) + normalised(last_use(units))
