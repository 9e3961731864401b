"""Memory of units by digest, within bounds, for policies with queues of their own."""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import numpy as np

from tiercache.policy.base import Column, Ranks, Units

MAX_REMEMBERED: Final = 1 << 16
"""Maximum number of digests in each list of a queue. The oldest are forgotten first."""
GROUP: Final = float(2**44)
"""Difference of rank between two groups of units. Ticks are below it, so groups do not overlap."""
_MAX_QUEUES: Final = 8
"""Maximum number of queues that are told apart; an index has four."""

Kept = TypeVar("Kept")


class Digests(Generic[Kept]):
    """Dictionary by digest that forgets its oldest entries.

    Thread safety: as the policy that owns it.
    """

    def __init__(self) -> None:
        self.kept: dict[int, Kept] = {}

    def add(self, digest: int, kept: Kept) -> None:
        """Remember a digest as the newest. The digest 0 stands for none, and is not remembered."""
        if not digest:
            return
        self.kept.pop(digest, None)
        self.kept[digest] = kept
        if len(self.kept) > MAX_REMEMBERED:
            del self.kept[next(iter(self.kept))]

    def __contains__(self, digest: int) -> bool:
        return digest in self.kept


class GhostList:
    """Queue of evicted units, of which only digests and bytes are kept.

    Thread safety: as the policy that owns it.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._units: dict[int, int] = {}

    def __contains__(self, digest: int) -> bool:
        return digest in self._units

    def add(self, digest: int, nbytes: int) -> None:
        """Add an evicted unit as the newest; 0, the digest of an unknown unit, is not added."""
        self.take(digest)
        if digest:
            self._units[digest] = nbytes
            self.nbytes += nbytes
            if len(self._units) > MAX_REMEMBERED:
                self.take(next(iter(self._units)))

    def take(self, digest: int) -> int:
        """Remove a unit, and return its bytes; 0 if it is not here."""
        nbytes = self._units.pop(digest, 0)
        self.nbytes -= nbytes
        return nbytes

    def trim(self, nbytes: float) -> None:
        """Forget the oldest units until the others have at most `nbytes` together."""
        while self._units and self.nbytes > nbytes:
            self.take(next(iter(self._units)))


def queue_number(queue: int) -> int:
    """Return the number of one of the few queues that are told apart."""
    return queue % _MAX_QUEUES


def entered(units: Units) -> Column:
    """Return the tick at which each unit entered the cache or, if that is not known, that of its last use.

    A queue in the order of arrival becomes one in the order of last use where the owner knows no arrivals.
    """
    created: Column = np.where(units.created > 0, units.created, units.last_access)
    return created


def before(nbytes: Column, order: Column) -> Ranks:
    """Return for each unit how many bytes the units before it in `order` have."""
    out = np.empty(len(nbytes))
    sizes = nbytes[order].astype(np.float64)
    out[order] = np.cumsum(sizes) - sizes
    return out
