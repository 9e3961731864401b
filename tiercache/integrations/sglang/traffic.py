"""Pages that SGLang has read from the store and written to it, for its metrics and the log."""

from __future__ import annotations

from collections import Counter, deque
from threading import Lock
from typing import Any, Final

_KEPT: Final = 1024
"""Maximum number of samples between two calls of `take_samples`, for reads and for writes each.

If there are more, the oldest are dropped.
"""


class Traffic:
    """Totals of the pages read and written, for each pool.

    `sampled`: keep a sample of each call that moved pages, until the next `take_samples`: number of pages,
    and their speed in units of 10^9 bytes per second.

    Thread safety: any thread may call.
    """

    def __init__(self, *, sampled: bool) -> None:
        self._sampled = sampled
        self._lock = Lock()
        self._totals: Counter[tuple[str, str, str]] = Counter()
        self._samples = {way: deque[tuple[int, float]](maxlen=_KEPT) for way in ("read", "write")}

    def count(self, way: str, pool: str, wanted: int, moved: int, nbytes: int, seconds: float) -> None:
        """Count a read or a write of `wanted` pages, of which `moved` pages of `nbytes` bytes each moved.

        `way`: "read" or "write". A page moves if it is found, or newly stored.
        """
        with self._lock:
            self._totals[pool, way, "wanted"] += wanted
            self._totals[pool, way, "moved"] += moved
            if self._sampled and moved:
                self._samples[way].append((moved, moved * nbytes / 1e9 / max(seconds, 1e-9)))

    def summary(self) -> str:
        """Return the totals as text, one phrase per pool; empty if nothing was read or written."""
        with self._lock:
            total = self._totals.copy()
        return "; ".join(
            f"pool {pool}: {total[pool, 'read', 'moved']} of {total[pool, 'read', 'wanted']} pages read,"
            f" {total[pool, 'write', 'moved']} stored of {total[pool, 'write', 'wanted']} written"
            for pool in sorted({pool for pool, *_ in total})
        )

    def take_samples(self) -> Any:
        """Return the samples as SGLang's StorageMetrics, and forget them."""
        # Import StorageMetrics only when it is needed: the import loads half of SGLang.
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            reads, writes = (list(self._samples[way]) for way in ("read", "write"))
            for calls in self._samples.values():
                calls.clear()
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in reads],
            backup_pgs=[pages for pages, _ in writes],
            prefetch_bandwidth=[speed for _, speed in reads],
            backup_bandwidth=[speed for _, speed in writes],
        )
