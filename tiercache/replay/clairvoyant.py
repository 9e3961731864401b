"""A policy that knows the future: what an infinite cache would have hit, and when."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from tiercache.policy import Costs, Policy, Reuse, Units
from tiercache.policy.base import Ranks


class Recorder(Policy):
    """Least recently used, noting at which prefix each request of an infinite cache hit. Thread safety: as `Policy`."""

    name: ClassVar[str] = "infinite"
    steady: ClassVar[bool] = True

    def __init__(self) -> None:
        self.uses: dict[int, list[int]] = {}
        """By digest (see `Units`), the ordinals of the requests that hit there, rising."""
        self._request = -1

    def rank(self, units: Units) -> Ranks:
        """The times of the last accesses."""
        return units.last_access.astype(np.float64)

    def requested(self) -> None:
        """The next request begins."""
        self._request += 1

    def reused(self, reuse: Reuse) -> None:
        """A hit."""
        self.uses.setdefault(reuse.digest, []).append(self._request)


class Clairvoyant(Policy):
    """Cost of the next miss / (bytes freed x requests until then): what an infinite cache will not hit again goes first.

    Greedy, and so no proof of what is possible; a cache that knows only the past seldom does better. Thread safety: as `Policy`.
    """

    name: ClassVar[str] = "clairvoyant"

    def __init__(self, costs: Costs, uses: Mapping[int, Sequence[int]]) -> None:
        self._costs = costs
        self._uses = uses
        self._request = -1

    def requested(self) -> None:
        """The next request begins."""
        self._request += 1

    def rank(self, units: Units) -> Ranks:
        """The density; 0 for what is not used again."""
        distance = np.array([self._distance(digest) for digest in units.digest.tolist()])
        ranks: Ranks = self._costs.density(units) / distance
        return ranks

    def _distance(self, digest: int) -> float:
        uses = self._uses.get(digest, ())
        at = bisect_right(uses, self._request)
        return uses[at] - self._request if at < len(uses) else float("inf")
