"""Counters, gauges and histograms: numbers protected by locks, without any metrics package.

`families` gives these instruments names and labels.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from threading import Lock
from typing import Final

SECONDS: Final = (25e-6, 100e-6, 250e-6, 1e-3, 2.5e-3, 10e-3, 25e-3, 0.1, 0.25, 1.0, 2.5, 10.0, 60.0)
"""Upper ends of the buckets of every histogram, in seconds.

The first end is about the duration of a call of the memory store. The last is the default of `limits.call`.
"""


class Counter:
    """Number that only grows.

    Thread safety: any thread.
    """

    __slots__ = ("_lock", "_value")

    def __init__(self) -> None:
        self._lock: Final = Lock()
        self._value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add `amount`, which must not be negative unless this is a gauge."""
        with self._lock:
            self._value += amount

    @property
    def value(self) -> float:
        """Current value."""
        return self._value


class Gauge(Counter):
    """Number that grows, shrinks or is set.

    Thread safety: any thread.
    """

    __slots__ = ()

    def dec(self, amount: float = 1.0) -> None:
        """Subtract `amount`."""
        self.inc(-amount)

    def set(self, value: float) -> None:
        """Replace the value."""
        with self._lock:
            self._value = float(value)


class Histogram:
    """Durations in seconds, counted in the buckets of `SECONDS` and summed.

    Thread safety: any thread.
    """

    __slots__ = ("_counts", "_lock", "_sum")

    def __init__(self) -> None:
        self._lock: Final = Lock()
        self._counts: Final = [0] * (len(SECONDS) + 1)  # the last bucket has no upper end
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        # As in Prometheus, a duration equal to the upper end of a bucket counts in that bucket.
        bucket = bisect_left(SECONDS, seconds)
        with self._lock:
            self._counts[bucket] += 1
            self._sum += seconds

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Return the buckets and the sum of all durations, both read at the same moment.

        A bucket is a pair: its upper end as text, and the number of durations up to that end.
        """
        with self._lock:
            counts, total = list(self._counts), self._sum
        ends = [*map(str, SECONDS), "+Inf"]
        return list(zip(ends, map(float, accumulate(counts)), strict=True)), total


Instrument = Counter | Gauge | Histogram
