"""Through the page cache or past it: measured, not decided."""

from __future__ import annotations

from threading import Lock
from typing import Final

TRIAL_BYTES: Final = 8 << 20
"""Of a large batch so much goes the slower way when that is tried again: enough to tell, and no more."""
_TELLING_BYTES: Final = 4 << 20
_TRY_EVERY: Final = 16
_MEMORY: Final = 0.5


class Pace:
    """Which way to write blocks that are not in the page cache.

    Through the cache a burst runs at memory speed, and what was written can be read from there; until the kernel has to fetch fresh
    memory for it, or makes writers wait for the disk. Past it the device sets the speed. No fixed rule is right on all machines and at all
    times, so both are measured, the slower one every now and then.

    Thread safety: any thread.
    """

    def __init__(self) -> None:
        self._mutex = Lock()
        self._rates: dict[bool, float] = {}
        self._turns = 0

    def chooses_direct(self) -> tuple[bool, bool]:
        """Is the beginning of a batch, its first `TRIAL_BYTES`, to go past the page cache this time? And the rest of it?"""
        with self._mutex:
            self._turns += 1
            if len(self._rates) < 2:
                return bool(self._rates), False
            better = self._rates[True] > self._rates[False]
            return (better if self._turns % _TRY_EVERY else not better), better

    def note(self, direct: bool, nbytes: int, seconds: float) -> None:
        """So it went. Small writes say nothing."""
        if nbytes >= _TELLING_BYTES and seconds > 0:
            with self._mutex:
                rate = nbytes / seconds
                before = self._rates.get(direct, rate)
                # What has become slow mostly stays so: the cache is full of what the disk has not taken yet.
                self._rates[direct] = min(rate, _MEMORY * before + (1 - _MEMORY) * rate)
