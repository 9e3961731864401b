"""ARC: two lists in order of last use, for units used once and more often, whose shares adapt to misses."""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np

from tiercache.policy.base import Column, Policy, Ranks, Reuse, Units, last_use

_MAX_REMEMBERED: Final = 1 << 16
"""Maximum number of digests in each list of a queue. The oldest are forgotten first."""
_GROUP: Final = float(2**44)
"""Difference of rank between two groups of units. Ticks are below it, so groups do not overlap."""
_MAX_QUEUES: Final = 8
"""Maximum number of queues that are told apart; an index has four."""


class Arc(Policy):
    """Policy that balances recency against frequency by what it misses.

    Units without a hit are in the list T1, others in T2, both in the order of their last use. The lists B1
    and B2 have ghosts of the units that were evicted from T1 and T2. T1 has the target size p: if T1 is
    larger, its oldest unit is evicted, else that of T2. A miss of a unit in B1 raises p, one in B2 lowers it,
    by the bytes of the unit times the ratio of the other list of ghosts to this one, but at least by its
    bytes. A unit that is made again after such a miss enters T2.

    All sizes are in bytes. T1 and B1 have at most the bytes of the cache, all four lists at most twice as
    many.

    What is approximated: the size of the cache is that of the units that can be evicted. Between two passes
    of the owner (a 64th of the units, see `order`), the target does not change. If there are more than 4,096
    units, the policy sees a sample of them, and scales what it sees. The lists of ghosts have at most 65,536
    digests; the owner reports only misses of its last 4,096 lost units. A state that is taken again on a node
    with older hits counts as used more than once. Each queue of the owner has lists of its own. An owner that
    does not tell digests gets T1 and T2 without ghosts, and p stays 0.

    Source: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003.

    Thread safety: as `Policy`.
    """

    name: ClassVar[str] = "arc"

    def __init__(self) -> None:
        self._queues: dict[int, _Lists] = {}
        self._rank = 0.0

    def rank(self, units: Units) -> Ranks:
        """Return each unit's place in the order of eviction."""
        return self._queues.setdefault(units.queue % _MAX_QUEUES, _Lists()).rank(units)

    def evicted(self, rank: float) -> None:
        """Note the rank, which says from which list the unit comes (see `left`)."""
        self._rank = rank

    def left(self, queue: int, digest: int, nbytes: int) -> None:
        """Keep a ghost of an evicted unit."""
        if digest and (lists := self._queues.get(queue % _MAX_QUEUES)) is not None:
            lists.left(self._rank, digest, nbytes)

    def reused(self, reuse: Reuse) -> None:
        """Adapt the target to a miss of a ghost."""
        if reuse.evicted:
            for lists in self._queues.values():
                lists.missed(reuse.digest)


class _Lists:
    """The lists of one queue of the owner."""

    def __init__(self) -> None:
        self._again: dict[int, None] = {}
        """Digests of units that are in T2 although they have had no hit since they were made."""
        self._ghosts = _GhostList(), _GhostList()
        """B1 and B2."""
        self._bytes = [0.0, 0.0]
        """Bytes of T1 and T2."""
        self._capacity = 0.0
        self._target = 0.0
        """Bytes that T1 should have: p in the paper."""
        self._hit = [False, False]
        """Whether there was a miss of B1 or of B2 since the last eviction."""

    def rank(self, units: Units) -> Ranks:
        used, nbytes, scale = last_use(units), units.nbytes, units.population / len(units)
        again = self._again
        often = units.hits > 0
        if again:
            often |= np.fromiter((one in again for one in units.digest.tolist()), np.bool_, len(units))
        size = np.where(often, 0, nbytes)
        first = float(size.sum(dtype=np.float64)) * scale
        self._capacity = float(nbytes.sum(dtype=np.float64)) * scale
        self._bytes = [first, self._capacity - first]
        self._target = min(self._target, self._capacity)
        left = first - _before(size, np.lexsort((units.digest, used))) * scale
        excess = (left > self._target) | (self._hit[1] & (left >= self._target))
        return np.asarray(_GROUP * np.where(often, 1.0, np.where(excess, 0.0, 2.0)) + used, np.float64)

    def left(self, rank: float, digest: int, nbytes: int) -> None:
        second = _GROUP <= rank < 2 * _GROUP
        self._again.pop(digest, None)
        self._bytes[second] = max(0.0, self._bytes[second] - nbytes)
        self._ghosts[second].add(digest, nbytes)
        if not any(self._hit):
            # The paper makes room for the ghost of a new unit before the unit enters. Here the new unit is
            # not known yet; it takes the place of the evicted one.
            self._ghosts[0].trim(self._capacity - nbytes - self._bytes[0])
            rest = 2 * self._capacity - nbytes - sum(self._bytes)
            self._ghosts[1].trim(rest - self._ghosts[0].nbytes)
        self._hit = [False, False]

    def missed(self, digest: int) -> None:
        for list_, other, sign in ((0, 1, 1.0), (1, 0, -1.0)):
            mine = self._ghosts[list_]
            if digest in mine:
                ratio = max(1.0, self._ghosts[other].nbytes / mine.nbytes)
                nbytes = mine.take(digest)
                self._target = min(max(0.0, self._target + sign * nbytes * ratio), self._capacity)
                self._again.pop(digest, None)
                self._again[digest] = None
                if len(self._again) > _MAX_REMEMBERED:
                    del self._again[next(iter(self._again))]
                self._hit[list_] = True


class _GhostList:
    """Queue of evicted units, of which only digests and bytes are kept.

    Thread safety: as `Policy`.
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
            if len(self._units) > _MAX_REMEMBERED:
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


def _before(nbytes: Column, order: Column) -> Ranks:
    """Return for each unit how many bytes the units before it in `order` have."""
    out = np.empty(len(nbytes))
    sizes = nbytes[order].astype(np.float64)
    out[order] = np.cumsum(sizes) - sizes
    return out
