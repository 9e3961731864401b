"""Upper bound on the hit rate of any cache of a given size, whatever it knows of the future and wherever it takes its states.

Finished requests leave pages and states that compete for the cache's bytes in the gaps between requests; what a running request works on
is free. A hit of d pages needs each of them, and a state at d, in every gap since a request last had that prefix and could compute it.
Two hits never share bytes in a gap, because the next request with a prefix computes it anew, hit or not. So the optimum chooses one depth
per request such that the choices fit into every gap and gain most.

The bound is the Lagrangian dual of that choice: bytes have a price in each gap, each request takes the depth of the highest profit, and

    what any cache gains <= capacity x sum of the prices + sum of the profits,

since a hit is worth no more than its profit and the price of its bytes. The inequality holds for any prices, so the search for good prices
does not have to converge. With one price for all gaps this is the fractional knapsack over use intervals, PFOO-L in Berger, Beckmann and
Harchol-Balter, "Practical Bounds on Optimal Caching with Variable Object Sizes" (2018), here extended with states, and with hits that need
all pages before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from tiercache.core import reusable_pages
from tiercache.index.prefixes import Prefixes
from tiercache.policy import ModelProfile
from tiercache.replay.base import Request, Source

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

_LEVELS: Final = 48
"""Number of price levels that are first tried with the same price in all gaps."""
_ROUNDS: Final = 800
"""Largest number of rounds of the search for one capacity."""
_LEAST_ROUNDS: Final = 50
"""Smallest number of rounds, however many choices and gaps there are."""
_WORK: Final = 20_000_000
"""Limit of (gaps + choices) x rounds of the search for one capacity: about a second."""
_RATE: Final = 0.3
"""First step of the search, as a fraction of the mean price; steps fall linearly to 0."""
_MOMENTUM: Final = 0.9
"""Decay of Adam's mean of the slopes."""
_SPREAD: Final = 0.99
"""Decay of Adam's mean of the squared slopes."""


@dataclass(frozen=True, slots=True)
class Upper:
    """Bounds as fractions of all prompt tokens, and of the FLOPs of all prefills.

    Each is a bound of its own: no cache need reach both at once.
    """

    token_hit_rate: float
    flops_saved: float


def upper_bound(source: Source, profile: ModelProfile, capacities: Sequence[int], step: Callable[[], object] = lambda: None) -> list[Upper]:
    """Return the bound for each capacity in bytes; a larger capacity never has a lower bound.

    The source is read once; `step` is called after each request. Where requests overlap, up to `source.concurrency` of them hold what they
    work on beside the capacity. The bound is sound except for rounding errors of about 1e-12 of its value.
    """
    history = _History(source, profile)
    for request in source:
        history.add(request)
        step()
    choices = history.choices()
    hits = _bounds(choices, choices.tokens.astype(np.float64), capacities)
    saved = _bounds(choices, profile.flops(0, choices.tokens), capacities)
    return [
        Upper(hit / history.tokens if history.tokens else 0.0, flops / history.flops if history.flops else 0.0)
        for hit, flops in zip(hits, saved, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Choices:
    """Depths at which requests may hit, as columns ordered by request and then by depth.

    Each run of pages that the same earlier request had last is represented by its last depth only: the pages of a run and their states are
    needed in the same gaps, and gain per page never falls with depth, so that the last depth pays if any does.
    """

    gaps: int
    tokens: Ints
    """Tokens that a hit at this depth restores."""
    first: Ints
    last: Ints
    """Half-open range [first, last) of gaps in which the pages of the run and a state at its end are needed; gap g follows request g."""
    page_bytes: Ints
    """Bytes of the run's pages."""
    state_bytes: int
    starts: Ints
    """Index at which each request's choices begin; requests without any choice are left out."""


class _History:
    """Collector of the requests of a source; it tracks which request had each prefix last. Thread safety: one thread."""

    def __init__(self, source: Source, profile: ModelProfile) -> None:
        self._page_size = source.page_size
        self._overlapping = source.concurrency - 1
        self._profile = profile
        self._prefixes = Prefixes(source.page_size)
        self._last: dict[int, int] = {}
        self._requests = 0
        self._columns: list[Ints] = []
        self.tokens = 0
        self.flops = 0.0

    def add(self, request: Request) -> None:
        """Add the next request: record the depths at which it could hit, then the prefixes it leaves behind."""
        now, prompt = self._requests, len(request.prompt)
        computed = np.concatenate([request.prompt, request.output[:-1]])  # the last token's KV is never computed
        digests = self._prefixes.of(computed, 0).tolist()
        reusable = digests[: reusable_pages(prompt, self._page_size)]
        before = np.array([self._last[digest] for digest in reusable if digest in self._last], np.int64)
        if len(before):
            ends = np.append(np.flatnonzero(np.diff(before)) + 1, len(before))
            # With overlap, an earlier request may still be running and hold its pages for free until `_overlapping` more have begun.
            first = np.minimum(before[ends - 1] + self._overlapping, now)
            self._columns.append(np.stack([np.full(len(ends), now), ends, np.diff(ends, prepend=0), first]))
        self._last.update(dict.fromkeys(digests, now))
        self._requests += 1
        self.tokens += prompt
        self.flops += self._profile.flops(0, prompt)

    def choices(self) -> _Choices:
        """Return the choices of all requests so far."""
        request, depth, pages, first = np.concatenate([np.empty((4, 0), np.int64), *self._columns], axis=1)
        return _Choices(
            gaps=max(0, self._requests - 1),
            tokens=depth * self._page_size,
            first=first,
            last=request,
            page_bytes=pages * (self._page_size * self._profile.kv_bytes_per_token),
            state_bytes=self._profile.state_bytes,
            starts=np.flatnonzero(np.diff(request, prepend=-1)),
        )


class _Dual:
    """Bounds that prices prove for one objective. Prices are one float64 per gap, at least 0. Thread safety: one thread."""

    def __init__(self, choices: _Choices, gains: Floats) -> None:
        self._choices = choices
        self._gains = gains
        self._sizes = np.diff(choices.starts, append=len(gains))
        self._sums: list[float] = []
        self._profits: list[float] = []

    def densities(self) -> Floats:
        """Return the gain of each choice per byte and gap; choices that take no bytes in any gap are left out."""
        cost = self._cost(np.ones(self._choices.gaps))
        return self._gains[cost > 0] / cost[cost > 0]

    def add(self, prices: Floats) -> Floats:
        """Record the bound that these prices prove, and return the bytes in each gap that the choices of the highest profit take."""
        at = self._choices
        profits = self._gains - self._cost(prices)
        best = np.maximum.reduceat(profits, at.starts)
        self._sums.append(float(prices.sum()))
        self._profits.append(float(np.maximum(best, 0.0).sum()))
        order = np.arange(len(profits))
        deepest = np.maximum.reduceat(np.where(profits == np.repeat(best, self._sizes), order, -1), at.starts)
        chosen = np.where(best > 0, deepest, -1)
        nbytes = np.where(order <= np.repeat(chosen, self._sizes), at.page_bytes, 0)
        nbytes[chosen[chosen >= 0]] += at.state_bytes
        come, gone = (np.bincount(column, nbytes, at.gaps + 1) for column in (at.first, at.last))
        wanted: Floats = np.cumsum(come - gone)[:-1]
        return wanted

    def value(self, capacity: int) -> float:
        """Return the lowest bound found so far for a capacity in bytes."""
        return float((capacity * np.array(self._sums) + np.array(self._profits)).min())

    def level(self, capacity: int) -> float:
        """Return the mean price over all gaps of the lowest bound so far whose prices are not all 0."""
        sums, profits = np.array(self._sums), np.array(self._profits)
        return float(sums[np.where(sums > 0, capacity * sums + profits, np.inf).argmin()]) / self._choices.gaps

    def _cost(self, prices: Floats) -> Floats:
        """Return the cost of each choice: the price of the runs of pages up to its depth, and of its state."""
        at = self._choices
        until = np.concatenate([[0.0], np.cumsum(prices)])
        each = until[at.last] - until[at.first]
        pages = np.concatenate([[0.0], np.cumsum(each * at.page_bytes)])
        cost: Floats = pages[1:] - np.repeat(pages[at.starts], self._sizes) + each * at.state_bytes
        return cost


def _bounds(choices: _Choices, gains: Floats, capacities: Sequence[int]) -> list[float]:
    if not len(gains):
        return [0.0] * len(capacities)
    dual = _Dual(choices, gains)
    demand = dual.add(np.zeros(choices.gaps))
    densities = dual.densities()
    if len(densities):
        # At a price above the highest density no choice pays; that price gives the bound for a capacity of 0.
        for price in [*np.quantile(densities, np.linspace(0.0, 1.0, _LEVELS)), 2.0 * densities.max()]:
            dual.add(np.full(choices.gaps, price))
        for capacity in sorted(set(capacities)):
            if 0 < capacity < demand.max():
                _search(dual, choices, capacity)
    # Each set of prices proves a bound for every capacity, so the minimum is taken over all of them.
    return [dual.value(capacity) for capacity in capacities]


def _search(dual: _Dual, choices: _Choices, capacity: int) -> None:
    """Raise prices in gaps where more than the capacity is wanted and lower them elsewhere.

    The method is projected subgradient descent with Adam, whose step size falls to 0.
    """
    level = dual.level(capacity)
    prices = np.full(choices.gaps, level)
    mean, square = np.zeros(choices.gaps), np.zeros(choices.gaps)
    rounds = min(_ROUNDS, max(_LEAST_ROUNDS, _WORK // (choices.gaps + len(choices.tokens))))
    for i in range(rounds):
        slope = (capacity - dual.add(prices)) / capacity
        mean = _MOMENTUM * mean + (1 - _MOMENTUM) * slope
        square = _SPREAD * square + (1 - _SPREAD) * slope**2
        step = mean / (1 - _MOMENTUM ** (i + 1)) / (np.sqrt(square / (1 - _SPREAD ** (i + 1))) + 1e-8)
        prices = np.maximum(prices - _RATE * level * (1 - i / rounds) * step, 0.0)
    dual.add(prices)
