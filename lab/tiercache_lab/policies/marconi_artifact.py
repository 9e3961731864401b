"""Marconi as its published artifact does it: its score, and its single search for alpha."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np

from tiercache.errors import ConfigError
from tiercache.policy.base import Policy, Ranks, Units, last_use
from tiercache.policy.costs import Costs
from tiercache.policy.seglen import normalised

_ALPHAS: Final = tuple(n / 10 for n in range(21))
"""Values of alpha that the artifact tries."""
_BOOTSTRAP: Final = 5
"""The search comes after this many times the requests that came before the first eviction."""
_COVERED: Final = 10.0
"""Amount by which a unit ranks lower if a lower tier has a copy; more than any score."""


class ArtifactScore(Policy):
    """Policy with the rank: `normalised(1 / age) + alpha x normalised(FLOPs saved / bytes of the path)`.

    The two are normalised over the units with at most one continuation. Branches are no candidates of the
    artifact's, so they are evicted last. `marconi_artifact.MarconiArtifact` says what else is as there.

    A unit of which a lower tier has a copy ranks below all others: its eviction loses nothing.

    Thread safety: stateless, any thread.
    """

    name: ClassVar[str] = "marconi:artifact:0"
    needs_states: ClassVar[bool] = True

    def __init__(self, costs: Costs, alpha: float) -> None:
        if not 0.0 <= alpha <= _ALPHAS[-1]:
            raise ConfigError(
                f"the alpha {alpha} of marconi:artifact is not possible; use a number from 0 to 2"
            )
        self._costs = costs
        self.alpha = alpha

    def rank(self, units: Units) -> Ranks:
        """Return the score of each unit; for a branch infinity or, if a lower tier has a copy, -1."""
        covered, branch = units.covered != 0, units.children >= 2
        ranks = np.where(covered, -1.0, np.inf)
        if branch.all():
            return ranks
        profile = self._costs.profile
        nbytes = units.depth * (units.page_tokens * profile.kv_bytes_per_token) + max(1, profile.state_bytes)
        kept = ~branch
        recency = normalised((1.0 / np.maximum(units.now - last_use(units), 1))[kept])
        score = recency + self.alpha * normalised((self._costs.saved(units) / nbytes)[kept])
        ranks[kept] = score - _COVERED * covered[kept]
        return ranks


class MarconiArtifact(Policy):
    """Policy of Marconi's artifact: alpha is 0 until one search has found the best for the first requests.

    When the first unit is lost, the artifact multiplies the number of requests until then by 5. After so many
    requests, it serves all of them again from an empty cache, with alpha = 0, 0.1, and so on up to 2. From
    then on it uses the alpha that saved most FLOPs, the lowest one among equals, and never searches again. If
    the traffic ends before, alpha stays 0. Here the caller keeps a simulated cache for each of `members`,
    which serves the same requests at the time when they come, and passes to `served` what each cache has
    saved. The result is the same.

    What of the artifact's peculiarities is as there: the bytes in the score are those of the whole path, not
    those that an eviction frees. Recency is 1 / age, normalised, which is about 0 for all but the youngest.
    Only the last node of a hit counts as used. Branches stay.

    What is not: the artifact confuses MLP FLOPs of the parent with its attention FLOPs (a profile here has
    only their sum), counts evicted bytes of the wrong node, so that it holds up to 1.14 times its capacity,
    and has a state in every node. Its admission is that of `tiercache replay --checkpoints branch,end`, which
    is a choice of the caller here. Its time runs by more steps per request. `marconi` is the reading without
    peculiarities.

    Source: the public artifact of Marconi, MLSys 2025 (`radix_cache_hybrid.py`, `config_tuner.py`).

    Thread safety: as `Policy`.
    """

    name: ClassVar[str] = "marconi:artifact"
    needs_states: ClassVar[bool] = True

    def __init__(self, costs: Costs) -> None:
        self.members = [ArtifactScore(costs, alpha) for alpha in _ALPHAS]
        self.saved = [0.0] * len(self.members)
        """FLOPs that the simulated cache of each member has saved."""
        self.settled = False
        """Whether alpha is chosen, so that the simulated caches are not needed any more."""
        self._current = self.members[0]
        self._served = 0
        self._search_at: int | None = None
        """Number of requests after which alpha is chosen; None before the first loss."""

    @property
    def alpha(self) -> float:
        """Value of alpha that is in use."""
        return self._current.alpha

    def rank(self, units: Units) -> Ranks:
        """Return the scores with the current alpha."""
        return self._current.rank(units)

    def evicted(self, rank: float) -> None:
        """Note the first loss. The rank of a unit that a lower tier has is below 0."""
        if self._search_at is None and rank >= 0:
            self._search_at = _BOOTSTRAP * (self._served + 1)  # the present request counts

    def served(self, flops: Sequence[float]) -> None:
        """Count a request, of which the cache of each member saved so much; choose alpha after the last."""
        self._served += 1
        self.saved = [sum(pair) for pair in zip(self.saved, flops, strict=True)]
        if self._search_at is not None and self._served >= self._search_at:
            self._current = self.members[self.saved.index(max(self.saved))]
            self.settled = True
