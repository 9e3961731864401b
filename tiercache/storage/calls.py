"""Calls of one store on threads of their own, each with a deadline after which it is given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, Generic, TypeVar

from tiercache.errors import UnavailableError
from tiercache.threads import IoThreads

T = TypeVar("T")

MIN_BYTES_PER_SECOND: Final = 32 << 20
"""Throughput that a deadline allows for, on top of its fixed part."""

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

    Thread safety: `run` on a thread of the calls, the rest on the caller's.
    """

    def __init__(
        self,
        what: str,
        work: Callable[[], T],
        seconds: float,
        give_up: GiveUp,
        over: Callable[[], None] = _nothing,
        others_hang: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare a call of at most `seconds`.

        They count from the time at which the call begins, or from now if `others_hang` when it begins.
        `over` is called once, before `result` returns the value, or when a call that was given up has
        returned or would begin.
        """
        self._what = what
        self._over = over
        self._work = work
        self._seconds = seconds
        self._until = time.monotonic() + seconds  # until the call begins, that by which it must have begun
        self._give_up = give_up
        self._others_hang = others_hang
        self._lock = threading.Lock()  # guards the fields from here on
        self._ended = threading.Event()
        self._after: Callable[[], None] | None = None
        self._outcome: tuple[T | None, Exception | None] = (None, None)
        self._thread = 0
        self.given_up = False
        """Whether the call was given up."""

    @property
    def thread(self) -> int:
        """Identity of the thread that makes the call; 0 until it begins."""
        return self._thread

    def run(self) -> None:
        """Make the call, unless it was given up before it began."""
        with self._lock:
            begins = not self.given_up
            if begins:
                self._thread = threading.get_ident()
                if not self._others_hang():
                    self._until = time.monotonic() + self._seconds
        if not begins:
            self._over()
            return
        outcome: tuple[T | None, Exception | None]
        try:
            outcome = self._work(), None
        except BaseException as error:  # noqa: BLE001
            # `result` raises it on the caller's thread. The thread must live on, whatever it is.
            outcome = None, error if isinstance(error, Exception) else RuntimeError(repr(error))
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
                self.given_up = True
                if not self._thread:
                    raise NoThreadError(f"{self._what} has not begun for {self._seconds:g} s")
                self._after = self._give_up()
            raise UnavailableError(f"{self._what} has not returned for {self._seconds:g} s")
        value, error = self._outcome
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # a call without an error has its value


class Calls:
    """Threads for the calls of one store.

    A call that is given up while it runs *hangs*: its thread is replaced, and `on_hang` is called.

    Thread safety: any thread.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        deadline: float,
        on_hang: Callable[[str], None],
        on_return: Callable[[], None],
    ) -> None:
        """Start the threads.

        `deadline`: seconds that a call without payload may take, and that it may wait for a thread. `on_hang`
        gets a sentence about the call. `on_return` is called after a call that hung has returned.
        """
        self._name = name
        self._deadline = deadline
        self._on_hang = on_hang
        self._on_return = on_return
        self._threads = IoThreads(name, threads)
        self._lock = threading.Lock()  # guards `_hung` and `_lost`
        self._hung = 0
        self._lost = 0

    @property
    def hung(self) -> int:
        """Number of calls that hang now."""
        return self._hung

    @property
    def lost(self) -> int:
        """Number of calls that were given up while they ran."""
        return self._lost

    def begin(
        self,
        operation: str,
        work: Callable[[], T],
        nbytes: int = 0,
        give_up: GiveUp | None = None,
        over: Callable[[], None] = _nothing,
        seconds: float | None = None,
    ) -> PendingCall[T]:
        """Begin a call that moves `nbytes` bytes; `operation` names it in messages.

        `seconds`: time for the call; None: the deadline, and what the bytes may take. A call that waits for a
        thread gets that time anew when it begins, unless another call hangs then. `over` is called when the
        call has ended, or will not begin any more.
        """
        call: PendingCall[T] = PendingCall(
            f"{self._name}: {operation}",
            work,
            self._deadline + nbytes / MIN_BYTES_PER_SECOND if seconds is None else seconds,
            lambda: self._hang(call, operation, give_up),
            over,
            lambda: self._hung > 0,
        )
        self._threads.submit(call.run)
        return call

    def close(self) -> None:
        """End the threads, those that hang when their calls return."""
        self._threads.close(0.1 if self._hung else self._deadline)

    def _hang(self, call: PendingCall[T], operation: str, give_up: GiveUp | None) -> Callable[[], None]:
        with self._lock:
            self._hung += 1
            self._lost += 1
        self._on_hang(f"{operation} does not return")
        after = give_up() if give_up is not None else None
        with suppress(RuntimeError):  # no thread can be started; the others go on
            self._threads.replace(call.thread)
        return partial(self._return, after)

    def _return(self, after: Callable[[], None] | None) -> None:
        """Note that a call that hung has returned."""
        with self._lock:
            self._hung -= 1
        if after is not None:
            after()
        self._on_return()
