"""Circuit breaker: when to leave a store alone that does not answer, and when to try it again."""

from __future__ import annotations

import enum
from collections.abc import Callable
from math import inf
from threading import Lock
from typing import Final

MOST_PAUSE: Final = 30.0
"""Longest pause in seconds."""
_JITTER: Final = 0.25
"""Part of a pause that is random, so that the clients of a store that comes back do not all return at once."""


class Verdict(enum.Enum):
    """Answer of a breaker to a call."""

    PASS = enum.auto()
    """The call may go on."""
    FAIL = enum.auto()
    """The call must fail at once."""
    PROBE = enum.auto()
    """The call must fail at once as well, but first start a probe of whether the store is back, whose result goes to `probed`."""


class Breaker:
    """Circuit breaker: closed until `failures` calls in a row fail, then open for a pause, then half-open until its one probe reports.

    A probe that fails opens it again for twice as long, up to MOST_PAUSE. So do calls that fail after a successful probe, if they open it
    sooner than the last pause was long. Reports of calls that arrive while it is open or half-open change nothing.

    Thread safety: any thread.
    """

    def __init__(self, failures: int, pause: float, *, clock: Callable[[], float], random: Callable[[], float]) -> None:
        """Make a closed breaker. `pause`: seconds; `clock`: returns seconds; `random`: returns a number from [0, 1)."""
        self._most_failures = failures
        self._first_pause = pause
        self._clock = clock
        self._random = random
        self._lock = Lock()
        self._failures = 0
        self._pause = pause
        self._until: float | None = None  # clock reading until which the breaker is open; None: closed
        self._closed_at = -inf
        self._probing = False

    @property
    def closed(self) -> bool:
        """Whether calls pass."""
        return self._until is None

    def ask(self) -> Verdict:
        """Return whether a call may go on. PROBE is returned to one call only, until `probed` reports."""
        with self._lock:
            if self._until is None:
                return Verdict.PASS
            if self._probing or self._clock() < self._until:
                return Verdict.FAIL
            self._probing = True
            return Verdict.PROBE

    def succeeded(self) -> None:
        """Report that a call that passed got its answer."""
        with self._lock:
            self._failures = 0

    def failed(self) -> None:
        """Report that a call that passed got no answer."""
        with self._lock:
            if self._until is None:
                self._failures += 1
                if self._failures >= self._most_failures:
                    self._trip()

    def trip(self) -> None:
        """Open the breaker, if it is closed, however few calls have failed."""
        with self._lock:
            if self._until is None:
                self._trip()

    def probed(self, well: bool) -> None:
        """Report the result of the probe. Without a probe under way this changes nothing."""
        with self._lock:
            if not self._probing:
                return
            self._probing = False
            if well:
                self._until, self._failures, self._closed_at = None, 0, self._clock()
            else:
                self._open(2 * self._pause)

    def _trip(self) -> None:
        again = self._clock() - self._closed_at < self._pause
        self._open(2 * self._pause if again else self._first_pause)

    def _open(self, pause: float) -> None:
        self._pause = pause = min(MOST_PAUSE, pause)
        self._until = self._clock() + pause * (1 - _JITTER * self._random())
