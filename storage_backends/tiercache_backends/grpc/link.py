"""Current connection to the daemon: whether it may be used, and how it is replaced."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from threading import Condition, Thread
from typing import Final, TypeVar

from tiercache.core import Reason
from tiercache.errors import RefusedError, StorageError
from tiercache.storage.breaker import Breaker, Verdict
from tiercache.wire.v1 import storage_pb2 as pb
from tiercache_backends.grpc.connection import Connection
from tiercache_backends.grpc.failures import CallError, Kind
from tiercache_backends.grpc.settings import Settings

_log = logging.getLogger(__name__)

_CHECK_SECONDS: Final = 10.0
"""Seconds after which a call has the connection checked in the background: the daemon may have been restarted between two calls."""

_MOST_TOLD: Final = 64
"""Different refusals that are logged at most, until there is another connection."""

T = TypeVar("T")
Work = Callable[[Connection, float], T]
"""Function that makes one call on a connection within the given seconds, or raises CallError."""


class Link:
    """Link to a daemon, which gives every call a connection or lets it fail soon.

    Connections are never opened by a caller's thread, but by one that lives as long as that takes: at most one at a time, for all waiting
    callers. `prepare` makes a connection ready that is fresh or was checked; `settled` is called with it once it is in use.

    Thread safety: any thread may call.
    """

    def __init__(self, settings: Settings, prepare: Callable[[Connection], None], settled: Callable[[Connection], None]) -> None:
        self._settings = settings
        self._prepare = prepare
        self._settled = settled
        self._breaker = Breaker(settings.breaker_failures, settings.breaker_pause, clock=time.monotonic, random=random.random)
        self._changed = Condition()
        self._current: Connection | None = None
        self._working = False
        self._closed = False
        self._failure = CallError(Kind.AWAY, f"{settings}: not connected yet")
        self._refused_until = 0.0
        self._away = False
        self._told: set[str] = set()
        self.outage = Reason.NONE
        """Reason why the latest call was not served: UNAVAILABLE or REFUSED; else NONE."""
        self.limits = pb.Limits(keys=1024, message_bytes=1 << 20, object_bytes=1 << 40)
        """Limits of the daemon; a guess until the first connection."""

    def start(self) -> None:
        """Connect for the first time; open the breaker if the daemon does not answer."""
        try:
            self.connected(self._settings.timeout)
        except CallError as error:
            if error.kind is Kind.AWAY:
                self._breaker.trip()

    def peek(self) -> Connection | None:
        """Return the connection that is in use, or None."""
        with self._changed:
            return self._current if self._usable() else None

    def connected(self, seconds: float) -> Connection:
        """Return the connection for the next calls, within `seconds`; raise CallError."""
        try:
            found = self._ready(time.monotonic() + seconds)
        except CallError as error:
            self._met(error)
            raise
        found.finish()
        return found

    def perform(self, work: Work[T], seconds: float) -> T:
        """Return the result of `work`, repeated once if the session had ended; raise CallError. Takes at most `seconds`."""
        deadline = time.monotonic() + seconds
        try:
            connection = self._ready(deadline)
            try:
                result = self._run(connection, work, deadline)
            except CallError as error:
                if error.kind is not Kind.ENDED or connection.session is None:
                    raise
                connection.session.end()
                result = self._run(self._ready(deadline), work, deadline)
        except CallError as error:
            self._met(error)
            raise
        self._met(None)
        return result

    def ask(self, work: Work[T], what: str, seconds: float | None = None) -> T:
        """Perform a call whose failure must be reported: raise StorageError with advice, or RefusedError where the daemon refuses.

        `what` names the call in the message.
        """
        try:
            return self.perform(work, seconds or self._settings.timeout)
        except CallError as error:
            if error.kind in (Kind.REFUSED, Kind.ENDED, Kind.BUSY):
                raise RefusedError(f"{what} is refused by {error.text}") from error
            advice = "; start the daemon there, or wait until it is back" if error.kind is Kind.AWAY else ""
            raise StorageError(f"{what}: {error.text}{advice}") from error

    def close(self) -> bool:
        """Close the connection; return False where a thread is still opening one, which that thread will close itself."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._working, self._settings.timeout + self._settings.transfer_timeout)
            current, self._current = self._current, None
            left = self._working
        if current is not None:
            current.close()
        return not left

    def _usable(self) -> bool:
        return self._current is not None and not self._current.over

    def _ready(self, deadline: float) -> Connection:
        """Return a connection on which `begin` was called; the caller must call `finish`. Raises CallError."""
        with self._changed:
            verdict = self._breaker.ask()
            if verdict is Verdict.PROBE:
                self._open(check=False)
            if verdict is not Verdict.PASS:
                raise self._failure.again()
            if not self._usable():
                if time.monotonic() < self._refused_until:
                    raise self._failure.again()
                self._open(check=False)
                self._changed.wait_for(lambda: self._usable() or not self._working, deadline - time.monotonic())
            if not self._usable():
                raise CallError(Kind.AWAY, f"{self._settings} does not answer in time") if self._working else self._failure.again()
            assert self._current is not None
            if time.monotonic() - self._current.checked > _CHECK_SECONDS:
                self._open(check=True)
            self._current.begin()  # under the condition, so that it cannot be retired before
            return self._current

    def _run(self, connection: Connection, work: Work[T], deadline: float) -> T:
        try:
            return work(connection, deadline - time.monotonic())
        finally:
            connection.finish()

    def _met(self, error: CallError | None) -> None:
        """Record how a call ended (None: with an answer) for the breaker, `outage` and the log."""
        kind = None if error is None else error.kind
        if kind is Kind.AWAY:
            self._breaker.failed()
        else:
            self._breaker.succeeded()
        refused = kind in (Kind.REFUSED, Kind.ENDED)
        with self._changed:
            self.outage = Reason.REFUSED if refused else Reason.UNAVAILABLE if kind is Kind.AWAY else Reason.NONE
            if error is not None and self.outage is not Reason.NONE:
                self._failure = error.again()
            before, self._away = self._away, kind is Kind.AWAY
            new = error is not None and refused and error.text not in self._told and len(self._told) < _MOST_TOLD
            if new and error is not None:
                self._told.add(error.text)
        if new and error is not None:
            _log.warning("refused by %s; this is so until its operator changes it", error.text)
        if self._away and not before and error is not None:
            _log.warning("%s; its objects are not available until that changes", error.text)
        elif before and not self._away:
            _log.warning("%s answers again", self._settings)

    def _open(self, *, check: bool) -> None:
        """Start a thread that opens a connection, or checks the current one. The caller holds the condition."""
        if not self._working and not self._closed:
            self._working = True
            try:
                Thread(target=self._work, args=(self._current, check), name="tiercache-grpc-connect", daemon=True).start()
            except RuntimeError:  # no thread could be started; a later call tries again
                self._working = False
                self._breaker.probed(False)

    def _work(self, old: Connection | None, check: bool) -> None:
        fresh: Connection | None = None
        failure: CallError | None = None
        try:
            fresh = self._fresh(old if check else None)
            self._prepare(fresh)
        except CallError as error:
            failure = error
        except Exception:  # noqa: BLE001  whatever it is, somebody waits for us
            failure = CallError(Kind.AWAY, f"{self._settings}: a connection could not be made; the log says why")
            _log.exception("%s: a connection could not be made", self._settings)
        with self._changed:
            self._working = False
            kept = failure is None and not self._closed
            if fresh is not None and kept:
                self._current, self.limits = fresh, fresh.hello.limits
                self._settled(fresh)
                self._told.clear()
            elif failure is not None and not check:
                self._failure = failure.again()
            refused = failure is not None and failure.kind is not Kind.AWAY
            if refused:  # calls during the pause fail without asking the daemon again
                self._refused_until = time.monotonic() + self._settings.breaker_pause
            self._breaker.probed(kept or refused)
            self._changed.notify_all()
        unused = old if kept else fresh
        if unused is not None and fresh is not old:
            unused.retire()

    def _fresh(self, old: Connection | None) -> Connection:
        """Return `old` if the daemon behind it is still the same, else a new connection; raise CallError."""
        if old is not None and not old.over:
            try:
                if old.greet(self._settings.timeout).instance == old.hello.instance:
                    return old
            except CallError:
                pass
        return Connection.open(self._settings, self._settings.timeout)
