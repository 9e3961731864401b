"""What SGLang's metrics want to know of a backend."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple

_KEPT: Final = 1024
"""Calls between two visits of the collector, at most; older ones are forgotten."""


class Call(NamedTuple):
    """One read or write: pages that arrived, and GB/s."""

    pages: int
    gb_per_s: float


class Traffic:
    """Reads and writes since somebody asked last. Thread rule: any thread."""

    def __init__(self) -> None:
        self.reads: deque[Call] = deque(maxlen=_KEPT)
        self.writes: deque[Call] = deque(maxlen=_KEPT)

    def take(self) -> Any:
        """Them as SGLang's StorageMetrics; the count starts anew."""
        from sglang.srt.observability.metrics_collector import StorageMetrics  # late: it imports half of SGLang

        reads, writes = _drained(self.reads), _drained(self.writes)
        return StorageMetrics(
            prefetch_pgs=[c.pages for c in reads],
            backup_pgs=[c.pages for c in writes],
            prefetch_bandwidth=[c.gb_per_s for c in reads],
            backup_bandwidth=[c.gb_per_s for c in writes],
        )


def _drained(calls: deque[Call]) -> list[Call]:
    return [calls.popleft() for _ in range(len(calls))]
