"""Upper bound on the hit rate of any cache of a given size, even one that knows the future.

A gap is the time between two consecutive requests. In each gap, the pages and states that finished requests
left compete for the cache's bytes. The memory of a running request is not counted. A hit at depth d needs the
d pages before it and a state at d. Each of these objects must be in the cache in every gap since the last
request with the same prefix:

    request      0     1     2     3
    gap             0     1     2
    prefix P     x                 x        a hit of P at request 3 needs the bytes of P in gaps 0, 1 and 2

Each request with a prefix has the whole prefix in memory when it ends, whether it hit or not. So the next hit
of the prefix needs the cache only from the end of that request on, and two hits never need the same bytes in
the same gap. Therefore the optimum is a choice of one depth for each request: the choices must fit into every
gap, and their total gain must be as high as possible.

The bound is the Lagrangian dual of this choice. A byte has a price in each gap. The profit of a hit is its
gain minus the price of its bytes. Each request takes the depth with the highest profit. Then

    gain of any cache <= capacity x sum of the prices + sum of the profits,

because the gain of a hit is at most the price of its bytes plus the highest profit. The inequality holds for
any prices, so the search for good prices need not converge.

With one price for all gaps, the bound is the fractional knapsack over use intervals. Berger, Beckmann and
Harchol-Balter call it PFOO-L in "Practical Bounds on Optimal Caching with Variable Object Sizes" (2018). The
bound of this module also covers states, and hits that need all pages before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from tiercache.core import reusable_pages
from tiercache.index.node import Prefixes
from tiercache.policy import ModelProfile
from tiercache_lab.replay.base import Request, Source

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

_LEVELS: Final = 48
"""Number of prices that are tried first. Each is tried as the price of every gap."""
_MAX_ROUNDS: Final = 800
"""Maximum number of rounds of the search for one capacity."""
_MIN_ROUNDS: Final = 50
"""Minimum number of rounds; it takes precedence over `_WORK`."""
_WORK: Final = 20_000_000
"""Limit of (gaps + choices) x rounds of the search for one capacity, reached in about a second."""
_RATE: Final = 0.3
"""First step of the search, as a fraction of the mean price. The steps fall linearly to 0."""
_MOMENTUM: Final = 0.9
"""Decay of Adam's mean of the slopes."""
_SPREAD: Final = 0.99
"""Decay of Adam's mean of the squared slopes."""


@dataclass(frozen=True, slots=True)
class Upper:
    """Bounds on the two rates of a cache. Possibly no cache can reach both bounds at once."""

    token_hit_rate: float
    """Bound on the fraction of prompt tokens that are restored."""
    flops_saved: float
    """Bound on the fraction of the FLOPs of all prefills that are saved."""


def upper_bound(
    source: Source,
    profile: ModelProfile,
    capacities: Sequence[int],
    step: Callable[[], object] = lambda: None,
) -> list[Upper]:
    """Return the bounds for each capacity in bytes; a larger capacity never has a lower bound.

    The source is read once, and `step` is called after each request. The memory of running requests, up to
    `source.concurrency` at a time, does not count for the capacity. Rounding may make a bound too low by
    about 1e-12 of its value.
    """
    history = _History(source, profile)
    for request in source:
        history.add(request)
        step()
    choices = history.choices()
    hits = _bounds(choices, choices.tokens.astype(np.float64), capacities)
    saved = _bounds(choices, profile.flops(0, choices.tokens), capacities)
    return [
        Upper(
            hit / history.tokens if history.tokens else 0.0, flops / history.flops if history.flops else 0.0
        )
        for hit, flops in zip(hits, saved, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Choices:
    """Depths at which requests may hit, as columns. Rows are ordered by request and then by depth.

    A run is a sequence of consecutive pages of a request that were last used by the same earlier request:

        page of request 7      0   1   2   3   4
        last used by request   6   6   6   2   2        two runs: pages [0, 3) and [3, 5)

    Only the depth at the end of a run is a choice. One of the ends of a run is always at least as profitable
    as a depth within the run: all pages of the run are needed in the same gaps, and the gain per page never
    falls with depth.
    """

    gaps: int
    """Number of gaps; gap g follows request g."""
    tokens: Ints
    """Number of tokens that a hit at this depth restores."""
    first: Ints
    """First gap in which the pages of the run and the state at its end are needed."""
    last: Ints
    """First gap in which the pages and the state are no longer needed."""
    page_bytes: Ints
    """Bytes of the run's pages."""
    state_bytes: int
    starts: Ints
    """Row of the first choice of each request. Requests without choices are left out."""


class _History:
    """Choices of the requests of a source, and the last request of each prefix.

    Thread safety: one thread.
    """

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
        """Add the next request.

        Record the depths at which the request could hit. Then note this request as the last one that used
        its prefixes.
        """
        now, prompt = self._requests, len(request.prompt)
        # The KV of the last output token is never computed.
        computed = np.concatenate([request.prompt, request.output[:-1]])
        digests = self._prefixes.of(computed, 0).tolist()
        reusable = digests[: reusable_pages(prompt, self._page_size)]
        before = np.array([self._last[digest] for digest in reusable if digest in self._last], np.int64)
        if len(before):
            # before 6 6 6 2 2 gives ends 3 5: the depths after the last page of each run
            ends = np.append(np.flatnonzero(np.diff(before)) + 1, len(before))
            # If requests overlap, the earlier request may still be running. Its memory is not counted, so its
            # pages need none of the cache's bytes until `_overlapping` more requests have begun.
            first = np.minimum(before[ends - 1] + self._overlapping, now)
            self._columns.append(np.stack([np.full(len(ends), now), ends, np.diff(ends, prepend=0), first]))
        self._last.update(dict.fromkeys(digests, now))
        self._requests += 1
        self.tokens += prompt
        self.flops += self._profile.flops(0, prompt)

    def choices(self) -> _Choices:
        """Return the choices of all recorded requests."""
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
    """Bounds for one kind of gain, each computed from prices.

    Prices are an array with one float64 of at least 0 for each gap.

    Thread safety: one thread.
    """

    def __init__(self, choices: _Choices, gains: Floats) -> None:
        self._choices = choices
        self._gains = gains
        self._sizes = np.diff(choices.starts, append=len(gains))
        self._sums: list[float] = []
        self._profits: list[float] = []

    def densities(self) -> Floats:
        """Return the gain per byte and gap of each choice that needs bytes in any gap."""
        cost = self._cost(np.ones(self._choices.gaps))
        return self._gains[cost > 0] / cost[cost > 0]

    def add(self, prices: Floats) -> Floats:
        """Record the bound for these prices; return the bytes per gap of the most profitable choices."""
        at = self._choices
        profits = self._gains - self._cost(prices)
        best = np.maximum.reduceat(profits, at.starts)
        self._sums.append(float(prices.sum()))
        self._profits.append(float(np.maximum(best, 0.0).sum()))
        # Of equally profitable depths of a request, the deepest is chosen.
        order = np.arange(len(profits))
        deepest = np.maximum.reduceat(np.where(profits == np.repeat(best, self._sizes), order, -1), at.starts)
        chosen = np.where(best > 0, deepest, -1)
        # A chosen depth needs the pages of all runs before it, but only its own state.
        nbytes = np.where(order <= np.repeat(chosen, self._sizes), at.page_bytes, 0)
        nbytes[chosen[chosen >= 0]] += at.state_bytes
        # Bytes are added at gap `first` and taken away at gap `last`; the running sum is what each gap needs.
        come, gone = (np.bincount(column, nbytes, at.gaps + 1) for column in (at.first, at.last))
        wanted: Floats = np.cumsum(come - gone)[:-1]
        return wanted

    def value(self, capacity: int) -> float:
        """Return the lowest recorded bound for a capacity in bytes."""
        return float((capacity * np.array(self._sums) + np.array(self._profits)).min())

    def level(self, capacity: int) -> float:
        """Return the mean, over all gaps, of the recorded prices that give the lowest bound.

        Prices that are 0 in every gap are left out.
        """
        sums, profits = np.array(self._sums), np.array(self._profits)
        return (
            float(sums[np.where(sums > 0, capacity * sums + profits, np.inf).argmin()]) / self._choices.gaps
        )

    def _cost(self, prices: Floats) -> Floats:
        """Return the price of each choice: of its state, and of all pages up to its depth."""
        at = self._choices
        # until[g] is the price of a byte in the gaps [0, g). So the price in the gaps [first, last) is
        # until[last] - until[first].
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
        # The last price is above the highest density, so that no choice is profitable. It gives the bound for
        # a capacity of 0.
        for price in [*np.quantile(densities, np.linspace(0.0, 1.0, _LEVELS)), 2.0 * densities.max()]:
            dual.add(np.full(choices.gaps, price))
        for capacity in sorted(set(capacities)):
            # A capacity above the demand at price 0 lets every choice fit, so price 0 gives its bound.
            if 0 < capacity < demand.max():
                _search(dual, choices, capacity)
    # Every recorded price gives a valid bound for every capacity. The lowest bound is taken.
    return [dual.value(capacity) for capacity in capacities]


def _search(dual: _Dual, choices: _Choices, capacity: int) -> None:
    """Search for prices that give a low bound for a capacity.

    The price of a gap rises if the choices need more bytes there than the capacity, and falls otherwise. The
    method is projected subgradient descent with Adam and a step size that falls to 0.
    """
    level = dual.level(capacity)
    prices = np.full(choices.gaps, level)
    mean, square = np.zeros(choices.gaps), np.zeros(choices.gaps)
    rounds = min(_MAX_ROUNDS, max(_MIN_ROUNDS, _WORK // (choices.gaps + len(choices.tokens))))
    for i in range(rounds):
        slope = (capacity - dual.add(prices)) / capacity
        mean = _MOMENTUM * mean + (1 - _MOMENTUM) * slope
        square = _SPREAD * square + (1 - _SPREAD) * slope**2
        step = mean / (1 - _MOMENTUM ** (i + 1)) / (np.sqrt(square / (1 - _SPREAD ** (i + 1))) + 1e-8)
        prices = np.maximum(prices - _RATE * level * (1 - i / rounds) * step, 0.0)
    dual.add(prices)
