"""Memory of evictions: digests of lost pages, and descriptions of lost units.

A unit is what one eviction takes. A unit is *lost* if no hit can end at its depth after its eviction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import repeat
from struct import Struct
from typing import Final

import numpy as np
import numpy.typing as npt

from tiercache.index.node import Digests
from tiercache.policy import Reuse, UnitKind

_COLUMNS: Final = tuple("last_access" if name == "age" else name for name in Reuse._fields[:-1])
"""Fields of `Reuse` but `evicted`, with the tick of the last access in place of the age."""
_OWN: Final = _COLUMNS.index("last_access")
"""Number of fields before the age, which are copied as they are."""
_ROW: Final = Struct(f"={len(_COLUMNS)}q")


class Ghosts:
    """Memory of the pages lost in the last `requests` requests, and of the last `units` lost units.

    At most `pages` pages are remembered. A page takes about 150 bytes, a unit about 200 bytes. Thread safety:
    the index's thread only.
    """

    def __init__(self, requests: int = 1000, pages: int = 1 << 17, units: int = 4096) -> None:
        self._max_requests = requests
        self._max_pages = pages
        self._request = 0
        self._pages: dict[int, int] = {}
        """By digest: number of the request during which the page was last lost."""
        self._edges: deque[tuple[int, list[int]]] = deque()
        """Lost edges, oldest first: the number of the request, and the digests of the edge's pages."""
        self._held = 0
        """Number of digests in `_edges`, repeated ones included."""
        # The rows of lost units are a ring. Row `_next` is the oldest one, and is overwritten next.
        self._units = np.zeros((units, len(_COLUMNS)), np.int64)
        self._there = np.zeros(units, np.bool_)
        """Whether each row has a unit."""
        self._digest = [0] * units
        """Digest of the unit in each row."""
        self._at: dict[int, int] = {}
        """Row of a unit in `_units`, by digest."""
        self._next = 0

    def begin(self) -> None:
        """Record that a request begins, and forget pages that were lost too many requests ago."""
        self._request += 1
        self._trim()

    def _trim(self) -> None:
        while self._edges and (
            self._edges[0][0] <= self._request - self._max_requests or self._held > self._max_pages
        ):
            stamp, digests = self._edges.popleft()
            self._held -= len(digests)
            # A page that was lost again during a later request stays: its number is not `stamp`.
            for digest in digests:
                if self._pages.get(digest) == stamp:
                    del self._pages[digest]

    def note_pages(self, digests: Digests) -> None:
        """Remember that these pages were lost."""
        edge = digests.tolist()[: self._max_pages]
        self._pages.update(zip(edge, repeat(self._request)))
        self._edges.append((self._request, edge))
        self._held += len(edge)
        if self._held > self._max_pages:
            self._trim()

    def note_unit(self, digest: int, unit: Reuse, now: int) -> None:
        """Remember the lost unit that ended with the prefix `digest`.

        `unit` describes it at the tick `now`.
        """
        slot, self._next = self._next, (self._next + 1) % len(self._digest)
        self.forget(self._digest[slot], slot)
        if digest in self._at:
            self.forget(digest, self._at[digest])
        self._digest[slot], self._at[digest], self._there[slot] = digest, slot, True
        _ROW.pack_into(self._units.data, slot * _ROW.size, *unit[:_OWN], now - unit.age, unit.digest)

    @property
    def has_units(self) -> bool:
        """Whether any lost unit is remembered."""
        return bool(self._at)

    def repeated(self, digests: Sequence[int]) -> int:
        """Return how many leading pages of `digests` are remembered as lost."""
        pages = self._pages
        for count, digest in enumerate(digests):
            if digest not in pages:
                return count
        return len(digests)

    def deepest(self, digests: Sequence[int]) -> int | None:
        """Return the last of `digests` with which a lost unit ended, or None."""
        at = self._at
        return next((digest for digest in reversed(digests) if digest in at), None)

    def reuse(self, digest: int, now: int) -> Reuse:
        """Return and forget the description of the lost unit with this digest."""
        slot = self._at[digest]
        *unit, last_access, signature = self._units[slot].tolist()
        self.forget(digest, slot)
        return Reuse._make((*unit, now - last_access, signature, True))

    def forget(self, digest: int, slot: int) -> None:
        """Forget the unit in row `slot`, which ended with the prefix `digest`."""
        if self._there[slot] and self._at.get(digest) == slot:
            del self._at[digest]
        self._there[slot] = False

    def restored(self, digest: int) -> None:
        """Forget the lost unit with this digest, if any, because the index can answer a hit there again."""
        if digest in self._at:
            self.forget(digest, self._at[digest])

    def view(self, now: int, page_tokens: int) -> GhostUnits:
        """Return the lost units as a policy sees them at the tick `now`, with `page_tokens` tokens a page."""
        return GhostUnits(now, page_tokens, self._units[self._there])

    def __len__(self) -> int:
        return len(self._pages)


class GhostUnits:
    """Lost units as columns; `Units` describes the columns.

    Thread safety: the index's thread, during one call of the policy.
    """

    def __init__(self, now: int, page_tokens: int, rows: npt.NDArray[np.int64]) -> None:
        self.now = now
        self.page_tokens = page_tokens
        (
            self.depth, self.replay, self.children, self.hits, self.checkpoint, self.lineage, self.grown,
            self.ending, self.last_access, self.digest,
        ) = rows.T  # fmt: skip
        nothing = np.zeros(len(rows), np.int64)
        # What is not remembered: when a unit was made, what was expected of it, and its copies and size.
        self.created = self.expected = self.covered = nothing
        self.nbytes = nothing + 1
        self.kind = nothing + UnitKind.NONE  # it cannot be evicted

    def __len__(self) -> int:
        return len(self.kind)
