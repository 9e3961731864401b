"""What no cache of a size can exceed on a source, whatever it knows of the future and wherever it takes its states.

What a request leaves competes for the cache's bytes in the gaps between requests; what a running request works on is free. A hit of d pages
needs each of them, and a state at d, in every gap since a request last had that prefix and could compute it. Two hits never share bytes in
a gap, for the next request with a prefix computes it anew, hit or not. So nothing is better than the choice of one depth per request that
gains most among those that fit into every gap.

The bound is the Lagrangian dual of that choice: bytes have a price in each gap, each request takes the depth of the highest profit, and

    what any cache gains <= capacity x sum of the prices + sum of the profits,

since its hits are worth no more than their profits and the price of their bytes. That holds for any prices: they are searched for and need
not be right. With one price for all gaps this is the fractional knapsack over use intervals, PFOO-L in Berger, Beckmann and Harchol-Balter,
"Practical Bounds on Optimal Caching with Variable Object Sizes" (2018), here with states, and with hits that need all pages before them.
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





@dataclass(frozen=True, slots=True)
class Upper:
    """Fractions of all prompt tokens, and of the FLOPs of all prefills; each is bounded by itself."""

    token_hit_rate: float
    flops_saved: float


def upper_bound(
    source: Source, profile: ModelProfile, capacities: Sequence[int], step: Callable[[], object] = lambda: None
) -> list[Upper]:
    """The bound for each capacity in bytes. The source is read once; `step` is called after each request."""
    history = _History(source, profile)
    for request in source:
        history.add(request)
        step()
    choices = history.choices()
    tokens = _bounds(choices, choices.tokens, capacities)
    flops = _bounds(choices, profile.flops(0, choices.tokens), capacities)
    return [
        Upper(hit / max(history.tokens, 1), saved / history.flops if history.flops else 0.0)
        for hit, saved in zip(tokens, flops, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Choices:
    """Depths at which requests may hit, one after another by request and depth, as columns.

    Pages that the same earlier request had last are needed in the same gaps, the gain per page never falls with the depth, and the state
    costs the same at each of them: where one of them pays, all do. So there is one choice per such run of pages, at its end.
    """

    gaps: int
    tokens: Ints
    """What a hit here restores."""
    first: Ints
    last: Ints
    """The pages of the run, and a state at its end, are needed in the gaps [first, last); gap g is before request g."""
    page_bytes: Ints
    """Of the run."""
    state_bytes: int
    starts: Ints
    """Where each request's choices begin."""


class _History:
    """Reads requests, and knows who had each prefix last. Thread rule: one thread."""

    def __init__(self, source: Source, profile: ModelProfile) -> None:
        self._page_size = source.page_size
        self._in_flight = source.concurrency - 1
        self._profile = profile
        self._prefixes = Prefixes(source.page_size)
        self._last: dict[int, int] = {}
        self._requests = 0
        self._columns: list[Ints] = []
        self.tokens = 0
        self.flops = 0.0

    def add(self, request: Request) -> None:
        """The next request: what it could hit, then what it computes."""
        now, prompt = self._requests, len(request.prompt)
        digests = self._prefixes.of(np.concatenate([request.prompt, request.output[:-1]]), 0).tolist()
        limit = reusable_pages(prompt, self._page_size)
        before = np.array([self._last[digest] for digest in digests[:limit] if digest in self._last], np.int64)
        if len(before):
            ends = np.append(np.flatnonzero(before[1:] != before[:-1]) + 1, len(before))
            # What a request holds is free while it is under way, which it may be until `_in_flight` others have begun.
            first = np.minimum(before[ends - 1] + 1 + self._in_flight, now + 1)
            self._columns.append(np.stack([np.full(len(ends), now), ends, np.diff(ends, prepend=0), first]))
        self._last.update(dict.fromkeys(digests, now))
        self._requests += 1
        self.tokens += prompt
        self.flops += self._profile.flops(0, prompt)

    def choices(self) -> _Choices:
        """Of all requests so far."""
        request, depth, pages, first = np.concatenate([np.empty((4, 0), np.int64), *self._columns], axis=1)
        return _Choices(
            gaps=self._requests,
            tokens=depth * self._page_size,
            first=first,
            last=request + 1,
            page_bytes=pages * (self._page_size * self._profile.kv_bytes_per_token),
            state_bytes=self._profile.state_bytes,
            starts=np.flatnonzero(np.diff(request, prepend=-1)),
        )


class _Dual:
    """The bounds that prices give for one objective. Prices: float64, one per gap. Thread rule: one thread."""

    def __init__(self, choices: _Choices, gains: Floats) -> None:
        self._choices = choices
        self._gains = gains
        self._sizes = np.diff(choices.starts, append=len(gains))
        self.slopes: list[float] = []
        self.offsets: list[float] = []

    def densities(self) -> Floats:
        """Gain by bytes x gaps of each choice that takes any: about what bytes are worth."""
        cost = self._costs(np.ones(self._choices.gaps))
        return self._gains[cost > 0] / cost[cost > 0]

    def add(self, prices: Floats) -> Floats:
        """Note the bound that these prices give; the bytes that the requests of the highest profit take in each gap come out."""
        at, sizes = self._choices, self._sizes
        profits = self._gains - self._costs(prices)
        best = np.maximum.reduceat(profits, at.starts) if len(profits) else profits
        self.slopes.append(float(prices.sum()))
        self.offsets.append(float(np.maximum(best, 0.0).sum()))
        order = np.arange(len(profits))
        taken = np.where(profits >= np.repeat(best, sizes), order, -1)
        chosen = np.maximum.reduceat(taken, at.starts) if len(profits) else taken
        chosen = np.where(best > 0, chosen, -1)
        nbytes = np.where(order <= np.repeat(chosen, sizes), at.page_bytes, 0)
        nbytes[chosen[chosen >= 0]] += at.state_bytes
        came = np.bincount(at.first, nbytes, at.gaps + 1)
        gone = np.bincount(at.last, nbytes, at.gaps + 1)
        return np.cumsum(came - gone)[:-1]

    def bound(self, capacity: int) -> float:
        """The least so far."""
        return float((capacity * np.array(self.slopes) + np.array(self.offsets)).min())

    def _costs(self, prices: Floats) -> Floats:
        at = self._choices
        until = np.concatenate([[0.0], np.cumsum(prices)])
        each = until[at.last] - until[at.first]
        pages = np.concatenate([[0.0], np.cumsum(each * at.page_bytes)])
        above = np.repeat(pages[at.starts], self._sizes)
        return pages[1:] - above + each * at.state_bytes
