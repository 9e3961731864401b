"""Ranks of pages and states by the values that callers give, comparable between callers and over time.

A value (`ObjectMeta.value`) says how much work an object is expected to save. The rank of a hint is

    BASE + log2(value) + seconds / HALF_LIFE

with the seconds on the clock of the store when the hint came. So an hour of age counts as much as half of the
value, two hints never change their order, and a rank is a number that need not be computed again.

A page has two ranks: one for its KV, and one for its states. An object without a hint counts as if it had got
the mean value at its last use. Before the first hint nothing is kept, and the last use ranks.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import log2
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tiercache.storage.pages import PageTable

HALF_LIFE: Final = 3600.0
"""Seconds in which a hint loses half of its value."""
BASE: Final = 4096.0
"""Rank of the value 1 at the origin of the clock. It keeps all ranks above 0, which means "no hint"."""
_ZERO: Final = -2048.0
"""Stands for the logarithm of the value 0. The logarithm of the smallest float above 0 is -1074."""
_WINDOW: Final = 1024
"""Number of hints over which the mean is taken."""
_BOUND: Final = 64.0
"""Largest logarithm, up or down, with which a hint counts in the mean."""
_DRIFT: Final = 0.25
"""Change of the mean from which on objects without a hint are ranked anew: age of a quarter of an hour."""
_TICK: Final = 1e-6
"""Seconds that a tick takes, where the clock was not read for every tick."""
_SAMPLES: Final = 4096
"""Maximum number of times at which the clock was read; beyond that, every second one is dropped."""

Ints = npt.NDArray[np.int64]
Ranks = npt.NDArray[np.float64]


def is_value(value: float) -> bool:
    """Return whether a hint may have this value: a finite number from 0 on."""
    return 0 <= value <= sys.float_info.max


def is_worker(worker: int) -> bool:
    """Return whether this number may stand for a caller that gives values: 64 bits, from 0 on."""
    return 0 <= worker < 2**64


def usable_hints(values: Sequence[float], worker: int, count: int) -> tuple[Ranks, Ints]:
    """Return the possible values among hints for `count` keys, and the indices of their keys."""
    try:
        given = np.asarray(values[:count], np.float64)
    except OverflowError:  # integers beyond all floats
        given = np.array([value if is_value(value) else np.nan for value in values[:count]], np.float64)
    possible = np.flatnonzero(np.isfinite(given) & (given >= 0) if is_worker(worker) else [])
    return given[possible], possible


class Values:
    """Hints for the pages and states of a store, and the ranks by which they are evicted, the lowest first.

    The columns are in the table of pages, by node: `rank` and `worker` for KV, `state_rank` and
    `state_worker` for states.

    Thread safety: none of its own; the store calls it under its mutex.
    """

    def __init__(self, pages: PageTable, clock: Callable[[], float]) -> None:
        self._pages = pages
        self._clock = clock
        self._origin = 0.0
        self._count = 0
        """Number of hints that count in `mean`, at most `_WINDOW`."""
        self.mean = 0.0
        """Mean of the logarithms of the hints so far; the latest `_WINDOW` of them count most."""
        self._adopted = 0.0
        """Mean that objects without a hint count with (see `settle`)."""
        # The clock was read before tick `starts[i] + 1`, and said `seconds[i]`.
        self._starts = np.zeros(_SAMPLES)
        self._seconds = np.zeros(_SAMPLES)
        self._samples = 0

    @property
    def given(self) -> bool:
        """Whether any hint was given so far."""
        return self._pages.hinted

    def begin(self, tick: int) -> None:
        """Prepare for the first hint, at this tick; later calls change nothing.

        All uses so far count as just made, in their order.
        """
        if not self.given:
            self._pages.keep_hints()
            self._origin = self._clock() - tick * _TICK
            self._samples = 1

    def used(self, tick: int) -> None:
        """Note the time of a use at this tick. Call this only after `begin`."""
        now = self._clock() - self._origin
        if now < self._seconds[self._samples - 1] + 1.0:
            return
        if self._samples == _SAMPLES:
            half = self._samples // 2
            for column in (self._starts, self._seconds):
                column[:half] = column[: self._samples : 2]
            self._samples = half
        self._starts[self._samples], self._seconds[self._samples] = tick - 1, now
        self._samples += 1

    def rank(self, value: float) -> float:
        """Return the rank of a hint that is given now. Call this only after `begin`."""
        return BASE + (log2(value) if value else _ZERO) + (self._clock() - self._origin) / HALF_LIFE

    def value(self, rank: float) -> float:
        """Return the value that would get this rank if it was given now."""
        exponent = rank - BASE - (self._clock() - self._origin) / HALF_LIFE
        return 0.0 if exponent <= _ZERO / 2 else float(2.0 ** min(exponent, 1023.0))

    def give(self, nodes: Ints, attached: npt.NDArray[np.bool_], values: Ranks, worker: int) -> None:
        """Take hints for the states (where `attached`) or the KV of these nodes.

        A hint replaces an earlier one of the same worker. The hint of another worker counts if its rank is
        higher. Call this only after `begin`.
        """
        with np.errstate(divide="ignore"):
            logarithms = np.maximum(np.log2(values), _ZERO)
        self._learn(logarithms[values > 0])
        ranks = logarithms + BASE + (self._clock() - self._origin) / HALF_LIFE
        columns = self._pages.columns
        for kind, chosen in (("", ~attached), ("state_", attached)):
            at, new = nodes[chosen], ranks[chosen]
            rank, workers = columns[f"{kind}rank"], columns[f"{kind}worker"]
            wins = (workers[at] == np.uint64(worker)) | (new > rank[at])
            rank[at[wins]], workers[at[wins]] = new[wins], worker

    def give_one(self, node: int, value: float, worker: int, *, attached: bool) -> None:
        """Take one hint; does the same as `give`, and takes less time for a single node."""
        logarithm = log2(value) if value else _ZERO
        if value:
            self._count = min(self._count + 1, _WINDOW)
            self.mean += (min(_BOUND, max(-_BOUND, logarithm)) - self.mean) / self._count
        new = logarithm + BASE + (self._clock() - self._origin) / HALF_LIFE
        pages = self._pages
        rank, workers = (pages.state_rank, pages.state_worker) if attached else (pages.rank, pages.worker)
        if workers[node] == worker or new > rank[node]:
            rank[node], workers[node] = new, worker

    def settle(self) -> bool:
        """Let the present mean count for objects without a hint, if it has moved by much; return whether.

        Ranks that were computed before are then out of date.
        """
        if abs(self.mean - self._adopted) < _DRIFT:
            return False
        self._adopted = self.mean
        return True

    def ranks(self, nodes: Ints, alone: npt.NDArray[np.bool_] | None = None) -> Ranks:
        """Return the rank of each node: of its states where `alone`, otherwise of the page.

        By default, the states of a page are `alone` if other pages follow it, or a call holds it. A page
        without a hint has the rank of its states, if these have one. Before the first hint a rank is the tick
        of the last use.
        """
        columns = self._pages.columns
        if not self.given:
            return columns["tick"][nodes].astype(np.float64)
        if alone is None:
            alone = (columns["children"][nodes] > 0) | (columns["holds"][nodes] > 0)
        kv, states = columns["rank"][nodes], columns["state_rank"][nodes]
        ranks: Ranks = np.where(alone | (kv == 0), states, kv)
        plain = np.flatnonzero(ranks == 0)
        if len(plain):
            ticks = columns["tick"][nodes[plain]].astype(np.float64)
            last = np.searchsorted(self._starts[: self._samples], ticks) - 1
            last = np.maximum(last, 0)
            seconds = self._seconds[last] + (ticks - self._starts[last]) * _TICK
            ranks[plain] = BASE + self._adopted + seconds / HALF_LIFE
        return ranks

    def rank_of(self, node: int) -> float:
        """Return the rank of one node, as `ranks` does by default."""
        return self._rank(node, alone=self._pages.children[node] > 0 or self._pages.holds[node] > 0)

    def _rank(self, node: int, *, alone: bool) -> float:
        pages = self._pages
        if not pages.hinted:
            return float(pages.tick[node])
        rank = 0.0 if alone else pages.rank[node]
        if rank or (rank := pages.state_rank[node]):
            return rank
        tick = pages.tick[node]
        last = max(bisect_left(self._starts, tick, 0, self._samples) - 1, 0)
        seconds = float(self._seconds[last]) + (tick - float(self._starts[last])) * _TICK
        return BASE + self._adopted + seconds / HALF_LIFE

    def stand_alone(self, nodes: Ints) -> npt.NDArray[np.bool_]:
        """Return where the states of a page that others follow are a unit of their own: those with a hint."""
        if not self.given:
            return np.zeros(len(nodes), np.bool_)
        alone: npt.NDArray[np.bool_] = self._pages.columns["state_rank"][nodes] > 0
        return alone

    def stands_alone(self, node: int) -> bool:
        """Do the same as `stand_alone` for one page."""
        return self.given and self._pages.state_rank[node] > 0

    def inherit(self, above: int, node: int) -> None:
        """Give the page before `node`, which is being removed, the higher of the two ranks.

        If neither has a hint, their last use counts, and this changes nothing.
        """
        rank = self._pages.rank
        if rank[node] or rank[above] or self._pages.state_rank[node]:
            inherited = self._rank(node, alone=False)
            if inherited > self._rank(above, alone=False):
                rank[above] = inherited

    def _learn(self, logarithms: Ranks) -> None:
        if n := len(logarithms):
            self._count = min(self._count + n, _WINDOW)
            share = max(min(1.0, n / self._count), 1.0 - (1.0 - 1.0 / self._count) ** n)
            self.mean += share * (float(np.clip(logarithms, -_BOUND, _BOUND).mean()) - self.mean)
