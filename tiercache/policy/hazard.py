"""Rates of reuse by class and age, learned while they are used."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tiercache.policy.base import Column, Ranks

_BUCKETS = 24
"""Ages by powers of two: up to 2^23 ticks, and more."""
_DECAY = 0.95
"""What is kept of the past at each `begin`."""
_PSEUDO_HITS = 1.0
"""How many hits a class must have seen to weigh as much as the class above it."""

Table = npt.NDArray[np.float64]
Classes = tuple[Column, ...]


class Hazard:
    """The best hits per tick of keeping a unit, for each class and age. Classes are nested: `shape` says how many there are, how many parts
    each has, and so on.

    The rate of an age is hits / ticks waited. What keeping is worth is not that rate but the most that it comes to over any time from there
    on (the Gittins index of the unit): right behind a turn nobody comes back yet, and still that is when a session must be kept.

    What a class has seen too little of is filled in from the class around it, that from all units together, and that from 1 / age: so it
    starts as LRU. Thread safety: that of its owner.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._hits, self._waited = np.zeros((*shape, _BUCKETS)), np.zeros((*shape, _BUCKETS))
        self._edges = np.concatenate([[0.0], 2.0 ** np.arange(_BUCKETS)])  # bucket 0 is age 0, bucket n is [2^(n-1), 2^n)
        self._edges[-1] = np.inf
        self._middles = 1.5 * 2.0 ** np.arange(-1, _BUCKETS - 1)
        self._widths = np.maximum(np.diff(np.minimum(self._edges, 2.0**_BUCKETS)), 1.0)
        self._opened = self._elapsed = 0
        self.derive()

    def rate(self, classes: Classes, age: Column) -> Ranks:
        """Hits per tick that units of these classes and ages may expect."""
        rates: Ranks = self._rates[(*classes, _bucket(age))]
        return rates

    def begin(self, now: int) -> None:
        """What `hit` and `wait` tell next is of the ticks since the last `begin`, up to `now`."""
        self._hits *= _DECAY
        self._waited *= _DECAY
        self._opened, self._elapsed = now, now - self._opened

    def hit(self, classes: Classes, age: Column) -> None:
        """Units of these classes were hit at these ages."""
        np.add.at(self._hits, (*classes, _bucket(age)), 1.0)
        self._wait(classes, age, self._elapsed / 2)  # on average a hit comes in the middle

    def wait(self, classes: Classes, age: Column) -> None:
        """Units of these classes have come to these ages without a hit."""
        self._wait(classes, age, self._elapsed)

    def derive(self) -> None:
        """Let `rate` answer from everything that is in."""
        hits, waited = self._hits.reshape(-1, _BUCKETS).sum(axis=0), self._waited.reshape(-1, _BUCKETS).sum(axis=0)
        prior = (hits.sum() + 1.0) / ((waited / self._middles).sum() + 1.0) / self._middles
        rates = _shrunk(hits, waited, prior)[None]
        best = _best(rates, self._widths)
        for level, parts in enumerate(self._shape, 1):
            inner = tuple(range(level, len(self._shape)))
            hits, waited = (table.sum(axis=inner).reshape(-1, _BUCKETS) for table in (self._hits, self._waited))
            rates, best = np.repeat(rates, parts, axis=0), np.repeat(best, parts, axis=0)
            seen = waited.any(axis=1)  # the others are as the class around them, and most are never seen
            rates[seen] = _shrunk(hits[seen], waited[seen], rates[seen])
            best[seen] = _best(rates[seen], self._widths)
        self._rates = best.reshape(*self._shape, _BUCKETS)

    def _wait(self, classes: Classes, age: Column, elapsed: float) -> None:
        until = age.astype(np.float64)
        since = np.maximum(until - elapsed, 0.0)
        last = _bucket(until)
        whole = _bucket(since) == last  # of most units, all of the wait is in one bucket
        np.add.at(self._waited, (*(part[whole] for part in classes), last[whole]), (until - since)[whole])
        low, high = self._edges[:-1], self._edges[1:]
        until, since = until[~whole, None], since[~whole, None]
        np.add.at(self._waited, tuple(part[~whole] for part in classes), np.clip(until, low, high) - np.clip(since, low, high))


def _shrunk(hits: Table, waited: Table, prior: Table) -> Table:
    """The rates, as if so many hits had been seen before, at the prior rate."""
    return (hits + _PSEUDO_HITS) / (waited + _PSEUDO_HITS / prior)


def _best(rates: Table, widths: npt.NDArray[np.float64]) -> Table:
    """For each age the most hits per tick that keeping a unit from there on, for whatever time is best, may give; shape (classes, ages)."""
    n = rates.shape[-1]
    alive, hits, ticks = np.ones_like(rates), np.zeros_like(rates), np.zeros_like(rates)
    best = np.zeros_like(rates)
    for ahead in range(n):
        at = np.minimum(np.arange(n) + ahead, n - 1)
        here, width = rates[..., at], widths[at] * (0.5 if ahead == 0 else 1.0)
        lost = -np.expm1(-here * width)
        hits += alive * lost
        ticks += alive * lost / here
        alive *= 1.0 - lost
        np.maximum(best, hits / ticks, out=best)
    return best


def _bucket(age: Column) -> npt.NDArray[np.int64]:
    return np.minimum(np.frexp(np.maximum(age, 0).astype(np.float64))[1], _BUCKETS - 1)
