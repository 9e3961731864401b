"""Bounded lists of what has happened in a daemon: changes of its own figures, and the slowest calls."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from threading import Lock
from typing import Final, Literal

from tiercache.daemon.status.document import CallStatus, JournalEntry, TierStatus
from tiercache.metrics.table import HEALTHS
from tiercache.storage.base import TierReport

_KEPT: Final = 48
"""Number of entries that are kept of what happened once."""
_COUNTS_KEPT: Final = 16
"""Number of entries that are kept of counters, with which strangers must not push out the others."""
_TEXT: Final = 300
"""Maximum number of characters of an entry."""


class Journal:
    """List of the last entries, and the figures from which the next ones are derived.

    Thread safety: any thread, but `compare` from one at a time.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock: Final = clock
        self._lock: Final = Lock()
        self._entries: Final[deque[JournalEntry]] = deque(maxlen=_KEPT)
        self._counts: Final[deque[JournalEntry]] = deque(maxlen=_COUNTS_KEPT)
        self._health: dict[str, str] = {}
        self._counted: Mapping[str, float] = {}

    def add(self, text: str, *, is_warning: bool = False) -> None:
        """Add an entry about something ordinary, or about something that an operator should look at."""
        self._add(self._entries, "warning" if is_warning else "info", text)

    def compare(self, tiers: Sequence[TierStatus], counted: Mapping[str, float]) -> None:
        """Add entries for what has changed since the last call.

        `counted` has counters of things that should not happen, by the words for them.
        """
        for tier in tiers:
            before = self._health.get(tier.name, HEALTHS[0])
            if tier.health != before:
                self.add(in_words(tier), is_warning=tier.health != HEALTHS[0])
        self._health = {tier.name: tier.health for tier in tiers}
        for what, count in counted.items():
            if (new := round(count - self._counted.get(what, 0.0))) > 0:
                self._add(self._counts, "warning", f"{what}: {new:,}")
        self._counted = dict(counted)

    def latest(self) -> list[JournalEntry]:
        """Return the entries, the newest first."""
        with self._lock:
            entries = [*self._entries, *self._counts]
        entries.sort(key=lambda entry: entry.time)  # equal times stay in the order in which they came
        return entries[::-1]

    def _add(self, to: deque[JournalEntry], level: Literal["info", "warning"], text: str) -> None:
        with self._lock:
            to.append(JournalEntry(self._clock(), level, text[:_TEXT]))


def in_words(tier: TierStatus | TierReport) -> str:
    """Return the health of a tier as a sentence."""
    return f"tier {tier.name} is {tier.health}" + (f": {tier.why}" if tier.why else "")


_SPAN_SECONDS: Final = 300.0
_SPANS: Final = 12
"""Number of spans, which together are an hour."""
_CALLS_KEPT: Final = 8
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
            if len(kept) == _CALLS_KEPT and seconds <= kept[0][0]:
                return
            self._number += 1  # decides between calls that took equally long
            entry = seconds, self._number, CallStatus(now, method, principal, seconds, failed)
            (heapq.heappush if len(kept) < _CALLS_KEPT else heapq.heappushpop)(kept, entry)

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
