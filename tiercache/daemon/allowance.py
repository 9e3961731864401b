"""Rate limit that all connections without an authenticated caller share."""

from __future__ import annotations

from collections import Counter
from typing import Final

_MAX_ORIGINS: Final = 4096
"""Origins whose usage is recorded; with more of them all usage is forgotten, so that its memory is bounded."""


class Allowance:
    """Token bucket in bytes, with the usage of each origin since the bucket was last full.

    It may be overdrawn by up to one second's worth, because the opening of a connection is not split. Until the debt is paid `left` is 0.

    Thread safety: one thread.
    """

    def __init__(self, most: int, per_second: int, now: float) -> None:
        """Start full, with `most` bytes; `now` is in seconds, of the clock that later calls use as well."""
        self._most: Final = most
        self._per_second: Final = per_second
        self._left: float = most
        self._at = now
        self._had: Counter[bytes] = Counter()

    def left(self, now: float) -> int:
        """Return the number of bytes that may be taken now; 0 in debt."""
        self._left = min(self._left + (now - self._at) * self._per_second, self._most)
        self._at = now
        if self._left == self._most:
            self._had.clear()
        return max(0, int(self._left))

    def take(self, origin: bytes, nbytes: int) -> None:
        """Record `nbytes` bytes from `origin`, whether or not they were left."""
        self._left = max(self._left - nbytes, -self._per_second)
        if len(self._had) > _MAX_ORIGINS:
            self._had.clear()
        self._had[origin] += nbytes

    def had(self, origin: bytes) -> int:
        """Return the number of bytes that `origin` has taken since the bucket was last full."""
        return self._had[origin]
