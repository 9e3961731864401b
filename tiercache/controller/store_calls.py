"""Calls of the store on background threads. Each call has a deadline, and a store that hangs or fails is left alone for a while."""

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
"""Number of calls that must fail as a whole, in a row, before the store is left alone. A single call that hangs is enough."""
_FIRST_PAUSE: Final = 1.0
"""Seconds until a store that is left alone is tried for the first time; the pause doubles each time, up to `breaker.MOST_PAUSE`."""
_MOST_HUNG: Final = 8
"""Most calls that may hang at a time, each on a thread of its own. With that many, the store is not tried until one has returned."""


@dataclass(eq=False, slots=True)
class StoreCall:
    """One call of the store. It ends with exactly one of `landed` and `lost`; `late` follows if a lost call returns in the end.

    `work` runs on a background thread, must not raise, and touches nothing but the store. `landed`, `lost` and `late` run on the owner's
    thread. `landed` gets what `work` returned, and returns whether the store did its work. `lost` gets the reason, and whether the call had
    begun (then the store may still be using what it was given). `late` gets what `work` of a lost call returned in the end. `probe` runs on
    a background thread and returns whether the store is back, by a small call of the same kind. A `patient` call that cannot begin waits
    until the store is back, instead of being lost. `objects`: number of objects that the call is about. `begun`: clock time in seconds at
    which `work` began. `thread`: identity of the thread that runs it.

    Thread safety: the owner's thread, except `work` and `probe`.
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
    """Whether this call tries a store that is being left alone."""


class StoreCalls:
    """Queue of the store calls of one kind (queries, reads or writes), first come first served.

    A call that has run for `deadline` seconds is lost, its thread is replaced, and the store is left alone: queued calls are lost as well,
    or keep waiting if they are patient, and no other call begins until a trial has shown that the store is back. Several failed calls in a
    row have the same effect. No method waits, except `close`.

    Thread safety: the owner's thread; `submit` of a patient call from any thread.
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
        """Keep the callbacks: `post` hands an event to the owner's thread; `hung` is called there, once per call that hangs."""
        self.kind = kind
        self.waiting: deque[StoreCall] = deque()
        """Patient calls that wait until the store is back."""
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
        """Whether the store is being left alone."""
        return not self._breaker.closed

    @property
    def hung(self) -> int:
        """Number of calls that were lost while they ran and have not returned yet."""
        return len(self._hung)

    def submit(self, call: StoreCall) -> None:
        """Begin `call` as soon as a thread is free. While the store is left alone, the call is lost at once, or waits if it is patient.

        Any thread may submit a patient call; other calls come from the owner's thread.
        """
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
        """Lose `call` if it has not begun; otherwise let it go on."""
        with self._lock:
            queued = call in self._queued
            if queued:
                self._queued.remove(call)
        if queued:
            call.lost(Reason.NONE, False)

    def watch(self) -> None:
        """Lose the calls that have run too long, and try a store that is being left alone when its pause is over."""
        if self._running:
            now = self._clock()
            with self._lock:
                late = [call for call in self._running if call.begun is not None and now - call.begun >= self._deadline]
            for call in late:
                self._lose(call)
        if self.is_away:
            self._try_again()

    def close(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for running and queued calls to end; return False if one still runs then."""
        return self._threads.close(timeout)

    def _run(self) -> None:
        with self._lock:
            if not self._queued:  # the call was cancelled or lost meanwhile
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
        """Tell the breaker how a call ended; when a trial went well, queue the patient calls again."""
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
        """Try the store once the pause is over, by a waiting call or else by the probe of the call that failed."""
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
