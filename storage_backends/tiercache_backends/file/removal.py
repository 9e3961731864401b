"""Takes objects out of a `file` store for good, and sees to what they leave behind: records, blocks, and a count of what went wrong."""

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
    """Removes what was taken out of the holdings, and proves blocks that held a damaged object.

    Thread safety: any thread.
    """

    def __init__(self, path: str, catalog: Catalog, slabs: Slabs, holdings: Holdings) -> None:
        self._path = path
        self._catalog = catalog
        self._slabs = slabs
        self._holdings = holdings

    def forget(self, departure: Departure, *, keep: bool = True) -> bool:
        """Remove objects that were taken out from the catalog. Where that fails they come back, or without `keep` stay out of sight."""
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
        """Drop damaged objects, and prove their blocks when nobody reads them any more: how many there were."""
        departure = self._holdings.take_out_suspects(damaged)
        self.forget(departure, keep=False)
        return len(departure.leavers)

    def settle(self, suspects: Sequence[Extent]) -> None:
        """Prove blocks that held a damaged object, and retire those that fail."""
        for extent in suspects:
            if self._slabs.proven(extent):
                self._holdings.give(extent)
            else:
                _log.error("%d blocks in %s do not keep their data and are retired", extent.blocks, self._slabs.locate(extent)[0])
                self._holdings.retire(extent)

    def failed(self, call: str, error: OSError) -> Outcome:
        """Count a failure. A full disk is a set that comes back later; anything else is an error. Neither touches what is stored."""
        _log.warning("a %s in %s failed: %s", call, self._path, error)
        self._holdings.count(f"{call}_failures", 1)
        return Outcome.THROTTLED if error.errno in (ENOSPC, EDQUOT) else Outcome.ERROR
