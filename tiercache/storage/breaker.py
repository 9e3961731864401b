"""When to leave a store alone that does not answer, and when to try again."""

from __future__ import annotations

import enum
from collections.abc import Callable
from math import inf
from threading import Lock
from typing import Final

MOST_PAUSE: Final = 30.0
_JITTER: Final = 0.25
"""The part of a pause that is random, so that the clients of a store that comes back do not all come at once."""


class Verdict(enum.Enum):
    """What a call may do."""

    PASS = enum.auto()
    """Go on."""
    FAIL = enum.auto()
    """Fail at once."""
    PROBE = enum.auto()
    """Fail at once as well, but first let somebody try whether the store is back, and tell `probed`."""


class Breaker:
    """Closed until `failures` calls in a row fail; then open for a pause; then half-open until its one probe tells how it went.

    A probe that fails opens it again for twice as long, up to MOST_PAUSE; so do calls that fail sooner after a probe went well than the
    last pause was long. What calls report that began before it opened changes nothing.

    Thread safety: any thread.
    """

    def __init__(self, failures: int, pause: float, *, clock: Callable[[], float], random: Callable[[], float]) -> None:
        """`clock`: seconds; `random`: from [0, 1)."""
        self._most_failures = failures
        self._first_pause = pause
        self._clock = clock
        self._random = random
        self._lock = Lock()
        self._failures = 0
        self._pause = pause
        self._until: float | None = None  # open until then; None: closed
        self._closed_at = -inf
        self._probing = False

    @property
    def closed(self) -> bool:
        """Do calls pass?"""
        return self._until is None

    def ask(self) -> Verdict:
        """May a call go on? PROBE is answered once, until `probed`."""
        with self._lock:
            if self._until is None:
                return Verdict.PASS
            if self._probing or self._clock() < self._until:
                return Verdict.FAIL
            self._probing = True
            return Verdict.PROBE

    def succeeded(self) -> None:
        """A call that passed got its answer."""
        with self._lock:
            self._failures = 0

    def failed(self) -> None:
        """A call that passed did not."""
        with self._lock:
            if self._until is None:
                self._failures += 1
                if self._failures >= self._most_failures:
                    self._trip()

    def trip(self) -> None:
        """Open it, if it is closed, whatever was before."""
        with self._lock:
            if self._until is None:
                self._trip()

    def probed(self, well: bool) -> None:
        """How the probe went. Without one under way it changes nothing."""
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
