"""Measured speeds of a worker, and whether they make a restore faster than a prefill."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from tiercache.core import Locations
from tiercache.policy import ModelProfile

HALF_LIFE_S: Final = 60.0
"""Seconds after which a measurement counts half."""
ENOUGH_S: Final = 0.02
"""Seconds that measurements must have taken together before a speed is known."""
MOST_S: Final = 10 * ENOUGH_S
"""Maximum number of seconds that measurements count for.

After a time in which nothing was measured, for example because nothing was worth a load, a speed is unknown
again: at the latest after log2(10) half-lives, 200 s.
"""
LEAST_BYTES: Final = 1 << 20
"""Smallest transfer that is measured. Smaller ones measure the call and not the bytes."""
LEAST_PREFILL_S: Final = 0.01
"""Shortest prefill that is measured, in seconds."""


class Speed:
    """Decayed mean of an amount (bytes or FLOPs) per second.

    Thread safety: any thread.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._amount = self._seconds = self._at = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Add the measurement of `amount` in `seconds`.

        A measurement without a duration, or without a finite amount, says nothing.
        """
        if not (seconds > 0.0 and 0.0 < amount < math.inf):
            return
        with self._lock:
            self._decay()
            self._amount += amount
            self._seconds += seconds
            scale = min(1.0, MOST_S / self._seconds)
            self._amount *= scale
            self._seconds *= scale

    def pace(self) -> float | None:
        """Return the seconds that one byte or FLOP takes; None while the speed is unknown."""
        with self._lock:
            self._decay()
            return self._seconds / self._amount if self._seconds >= ENOUGH_S else None

    def _decay(self) -> None:
        now = self._clock()
        factor = 0.5 ** (max(0.0, now - self._at) / HALF_LIFE_S)
        self._amount *= factor
        self._seconds *= factor
        self._at = now


class Speeds:
    """Speeds of the reads from storage, of the loads to the device, and of the prefill.

    Thread safety: any thread.
    """

    def __init__(self, profile: ModelProfile, readers: int, clock: Callable[[], float]) -> None:
        """Begin with unknown speeds. `readers` is the number of threads that read from storage."""
        self._profile = profile
        self._readers = readers
        self._clock = clock
        self._reads, self._loads, self._prefills = Speed(clock), Speed(clock), Speed(clock)
        self._last_load_end = -math.inf

    def note_read(self, nbytes: int, seconds: float) -> None:
        """Record that one thread has read `nbytes` from storage in `seconds`."""
        if nbytes >= LEAST_BYTES:
            self._reads.add(nbytes, seconds)

    def note_load(self, nbytes: int, begun: float) -> None:
        """Record that a load of `nbytes`, begun at clock time `begun`, is over now.

        With 0 bytes, the load is not measured.
        """
        # Loads are served one after the other, so a load that was begun early has waited for the one before.
        now = self._clock()
        if nbytes >= LEAST_BYTES:
            self._loads.add(nbytes, now - max(begun, self._last_load_end))
        self._last_load_end = now

    def note_prefill(self, start: int, end: int, seconds: float) -> None:
        """Record that the device has computed tokens [start, end) of a sequence in `seconds`."""
        if seconds >= LEAST_PREFILL_S:
            self._prefills.add(self._profile.flops(start, end), seconds)

    @property
    def prefill_flops_per_second(self) -> int | None:
        """FLOPs per second of the prefill; None while they are not known."""
        pace = self._prefills.pace()
        return None if not pace else round(1 / pace)

    def gains(
        self,
        start: int,
        ends: Locations,
        reads: Locations,
        loads: Locations,
        load_before: int = 0,
        part: int = 0,
    ) -> npt.NDArray[np.float64] | None:
        """Return the seconds that restores of `ends` tokens save over a restore of `start` tokens.

        Each of the longer restores reads `reads` bytes from storage and loads `loads` bytes to the device,
        both at the same time; the shorter one loads `load_before` bytes. `ends`, `reads`, `loads` and the
        result have shape [restores]. A gain is negative if computing the tokens behind `start` is faster. The
        result is None while the speed of the prefill, or of both legs, is unknown.

        One thread reads up to `part` bytes at once, so only larger reads are shared among the threads.
        """
        prefill, read, load = (one.pace() for one in (self._prefills, self._reads, self._loads))
        if prefill is None or (read is None and load is None):
            return None
        read, load = read or 0.0, load or 0.0
        longest = np.maximum(reads / self._readers, np.minimum(reads, part))
        restore = np.maximum(longest * read, loads * load)
        gained: npt.NDArray[np.float64] = (
            self._profile.flops(start, ends) * prefill + load_before * load - restore
        )
        return gained
