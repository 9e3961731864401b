"""Throughput of a store's transfers, as this process sees it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final


class WireSpeed:
    """Bytes a second that a store's transfers have together, while any of them is under way.

    Transfers of less than 1 MiB do not count: they tell the latency, which no compression shortens.

    Thread safety: any thread.
    """

    SMALLEST: Final = 1 << 20
    FIRST: Final = 0.5e9
    """Bytes a second that are assumed until 64 MiB were moved: 16 gets at once from a server on loopback."""
    _ENOUGH: Final = 64 << 20
    _WINDOW: Final = 1 << 30

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = 0.0
        self._bytes = 0.0
        self._seconds = 0.0

    def begin(self, nbytes: int) -> None:
        """Note that a transfer of about `nbytes` bytes begins."""
        if nbytes < self.SMALLEST:
            return
        with self._lock:
            if not self._under_way:
                self._since = self._clock()
            self._under_way += 1

    def end(self, nbytes: int, moved: int) -> None:
        """Note that a transfer is over, and how many of its bytes were moved; `nbytes` as in `begin`."""
        if nbytes < self.SMALLEST:
            return
        with self._lock:
            now = self._clock()
            self._under_way -= 1
            self._bytes += moved
            self._seconds += now - self._since
            self._since = now
            if self._bytes > self._WINDOW:
                self._bytes /= 2
                self._seconds /= 2

    @property
    def speed(self) -> float:
        """Bytes a second."""
        with self._lock:
            if self._bytes < self._ENOUGH or self._seconds <= 0:
                return self.FIRST
            return self._bytes / self._seconds
