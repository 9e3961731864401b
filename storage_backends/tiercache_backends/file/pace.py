"""Choice between writing through the page cache and past it, by measurement."""

from __future__ import annotations

from threading import Lock
from typing import Final

TRIAL_BYTES: Final = 8 << 20
"""Bytes of a large batch that go the slower way when it is measured again: just enough to measure it."""
_TELLING_BYTES: Final = 4 << 20
_TRY_EVERY: Final = 16
_MEMORY: Final = 0.5


class Pace:
    """Measured speeds of the two ways to write blocks that are not in the page cache.

    Through the cache a burst runs at memory speed, and what was written can be read from there, until the kernel has to find fresh memory
    for it or makes writers wait for the disk. Past the cache the device sets the speed. No fixed rule is right on all machines and at all
    times, so both ways are measured, the slower one at every 16th choice.

    Thread safety: any thread may call.
    """

    def __init__(self) -> None:
        self._mutex = Lock()
        self._rates: dict[bool, float] = {}
        self._turns = 0

    def chooses_direct(self) -> tuple[bool, bool]:
        """Return whether the first `TRIAL_BYTES` of a batch should go past the page cache, and whether the rest should."""
        with self._mutex:
            self._turns += 1
            if len(self._rates) < 2:
                return bool(self._rates), False
            better = self._rates[True] > self._rates[False]
            return (better if self._turns % _TRY_EVERY else not better), better

    def note(self, direct: bool, nbytes: int, seconds: float) -> None:
        """Record the speed of a write; writes of less than 4 MiB are ignored, because they tell nothing."""
        if nbytes >= _TELLING_BYTES and seconds > 0:
            with self._mutex:
                rate = nbytes / seconds
                before = self._rates.get(direct, rate)
                # A drop counts fully, a rise by half: a way that became slow mostly stays so, while the cache is full of unwritten data.
                self._rates[direct] = min(rate, _MEMORY * before + (1 - _MEMORY) * rate)
