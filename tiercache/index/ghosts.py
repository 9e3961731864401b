"""Memory of what the index has evicted: digests of lost paths, and descriptions of lost units that could have answered a hit."""

from __future__ import annotations

from collections import deque
from itertools import repeat
from typing import Final

import numpy as np
import numpy.typing as npt

from tiercache.index.prefixes import Digests
from tiercache.index.units import UnitTable
from tiercache.policy import Reuse, UnitKind
from tiercache.policy.base import Column

_COLUMNS: Final = ("depth", "replay", "children", "hits", "checkpoint", "lineage", "grown", "last_access", "digest")
"""Fields of `Reuse`, with the tick of the last access in place of the age."""


class Ghosts:
    """Memory of the pages evicted in the last `requests` requests, at most `pages` of them, and of the last `units` evicted units.

    It takes some 150 bytes a page and 200 bytes a unit. Thread safety: the index's thread only.
    """

    def __init__(self, requests: int = 1000, pages: int = 1 << 17, units: int = 4096) -> None:
        self._most_requests = requests
        self._most_pages = pages
        self._request = 0
        self._pages: dict[int, int] = {}  # by digest: the number of the request at which the page was last lost
        self._edges: deque[tuple[int, list[int]]] = deque()  # (request, digests of the pages lost together), oldest first
        self._held = 0  # digests in `_edges`, repeated ones included
        self._units = np.zeros((units, len(_COLUMNS)), np.int64)
        self._there = np.zeros(units, np.bool_)
        self._digest = [0] * units
        self._at: dict[int, int] = {}  # by digest: the row of the unit in `_units`
        self._next = 0

    def begin(self) -> None:
        """Note that a request begins, and forget pages that were lost too many requests ago."""
        self._request += 1
        self._trim()

    def _trim(self) -> None:
        while self._edges and (self._edges[0][0] <= self._request - self._most_requests or self._held > self._most_pages):
            stamp, digests = self._edges.popleft()
            self._held -= len(digests)
            for digest in digests:
                if self._pages.get(digest) == stamp:
                    del self._pages[digest]

    def note_pages(self, digests: Digests) -> None:
        """Remember that these pages were lost."""
        edge = digests.tolist()[: self._most_pages]
        self._pages.update(zip(edge, repeat(self._request)))
        self._edges.append((self._request, edge))
        self._held += len(edge)
        if self._held > self._most_pages:
            self._trim()

    def note_unit(self, digest: int, unit: Reuse, now: int) -> None:
        """Remember that a unit that ended with the prefix `digest` was lost; `unit` describes it at the tick `now`."""
        slot, self._next = self._next, (self._next + 1) % len(self._digest)
        self.forget(self._digest[slot], slot)
        if digest in self._at:
            self.forget(digest, self._at[digest])
        self._digest[slot], self._at[digest], self._there[slot] = digest, slot, True
        self._units[slot] = (*unit[:7], now - unit.age, unit.digest)

    @property
    def has_units(self) -> bool:
        """Whether any lost unit is remembered."""
        return bool(self._at)

    def repeated(self, digests: Digests) -> int:
        """Return how many of these pages, from the first on, are remembered as lost."""
        pages = self._pages
        if not pages:
            return 0
        for count, digest in enumerate(digests.tolist()):
            if digest not in pages:
                return count
        return len(digests)

    def deepest(self, digests: Digests) -> int | None:
        """Return the place in `digests` of the last prefix at which a unit was lost, or None."""
        at = self._at
        if at:
            for place in range(len(digests) - 1, -1, -1):
                if int(digests[place]) in at:
                    return place
        return None

    def reuse(self, digest: int, now: int) -> Reuse:
        """Return the description of the lost unit with this digest, which would have answered a hit, and forget it."""
        slot = self._at[digest]
        *unit, last_access, signature = self._units[slot].tolist()
        self.forget(digest, slot)
        depth, replay, children, hits, checkpoint, lineage, grown = unit
        return Reuse(depth, replay, children, hits, checkpoint, lineage, grown, now - last_access, signature, evicted=True)

    def forget(self, digest: int, slot: int) -> None:
        """Forget the unit at `slot`, because it is in the index again or too old."""
        if self._there[slot] and self._at.get(digest) == slot:
            del self._at[digest]
        self._there[slot] = False

    def restored(self, digest: int) -> None:
        """Forget the lost unit with this digest, if there is one, because the index has it again."""
        if digest in self._at:
            self.forget(digest, self._at[digest])

    def view(self, table: UnitTable) -> GhostUnits:
        """Return the lost units as a policy sees them."""
        return GhostUnits(table, self._units[self._there])

    def __len__(self) -> int:
        return len(self._pages)


class GhostUnits:
    """Lost units as columns, as described at `Units`. Thread safety: the index's thread, during one call of the policy."""

    def __init__(self, table: UnitTable, rows: npt.NDArray[np.int64]) -> None:
        self.now = table.now
        self.page_tokens = table.page_tokens
        self._count = len(rows)
        self.depth, self.replay, self.children, self.hits, self.checkpoint, self.lineage, self.grown, self.last_access, self.digest = rows.T

    def __len__(self) -> int:
        return self._count

    @property
    def kind(self) -> Column:
        """Always `UnitKind.NONE`: a lost unit cannot be evicted."""
        return np.full(self._count, UnitKind.NONE)

    @property
    def covered(self) -> Column:
        """Always 0: no lower tier is known to hold a lost unit."""
        return np.zeros(self._count, np.int64)

    @property
    def nbytes(self) -> Column:
        """Always 1: the size of a lost unit is not known any more."""
        return np.ones(self._count, np.int64)
