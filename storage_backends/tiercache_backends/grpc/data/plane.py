"""The data connections of one connection to a daemon: they are lent to calls, and opened again after a loss.

A call that finds no data connection, or loses it, is made over gRPC at once. After a loss, a thread in the
background says Hello for a new token and opens one connection again, after a pause that doubles:

    open ── a connection breaks, or a call gets no answer ──▶ closed ── pause, Hello, connect ──▶ open
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Lock, Thread
from typing import Final, TypeVar

from tiercache.config.addresses import parse_address
from tiercache.errors import ConfigError, WireError
from tiercache.wire.v1 import data_pb2
from tiercache.wire.v1 import storage_pb2 as pb
from tiercache_backends.grpc.data.connection import DataConnection, FailedError
from tiercache_backends.grpc.failures import CallError, Kind
from tiercache_backends.grpc.settings import GrpcSettings

_log = logging.getLogger(__name__)

_CONNECT_SECONDS: Final = 1.0
"""Maximum seconds for opening a connection, so that a port behind a firewall delays little."""
PAUSES: Final = (1.0, 30.0)
"""Shortest and longest pause, in seconds, until a closed plane is tried again."""

T = TypeVar("T")


class DataPlane:
    """Data connections beside one connection to gRPC.

    Thread safety: any thread may call.
    """

    def __init__(self, settings: GrpcSettings, greet: Callable[[float], pb.HelloReply]) -> None:
        """Make a plane without connections; `greet` says Hello on the connection to gRPC."""
        self._settings = settings
        self._greet = greet
        self._address = parse_address(settings.address)
        self._lock = Lock()
        self._port = pb.DataPort()
        self._idle: list[DataConnection] = []
        self._count = 0
        """Number of connections, idle or lent."""
        self._epoch = 0
        """Number of losses; connections of an earlier epoch are closed when they come back."""
        self._working = False
        self._closed = False
        self._pause, _ = PAUSES
        self._retry_at = 0.0
        self.why = "the daemon offers no port for data connections"
        """Reason for which the plane is closed; empty while it is open."""
        self.losses = 0
        """Number of calls that lost their data connection, or its answer."""

    def start(self, hello: pb.HelloReply, seconds: float) -> None:
        """Open a first connection to the port that a daemon has offered, if it offers one."""
        if self._adopt(hello):
            self._try_to_open(time.monotonic() + min(seconds, _CONNECT_SECONDS))

    def attempt(self, work: Callable[[DataConnection], T], deadline: float) -> T | None:
        """Return the result of `work` on a data connection, or None if the call must be made over gRPC.

        `deadline`: in seconds of the monotonic clock. Raises CallError if the daemon does not serve the call,
        or does not answer in time.
        """
        lent = self._borrow(deadline)
        if lent is None:
            return None
        connection, epoch = lent
        try:
            result = work(connection)
        except FailedError as failed:
            self._give_back(connection, epoch)
            raise failed.error from None
        except (OSError, WireError) as error:
            self._lose(connection, epoch, str(error))
            if time.monotonic() >= deadline:
                text = f"{self._settings} does not answer in time"
                raise CallError(Kind.UNREACHABLE, text) from error
            return None
        except BaseException:  # the connection is in the middle of something
            self._lose(connection, epoch, "a call was interrupted")
            raise
        self._give_back(connection, epoch)
        return result

    def close(self) -> None:
        """Close every connection; calls that have one end soon."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _borrow(self, deadline: float) -> tuple[DataConnection, int] | None:
        with self._lock:
            if self._closed or self.why:
                self._start_reopening()
                return None
            epoch = self._epoch
            if self._idle:
                return self._idle.pop(), epoch
            if self._count >= self._port.connections:
                return None
            self._count += 1
        now = time.monotonic()
        try:
            return self._open(min(now + _CONNECT_SECONDS, now + (deadline - now) / 4)), epoch
        except (OSError, WireError, FailedError, ConfigError) as error:
            _log.debug("%s: no further data connection: %s", self._settings, error)
        with self._lock:
            if epoch == self._epoch:
                self._count -= 1
        return None

    def _give_back(self, connection: DataConnection, epoch: int) -> None:
        with self._lock:
            usable = not self._closed and epoch == self._epoch
            if usable:
                self._idle.append(connection)
        if not usable:
            connection.close()

    def _lose(self, connection: DataConnection, epoch: int, why: str) -> None:
        """Close a connection, and with it the plane, until it was opened again."""
        connection.close()
        with self._lock:
            self.losses += 1
            if self._closed or epoch != self._epoch:
                return
            idle, self._idle = self._idle, []
            self._epoch += 1
            self._count = 0
            self._shut(why)
        for other in idle:
            other.close()

    def _shut(self, why: str) -> None:
        """Note why the plane is closed; the caller holds the lock."""
        if not self.why:
            _log.warning("%s: payload travels by gRPC, for its data port fails: %s", self._settings, why)
        self.why = why
        self._retry_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, PAUSES[1])

    def _start_reopening(self) -> None:
        """Start a thread that opens the plane, if it is time for that; the caller holds the lock."""
        due = self._port.token and time.monotonic() >= self._retry_at
        if due and not self._working and not self._closed:
            self._working = True
            try:
                Thread(target=self._reopen, name="tiercache-grpc-data", daemon=True).start()
            except RuntimeError:  # no thread could be started; a later call tries again
                self._working = False

    def _reopen(self) -> None:
        try:
            if self._adopt(self._greet(self._settings.timeout)):
                self._try_to_open(time.monotonic() + _CONNECT_SECONDS)
        except CallError as error:
            with self._lock:
                self._shut(error.text)
        finally:
            with self._lock:
                self._working = False

    def _adopt(self, hello: pb.HelloReply) -> bool:
        """Note the port and the token that a daemon offers; return False if it offers none."""
        with self._lock:
            self._port = hello.data
        return 0 < hello.data.port < 1 << 16 and hello.data.connections > 0

    def _try_to_open(self, deadline: float) -> None:
        try:
            opened = self._open(deadline)
        except (OSError, WireError, FailedError, ConfigError) as error:
            with self._lock:
                self._shut(str(error))
            return
        with self._lock:
            closed = self._closed
            if not closed:
                if self.why and self.losses:
                    _log.warning("%s: payload travels by data connections again", self._settings)
                self.why = ""
                self._pause, _ = PAUSES
                self._count += 1
                self._idle.append(opened)
        if closed:
            opened.close()

    def _open(self, deadline: float) -> DataConnection:
        settings, port = self._settings, self._port
        authorization = next((str(value) for _, value in settings.metadata()), "")
        return DataConnection(
            (self._address.host, port.port),
            data_pb2.DataOpen(token=port.token, authorization=authorization),
            deadline,
            str(settings),
            settings.context(),
            settings.server_name or self._address.host,
        )
