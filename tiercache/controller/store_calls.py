"""Calls of the store on background threads, so that the engine's thread never waits for the store.

The engine's thread owns the queues of calls, and is called the owner's thread here. Each call has a deadline.
After a hang or several failures, calls are *suspended*: no call begins until a *trial* (one call, or a small
probe) shows that the store works again.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from tiercache.controller.ranks.landings import ENDED, LATE, PENDING, UNDONE, AgreedLandings, Codes
from tiercache.core import Outcome, Reason
from tiercache.storage.guard import Breaker
from tiercache.threads import IoThreads

_log = logging.getLogger(__name__)
TAKEN: Final = (Outcome.STORED, Outcome.HIT)
"""Outcomes of a set that show that the object is in storage."""
_MAX_FAILURES: Final = 5
"""Number of successive calls that must fail before calls are suspended. One hang suspends them at once.

A call fails if all of its outcomes are errors.
"""
_FIRST_PAUSE: Final = 1.0
"""Seconds from the suspension of calls to the first trial.

The pause doubles with each trial that fails, up to `guard.MAX_PAUSE`.
"""
_MAX_HUNG: Final = 8
"""Maximum number of hung calls, each on a thread of its own.

At the maximum, no trial begins until a hung call returns.
"""


@dataclass(eq=False, slots=True)
class StoreCall:
    """One call of the store.

    A call ends with exactly one of `landed` and `lost`. If a lost call returns at last, `late` follows.

    Thread safety: the owner's thread. Only `work` and `probe` run on a background thread.
    """

    work: Callable[[], Any]
    """Function that calls the store. It must not raise, and touches only the store."""
    landed: Callable[[Any], bool]
    """Callback with the result of `work`; it returns whether the store did its work."""
    lost: Callable[[Reason, bool], None]
    """Callback with the reason, and whether `work` had begun.

    If `work` had begun, the store may still use the buffers of the call.
    """
    late: Callable[[Any], object] = lambda _: None
    """Callback with the result of `work`, when a lost call returns at last."""
    probe: Callable[[], bool] | None = None
    """Function that makes a small call of the same kind, and returns whether the call worked."""
    codes: Codes = Codes()  # noqa: RUF009 (immutable)
    """How the result is written as numbers, for ranks that agree on it."""
    is_held: Callable[[], bool] = lambda: False
    """Function that says whether the store may still use the buffers, although `work` has returned."""
    patient: bool = False
    """Whether the call waits while calls are suspended. A call that is not patient is lost instead."""
    begun: float | None = None
    """Clock time in seconds at which `work` began; None before."""
    thread: int = 0
    """Identity of the thread that runs `work`."""
    is_trial: bool = False
    """Whether this call is the trial that may end a suspension."""


class StoreCalls:
    """Queue of the store calls of one kind (queries, reads or writes), served in the order of submission.

    A call that has run for `deadline` seconds hangs: it is lost, its thread is replaced, and calls are
    suspended. Several failed calls in a row suspend calls too. At a suspension, patient calls in the queue
    keep waiting, and the others are lost. Then no call begins until a trial has shown that the store works
    again. No method waits, except `close`.

    Thread safety: the owner's thread. Any thread may submit a patient call.
    """

    def __init__(
        self,
        kind: str,
        threads: IoThreads,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
        deadline: float,
        on_hang: Callable[[], None],
    ) -> None:
        """Make an empty queue of calls of `kind`, which run on `threads`.

        `post` hands an event to the owner's thread. `on_hang` is called on the owner's thread, once for each
        call that hangs.
        """
        self.kind = kind
        self.waiting: deque[StoreCall] = deque()
        """Patient calls that wait until the suspension ends."""
        self._threads = threads
        self._post = post
        self._clock = clock
        self._deadline = deadline
        self._on_hang = on_hang
        self._breaker = Breaker(_MAX_FAILURES, _FIRST_PAUSE, clock=clock, random=random.random)
        self._probe: Callable[[], bool] | None = None
        # `_lock` guards `_queued`, `_running` and additions to `waiting`, and is held for list operations
        # only: no callback and no call of the store runs under it.
        self._lock = threading.RLock()
        self._queued: deque[StoreCall] = deque()
        self._running: list[StoreCall] = []
        self._hung: list[StoreCall] = []

    @property
    def is_suspended(self) -> bool:
        """Whether calls are suspended."""
        return not self._breaker.closed

    @property
    def is_held_up(self) -> bool:
        """Whether calls are suspended, and a waiting call can be the next trial."""
        return self.is_suspended and bool(self.waiting)

    @property
    def hung(self) -> int:
        """Number of calls that were lost while they ran and have not returned yet."""
        return len(self._hung)

    def submit(self, call: StoreCall) -> None:
        """Begin `call` as soon as a thread is free.

        While calls are suspended, a patient call waits, and another call is lost at once. Any thread may
        submit a patient call; other calls come from the owner's thread.
        """
        with self._lock:
            suspended = self.is_suspended
            if not suspended:
                self._begin(call)
            elif call.patient:
                self.waiting.append(call)
        if suspended and not call.patient:
            call.lost(Reason.UNAVAILABLE, False)

    def _begin(self, call: StoreCall) -> None:
        with self._lock:
            self._queued.append(call)
        self._threads.submit(self._run)

    def cancel(self, call: StoreCall) -> None:
        """End `call` as lost if it has not begun. A call that has begun goes on."""
        with self._lock:
            queued = call in self._queued
            if queued:
                self._queued.remove(call)
        if queued:
            call.lost(Reason.NONE, False)

    def watch(self) -> None:
        """End calls that have run too long as lost, and begin the next trial if it is due."""
        if self._running:
            latest = self._clock() - self._deadline
            with self._lock:
                late = [call for call in self._running if call.begun is not None and call.begun <= latest]
            for call in late:
                self._lose(call)
        if self.is_suspended:
            self._try_again()

    def close(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for running and queued calls; return whether all of them ended."""
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
        self._tell_breaker(call, well=call.landed(value))

    def _tell_breaker(self, call: StoreCall, *, well: bool) -> None:
        """Tell the breaker how a call ended. After a trial that went well, queue the patient calls again."""
        if call.is_trial:
            self._breaker.probed(well)
            if well:
                _log.warning("storage answers again (%s)", self.kind)
                with self._lock:
                    waiting, self.waiting = self.waiting, deque()
                for other in waiting:
                    self._begin(other)
        elif well:
            self._breaker.succeeded()
        else:
            self._suspend(call, self._breaker.failed, "fails")

    def _lose(self, call: StoreCall) -> None:
        """End a running call as lost because it hangs, and suspend calls."""
        with self._lock:
            self._running.remove(call)
        self._hung.append(call)
        if call.thread:  # of ranks that agree, one may not have begun
            self._threads.replace(call.thread)
        self._on_hang()
        if call.is_trial:
            self._breaker.probed(False)
        else:
            self._suspend(call, self._breaker.trip, f"has not answered for {self._deadline:g} s")
        call.lost(Reason.TIMEOUT, True)

    def _suspend(self, call: StoreCall, tell: Callable[[], None], why: str) -> None:
        """Call `tell`, which tells the breaker that `call` failed; if the breaker opens, suspend calls.

        A suspension empties the queue: patient calls wait, and the others are lost.
        """
        before = self.is_suspended
        tell()
        if before or not self.is_suspended:
            return
        _log.warning("storage %s (%s); no call goes to it until it answers again", why, self.kind)
        self._probe = call.probe
        self._empty_queue()

    def _empty_queue(self) -> None:
        """Let the queued calls wait that are patient, and end the others as lost."""
        with self._lock:
            queued, self._queued = self._queued, deque()
            self.waiting += [other for other in queued if other.patient]
        for other in queued:
            if not other.patient:
                other.lost(Reason.UNAVAILABLE, False)

    def _try_again(self) -> None:
        """Begin a trial if the pause before it is over.

        The trial is the first waiting call. If no call waits, it is the `probe` of the call that led to the
        suspension.
        """
        if self.hung >= _MAX_HUNG or not (self.waiting or self._probe) or not self._breaker.is_probe_due():
            return
        if self.waiting:
            call = self.waiting.popleft()
        else:
            assert self._probe is not None
            call = StoreCall(self._probe, landed=bool, lost=lambda *_: None)
        call.is_trial = True
        self._begin(call)


class AgreedCalls(StoreCalls):
    """Calls that all ranks submit alike, and that end alike: with what is so on all of them.

    A call that hangs on one rank is lost on all, and returns once it has returned on all. A call that was
    cancelled, or was in the queue at a suspension, is lost unless it turns out to have been made on all.

    Thread safety: the owner's thread.
    """

    def __init__(
        self,
        kind: str,
        threads: IoThreads,
        post: Callable[[Callable[[], None]], None],
        deadline: float,
        on_hang: Callable[[], None],
        landings: AgreedLandings,
    ) -> None:
        super().__init__(kind, threads, post, landings.now, deadline, on_hang)
        draw = random.Random(0).random  # noqa: S311 (all ranks draw alike)
        self._breaker = Breaker(_MAX_FAILURES, _FIRST_PAUSE, clock=landings.now, random=draw)
        self._landings = landings
        self._made: dict[StoreCall, _AgreedCall] = {}

    def _begin(self, call: StoreCall) -> None:
        call.begun, call.thread = None, 0
        self._running.append(call)
        made = _AgreedCall(call, self._landings, self._deadline, partial(self._settle, call))
        self._made[call] = made
        self._landings.expect(made)
        self._threads.submit(made.run)

    def cancel(self, call: StoreCall) -> None:  # noqa: D102
        if call in self._made:
            self._made[call].withdraw(Reason.NONE)

    def watch(self) -> None:
        """Begin the next trial if it is due."""
        if self.is_suspended:
            self._try_again()

    def _empty_queue(self) -> None:
        for call in self._running:
            self._made[call].withdraw(Reason.UNAVAILABLE)

    def _settle(self, call: StoreCall, common: int, codes: Sequence[int], why: Reason) -> None:
        if common == LATE:
            self._lose(call)
            return
        del self._made[call]
        if common == ENDED:
            self._land(call, call.codes.unpack(codes))
            return
        self._running.remove(call)
        if call.patient:
            self.submit(call)
        else:
            call.lost(why, False)


class _AgreedCall:
    """Call of one rank, whose end waits for the others."""

    def __init__(
        self, call: StoreCall, landings: AgreedLandings, deadline: float, settle: Callable[..., None]
    ) -> None:
        self.codes = np.zeros(call.codes.size, np.int8)
        self._call, self._landings, self._deadline, self._settle = call, landings, deadline, settle
        self._lock = threading.Lock()  # guards `_state` and the call's `begun`
        self._state = PENDING
        self._why: Reason | None = None
        self._is_lost = False

    def run(self) -> None:
        """Call the store, on a background thread, unless the call was withdrawn."""
        with self._lock:
            if self._state != PENDING:
                return
            self._call.begun, self._call.thread = self._landings.clock(), threading.get_ident()
        codes = self._call.codes.pack(self._call.work())
        if len(codes) == len(self.codes):
            self.codes[:] = codes
        with self._lock:
            self._state, self._call.thread = ENDED, 0
        self._landings.wake()

    def withdraw(self, why: Reason) -> None:
        """Make the call no more if it has not begun here; of several reasons, the first counts."""
        self._why = self._why or why
        with self._lock:
            if self._call.begun is None:
                self._state = UNDONE

    def state(self, now: float) -> int:
        with self._lock:
            state, begun = self._state, self._call.begun
        if state == ENDED and self._call.is_held():
            state = PENDING
        if self._is_lost:
            return ENDED if state else PENDING
        return LATE if not state and begun is not None and now - begun >= self._deadline else state

    def settle(self, common: int, codes: Sequence[int]) -> bool:
        if common == LATE:
            self._is_lost = True
            self.withdraw(Reason.TIMEOUT)
        self._settle(common, codes, self._why)
        return common != LATE
