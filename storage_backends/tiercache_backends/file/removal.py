"""Removal of objects from a `file` store for good: their records, their blocks, and counts of what failed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from errno import EDQUOT, ENOSPC

from tiercache.core import Outcome
from tiercache_backends.file.catalog import Catalog
from tiercache_backends.file.holdings import Departure, Holdings, Pin
from tiercache_backends.file.slabs import Slabs
from tiercache_backends.file.space import Extent

_log = logging.getLogger(__name__)


class Removal:
    """Removal of objects that were taken out of the holdings, with a proof of blocks that held a damaged object.

    Thread safety: any thread may call.
    """

    def __init__(self, path: str, catalog: Catalog, slabs: Slabs, holdings: Holdings) -> None:
        self._path = path
        self._catalog = catalog
        self._slabs = slabs
        self._holdings = holdings

    def forget(self, departure: Departure, *, keep: bool = True) -> bool:
        """Remove objects that were taken out from the catalog as well; return whether that succeeded.

        If it fails, they become resident again, or without `keep` they stay unreadable.
        """
        if departure.leavers:
            try:
                self._catalog.apply(removals=departure.numbers)
            except OSError as error:
                self.failed("remove", error)
                (self._holdings.restored if keep else self._holdings.strand)(departure)
                return False
        self.settle(self._holdings.removed(departure))
        return True

    def give_up(self, damaged: Sequence[Pin]) -> int:
        """Remove damaged objects, prove their blocks once they have no reader, and return how many objects there were."""
        departure = self._holdings.take_out_suspects(damaged)
        self.forget(departure, keep=False)
        return len(departure.leavers)

    def settle(self, suspects: Sequence[Extent]) -> None:
        """Prove blocks that held a damaged object: free those that keep their data, and retire the others."""
        for extent in suspects:
            if self._slabs.proven(extent):
                self._holdings.give(extent)
            else:
                _log.error("%d blocks in %s do not keep their data and are retired", extent.blocks, self._slabs.locate(extent)[0])
                self._holdings.retire(extent)

    def failed(self, call: str, error: OSError) -> Outcome:
        """Log and count a failure; return THROTTLED for a full disk or quota, so that a set is tried again later, else ERROR.

        Neither affects what is stored.
        """
        _log.warning("a %s in %s failed: %s", call, self._path, error)
        self._holdings.count(f"{call}_failures", 1)
        return Outcome.THROTTLED if error.errno in (ENOSPC, EDQUOT) else Outcome.ERROR
