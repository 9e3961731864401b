"""Learned prefix caching: a logistic regression predicts which units are hit before long."""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from tiercache.policy.base import CheckpointKind, Column, Policy, Ranks, Reuse, Units

_ROLES: Final = len(CheckpointKind) * 3
"""Number of roles: the reasons for a state, each with no, one or more continuations."""
_SHARED: Final = 5
"""Number of features that are the same for all roles (see `_features`)."""
_FEATURES: Final = _SHARED + 2 * _ROLES
_EXAMPLES: Final = 4096
"""Number of examples from which the weights are computed: the latest of which the answer is known."""
_DRAWN: Final = 256
"""Maximum number of examples that each `learn` draws; a quarter of them are evicted units."""
_MAX_WAITING: Final = 1 << 15
"""Maximum number of examples of which the answer is not known yet. The oldest are forgotten first."""
_RIDGE: Final = 1.0
"""Weight of the prior, in examples."""
_STEPS: Final = 2
"""Newton's steps of each `learn`."""
_SHORTEST: Final = 64.0
"""Minimum of the time within which a hit counts, in ticks."""
_EXPECTED: Final = 1000.0
"""Amount by which the rank of a unit is raised on which a hit is expected."""

Matrix = npt.NDArray[np.float64]


class Lpc(Policy):
    """Policy with the rank: predicted log-odds that the unit is hit within the next ticks.

    How many ticks these are follows from the cache: twice the mean age of its units. The features are the
    age, the turn of the session, the number of new tokens, the hits, and, each with a weight of its own for
    the age, the reason why the state was taken together with the number of continuations.

    Every `LEARN_EVERY` requests, up to 256 units are drawn as examples, evicted ones among them. An example's
    answer is known when its time is over: it was hit or, if evicted, missed, or not. The weights fit the last
    4,096 answers, by two steps of Newton's method. Before that they are those of LRU. The same `seed` and
    the same calls give the same weights.

    Source: Yang, Li, Li and Lloyd, "Learned Prefix Caching for Efficient LLM Inference" (LPC), NeurIPS 2025,
    which predicts from the text of a conversation whether it continues, and combines the probability with the
    time of the last access. What differs:

    - The text is not known here. The features above take its place, so it is a policy in the manner of LPC.
    - The paper trains a small neural network beforehand, on conversations of the same kind. Here nothing is
      known beforehand, and a linear model learns from the requests.
    - How the paper combines probability and time is known to us only in general. Here the age is a feature.
    - The paper's units are conversations, here they are leaves and states. As in the paper, neither their
      size nor the cost of a miss counts.

    Thread safety: as `Policy`.
    """

    name: ClassVar[str] = "lpc"

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._weights = _prior()
        self._reused: set[int] = set()
        # Examples whose answers are not known yet, the oldest first.
        self._features: Matrix = np.empty((0, _FEATURES))
        self._digests: Column = np.empty(0, np.int64)
        self._until: Column = np.empty(0, np.int64)
        """Tick up to which a hit counts, for each of these examples."""
        self._hit: npt.NDArray[np.bool_] = np.empty(0, np.bool_)
        # Examples with their answers, the oldest first.
        self._known: Matrix = np.empty((0, _FEATURES))
        self._answers: npt.NDArray[np.bool_] = np.empty(0, np.bool_)

    def rank(self, units: Units) -> Ranks:
        """Return the log-odds of a hit of each unit; more if a hit is expected of it."""
        odds: Ranks = _features(units) @ self._weights
        return odds + _EXPECTED * (units.expected > units.now)

    def chance(self, units: Units, ticks: float) -> Ranks:
        """Return 1: probabilities are predicted for one length of time only."""
        return np.ones(len(units))

    def reused(self, reuse: Reuse) -> None:
        """Record a hit or miss as an answer, for the next `learn`."""
        self._reused.add(reuse.digest)

    def learn(self, live: Units, gone: Units) -> None:
        """Note the answers since the last call, compute new weights, and draw new examples."""
        self._hit |= np.isin(self._digests, list(self._reused))
        self._reused.clear()
        over = self._until <= live.now
        if over.any():
            self._known = np.concatenate([self._known, self._features[over]])[-_EXAMPLES:]
            self._answers = np.concatenate([self._answers, self._hit[over]])[-_EXAMPLES:]
            self._keep(np.flatnonzero(~over))
        if len(self._known):
            self._fit()
        if len(live):
            age = np.maximum(live.now - live.last_access, 0)
            until = live.now + int(max(_SHORTEST, 2.0 * age.mean()))
            self._draw(live, _DRAWN * 3 // 4, until)
            self._draw(gone, _DRAWN // 4, until)

    def _keep(self, rows: Column) -> None:
        """Forget all examples without answers, except for these rows."""
        self._features, self._digests = self._features[rows], self._digests[rows]
        self._until, self._hit = self._until[rows], self._hit[rows]

    def _draw(self, units: Units, count: int, until: int) -> None:
        """Draw up to `count` of these units as examples."""
        rows = np.flatnonzero(units.digest)  # the digest 0 stands for none
        if not len(rows):
            return
        if len(rows) > count:
            rows = self._rng.choice(rows, count, replace=False)
        self._features = np.concatenate([self._features, _features(units)[rows]])
        self._digests = np.concatenate([self._digests, units.digest[rows]])
        self._until = np.concatenate([self._until, np.full(len(rows), until)])
        self._hit = np.concatenate([self._hit, np.zeros(len(rows), np.bool_)])
        if len(self._digests) > _MAX_WAITING:
            self._keep(np.arange(len(self._digests) - _MAX_WAITING, len(self._digests)))

    def _fit(self) -> None:
        """Move the weights towards those under which the answers and the prior are most likely."""
        prior = _prior()
        for _ in range(_STEPS):
            odds = np.clip(self._known @ self._weights, -30.0, 30.0)
            chance = 1.0 / (1.0 + np.exp(-odds))
            slope = self._known.T @ (self._answers - chance) - _RIDGE * (self._weights - prior)
            curve = (self._known.T * (chance * (1.0 - chance))) @ self._known + _RIDGE * np.eye(_FEATURES)
            # A full step may overshoot where a class has hits only or none; a long one is cut.
            step = np.linalg.solve(curve, slope)
            self._weights = self._weights + step * min(1.0, 5.0 / max(1e-9, float(np.abs(step).max())))


def _prior() -> Matrix:
    """Return weights under which the odds fall with the age and depend on nothing else."""
    weights = np.zeros(_FEATURES)
    weights[_SHARED + _ROLES :] = -4.0
    return weights


def _features(units: Units) -> Matrix:
    """Return the features of each unit; shape (units, `_FEATURES`).

        column   0      1            2     3     4      5 ...         5 + roles ...
        feature  age^2  new tokens   turn  hits  hit?   1 if of role  age if of role

    All numbers but the last two flags are logarithms, scaled to about 1.
    """
    count = len(units)
    age = _scaled(units.now - units.last_access, 10)
    role = units.checkpoint * 3 + np.minimum(units.children, 2)
    found = np.zeros((count, _FEATURES))
    found[:, 0] = age * age
    found[:, 1] = _scaled(units.grown * units.page_tokens, 14)
    found[:, 2] = _scaled(units.lineage, 4)
    found[:, 3] = _scaled(units.hits, 4)
    found[:, 4] = units.hits > 0
    rows = np.arange(count)
    found[rows, _SHARED + role] = 1.0
    found[rows, _SHARED + _ROLES + role] = age
    return found


def _scaled(numbers: Column, bits: int) -> Ranks:
    scaled: Ranks = np.log2(1.0 + np.maximum(numbers, 0)) / bits
    return scaled
