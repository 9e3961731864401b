"""Rates of reuse by class and age, learned while they are used."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tiercache.policy.base import Column, Ranks

_BUCKETS = 24
"""Ages by powers of two: up to 2^24 ticks."""
_DECAY = 0.9
"""What is kept of the past at each `begin`."""
_PSEUDO_HITS = 2.0
"""How many hits a class must have seen to weigh as much as the class above it."""

Table = npt.NDArray[np.float64]


class Hazard:
    """hits / ticks waited, for each class and age; classes are `structures` x `parts`.

    What a class has seen too little of is filled in from its structure, that from all units together, and that from 1 / age: so it starts
    as LRU. Thread rule: that of its owner.
    """

    def __init__(self, structures: int, parts: int) -> None:
        shape = (structures, parts, _BUCKETS)
        self._hits, self._waited = np.zeros(shape), np.zeros(shape)
        self._edges = np.concatenate([[0.0], 2.0 ** np.arange(_BUCKETS)])  # bucket 0 is age 0, bucket n is [2^(n-1), 2^n)
        self._edges[-1] = np.inf
        self._middles = 1.5 * 2.0 ** np.arange(-1, _BUCKETS - 1)
        self._opened = self._elapsed = 0
        self._rates = np.empty(shape)
        self.derive()

    def rate(self, structure: Column, part: Column, age: Column) -> Ranks:
        """Hits per tick that units of these classes and ages may expect."""
        return self._rates[structure, part, _bucket(age)]

    def begin(self, now: int) -> None:
        """What `hit` and `wait` tell next is of the ticks since the last `begin`, up to `now`."""
        self._hits *= _DECAY
        self._waited *= _DECAY
        self._opened, self._elapsed = now, now - self._opened

    def hit(self, structure: Column, part: Column, age: Column) -> None:
        """Units of these classes were hit at these ages."""
        np.add.at(self._hits, (structure, part, _bucket(age)), 1.0)
        self._wait(structure, part, age, self._elapsed / 2)  # on average a hit comes in the middle

    def wait(self, structure: Column, part: Column, age: Column) -> None:
        """Units of these classes have come to these ages without a hit."""
        self._wait(structure, part, age, self._elapsed)

    def derive(self) -> None:
        """Let `rate` answer from everything that is in."""
        hits, waited = self._hits.sum(axis=(0, 1)), self._waited.sum(axis=(0, 1))
        prior = (hits.sum() + 1.0) / ((waited / self._middles).sum() + 1.0) / self._middles
        pooled = _shrunk(hits, waited, prior)
        structures = _shrunk(self._hits.sum(axis=1), self._waited.sum(axis=1), pooled)
        self._rates = _shrunk(self._hits, self._waited, structures[:, None])

    def _wait(self, structure: Column, part: Column, age: Column, elapsed: float) -> None:
        low, high = self._edges[:-1], self._edges[1:]
        until = age[:, None].astype(np.float64)
        since = np.maximum(until - elapsed, 0.0)
        np.add.at(self._waited, (structure, part), np.clip(until, low, high) - np.clip(since, low, high))


def _shrunk(hits: Table, waited: Table, prior: Table) -> Table:
    """The rate where so many hits had been seen at the prior rate before."""
    return (hits + _PSEUDO_HITS) / (waited + _PSEUDO_HITS / prior)


def _bucket(age: Column) -> npt.NDArray[np.int64]:
    return np.minimum(np.frexp(np.maximum(age, 0))[1], _BUCKETS - 1)
