"""Places where later prompts leave a request: how often at each mark, and how far from them in between."""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

_DECAY: Final = 0.95
"""Factor by which each `Departures.decay` multiplies earlier observations."""
_PRIOR: Final = 4.0
"""Number of requests that a class needs for its own rate to weigh as much as that of the class around it."""
_SIZES: Final = 7
"""Number of classes by new tokens: below 512 tokens, and by powers of two up to 16,384 and more."""
_QUARTERS: Final = 4
_EXACT: Final = 8
"""Distances up to this one, in pages, are told apart by the page."""
_OCTAVE: Final = 2
"""Number of classes of longer distances for each doubling."""
_LEAST: Final = 0.01
"""Share of departures below which a distance is not likely."""
_FLOOR: Final = 0.01
"""Number of departures that every class of distances has from the start."""


class Mark(enum.IntEnum):
    """Part of a request at which a later prompt leaves it."""

    END = 0
    """Behind the prompt: the later prompt continues the answer."""
    PROMPT = 1
    """The prompt's last page boundary."""
    BRANCH = 2
    """The depth at which the request itself left an earlier one."""
    BETWEEN = 3
    """Any other depth of the prompt."""
    FRESH = 4
    """None: the later prompt shares nothing with a request that is remembered."""


class Past(NamedTuple):
    """Memory of one request. Depths are in pages."""

    branch: int
    """Depth at which the prompt left all earlier ones."""
    last: int
    """Deepest depth that a repeat of the prompt may restore."""
    full: int
    """Number of whole pages of the prompt."""
    mark: Mark
    """Mark at which the request left the one whose pages it shares."""
    size: int
    """Class by the number of tokens that were new with it (see `size_of`)."""
    quarter: int
    """Quarter of a page, from 0 to 3, in which the prompt ends.

    The answer is more likely to reach the next page boundary, and the state there, from a later quarter.
    """

    def mark_of(self, depth: int) -> Mark:
        """Return the mark at which a later prompt leaves this request, if it leaves it at `depth`."""
        if depth > self.full:
            return Mark.END
        if depth >= self.last:
            return Mark.PROMPT
        return Mark.BRANCH if depth == self.branch else Mark.BETWEEN


def size_of(tokens: int) -> int:
    """Return the size class of a request with this many new tokens."""
    return min((tokens >> 9).bit_length(), _SIZES - 1)


class Distances(NamedTuple):
    """Likely distances of departures between the marks, in pages."""

    ahead: list[int]
    """Distances behind the branch."""
    back: list[int]
    """Distances before the prompt's last page boundary."""
    shares: list[float]
    """Share of departures at each distance in `ahead`, and then at each in `back`."""


class Departures:
    """Rates of departures for each mark and class of requests, and distances of those between marks.

    The class of a request is the mark at which it left an earlier request itself: conversations go on, and
    documents get more questions. Within it, requests are told apart by size and by the quarter of a page in
    which the prompt ends. The rate of a class with few requests is close to that of the class around it, and
    at first to that of the fixed rules, in which each mark is left once.

    Thread safety: one thread at a time.
    """

    def __init__(self) -> None:
        marks = len(Mark)
        self._requests = np.zeros((marks, _SIZES, _QUARTERS))
        self._left = np.zeros((marks, _SIZES, _QUARTERS, marks))
        """Departures by the classes of the request that was left, and by mark."""
        self._between = np.zeros((marks, 2, len(_LOW)))
        """Departures by the class of the request, and by the distance behind the branch or before the end."""
        self._distances: dict[int, Distances] = {}
        self.refresh()

    def began(self, past: Past) -> None:
        """Count a request, which later prompts can leave."""
        self._requests[past.mark, past.size, past.quarter] += 1.0

    def left(self, past: Past, depth: int) -> None:
        """Count a later prompt that left a request at `depth`."""
        mark = past.mark_of(depth)
        self._left[past.mark, past.size, past.quarter, mark] += 1.0
        if mark is not Mark.BETWEEN:
            return
        # Whether the depth follows from the branch or from the prompt's end is not known. Each explains a
        # part of it, as likely as it made this depth so far (one step of expectation maximisation).
        table = self._between[past.mark]
        back = _class_of(past.last - depth)
        explained = 0.0
        if depth > past.branch:
            ahead = _class_of(depth - past.branch)
            density = (table[[0, 1], [ahead, back]] + _FLOOR) / _WIDTH[[ahead, back]]
            explained = float(density[0] / density.sum())
            table[0, ahead] += explained
        table[1, back] += 1.0 - explained

    def decay(self) -> None:
        """Let older observations count less."""
        for table in (self._requests, self._left, self._between):
            table *= _DECAY

    def refresh(self) -> None:
        """Let the next answers include all observations so far. Otherwise they may be older ones."""
        self._distances.clear()
        # From the class of all requests inwards: each turn divides every class into its parts.
        rates, within = _START, (0, 1, 2)
        for level in range(len(within) + 1):
            requests, left = (table.sum(within[level:]) for table in (self._requests, self._left))
            around = rates[..., None, :] if level else rates
            rates = (left + _PRIOR * around) / (requests[..., None] + _PRIOR)
        self._rates: list[list[list[list[float]]]] = rates.tolist()

    def rates(self, past: Past) -> list[float]:
        """Return how many later prompts leave a request of the classes of this one, by mark."""
        return self._rates[past.mark][past.size][past.quarter]

    def distances(self, mark: Mark) -> Distances:
        """Return the likely distances of departures between the marks of a request of this class."""
        found = self._distances.get(mark)
        if found is None:
            pooled = self._between.sum(0)
            table = self._between[mark] + _PRIOR * pooled / max(1.0, pooled.sum())
            share = table / max(1.0, table.sum())
            ahead, back = (np.flatnonzero(one > _LEAST) for one in share)
            # A state serves a whole class of distances if it lies before the shallowest depth of the class.
            found = self._distances[mark] = Distances(
                _LOW[ahead].tolist(),
                _HIGH[back].tolist(),
                [*share[0, ahead].tolist(), *share[1, back].tolist()],
            )
        return found


def _class_of(distance: int) -> int:
    return int(np.searchsorted(_LOW, distance, "right")) - 1


def _low() -> npt.NDArray[np.int64]:
    steps = _EXACT * 2.0 ** (np.arange(1, 13 * _OCTAVE) / _OCTAVE)
    return np.unique(np.concatenate([np.arange(1, _EXACT + 1), np.ceil(steps).astype(np.int64)]))


_LOW: Final = _low()
"""Shortest distance of each class, in pages."""
_HIGH: Final = np.append(_LOW[1:] - 1, _LOW[-1])
"""Longest distance of each class, in pages; that of the last class stands for all longer ones."""
_WIDTH: Final = (_HIGH - _LOW + 1).astype(np.float64)
_START: Final = np.array([1.0, 1.0, 1.0, 0.0, 0.0])
"""Rates by mark before anything is learned."""
