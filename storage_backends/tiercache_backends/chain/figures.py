"""Figures of one tier: what it has read, written and missed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

from tiercache.storage.env import Env


class Figures:
    """Counters of a tier since the chain was opened.

    Thread safety: any thread.
    """

    def __init__(self, env: Env) -> None:
        self._env: Final = env
        self._lock: Final = threading.Lock()  # guards the fields from here on
        self._read_objects = self._read_bytes = self._written_objects = self._written_bytes = 0
        self.dropped = 0
        """Number of objects that should have been copied to the tier, and were not."""
        self._last_read: float | None = None

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
        """Count objects that were written, given the bytes of each."""
        with self._lock:
            self._written_objects += len(lengths)
            self._written_bytes += sum(lengths)

    def count_dropped(self, objects: int) -> None:
        """Count objects that should have been copied to the tier, and were not."""
        with self._lock:
            self.dropped += objects

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
