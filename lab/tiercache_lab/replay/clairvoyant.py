"""A policy that records the hits of an infinite cache, and a policy that knows these hits in advance."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from tiercache.policy import Costs, Policy, Reuse, Units
from tiercache.policy.base import Ranks


class Recorder(Policy):
    """Least-recently-used policy that records which prefixes are hit, and by which requests.

    Thread safety: as `Policy`.
    """

    name: ClassVar[str] = "infinite"
    steady: ClassVar[bool] = True

    def __init__(self) -> None:
        self.uses: dict[int, list[int]] = {}
        """For the digest of each prefix (see `Units`): the numbers of the requests that hit it, ascending."""
        self._request = -1

    def rank(self, units: Units) -> Ranks:
        """Return the times of the last accesses as ranks."""
        return units.last_access.astype(np.float64)

    def requested(self) -> None:
        """Count the next request."""
        self._request += 1

    def reused(self, reuse: Reuse) -> None:
        """Record a hit of the current request."""
        self.uses.setdefault(reuse.digest, []).append(self._request)


class Clairvoyant(Policy):
    """Policy that ranks units by their next use, which it knows in advance.

        rank  =  cost of a miss  /  (bytes that an eviction frees  x  number of requests until the next use)

    `uses` are the `Recorder.uses` of an infinite cache that served the same requests. Units that are not used
    again are evicted first. The policy is greedy, so its hit rate is not a proven bound. But a policy that
    knows only the past seldom has a higher hit rate.

    Thread safety: as `Policy`.
    """

    name: ClassVar[str] = "clairvoyant"

    def __init__(self, costs: Costs, uses: Mapping[int, Sequence[int]]) -> None:
        self._costs = costs
        self._uses = uses
        self._request = -1

    def requested(self) -> None:
        """Count the next request."""
        self._request += 1

    def rank(self, units: Units) -> Ranks:
        """Return the rank of each unit; 0 for units that are not used again."""
        distance = np.array([self._distance(digest) for digest in units.digest.tolist()])
        ranks: Ranks = self._costs.density(units) / distance
        return ranks

    def _distance(self, digest: int) -> float:
        uses = self._uses.get(digest, ())
        at = bisect_right(uses, self._request)
        return uses[at] - self._request if at < len(uses) else float("inf")
