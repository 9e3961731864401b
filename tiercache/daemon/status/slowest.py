"""The slowest calls of the last hour, kept in a bounded place."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Container
from threading import Lock
from typing import Final

from tiercache.daemon.status.document import CallStatus

_SPAN_SECONDS: Final = 300.0
_SPANS: Final = 12
"""Number of spans, which together are an hour."""
_KEPT: Final = 8
"""Number of calls that each span keeps of each principal."""


class SlowestCalls:
    """The slowest calls of each principal in each span of five minutes within the last hour.

    No principal's calls displace another's, so what is kept of one says nothing about others.

    Thread safety: any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Use `clock` for the time when a call ends, in seconds since 1970."""
        self._clock: Final = clock
        self._lock: Final = Lock()
        self._spans: Final[deque[tuple[float, dict[str, list[tuple[float, int, CallStatus]]]]]] = deque(
            maxlen=_SPANS
        )
        self._number = 0

    def note(self, method: str, principal: str, seconds: float, *, failed: bool) -> None:
        """Note a call that has just ended, after so many seconds."""
        now = self._clock()
        span = now // _SPAN_SECONDS
        with self._lock:
            if not self._spans or self._spans[-1][0] != span:
                self._spans.append((span, {}))
            kept = self._spans[-1][1].setdefault(principal, [])
            if len(kept) == _KEPT and seconds <= kept[0][0]:
                return
            self._number += 1  # decides between calls that took equally long
            entry = seconds, self._number, CallStatus(now, method, principal, seconds, failed)
            (heapq.heappush if len(kept) < _KEPT else heapq.heappushpop)(kept, entry)

    def latest(self, principals: Container[str]) -> list[CallStatus]:
        """Return the calls of these principals that are kept, the slowest first."""
        oldest = self._clock() // _SPAN_SECONDS - _SPANS
        with self._lock:
            kept = [
                call
                for span, rows in self._spans
                if span > oldest
                for principal in rows
                if principal in principals
                for _, _, call in rows[principal]
            ]
        return sorted(kept, key=lambda call: -call.seconds)
