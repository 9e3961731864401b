"""Circuit breaker, which decides when a store that does not answer is called again."""

from __future__ import annotations

import enum
from collections.abc import Callable
from math import inf
from threading import Lock
from typing import Final

MAX_PAUSE: Final = 30.0
"""Longest pause in seconds."""
_JITTER: Final = 0.25
"""Fraction of a pause that is random, so that clients do not all return at once."""


class Verdict(enum.Enum):
    """Answer of a breaker to a call."""

    PASS = enum.auto()
    """The call may be made."""
    FAIL = enum.auto()
    """The call must fail at once."""
    PROBE = enum.auto()
    """The call must fail at once, and its caller must start a probe: a call that tests the store.

    The caller reports the result of the probe to `probed`.
    """


class Breaker:
    """Circuit breaker: closed, open for a pause, then half-open until a probe reports.

        closed      calls pass; after `failures` failed calls in a row the breaker opens
        open        calls fail for the length of the pause
        half-open   one probe is under way, all calls fail; if the probe succeeds, the breaker closes,
                    otherwise it opens for twice as long, at most MAX_PAUSE

    The pause is also doubled if the breaker opens again after it was closed for less time than the last
    pause. While the breaker is open or half-open, reports of calls change nothing.

    Thread safety: any thread.
    """

    def __init__(
        self, failures: int, pause: float, *, clock: Callable[[], float], random: Callable[[], float]
    ) -> None:
        """Make a closed breaker.

        `pause` is the first pause in seconds. `clock` returns seconds, and `random` a number from [0, 1).
        """
        self._max_failures = failures
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
        """Return whether a call may be made. After a PROBE, calls get FAIL until `probed` is called."""
        with self._lock:
            if self._until is None:
                return Verdict.PASS
            if self._probing or self._clock() < self._until:
                return Verdict.FAIL
            self._probing = True
            return Verdict.PROBE

    def succeeded(self) -> None:
        """Report that the store has answered a call."""
        with self._lock:
            self._failures = 0

    def failed(self) -> None:
        """Report that the store has not answered a call."""
        with self._lock:
            if self._until is None:
                self._failures += 1
                if self._failures >= self._max_failures:
                    self._trip()

    def trip(self) -> None:
        """Open the breaker if it is closed, even if few calls have failed."""
        with self._lock:
            if self._until is None:
                self._trip()

    def probed(self, well: bool) -> None:
        """Report whether the probe succeeded (`well`). Without a probe under way this changes nothing."""
        with self._lock:
            if not self._probing:
                return
            self._probing = False
            if well:
                self._until, self._failures, self._closed_at = None, 0, self._clock()
            else:
                self._open(2 * self._pause)

    def _trip(self) -> None:
        # `again`: the breaker was closed for less time than its last pause.
        again = self._clock() - self._closed_at < self._pause
        self._open(2 * self._pause if again else self._first_pause)

    def _open(self, pause: float) -> None:
        self._pause = pause = min(MAX_PAUSE, pause)
        self._until = self._clock() + pause * (1 - _JITTER * self._random())
