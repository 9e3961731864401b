"""Manager of the current connection to a daemon, which opens, checks and replaces the connection."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from threading import Condition, Thread
from typing import Final, TypeVar

from tiercache.errors import RefusedError, StorageError, UnansweredError, UnavailableError
from tiercache.storage.guard import Breaker
from tiercache.wire.v1 import storage_pb2 as pb
from tiercache_backends.grpc.connection import Connection
from tiercache_backends.grpc.failures import CallError, Kind, advice
from tiercache_backends.grpc.settings import GrpcSettings

_log = logging.getLogger(__name__)

_CHECK_SECONDS: Final = 10.0
"""Seconds after which the next call starts a check of the connection.

A check asks the daemon, in the background, whether it was restarted.
"""

_MAX_LOGGED: Final = 64
"""Maximum number of different refusals that are logged until the next connection or check."""

T = TypeVar("T")
Work = Callable[[Connection, float], T]
"""Function that makes one call on a connection within the given seconds, or raises CallError."""


class ConnectionManager:
    """Manager of the connection to a daemon. Every call gets a connection, or fails soon.

    Only a background thread opens or checks connections. At most one such thread runs at a time. The thread
    ends when it has opened or checked one connection:

        1. A caller finds no usable connection, starts the thread and waits. Other callers wait too.
        2. The thread opens a connection and calls `prepare` with it.
        3. The connection becomes the current one. The thread calls `settled` with it, and wakes all callers.
        4. The old connection is retired: it closes when the last call on it has ended.

    After a check, the thread calls `prepare` and `settled` with the current connection too.

    Thread safety: any thread may call.
    """

    def __init__(
        self,
        settings: GrpcSettings,
        prepare: Callable[[Connection], None],
        settled: Callable[[Connection], None],
    ) -> None:
        self._settings = settings
        self._prepare = prepare
        self._settled = settled
        self._breaker = Breaker(
            settings.breaker_failures, settings.breaker_pause, clock=time.monotonic, random=random.random
        )
        self._changed = Condition()
        """Lock of the fields below; waiting callers are notified when the background thread has finished."""
        self._current: Connection | None = None
        self._working = False
        """Whether the background thread is running."""
        self._closed = False
        self._failure = CallError(Kind.UNREACHABLE, f"{settings}: not connected yet")
        """Latest failure, which calls without a connection raise."""
        self._refused_until = 0.0
        """Time until which calls fail without asking the daemon, in seconds of the monotonic clock."""
        self._away = False
        """Whether the daemon did not answer the last call."""
        self._logged: set[str] = set()
        """Texts of the refusals that were logged since the last connection or check."""
        self.limits = pb.Limits(keys=1024, message_bytes=1 << 20, object_bytes=1 << 40)
        """Limits that the daemon reported. Before the first connection, these values are a guess."""

    def start(self) -> None:
        """Connect for the first time; open the breaker if the daemon does not answer."""
        try:
            self.connected(self._settings.timeout)
        except CallError as error:
            if error.kind is Kind.UNREACHABLE:
                self._breaker.trip()

    def peek(self) -> Connection | None:
        """Return the current connection if it is usable, else None; do not wait."""
        with self._changed:
            return self._current if self._usable() else None

    def connected(self, seconds: float) -> Connection:
        """Return a usable connection.

        Raises CallError if there is none within `seconds`.
        """
        try:
            found = self._acquire(time.monotonic() + seconds)
        except CallError as error:
            self._record_end(error)
            raise
        found.finish()
        return found

    def perform(self, work: Work[T], seconds: float) -> T:
        """Return the result of `work`.

        If the session has ended, `work` runs once more on a new connection. Raises CallError if `work` fails,
        or if both runs together take more than `seconds`.
        """
        deadline = time.monotonic() + seconds
        try:
            connection = self._acquire(deadline)
            try:
                result = self._run(connection, work, deadline)
            except CallError as error:
                if error.kind is not Kind.SESSION_ENDED:
                    raise
                connection.expire()
                result = self._run(self._acquire(deadline), work, deadline)
        except CallError as error:
            self._record_end(error)
            raise
        self._record_end(None)
        return result

    def ask(
        self,
        work: Work[T],
        what: str,
        seconds: float | None = None,
        impossible: type[StorageError] = StorageError,
        *,
        changes: bool = False,
    ) -> T:
        """Return the result of `work`, as `perform` does, but turn a failure into a StorageError.

        `what`: the call's name in error messages. `changes`: the daemon may do it without this client. Raises
        UnavailableError if the daemon does not answer, UnansweredError if it then may have done it,
        RefusedError if the daemon refuses the call, `impossible` if it does not have what the call asks for,
        and StorageError if it cannot serve this call.
        """
        is_sent = False

        def send(connection: Connection, left: float) -> T:
            nonlocal is_sent
            is_sent = changes
            return work(connection, left)

        try:
            return self.perform(send, seconds or self._settings.timeout)
        except CallError as error:
            if error.kind in (Kind.REFUSED, Kind.SESSION_ENDED, Kind.BUSY):
                raise RefusedError(f"{what} is refused by {error.text}") from error
            if error.kind is Kind.UNREACHABLE:
                if is_sent:
                    raise UnansweredError(
                        f"{what}: {error.text}; it may be done, or go on there: look again before you"
                        " repeat it; the daemon's audit log says how it ended"
                    ) from error
                raise UnavailableError(f"{what}: {error.text}; {advice(error)}") from error
            kind = impossible if error.kind is Kind.IMPOSSIBLE else StorageError
            raise kind(f"{what}: {error.text}") from error

    def close(self) -> bool:
        """Close the connection; return False if the background thread is still running.

        In this case the background thread itself closes the connection that it is opening.
        """
        with self._changed:
            self._closed = True
            self._changed.wait_for(
                lambda: not self._working, self._settings.timeout + self._settings.transfer_timeout
            )
            current, self._current = self._current, None
            left = self._working
        if current is not None:
            current.close()
        return not left

    def _usable(self) -> bool:
        return self._current is not None and not self._current.over

    def _acquire(self, deadline: float) -> Connection:
        """Return a usable connection, after calling its `begin`; the caller must call `finish`.

        Raises CallError.
        """
        with self._changed:
            # An open breaker fails the call at once. The call that finds a probe due first starts the
            # background thread, which reports to the breaker whether the daemon answers.
            if self._breaker.is_probe_due():
                self._start_opening(check=False)
            if not self._breaker.closed:
                raise self._failure.without_traceback()
            if not self._usable():
                # If the daemon refused this client a short time ago, do not ask it again.
                if time.monotonic() < self._refused_until:
                    raise self._failure.without_traceback()
                self._start_opening(check=False)
                self._changed.wait_for(
                    lambda: self._usable() or not self._working, deadline - time.monotonic()
                )
            if not self._usable():
                raise (
                    CallError(Kind.UNREACHABLE, f"{self._settings} does not answer in time")
                    if self._working
                    else self._failure.without_traceback()
                )
            assert self._current is not None
            if time.monotonic() - self._current.checked > _CHECK_SECONDS:
                self._start_opening(check=True)
            self._current.begin()  # under the condition: otherwise the connection could be retired first
            return self._current

    def _run(self, connection: Connection, work: Work[T], deadline: float) -> T:
        try:
            return work(connection, deadline - time.monotonic())
        finally:
            connection.finish()

    def _record_end(self, error: CallError | None) -> None:
        """Report to the breaker and the log how a call ended; `error` is None if the call was answered."""
        kind = None if error is None else error.kind
        if kind is Kind.UNREACHABLE:
            self._breaker.failed()
        else:
            self._breaker.succeeded()
        refused = kind in (Kind.REFUSED, Kind.SESSION_ENDED)
        with self._changed:
            if error is not None and (refused or kind is Kind.UNREACHABLE):
                self._failure = error.without_traceback()
            before, self._away = self._away, kind is Kind.UNREACHABLE
            new = (
                error is not None
                and refused
                and error.text not in self._logged
                and len(self._logged) < _MAX_LOGGED
            )
            if new and error is not None:
                self._logged.add(error.text)
        if new and error is not None:
            _log.warning("refused by %s; only the daemon's operator can change that", error.text)
        if self._away and not before and error is not None:
            _log.warning("%s; its objects are not available until it answers", error.text)
        elif before and not self._away:
            _log.warning("%s answers again", self._settings)

    def _start_opening(self, *, check: bool) -> None:
        """Start a thread that opens a connection, or checks the current one.

        The caller holds the condition.
        """
        if not self._working and not self._closed:
            self._working = True
            try:
                Thread(
                    target=self._open_connection,
                    args=(self._current, check),
                    name="tiercache-grpc-connect",
                    daemon=True,
                ).start()
            except RuntimeError:  # no thread could be started; a later call tries again
                self._working = False
                self._breaker.probed(False)

    def _open_connection(self, old: Connection | None, check: bool) -> None:
        fresh: Connection | None = None
        failure: CallError | None = None
        try:
            fresh = self._reuse_or_open(old if check else None)
            self._prepare(fresh)
        except CallError as error:
            failure = error
        except Exception:  # noqa: BLE001  callers wait for this thread, so it must report every failure
            failure = CallError(
                Kind.UNREACHABLE, f"{self._settings}: a connection could not be made; the log says why"
            )
            _log.exception("%s: a connection could not be made", self._settings)
        with self._changed:
            self._working = False
            kept = failure is None and not self._closed
            if fresh is not None and kept:
                self._current, self.limits = fresh, fresh.hello.limits
                self._settled(fresh)
                self._logged.clear()
            elif failure is not None and not check:
                self._failure = failure.without_traceback()
            refused = failure is not None and failure.kind is not Kind.UNREACHABLE
            if refused:
                self._refused_until = time.monotonic() + self._settings.breaker_pause
            self._breaker.probed(kept or refused)  # a daemon that refuses does answer
            self._changed.notify_all()
        # After a check that passed, `fresh` is `old`, and stays the current connection.
        unused = old if kept else fresh
        if unused is not None and fresh is not old:
            unused.retire()

    def _reuse_or_open(self, old: Connection | None) -> Connection:
        """Return `old` if the daemon still answers on it and was not restarted, else a new connection.

        Raises CallError if a new connection cannot be opened.
        """
        if old is not None and not old.over:
            try:
                if old.greet(self._settings.timeout).instance == old.hello.instance:
                    return old
            except CallError:
                pass
        return Connection.open(self._settings, self._settings.timeout)
