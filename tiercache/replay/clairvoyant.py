"""A policy that knows the future: which prefixes an infinite cache hits, and when."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from tiercache.policy import Costs, Policy, Reuse, Units
from tiercache.policy.base import Ranks


class Recorder(Policy):
    """Least-recently-used policy that records the prefix at which each request of an infinite cache hits. Thread safety: as `Policy`."""

    name: ClassVar[str] = "infinite"
    steady: ClassVar[bool] = True

    def __init__(self) -> None:
        self.uses: dict[int, list[int]] = {}
        """Ordinals of the requests that hit each prefix, ascending, by digest (see `Units`)."""
        self._request = -1

    def rank(self, units: Units) -> Ranks:
        """Return the times of the last accesses."""
        return units.last_access.astype(np.float64)

    def requested(self) -> None:
        """Note that the next request begins."""
        self._request += 1

    def reused(self, reuse: Reuse) -> None:
        """Record a hit of the current request."""
        self.uses.setdefault(reuse.digest, []).append(self._request)


class Clairvoyant(Policy):
    """Policy that ranks by cost of the next miss / (bytes freed x requests until then); prefixes without a future hit are evicted first.

    The choice is greedy, so its result is not a proven bound; a cache that knows only the past seldom does better.
    Thread safety: as `Policy`.
    """

    name: ClassVar[str] = "clairvoyant"

    def __init__(self, costs: Costs, uses: Mapping[int, Sequence[int]]) -> None:
        self._costs = costs
        self._uses = uses
        self._request = -1

    def requested(self) -> None:
        """Note that the next request begins."""
        self._request += 1

    def rank(self, units: Units) -> Ranks:
        """Return the density divided by the distance to the next use; 0 for units that are not used again."""
        distance = np.array([self._distance(digest) for digest in units.digest.tolist()])
        ranks: Ranks = self._costs.density(units) / distance
        return ranks

    def _distance(self, digest: int) -> float:
        uses = self._uses.get(digest, ())
        at = bisect_right(uses, self._request)
        return uses[at] - self._request if at < len(uses) else float("inf")
