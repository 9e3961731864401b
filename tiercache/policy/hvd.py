"""Hit-value density: the likely hits of a unit, times the cost that a hit saves, per byte of the unit.

`HitValueDensity` is the policy; `Hazard` learns the rates of reuse by class and age.
"""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from tiercache.policy.base import (
    CheckpointKind,
    Column,
    Costs,
    Ending,
    Policy,
    Ranks,
    Reuse,
    Units,
    columns_of,
)

_LINEAGES = 5
"""Number of classes by lineage (requests in a row): 0, 1 to 2, 3 to 6, 7 to 14, 15 and more."""
_HITS = 6
"""Number of classes by a unit's own hits: 1, 2 to 3, and so on up to 32 and more."""
_SIZES = 6
"""Number of classes by new tokens: below 1,024 tokens, and by powers of two up to 16,384 tokens and more."""
_BUCKETS = 24
"""Number of age buckets, by powers of two. The last bucket has all ages from 2^22 ticks on."""
DECAY = 0.95
"""Factor by which each `Hazard.begin` multiplies earlier observations."""
_PSEUDO_HITS = 1.0
"""Number of hits that a class needs for its own rate to weigh as much as the rate of the class around it."""
Table = npt.NDArray[np.float64]
Classes = tuple[Column, ...]


class HitValueDensity(Policy):
    """Policy with the rank: hazard(class, age) x cost of a miss / bytes freed.

    The hazard is learned. It follows from the rate at which units of a class are hit at an age (see
    `Hazard`), where a miss of an evicted unit counts as a hit. Classes are nested in three levels, by

    1. the reason why the state was taken, the number of continuations (0, 1, more), and how the request that
       left the state ended (see `Ending`)
    2. the unit's own hits or, if it has none, its lineage (see `Units.lineage`)
    3. the number of tokens that the owner did not know before (see `Units.grown`)

    Superseded states, ends of sessions, and branches that many requests share therefore get different rates.
    No weight needs to be set.

    Thread safety: as `Policy`.
    """

    name: ClassVar[str] = "hvd"

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._hazard = Hazard((len(CheckpointKind) * 3 * len(Ending), _LINEAGES + _HITS, _SIZES))
        self._reused: list[Reuse] = []

    def rank(self, units: Units) -> Ranks:
        """Return the hit-value density of each unit."""
        rate = self._hazard.rate(_classes(units), units.now - units.last_access)
        if np.count_nonzero(units.expected):
            rate = np.maximum(rate, _expected_rate(units))
        return rate * self._costs.density(units)

    def value(self, units: Units) -> Ranks:
        """Return the hit-value density, which is in FLOPs per byte and tick already."""
        return self.rank(units)

    def chance(self, units: Units, ticks: float) -> Ranks:
        """Return the probability of a hit as units of the same class were hit so far.

        A unit whose hit is expected within that time has a probability of 1.
        """
        chance = self._hazard.chance(_classes(units), units.now - units.last_access, ticks)
        return np.where((units.expected > units.now) & (units.expected <= units.now + ticks), 1.0, chance)

    def reused(self, reuse: Reuse) -> None:
        """Record a hit, or a miss of an evicted unit, for the next `learn`."""
        self._reused.append(reuse)

    def learn(self, live: Units, gone: Units) -> None:
        """Learn, for each class, the hits since the last call and the ticks that units waited for a hit."""
        told = columns_of(self._reused)
        self._reused.clear()
        self._hazard.begin(live.now)
        self._hazard.hit(
            _classes_of(
                told["checkpoint"], told["children"], told["ending"], told["hits"], told["lineage"],
                told["grown"] * live.page_tokens,
            ),
            told["age"],
        )  # fmt: skip
        for units in (live, gone):
            if len(units):
                self._hazard.wait(_classes(units), units.now - units.last_access)
        self._hazard.derive()


def _expected_rate(units: Units) -> Ranks:
    """Return, in hits per tick, the value of keeping each unit for the hit that is expected of it; else 0.

    A hit that is expected in n ticks is worth one hit for n ticks of keeping. A hit that is overdue by n
    ticks is worth the same, because a wait tends to last about as long again; after twice the announced time,
    it counts no more.
    """
    #   last_access        expected               given up
    #        |-- announced --|---- announced ----|
    #   rate     1 / (expected - now)   1 / (now - expected)   0
    expected = units.expected
    ahead = expected - units.now
    holds = (expected > 0) & (-ahead <= expected - units.last_access)
    rate: Ranks = np.where(holds, 1.0 / np.maximum(np.abs(ahead), 1), 0.0)
    return rate


def _classes(units: Units) -> tuple[Column, Column, Column]:
    return _classes_of(
        units.checkpoint, units.children, units.ending, units.hits, units.lineage,
        units.grown * units.page_tokens,
    )  # fmt: skip


def _classes_of(
    checkpoint: Column, children: Column, ending: Column, hits: Column, lineage: Column, new_tokens: Column
) -> tuple[Column, Column, Column]:
    """Return the class of each unit on the three levels, outermost first."""
    kind = (checkpoint * 3 + np.minimum(children, 2)) * len(Ending) + ending
    past = _PAST[np.minimum(hits, _PAST.shape[0] - 1), np.minimum(lineage, _PAST.shape[1] - 1)]
    size = _SIZE[np.minimum(new_tokens >> 10, len(_SIZE) - 1)]
    return kind, past, size


# Classes of the second level, by the hits and the lineage:
#   0 to 4    units without hits, by the logarithm of lineage + 1
#   5 to 10   units with hits, by the logarithm of the hits
_PAST: Final = np.array(
    [
        [
            (lineage + 1).bit_length() - 1 if not hits else _LINEAGES + hits.bit_length() - 1
            for lineage in range(16)
        ]
        for hits in range(33)
    ]
)
_SIZE: Final = np.array([thousands.bit_length() for thousands in range(17)])
"""Class of the third level, by the number of new tokens in units of 1,024."""


class Hazard:
    """Learned value of keeping a unit, in hits per tick, for each class and age.

    Classes are nested. `shape` has the number of outermost classes, then the number of parts into which each
    of them is divided, and so on.

    The rate of a class at an age is its number of hits divided by the ticks that its units waited for them.
    The value of keeping a unit is not the rate at its present age. It is the highest average rate over any
    period that begins now (the unit's Gittins index). Example: right after a request of a session the rate is
    low, but it is high soon after. The session must be kept until then.

    The rate of a class with few observations is close to the rate of the class that contains it. The
    outermost classes are parts of one class of all units. The prior rate of that class is proportional to
    1 / age. Before anything is learned, units are therefore evicted in the order of LRU.

    Thread safety: as the policy that owns the hazard.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self.hits = np.zeros((*shape, _BUCKETS))
        """Hits, by class and age bucket; shape (*classes, buckets)."""
        self.waited = np.zeros((*shape, _BUCKETS))
        """Ticks that units waited for a hit, by class and age bucket; shape (*classes, buckets)."""
        self._seen = np.zeros(int(np.prod(shape)), np.bool_)
        """Whether each innermost class was ever observed; most never are."""
        # Ages by bucket: 0 is age 0, n is [2^(n-1), 2^n), and the last one is open-ended.
        #   bucket  0    1     2      3       ...   23
        #   ages    0  [1,2) [2,4)  [4,8)     ...  [2^22, inf)
        self.edges = np.concatenate([[0.0], 2.0 ** np.arange(_BUCKETS)])
        """Ages in ticks at which the buckets begin, and infinity, where the last bucket ends."""
        self.edges[-1] = np.inf
        self._middles = 1.5 * 2.0 ** np.arange(-1, _BUCKETS - 1)
        """Age in the middle of each bucket, in ticks."""
        self._widths = np.maximum(np.diff(np.minimum(self.edges, 2.0**_BUCKETS)), 1.0)
        """Ticks in each bucket. The last bucket counts as if it ended at 2^24 ticks."""
        self._opened = self._elapsed = 0
        self.derive()

    def rate(self, classes: Classes, age: Column) -> Ranks:
        """Return the value of keeping units of these classes and ages, in hits per tick."""
        rates: Ranks = self._best.ravel().take(self._at.take(self._class(classes)) * _BUCKETS + _bucket(age))
        return rates

    def chance(self, classes: Classes, age: Column, ticks: float) -> Ranks:
        """Return the probability that units of these classes and ages are hit within `ticks` ticks."""
        # hits that are expected in each bucket:   rate x ticks of [age, age + ticks) in that bucket
        since = age.astype(np.float64)[:, None]
        spent = np.clip(since + ticks, self.edges[:-1], self.edges[1:]) - np.clip(
            since, self.edges[:-1], self.edges[1:]
        )
        expected = (self._plain[self._at[self._class(classes)]] * spent).sum(axis=1)
        chance: Ranks = -np.expm1(-expected)
        return chance

    def begin(self, now: int) -> None:
        """Begin a report on the period from the last `begin` to the tick `now`, and let older reports decay.

        The caller then reports the hits and waits of that period, with `hit` and `wait`.
        """
        for table in (self.hits, self.waited):
            table.reshape(-1, _BUCKETS)[self._seen] *= DECAY
        self._opened, self._elapsed = now, now - self._opened

    def hit(self, classes: Classes, age: Column) -> None:
        """Add hits of units of these classes at these ages."""
        np.add.at(self.hits.ravel(), self._class(classes) * _BUCKETS + _bucket(age), 1.0)
        self._wait(classes, age, self._elapsed / 2)  # on average a hit comes in the middle of the period

    def wait(self, classes: Classes, age: Column) -> None:
        """Add the ticks of this period that units of these classes waited without a hit.

        `age` is their age at the end of the period.
        """
        self._wait(classes, age, self._elapsed)

    def derive(self) -> None:
        """Recompute the values that `rate` returns from all observations."""
        seen = np.flatnonzero(self._seen)
        hits, waited = (table.reshape(-1, _BUCKETS)[seen] for table in (self.hits, self.waited))
        total, waits = hits.sum(axis=0), waited.sum(axis=0)
        # The prior rate is c / age. This c is chosen so that the prior rate, over the ticks that units
        # waited, predicts about as many hits as were observed.
        prior = (total.sum() + 1.0) / ((waits / self._middles).sum() + 1.0) / self._middles
        # `known` collects the rates of all classes that were observed, on all levels. `at` has one entry per
        # class of a level: the row of its rates in `known`. At first there is only the class of all units.
        # Each turn of the loop divides every class into its parts. Most parts are never observed: these keep
        # the rates of the class that contains them.
        known, at, inner = _shrunk(total, waits, prior)[None], np.zeros(1, np.int64), len(self._seen)
        for parts in self._shape:
            inner //= parts
            classes, first = np.unique(seen // inner, return_index=True)
            hits_of, waited_of = np.add.reduceat(hits, first), np.add.reduceat(waited, first)
            some = waited_of.any(axis=1)
            classes, at = classes[some], np.repeat(at, parts)
            rates = _shrunk(hits_of[some], waited_of[some], known[at[classes]])
            at[classes] = np.arange(len(known), len(known) + len(classes))
            known = np.concatenate([known, rates])
        self._best, self._plain, self._at = _best(known, self._widths), known, at

    def _wait(self, classes: Classes, age: Column, elapsed: float) -> None:
        # A unit that waited over several buckets adds to each bucket the ticks that it spent there:
        #   bucket      2 [2, 4)   3 [4, 8)   4 [8, 16)
        #   age 10, waited 7 ticks: from 3 to 10, so 1, 4 and 2 ticks
        until = age.astype(np.float64)
        since = np.maximum(until - elapsed, 0.0)
        last = _bucket(until)
        whole = _bucket(since) == last  # for most units the whole wait lies in one bucket
        of = self._class(classes)
        self._seen[of] = True
        ticks, first = self.waited.ravel(), of * _BUCKETS
        np.add.at(ticks, (first + last)[whole], (until - since)[whole])
        low, high = self.edges[:-1], self.edges[1:]
        until, since = until[~whole, None], since[~whole, None]
        spent = np.clip(until, low, high) - np.clip(since, low, high)
        places = first[~whole, None] + np.arange(_BUCKETS)
        np.add.at(ticks, places.ravel(), spent.ravel())

    def _class(self, classes: Classes) -> Column:
        """Return the number of each class among all innermost ones; with flat tables numpy is much faster."""
        number = classes[0]
        for part, parts in zip(classes[1:], self._shape[1:], strict=True):
            number = number * parts + part
        return number


def _shrunk(hits: Table, waited: Table, prior: Table) -> Table:
    """Return the rates hits / ticks, drawn towards the rates `prior`.

    The result is as if each class had `_PSEUDO_HITS` more hits, at the rate `prior`.
    """
    return (hits + _PSEUDO_HITS) / (waited + _PSEUDO_HITS / prior)


def _best(rates: Table, widths: npt.NDArray[np.float64]) -> Table:
    """Return the hits per tick of keeping a unit for the best length of time; shape (classes, buckets).

    A unit in age bucket a can be kept until the end of bucket a, of bucket a + 1, and so on up to the last.
    Each choice has a value: the expected number of hits (at most one) divided by the expected ticks until the
    hit or the end. The result has the highest value for each class and bucket.
    """
    # In a bucket of w ticks with the rate r, the chance of a hit is 1 - exp(-r w). The expected ticks until
    # the hit or the bucket's end are chance / r. A unit is on average in the middle of its first bucket.
    n = rates.shape[-1]
    chance = -np.expm1(-rates * (0.5 * widths))
    hits, waiting = chance.copy(), 1.0 - chance
    ticks = chance / rates
    best = hits / ticks
    # Column a + `ahead` of the next tables belongs to bucket a. The last bucket goes on for ever.
    later = np.minimum(np.arange(2 * n - 1), n - 1)
    chance = -np.expm1(-rates * widths)
    survival, chance, rates = (1.0 - chance)[:, later], chance[:, later], rates[:, later]
    for ahead in range(1, n):
        # `waiting` is the chance that no earlier bucket brought a hit.
        here = slice(ahead, ahead + n)
        gain = waiting * chance[:, here]
        hits += gain
        gain /= rates[:, here]
        ticks += gain
        waiting *= survival[:, here]
        np.maximum(best, np.divide(hits, ticks, out=gain), out=best)
    return best


def _bucket(age: Column) -> npt.NDArray[np.int64]:
    return np.minimum(np.frexp(np.maximum(age, 0).astype(np.float64))[1], _BUCKETS - 1)
