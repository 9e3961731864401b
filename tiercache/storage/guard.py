"""Guarded calls: how everything here calls a store that may fail, hang, or return too late.

    caller      begin ......... result: the value, or UnavailableError at the deadline
    a thread          work ......................................... returns late, memory comes back

1. A call that takes too long is given up. Its caller goes on; its thread is replaced, and ends with the call.
2. What a call may read or write belongs to it until it has returned. The caller lends memory that nobody else
   uses, or withholds it by `give_up` of `begin`, which runs before `result` raises. So a late call changes
   no byte that somebody was told is right.
3. A store that fails or hangs is left out: calls fail at once, until a probe succeeds after a pause.
4. The guard that can go on without the store guards. What runs inside makes plain calls on its thread, and
   needs a guard of its own only for several requests at once or for memory that its caller does not know.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from typing import Final, Generic, TypeVar

from tiercache.errors import UnavailableError
from tiercache.threads import IoThreads

_log = logging.getLogger(__name__)

T = TypeVar("T")

MIN_BYTES_PER_SECOND: Final = 32 << 20
"""Throughput that a deadline allows for, on top of its fixed part."""
MAX_PAUSE: Final = 30.0
"""Longest pause in seconds from one probe of a store that is left out to the next."""
_JITTER: Final = 0.25
"""Fraction of a pause that is random, so that clients do not all return at once."""

GiveUp = Callable[[], Callable[[], None]]
"""Function for a call that is given up; it returns what is to be done if the call ends after all."""


class NoThreadError(UnavailableError):
    """A call did not begin within its deadline, because other calls took all threads."""


def _nothing() -> None:
    """Do nothing."""


class PendingCall(Generic[T]):
    """A call that has begun: `result` waits for its end, and gives it up if that takes too long.

    Both sides decide under the lock how the call ends, so that no caller goes on while the call could still
    use memory that is not withheld:

        1. the call returns first, and sets `_ended`        `result` returns its value
        2. `result` gives the call up, and sets `_after`    the call returns later, and calls `_after`

    Thread safety: `run` on a thread of the guard, the rest on the caller's.
    """

    def __init__(
        self,
        what: str,
        work: Callable[[], T],
        seconds: float,
        give_up: GiveUp,
        over: Callable[[], None],
        is_strict: Callable[[], bool],
    ) -> None:
        """Prepare a call of at most `seconds`, counted from its begin, or from now if `is_strict` then."""
        self._what = what
        self._over = over
        self._seconds = seconds
        self._until = time.monotonic() + seconds  # until the call begins, that by which it must have begun
        self._give_up = give_up
        self._is_strict = is_strict
        self._lock = threading.Lock()  # guards the fields from here on
        self._work: Callable[[], T] | None = work  # dropped when it is over, with all that it refers to
        self._ended = threading.Event()
        self._after: Callable[[], None] | None = None
        self._outcome: tuple[T | None, Exception | None] = (None, None)
        self.thread = 0
        """Identity of the thread that makes the call; 0 until it begins."""
        self.hangs = False
        """Whether the call was given up while it ran, so that its memory is withheld."""

    def run(self) -> None:
        """Make the call, unless it was given up before it began, or its time is over."""
        with self._lock:
            work, self._work = self._work, None
            is_strict = self._is_strict()
            if is_strict and time.monotonic() >= self._until:
                work = None  # it would hang at once
            if work is not None:
                self.thread = threading.get_ident()
                if not is_strict:
                    self._until = time.monotonic() + self._seconds
        if work is None:
            self._over()
            return
        outcome: tuple[T | None, Exception | None]
        try:
            outcome = work(), None
        except BaseException as error:  # noqa: BLE001
            # `result` raises it on the caller's thread. The thread must live on, whatever it is.
            outcome = None, error if isinstance(error, Exception) else RuntimeError(repr(error))
        del work
        self._over()
        with self._lock:
            self._outcome = outcome
            self._ended.set()
            after = self._after
        if after is not None:
            after()

    def result(self) -> T:
        """Return the value of the call, or raise its exception; UnavailableError if it takes too long."""
        while not self._ended.wait(max(0.0, self._until - time.monotonic())):
            with self._lock:
                if self._ended.is_set() or time.monotonic() < self._until:
                    continue  # the call has begun in the meantime, which gave it more time
                if not self.thread:
                    self._work = None
                    raise NoThreadError(f"{self._what} has not begun for {self._seconds:g} s")
                self.hangs = True
                self._after = self._give_up()
            raise UnavailableError(f"{self._what} has not returned for {self._seconds:g} s")
        value, error = self._outcome
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # a call without an error has its value


class Guard:
    """Threads for the calls of one store, and whether it is called at all.

    A call that is given up while it runs *hangs*: its thread is replaced, and `on_hang` is called with a
    sentence about it. `on_return` is called after a call that hung has returned. The callers report whether
    the store did its work (`succeeded`, `failed`): only they know what its answer means.

    Thread safety: any thread.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        deadline: float,
        *,
        on_hang: Callable[[str], None] = lambda _: None,
        on_return: Callable[[], None] = _nothing,
        failures: int = 3,
        pause: float = 1.0,
        max_hung: int = 8,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads.

        `deadline`: seconds that a call without payload may take, and that it may wait for a thread. After
        `failures` failed calls in a row the store is left out, and probed after `pause` seconds. While
        `max_hung` calls hang it is not probed. `clock` is that of the pauses.
        """
        self._name = name
        self._deadline = deadline
        self._on_hang = on_hang
        self._on_return = on_return
        self._max_hung = max_hung
        self._breaker = Breaker(failures, pause, clock=clock, random=random.random)
        self._threads = IoThreads(name, threads)
        self._lock = threading.Lock()  # guards `hung` and `lost`
        self.hung = 0
        """Number of calls that hang now."""
        self.lost = 0
        """Number of calls that were given up while they ran."""
        self.why = "it is not open yet"
        """Reason, for people, why the store was left out last."""

    # --- calls
    # --------------------------------------------------------------------------------------------------------

    def begin(
        self,
        operation: str,
        work: Callable[[], T],
        nbytes: int = 0,
        *,
        give_up: GiveUp | None = None,
        over: Callable[[], None] = _nothing,
        seconds: float | None = None,
        strict: bool = False,
    ) -> PendingCall[T]:
        """Begin a call that moves `nbytes` bytes; `operation` names it in messages.

        `seconds`: time for the call; None: the deadline, and what the bytes may take. A call that waits for a
        thread gets that time anew when it begins, unless it is `strict`, or another call hangs then.
        `give_up`: see the head of this module. `over` is called once, when the call has ended or will not
        begin any more, and before `result` returns the value.
        """
        call: PendingCall[T] = PendingCall(
            f"{self._name}: {operation}",
            work,
            self._deadline + nbytes / MIN_BYTES_PER_SECOND if seconds is None else seconds,
            lambda: self._hang(call, operation, give_up),
            over,
            lambda: strict or self.hung > 0,
        )
        self._threads.submit(call.run)
        return call

    def close(self) -> None:
        """End the threads, those that hang when their calls return."""
        self._threads.close(0.1 if self.hung else self._deadline)

    def _hang(self, call: PendingCall[T], operation: str, give_up: GiveUp | None) -> Callable[[], None]:
        with self._lock:
            self.hung += 1
            self.lost += 1
        self._on_hang(f"{operation} does not return")
        after = give_up() if give_up is not None else None
        with suppress(RuntimeError):  # no thread can be started; the others go on
            self._threads.replace(call.thread)
        return partial(self._return, after)

    def _return(self, after: Callable[[], None] | None) -> None:
        """Note that a call that hung has returned."""
        with self._lock:
            self.hung -= 1
        if after is not None:
            after()
        self._on_return()

    # --- whether the store is called
    # --------------------------------------------------------------------------------------------------------

    @property
    def is_left_out(self) -> bool:
        """Whether calls are not to be made, because a probe has not succeeded yet."""
        return not self._breaker.closed

    def may_call(self, probe: Callable[[], object]) -> bool:
        """Return whether a call may be made now; begin `probe` on a thread if it is time for one.

        `probe` tests the store, and reports to `probed`; that it ends without a report counts as a failure.
        """
        if self.is_probe_due():
            self.begin("an examination", probe, over=lambda: self.probed(False))
        return not self.is_left_out

    def is_probe_due(self) -> bool:
        """Return whether the caller has to probe the store now, and report to `probed`."""
        may_probe = not self.is_left_out or self.hung < self._max_hung
        return may_probe and self._breaker.is_probe_due()

    def probed(self, well: bool) -> None:
        """Report whether the probe under way succeeded; without one, this changes nothing."""
        if self._breaker.probed(well) and well:
            _log.warning("%s is back", self._name)

    def succeeded(self) -> None:
        """Report that the store has done its work in a call."""
        self._breaker.succeeded()

    def failed(self, why: str) -> None:
        """Report that the store has not; while it is left out already, this changes nothing."""
        was_left_out = self.is_left_out
        self._breaker.failed()
        if not was_left_out:
            self.why = why
            if self.is_left_out:
                _log.warning("%s is left out: %s", self._name, why)

    def leave_out(self, why: str) -> None:
        """Leave the store out until a probe succeeds."""
        if not self.is_left_out:
            _log.warning("%s is left out: %s", self._name, why)
        self.why = why
        self._breaker.trip()


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
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = pause
        self._until: float | None = None  # clock reading until which the breaker is open; None: closed
        self._closed_at = -inf
        self._probing = False

    @property
    def closed(self) -> bool:
        """Whether calls pass."""
        return self._until is None

    def is_probe_due(self) -> bool:
        """Return whether the caller has to probe the store now, and report to `probed`.

        After one True the breaker is half-open: the answer is False until `probed` is called.
        """
        with self._lock:
            if self._until is None or self._probing or self._clock() < self._until:
                return False
            self._probing = True
            return True

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

    def probed(self, well: bool) -> bool:
        """Report whether the probe succeeded (`well`); return False, with nothing changed, if none is under
        way.
        """
        with self._lock:
            if not self._probing:
                return False
            self._probing = False
            if well:
                self._until, self._failures, self._closed_at = None, 0, self._clock()
            else:
                self._open(2 * self._pause)
            return True

    def _trip(self) -> None:
        # `again`: the breaker was closed for less time than its last pause.
        again = self._clock() - self._closed_at < self._pause
        self._open(2 * self._pause if again else self._first_pause)

    def _open(self, pause: float) -> None:
        self._pause = pause = min(MAX_PAUSE, pause)
        self._until = self._clock() + pause * (1 - _JITTER * self._random())


class BytesInFlight:
    """Bytes of the calls that are under way in one store, at most `limit` of them.

    A call that is larger than the limit is let in if it is alone. A call that was given up counts until it
    has returned, because it keeps its memory.

    Thread safety: any thread.
    """

    def __init__(self, limit: int) -> None:
        self._limit: Final = limit
        self._changed: Final = threading.Condition()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are under way."""
        return self._nbytes

    @property
    def is_full(self) -> bool:
        """Whether no call has room."""
        return self._nbytes >= self._limit

    def enter(self, nbytes: int, patience: float = 0.0) -> bool:
        """Count a call of so many bytes, as soon as it has room; False if it has none for `patience` s."""
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: not self._nbytes or self._nbytes + nbytes <= self._limit, patience
            )
            if has_room:
                self._nbytes += nbytes
            return has_room

    @contextmanager
    def undone(self, nbytes: int) -> Iterator[None]:
        """Leave if an exception ends the `with` block."""
        try:
            yield
        except BaseException:  # such as a MemoryError; it is raised again
            self.leave(nbytes)
            raise

    def leave(self, nbytes: int) -> None:
        """Count so many bytes no more."""
        with self._changed:
            self._nbytes -= nbytes
            self._changed.notify_all()
