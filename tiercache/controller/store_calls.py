"""Calls on the store, on threads of their own: each has a deadline, and a store that hangs or fails is left alone for a while."""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from tiercache.controller.io_threads import IoThreads
from tiercache.core import Reason
from tiercache.storage.breaker import Breaker, Verdict

_log = logging.getLogger(__name__)

_MOST_FAILURES: Final = 5
"""Calls in a row that fail, each whole, until the store is left alone. One that hangs is enough."""
_FIRST_PAUSE: Final = 1.0
"""Seconds until a store that was left alone is tried for the first time; then twice as long each time, up to `breaker.MOST_PAUSE`."""
_MOST_HUNG: Final = 8
"""Calls that may hang at a time, each of which keeps a thread; with that many the store is not tried again before one has come back."""


@dataclass(eq=False, slots=True)
class StoreCall:
    """One call of the store. It ends with `landed` or `lost`, exactly one of them, and after a `lost` that had begun with `late`.

    `work` runs on a thread, must not raise, and touches nothing but the store. All others run on the owner's thread: `landed` is given what
    `work` returned, and says whether the store did its work; `lost` is told why, and whether the call had begun (then the store may still
    be using what it was given); `late` is given what `work` returned in the end. `probe` tells whether the store is back, on a thread, by
    doing a little of the same. A `patient` call that cannot begin waits until the store is back, instead of being lost. `objects`: how many
    it is about.

    Thread safety: owner's thread, but for `work` and `probe`.
    """

    work: Callable[[], Any]
    landed: Callable[[Any], bool]
    lost: Callable[[Reason, bool], None]
    late: Callable[[Any], None]
    probe: Callable[[], bool] | None = None
    patient: bool = False
    objects: int = 0
    begun: float | None = None
    thread: int = 0
    tries: bool = False
    """Does it try a store that is left alone?"""


class StoreCalls:
    """The calls of one kind (queries, reads or writes), first come first served.

    A call that has run for `deadline` seconds is lost, its thread is replaced, and the store is left alone: what waits for it is lost as
    well, or goes on waiting if it is patient, and nothing new begins until a probe has shown that the store is back. Calls that fail do the
    same, a few in a row. Nothing here waits.

    Thread safety: the owner's thread, but for `submit`.
    """

    def __init__(
        self,
        kind: str,
        threads: IoThreads,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
        deadline: float,
        hung: Callable[[], None],
    ) -> None:
        """`post` hands an event to the owner's thread; `hung` is called there with each call that hangs."""
        self.kind = kind
        self.waiting: deque[StoreCall] = deque()
        """Patient calls that wait for the store to come back."""
        self._threads = threads
        self._post = post
        self._clock = clock
        self._deadline = deadline
        self._on_hang = hung
        self._breaker = Breaker(_MOST_FAILURES, _FIRST_PAUSE, clock=clock, random=random.random)
        self._probe: Callable[[], bool] | None = None
        self._lock = threading.Lock()
        self._queued: deque[StoreCall] = deque()
        self._running: list[StoreCall] = []
        self._hung: list[StoreCall] = []

    @property
    def is_away(self) -> bool:
        """Is the store being left alone?"""
        return not self._breaker.closed

    @property
    def hung(self) -> int:
        """How many calls were lost and have not come back."""
        return len(self._hung)

    def submit(self, call: StoreCall) -> None:
        """Begin `call` as soon as a thread is free. While the store is left alone it is lost at once, or waits. Any thread, if patient."""
        with self._lock:
            away = self.is_away
            if not away:
                self._queued.append(call)
            elif call.patient:
                self.waiting.append(call)
        if not away:
            self._threads.submit(self._run)
        elif not call.patient:
            call.lost(Reason.UNAVAILABLE, False)

    def cancel(self, call: StoreCall) -> None:
        """Lose a call that has not begun; one that has goes on."""
        with self._lock:
            queued = call in self._queued
            if queued:
                self._queued.remove(call)
        if queued:
            call.lost(Reason.NONE, False)

    def watch(self) -> None:
        """Lose what has run too long; see whether a store that was left alone is back."""
        if self._running:
            now = self._clock()
            with self._lock:
                late = [call for call in self._running if call.begun is not None and now - call.begun >= self._deadline]
            for call in late:
                self._lose(call)
        if self.is_away:
            self._try_again()

    def close(self, timeout: float) -> bool:
        """Let what has begun or is queued end, for `timeout` seconds; False if a call still runs then."""
        return self._threads.close(timeout)

    def _run(self) -> None:
        with self._lock:
            if not self._queued:  # it was lost meanwhile
                return
            call = self._queued.popleft()
            call.begun, call.thread = self._clock(), threading.get_ident()
            self._running.append(call)
        value = call.work()
        self._post(partial(self._land, call, value))

    def _land(self, call: StoreCall, value: Any) -> None:
        if call in self._hung:
            self._hung.remove(call)
            call.late(value)
            return
        with self._lock:
            self._running.remove(call)
        self._settle(call, well=call.landed(value))

    def _settle(self, call: StoreCall, *, well: bool) -> None:
        """Let the breaker know how a call ended."""
        if call.tries:
            self._breaker.probed(well)
            if well:
                _log.warning("storage answers again (%s)", self.kind)
                with self._lock:
                    waiting, self.waiting = self.waiting, deque()
                    self._queued += waiting
                for _ in waiting:
                    self._threads.submit(self._run)
        elif well:
            self._breaker.succeeded()
        else:
            self._leave_alone(call, self._breaker.failed, "fails")

    def _lose(self, call: StoreCall) -> None:
        with self._lock:
            self._running.remove(call)
        self._hung.append(call)
        self._threads.replace(call.thread)
        self._on_hang()
        if call.tries:
            self._breaker.probed(False)
        else:
            self._leave_alone(call, self._breaker.trip, f"has not answered for {self._deadline:g} s")
        call.lost(Reason.TIMEOUT, True)

    def _leave_alone(self, call: StoreCall, tell: Callable[[], None], why: str) -> None:
        before = self.is_away
        tell()
        if before or not self.is_away:
            return
        _log.warning("storage %s (%s); it is left alone until it answers again", why, self.kind)
        self._probe = call.probe
        with self._lock:
            queued, self._queued = self._queued, deque()
            self.waiting += [other for other in queued if other.patient]
        for other in queued:
            if not other.patient:
                other.lost(Reason.UNAVAILABLE, False)

    def _try_again(self) -> None:
        """Once the pause is over: by a call that waits, else by the probe of the call that failed."""
        if self.hung >= _MOST_HUNG or not (self.waiting or self._probe) or self._breaker.ask() is not Verdict.PROBE:
            return
        if self.waiting:
            call = self.waiting.popleft()
        else:
            assert self._probe is not None
            call = StoreCall(self._probe, landed=bool, lost=lambda *_: None, late=lambda _: None)
        call.tries = True
        with self._lock:
            self._queued.append(call)
        self._threads.submit(self._run)
