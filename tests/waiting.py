"""Waiting for what happens on other threads and in other processes."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], seconds: float = 60, every: float = 0.01) -> None:
    """Wait until a condition holds; the longest wait is a guard, not a measure."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass in time"
        time.sleep(every)
