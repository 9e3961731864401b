"""Figures of one tier: what it has read, written and missed, and what it may still write today."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

from tiercache.storage.env import Env

_DAY: Final = 86400.0
_BURST: Final = 24
"""Part of a day's budget that may be used at once: an hour's share, 1/24."""


class Figures:
    """Counters of a tier since the chain was opened, and its write budget.

    The budget is a number of bytes that grows by `per_day` bytes in a day, up to an hour's share. It may fall
    below 0 by what one call writes; the tier then takes nothing until the budget has grown above 0 again.

    Thread safety: any thread.
    """

    def __init__(self, env: Env, per_day: int | None) -> None:
        self._env: Final = env
        self._lock: Final = threading.Lock()  # guards the fields from here on
        self._read_objects = self._read_bytes = self._written_objects = self._written_bytes = 0
        self.dropped = 0
        """Number of objects that should have been copied to the tier, and were not."""
        self._last_read: float | None = None
        self._per_day = per_day
        self._budget = (per_day or 0) / _BURST
        self._filled_at = env.monotonic()

    @property
    def moved_bytes(self) -> int:
        """Bytes that were written to or read from the tier."""
        return self._written_bytes + self._read_bytes

    def note_read(self, lengths: Sequence[int]) -> None:
        """Count objects that were read, given the bytes of each."""
        if lengths:
            with self._lock:
                self._read_objects += len(lengths)
                self._read_bytes += sum(lengths)
                self._last_read = self._env.time_ns() / 1e9

    def note_written(self, lengths: Sequence[int]) -> None:
        """Count objects that were written, given the bytes of each, and charge the budget."""
        with self._lock:
            self._written_objects += len(lengths)
            self._written_bytes += sum(lengths)
            self._budget -= sum(lengths)

    def count_dropped(self, objects: int) -> None:
        """Count objects that should have been copied to the tier, and were not."""
        with self._lock:
            self.dropped += objects

    def limit(self, per_day: int | None) -> None:
        """Set the bytes that may be written in a day; None ends the limit."""
        with self._lock:
            if per_day != self._per_day:
                self._per_day, self._budget = per_day, (per_day or 0) / _BURST

    def has_budget(self) -> bool:
        """Return whether the tier may write."""
        with self._lock:
            if self._per_day is None:
                return True
            now = self._env.monotonic()
            grown = self._budget + (now - self._filled_at) * self._per_day / _DAY
            self._budget, self._filled_at = min(self._per_day / _BURST, grown), now
            return self._budget > 0

    def counters(self) -> dict[str, Any]:
        """Return the counters by their names in `TierReport`."""
        with self._lock:
            return {
                "read_objects": self._read_objects,
                "read_bytes": self._read_bytes,
                "written_objects": self._written_objects,
                "written_bytes": self._written_bytes,
                "dropped": self.dropped,
                "last_read": self._last_read,
            }
