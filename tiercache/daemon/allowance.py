"""What those whom nobody knows may make gRPC work: so many bytes a second, together."""

from __future__ import annotations

from collections import Counter
from typing import Final

_ORIGINS: Final = 4096
"""So many are told apart; then all begin anew."""


class Allowance:
    """Bytes for all strangers, that grow with time up to a most, and who had how many of them since there was no lack.

    It may be overdrawn, by a second's worth, for a beginning is not left half said; then nobody has a turn until that is made up for.

    Thread rule: one thread.
    """

    def __init__(self, most: int, per_second: int, now: float) -> None:
        """`now`: a clock's seconds, as everywhere here."""
        self._most: Final = most
        self._per_second: Final = per_second
        self._left: float = most
        self._at = now
        self._had: Counter[bytes] = Counter()

    def left(self, now: float) -> int:
        """So many bytes may be taken by whoever is next; 0 where more is owed."""
        self._left = min(self._left + (now - self._at) * self._per_second, self._most)
        self._at = now
        if self._left == self._most:
            self._had.clear()
        return max(0, int(self._left))

    def take(self, origin: bytes, nbytes: int) -> None:
        """Count what was taken."""
        self._left = max(self._left - nbytes, -self._per_second)
        if len(self._had) > _ORIGINS:
            self._had.clear()
        self._had[origin] += nbytes

    def had(self, origin: bytes) -> int:
        """How much was taken from there since there was no lack; who had least is next."""
        return self._had[origin]
