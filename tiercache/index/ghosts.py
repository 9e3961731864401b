"""What the index knew and lost: digests of evicted paths, and what the units looked like that could have answered a hit."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import repeat
from typing import Final

import numpy as np

from tiercache.index.prefixes import Digests
from tiercache.index.units import UnitTable
from tiercache.policy import Reuse, UnitKind
from tiercache.policy.base import Column

_COLUMNS: Final = ("last_access", "hits", "depth", "children", "replay", "checkpoint", "lineage", "grown", "nbytes", "digest")


class Ghosts:
    """Evicted pages of the last `requests` requests, at most `pages` of them, and the last `units` evicted units.

    Some 150 bytes a page and 200 a unit. Thread rule: the index's thread only.
    """

    def __init__(self, requests: int = 1000, pages: int = 1 << 17, units: int = 4096) -> None:
        self._most_requests = requests
        self._most_pages = pages
        self._request = 0
        self._pages: dict[int, int] = {}
        self._edges: deque[tuple[int, list[int]]] = deque()
        self._held = 0
        self._units = {name: np.zeros(units, np.int64) for name in _COLUMNS}
        self._there = np.zeros(units, np.bool_)
        self._digest = [0] * units
        self._at: dict[int, int] = {}
        self._next = 0

    def begin(self) -> None:
        """A request began: what is older than the horizon is forgotten."""
        self._request += 1
        while self._edges and (self._edges[0][0] <= self._request - self._most_requests or self._held > self._most_pages):
            stamp, digests = self._edges.popleft()
            self._held -= len(digests)
            for digest in digests:
                if self._pages.get(digest) == stamp:
                    del self._pages[digest]

    def note_pages(self, digests: Digests) -> None:
        """These pages were lost."""
        edge = digests.tolist()[: self._most_pages]
        self._pages.update(zip(edge, repeat(self._request)))
        self._edges.append((self._request, edge))
        self._held += len(edge)

    def note_unit(self, digest: int, unit: Mapping[str, int]) -> None:
        """A unit that ended with the prefix `digest` was lost; `unit` says what it looked like."""
        slot, self._next = self._next, (self._next + 1) % len(self._digest)
        self.forget(self._digest[slot], slot)
        if digest in self._at:
            self.forget(digest, self._at[digest])
        self._digest[slot], self._at[digest], self._there[slot] = digest, slot, True
        for name, column in self._units.items():
            column[slot] = unit[name]

    @property
    def has_units(self) -> bool:
        """Is any lost unit remembered?"""
        return bool(self._at)

    def repeated(self, digests: Digests) -> int:
        """How many of these pages, from the first on, were known once."""
        pages = self._pages
        if not pages:
            return 0
        for count, digest in enumerate(digests.tolist()):
            if digest not in pages:
                return count
        return len(digests)

    def deepest(self, digests: Digests) -> int | None:
        """The last of these prefixes at which a unit was lost, as a place in `digests`."""
        at = self._at
        if at:
            for place in range(len(digests) - 1, -1, -1):
                if int(digests[place]) in at:
                    return place
        return None

    def reuse(self, digest: int, now: int) -> Reuse:
        """The lost unit with this digest would have answered a hit: what it was. It is forgotten."""
        slot = self._at[digest]
        unit = {name: int(column[slot]) for name, column in self._units.items()}
        self.forget(digest, slot)
        del unit["nbytes"]
        return Reuse(age=now - unit.pop("last_access"), evicted=True, **unit)

    def forget(self, digest: int, slot: int) -> None:
        """The unit at `slot` is here again, or too old."""
        if self._there[slot] and self._at.get(digest) == slot:
            del self._at[digest]
        self._there[slot] = False

    def restored(self, digest: int) -> None:
        """A unit with this digest is here again."""
        if digest in self._at:
            self.forget(digest, self._at[digest])

    def view(self, table: UnitTable) -> GhostUnits:
        """The lost units as a policy sees them."""
        rows = np.flatnonzero(self._there)
        return GhostUnits(table, {name: column[rows] for name, column in self._units.items()}, len(rows))

    def __len__(self) -> int:
        return len(self._pages)


class GhostUnits:
    """Lost units as columns. See `Units`. Thread rule: the index's thread, during one call of the policy."""

    def __init__(self, table: UnitTable, columns: Mapping[str, Column], count: int) -> None:
        self.now = table.now
        self.page_tokens = table.page_tokens
        self._count = count
        self.last_access, self.hits, self.depth, self.children = (columns[name] for name in _COLUMNS[:4])
        self.replay, self.checkpoint, self.lineage, self.grown, self.nbytes, self.digest = (columns[name] for name in _COLUMNS[4:])

    def __len__(self) -> int:
        return self._count

    @property
    def kind(self) -> Column:
        """A lost unit could go no more."""
        return np.full(self._count, UnitKind.NONE)

    @property
    def covered(self) -> Column:
        """Nothing below holds it."""
        return np.zeros(self._count, np.int64)
