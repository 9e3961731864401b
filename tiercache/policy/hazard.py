"""Rates of reuse by class and age, learned online."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tiercache.policy.base import Column, Ranks

_BUCKETS = 24
"""Number of age buckets, by powers of two; the last one holds all ages from 2^22 ticks on."""
_DECAY = 0.95
"""Factor by which the past counts less at each `begin`."""
_PSEUDO_HITS = 1.0
"""Number of hits after which a class's own observations weigh as much as the rate of the class around it."""

Table = npt.NDArray[np.float64]
Classes = tuple[Column, ...]


class Hazard:
    """Learned value of keeping a unit, in hits per tick, for each class and age.

    Classes are nested: `shape` gives the number of outermost classes, the number of parts of each, and so on.

    The rate at an age is hits / ticks waited. The value of keeping a unit is not that rate but the highest average rate over any time from
    that age on (the unit's Gittins index): right after a turn a session's next request is not yet likely, but the session must be kept.

    Where a class has few observations, they are supplemented from the class around it, that one from all units together, and those from
    1 / age. So it starts as LRU.

    Thread safety: that of its owner.
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
        """Return the hits per tick that keeping units of these classes and ages is worth."""
        rates: Ranks = self._rates[(*classes, _bucket(age))]
        return rates

    def begin(self, now: int) -> None:
        """Begin a period: the next `hit` and `wait` report the ticks from the last `begin` up to `now`. Older observations decay."""
        self._hits *= _DECAY
        self._waited *= _DECAY
        self._opened, self._elapsed = now, now - self._opened

    def hit(self, classes: Classes, age: Column) -> None:
        """Add hits of units of these classes at these ages."""
        np.add.at(self._hits, (*classes, _bucket(age)), 1.0)
        self._wait(classes, age, self._elapsed / 2)  # on average a hit comes in the middle of the period

    def wait(self, classes: Classes, age: Column) -> None:
        """Add the ticks of this period that units of these classes have waited without a hit; `age` is their age at its end."""
        self._wait(classes, age, self._elapsed)

    def derive(self) -> None:
        """Recompute what `rate` returns from all observations so far."""
        hits, waited = self._hits.reshape(-1, _BUCKETS).sum(axis=0), self._waited.reshape(-1, _BUCKETS).sum(axis=0)
        prior = (hits.sum() + 1.0) / ((waited / self._middles).sum() + 1.0) / self._middles
        rates = _shrunk(hits, waited, prior)[None]
        best = _best(rates, self._widths)
        for level, parts in enumerate(self._shape, 1):
            inner = tuple(range(level, len(self._shape)))
            hits, waited = (table.sum(axis=inner).reshape(-1, _BUCKETS) for table in (self._hits, self._waited))
            rates, best = np.repeat(rates, parts, axis=0), np.repeat(best, parts, axis=0)
            seen = waited.any(axis=1)  # most classes are never seen; those keep the values of the class around them
            rates[seen] = _shrunk(hits[seen], waited[seen], rates[seen])
            best[seen] = _best(rates[seen], self._widths)
        self._rates = best.reshape(*self._shape, _BUCKETS)

    def _wait(self, classes: Classes, age: Column, elapsed: float) -> None:
        until = age.astype(np.float64)
        since = np.maximum(until - elapsed, 0.0)
        last = _bucket(until)
        whole = _bucket(since) == last  # for most units the whole wait lies in one bucket
        np.add.at(self._waited, (*(part[whole] for part in classes), last[whole]), (until - since)[whole])
        low, high = self._edges[:-1], self._edges[1:]
        until, since = until[~whole, None], since[~whole, None]
        np.add.at(self._waited, tuple(part[~whole] for part in classes), np.clip(until, low, high) - np.clip(since, low, high))


def _shrunk(hits: Table, waited: Table, prior: Table) -> Table:
    """Return the rates, as if `_PSEUDO_HITS` hits had been seen before at the prior rate."""
    return (hits + _PSEUDO_HITS) / (waited + _PSEUDO_HITS / prior)


def _best(rates: Table, widths: npt.NDArray[np.float64]) -> Table:
    """Return, for each age, the hits per tick of keeping a unit from there on for the best length of time; shape (classes, ages)."""
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
