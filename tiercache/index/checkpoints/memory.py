"""Memory of pages: which request computed the page that ends with a prefix."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from tiercache.index.node import Digests

_BITS: Final = 18
"""Binary logarithm of the number of pages that are remembered. A page takes 16 bytes."""
_SHIFT: Final = np.uint64(64 - _BITS)


class PageMemory:
    """Number of the request that last computed each page, for the last pages that were computed.

    A page is named by the digest of the prefix that it ends. The memory is a table of 2^18 places; a page
    overwrites what was in its place, so that old pages are forgotten by and by.

    Thread safety: one thread at a time.
    """

    def __init__(self) -> None:
        self._digests = np.zeros(1 << _BITS, np.uint64)
        self._requests = np.zeros(1 << _BITS, np.int64)

    def known(self, digests: Digests) -> int:
        """Return how many leading pages are remembered, up to the deepest one that is."""
        held = np.flatnonzero(self._digests[_places(digests)] == digests)
        return int(held[-1]) + 1 if len(held) else 0  # the page's digest is that of all pages before it, too

    def owner(self, digest: np.uint64) -> int | None:
        """Return the request that last computed the page; None if that is not remembered."""
        place = int(digest >> _SHIFT)
        return int(self._requests[place]) if self._digests[place] == digest else None

    def computed(self, digests: Digests, request: int) -> None:
        """Remember that `request` computes these pages."""
        places = _places(digests)
        self._digests[places] = digests
        self._requests[places] = request


def _places(digests: Digests) -> npt.NDArray[np.intp]:
    return (digests >> _SHIFT).astype(np.intp)
