"""Counters of the reads and writes of a backend, for SGLang's metrics and for a log line."""

from __future__ import annotations

from collections import Counter, deque
from threading import Lock
from typing import Any, Final, NamedTuple

_KEPT: Final = 1024
"""Maximum number of samples between two calls of `take`, for reads and for writes each.

If there are more, the oldest are dropped.
"""


class TrafficSample(NamedTuple):
    """Sample of one read or write that moved at least one page."""

    pages: int
    """Number of pages that were moved."""
    gb_per_s: float
    """Speed in units of 10^9 bytes per second."""


class Traffic:
    """Totals of the pages read and written, for each pool.

    `sampled`: keep a sample of each call that moved pages, until the next `take`.

    Thread safety: any thread may call.
    """

    def __init__(self, *, sampled: bool) -> None:
        self._sampled = sampled
        self._lock = Lock()
        self._totals: Counter[tuple[str, str]] = Counter()
        self._reads: deque[TrafficSample] = deque(maxlen=_KEPT)
        self._writes: deque[TrafficSample] = deque(maxlen=_KEPT)

    def read(self, pool: str, wanted: int, arrived: int, nbytes: int, seconds: float) -> None:
        """Count a read of `wanted` pages, of which `arrived` pages were found.

        `nbytes`: bytes of the pages that were found. `seconds`: duration of the read.
        """
        with self._lock:
            self._totals[pool, "wanted"] += wanted
            self._totals[pool, "arrived"] += arrived
            self._note(self._reads, arrived, nbytes, seconds)

    def wrote(self, pool: str, given: int, stored: int, nbytes: int, seconds: float) -> None:
        """Count a write of `given` pages, of which `stored` pages were new and were stored.

        `nbytes`: bytes of the pages that were stored. `seconds`: duration of the write.
        """
        with self._lock:
            self._totals[pool, "given"] += given
            self._totals[pool, "stored"] += stored
            self._note(self._writes, stored, nbytes, seconds)

    def summary(self) -> str:
        """Return the totals as text, one phrase per pool; empty if nothing was read or written."""
        with self._lock:
            total = self._totals.copy()
        return "; ".join(
            f"pool {pool}: {total[pool, 'arrived']} of {total[pool, 'wanted']} pages read,"
            f" {total[pool, 'stored']} stored of {total[pool, 'given']} written"
            for pool in sorted({pool for pool, _ in total})
        )

    def take(self) -> Any:
        """Return the samples as SGLang's StorageMetrics, and forget them."""
        # Import StorageMetrics only when it is needed: the import loads half of SGLang.
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            reads, writes = list(self._reads), list(self._writes)
            self._reads.clear()
            self._writes.clear()
        return StorageMetrics(
            prefetch_pgs=[c.pages for c in reads],
            backup_pgs=[c.pages for c in writes],
            prefetch_bandwidth=[c.gb_per_s for c in reads],
            backup_bandwidth=[c.gb_per_s for c in writes],
        )

    def _note(self, calls: deque[TrafficSample], pages: int, nbytes: int, seconds: float) -> None:
        if self._sampled and pages:
            calls.append(TrafficSample(pages, nbytes / 1e9 / max(seconds, 1e-9)))
