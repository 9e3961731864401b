"""Arrivals of a source's requests: at the times of the source, or each after the answer to the one before."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from typing import Final

from tiercache.errors import ConfigError
from tiercache_lab.replay.base import Request
from tiercache_lab.replay.queueing.server import Job

MAX_TOKENS: Final = 2**27
"""Maximum number of tokens of the requests that have come and not begun. They take 1 GiB."""


class SourceArrivals:
    """Requests of a source, `speed` times as fast as the source has them.

    No two requests of a session are in the server at once. If `closed`, a request comes as long after the
    end of the session's previous request as the source has between the arrivals of the two: the source's
    times are pauses. Otherwise it comes at the source's time, and waits for the end of the previous one.

    Thread safety: one thread.
    """

    def __init__(self, requests: Iterator[Request], speed: float, *, closed: bool) -> None:
        self._requests, self._speed, self._closed = requests, speed, closed
        self._ahead = next(requests, None)
        # Entries are (arrival, number, request); no two have the same number.
        self._coming: list[tuple[float, int, Request]] = []
        self._count = self._tokens = 0
        self._busy: dict[int, deque[Request]] = {}
        """For each session with a request that has not ended: the requests behind that one."""
        self._ended: dict[int, tuple[float, float]] = {}
        """For each other session: the end of its last request, and the arrival that the source has for it."""

    @property
    def next(self) -> float:
        """Time of the next arrival, or an earlier time; infinite if nothing comes before a request ends.

        An arrival is in the past if the request had to wait for the previous one of its session.
        """
        coming = self._coming[0][0] if self._coming else math.inf
        return min(coming, self._time(self._ahead)) if self._ahead is not None else coming

    def take(self, now: float) -> list[Job]:
        """Return the requests that have come until `now`.

        Raises ConfigError if those that have come and not begun have too many tokens for this process.
        """
        while self._ahead is not None and self._time(self._ahead) <= now:
            request, self._ahead = self._ahead, next(self._requests, None)
            self._tokens += len(request.prompt) + len(request.output)
            if self._tokens > MAX_TOKENS:
                raise ConfigError(
                    f"after {now:,.0f} s the requests that wait have more than {MAX_TOKENS:,} tokens, because"
                    " they come faster than this machine serves them; use a lower --rate or a faster machine"
                )
            if request.session in self._busy:
                self._busy[request.session].append(request)
            else:
                self._come(request)
        found = []
        while self._coming and self._coming[0][0] <= now:
            arrival, _, request = heapq.heappop(self._coming)
            found.append(Job(request, arrival))
        return found

    def begun(self, request: Request) -> None:
        """Note that a request has begun, so that it no longer waits."""
        self._tokens -= len(request.prompt) + len(request.output)

    def ended(self, request: Request, now: float) -> None:
        """Note that a request has ended, so that the next one of its session may come."""
        behind = self._busy.pop(request.session)
        self._ended[request.session] = now, self._time(request)
        if behind:
            self._come(behind.popleft())
            self._busy[request.session] = behind

    def _come(self, request: Request) -> None:
        """Let a request come whose session has no other one in the server."""
        self._busy[request.session] = deque()
        arrival = self._time(request)
        ended, before = self._ended.pop(request.session, (-math.inf, -math.inf))
        if self._closed and ended > -math.inf:
            arrival = ended + arrival - before
        self._count += 1
        heapq.heappush(self._coming, (arrival, self._count, request))

    def _time(self, request: Request) -> float:
        return request.arrival / self._speed
