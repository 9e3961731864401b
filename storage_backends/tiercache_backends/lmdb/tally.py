"""Counts of what went wrong in this process."""

from __future__ import annotations

import logging
from collections import Counter
from errno import EAGAIN, EDQUOT, ENOSPC
from threading import Lock
from typing import Final

from tiercache.core import Outcome

_log = logging.getLogger(__name__)

_KINDS: Final = {ENOSPC: "full", EDQUOT: "full", EAGAIN: "busy"}
"""Failures that may pass, by errno: a full disk or map, and another writer that does not get on."""


class Tally:
    """Counts of the calls of this process that met a `full` disk or map, a `busy` store, or other `failures`.

    `chores_dropped`: small writes (see `Chores`) that waited and could not be done, because of a damaged page.

    Thread safety: any thread may call.
    """

    def __init__(self, path: str) -> None:
        self._path: Final = path
        self._mutex = Lock()
        self._counts: Counter[str] = Counter()

    def count(self, what: str, by: int = 1) -> None:
        """Add `by` to the count named `what`."""
        with self._mutex:
            self._counts[what] += by

    def failed(self, what: str, error: OSError) -> Outcome:
        """Count and log a failure, and return the outcome of the objects that it hit.

        THROTTLED: the failure may pass, and the same set may succeed later. ERROR: any other failure.
        """
        kind = _KINDS.get(error.errno or 0, "failures")
        self.count(kind)
        _log.warning("%s in %s failed: %s", what, self._path, error)
        return Outcome.ERROR if kind == "failures" else Outcome.THROTTLED

    def figures(self) -> dict[str, int]:
        """Return all counts by name."""
        with self._mutex:
            return {"full": 0, "busy": 0, "failures": 0, "chores_dropped": 0, **self._counts}
