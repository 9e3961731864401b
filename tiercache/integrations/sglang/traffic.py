"""Counts the reads and writes of a backend, for SGLang's metrics and for a log line."""

from __future__ import annotations

from collections import Counter, deque
from threading import Lock
from typing import Any, Final, NamedTuple

_KEPT: Final = 1024
"""Reads, and as many writes, that are kept at most between two calls of `take`; older ones are forgotten."""


class Call(NamedTuple):
    """One read or write that moved at least one page: its pages, and its speed in GB/s (10^9 bytes)."""

    pages: int
    gb_per_s: float


class Traffic:
    """Totals of reads and writes by pool and, with `sampled`, each call since the last `take`.

    Thread safety: any thread.
    """

    def __init__(self, *, sampled: bool) -> None:
        self._sampled = sampled
        self._lock = Lock()
        self._totals: Counter[tuple[str, str]] = Counter()
        self._reads: deque[Call] = deque(maxlen=_KEPT)
        self._writes: deque[Call] = deque(maxlen=_KEPT)

    def read(self, pool: str, wanted: int, arrived: int, nbytes: int, seconds: float) -> None:
        """Count a read of `wanted` pages, of which `arrived` came with `nbytes` bytes in all, in `seconds`."""
        with self._lock:
            self._totals[pool, "wanted"] += wanted
            self._totals[pool, "arrived"] += arrived
            self._note(self._reads, arrived, nbytes, seconds)

    def wrote(self, pool: str, given: int, stored: int, nbytes: int, seconds: float) -> None:
        """Count a write of `given` pages, of which `stored` were new and are kept now, `nbytes` bytes in all, in `seconds`."""
        with self._lock:
            self._totals[pool, "given"] += given
            self._totals[pool, "stored"] += stored
            self._note(self._writes, stored, nbytes, seconds)

    def summary(self) -> str:
        """Return a phrase for each pool; empty if nothing was read or written."""
        with self._lock:
            total = self._totals.copy()
        return "; ".join(
            f"pool {pool}: {total[pool, 'arrived']} of {total[pool, 'wanted']} pages read,"
            f" {total[pool, 'stored']} stored of {total[pool, 'given']} written"
            for pool in sorted({pool for pool, _ in total})
        )

    def take(self) -> Any:
        """Return the sampled calls as SGLang's StorageMetrics and forget them."""
        from sglang.srt.observability.metrics_collector import StorageMetrics  # late: it imports half of SGLang

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

    def _note(self, calls: deque[Call], pages: int, nbytes: int, seconds: float) -> None:
        if self._sampled and pages:
            calls.append(Call(pages, nbytes / 1e9 / max(seconds, 1e-9)))
