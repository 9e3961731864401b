"""Data connections, on which payload travels beside gRPC, and their pool.

The caller's thread moves every byte. So when a call has returned or raised, nothing touches its buffers. A
daemon may have closed a connection while it was idle: a call that finds this out is made once more on a new
connection.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from threading import Condition
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError

from tiercache.config.urls import parse_address
from tiercache.core import Outcome
from tiercache.errors import ConfigError, WireError
from tiercache.storage.base import GetItem, SetItem
from tiercache.storage.checksum import CHECKSUM_BYTES, checksum
from tiercache.storage.vectors import take, total
from tiercache.wire import messages
from tiercache.wire.data import SEND_BYTES, Frame, FrameKind, FrameSocket, pack
from tiercache.wire.methods import DATA_SOCKET
from tiercache.wire.v1 import data_pb2
from tiercache.wire.v1 import storage_pb2 as pb
from tiercache_backends.grpc.failures import CallError, Kind, error_of_status
from tiercache_backends.grpc.settings import GrpcSettings

_MAX_HEADER: Final = 4 << 20
"""Maximum bytes of a header that a daemon may send; a thousand objects take a tenth of it."""
_CONNECT_SECONDS: Final = 1.0
"""Maximum seconds for opening a connection, so that a port behind a firewall delays little."""

T = TypeVar("T")


class FailedError(Exception):
    """The daemon has answered that it does not serve the call; the connection is as good as before."""

    def __init__(self, error: CallError) -> None:
        super().__init__(error.text)
        self.error: Final = error


class DataConnection:
    """Connection of one client, for one call at a time.

    Every method raises OSError or WireError if the connection cannot be used any more, TimeoutError (which is
    an OSError) at its deadline, in seconds of the monotonic clock, and FailedError for a call that the daemon
    does not serve.

    Thread safety: one thread at a time.
    """

    def __init__(self, settings: GrpcSettings, port: pb.DataPort, deadline: float) -> None:
        """Connect to the port or the unix socket, and open the connection."""
        self._name = str(settings)
        self._socket = FrameSocket(_connect(settings, port.port, deadline), self._name)
        try:
            if (context := settings.context()) is not None:
                host = parse_address(settings.address).host
                self._socket.secure(context, deadline, settings.server_name or host)
            authorization = next((str(value) for _, value in settings.metadata()), "")
            opening = data_pb2.DataOpen(token=port.token, authorization=authorization)
            first = pack(FrameKind.OPEN, opening.SerializeToString())
            self._socket.send([memoryview(first)], deadline)
            self._expect(FrameKind.OPENED, deadline)
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Close the connection, also if a process that was forked meanwhile has its descriptor."""
        self._socket.close()

    def exists(self, request: pb.ExistsRequest, deadline: float) -> pb.BitmapReply:
        """Return the reply to a call of Exists."""
        self._call("Exists", request, deadline)
        reply: pb.BitmapReply = self._reply(pb.BitmapReply, deadline)
        return reply

    def get(
        self, request: pb.GetRequest, items: Sequence[GetItem], outcomes: list[Outcome], deadline: float
    ) -> None:
        """Fill the buffers of `items`, and append to `outcomes` what became of each, as the objects come.

        An object that arrives damaged is ERROR, not CORRUPT: the daemon has verified the stored object, so
        only the copy that arrived is damaged.
        """
        self._call("Get", request, deadline)
        while len(outcomes) < len(items):
            left = items[len(outcomes) :]
            frame = self._expect(FrameKind.OBJECTS, deadline, sum(item.length for item in left))
            header = _read(self._socket.receive(frame.header, deadline), pb.GetHeader)
            found, sums = _described(header, left, len(outcomes), frame.payload)
            hits = [item for item, outcome in zip(left, found, strict=False) if outcome is Outcome.HIT]
            views = [view for item in hits for view in take(item.buffers, 0, item.length)]
            self._socket.fill(views, deadline)
            outcomes += [
                Outcome.ERROR
                if outcome is Outcome.HIT and checksum(item.key, item.buffers, item.length) != next(sums)
                else outcome
                for item, outcome in zip(left, found, strict=False)
            ]

    def set(self, items: Sequence[SetItem], sums: Sequence[bytes], deadline: float) -> list[Outcome]:
        """Send objects and their checksums, and return what became of each."""
        metas = [replace(item.meta, checksum=found) for item, found in zip(items, sums, strict=True)]
        header = pb.SetHeader(
            keys=messages.keys([item.key for item in items]), metas=[messages.meta(meta) for meta in metas]
        )
        payload = [view for item in items for view in take(item.buffers, 0, item.meta.length)]
        self._call("Set", header, deadline, payload)
        return messages.read_outcomes(self._reply(pb.OutcomesReply, deadline).outcomes, len(items))

    def _call(self, method: str, request: Any, deadline: float, payload: Sequence[memoryview] = ()) -> None:
        call = data_pb2.DataCall(
            method=method, seconds=max(0.0, deadline - time.monotonic()), request=request.SerializeToString()
        )
        first = pack(FrameKind.CALL, call.SerializeToString(), total(payload))
        self._socket.send([memoryview(first), *payload], deadline)

    def _reply(self, kind: type[Any], deadline: float) -> Any:
        frame = self._expect(FrameKind.REPLY, deadline)
        return _read(self._socket.receive(frame.header, deadline), kind)

    def _expect(self, kind: FrameKind, deadline: float, max_payload: int = 0) -> Frame:
        """Receive the start of a frame of this kind; raises FailedError if the daemon says so instead."""
        frame = self._socket.frame(deadline, _MAX_HEADER, max_payload)
        if frame.kind is FrameKind.FAILED and not frame.payload:
            failure = _read(self._socket.receive(frame.header, deadline), data_pb2.DataFailure)
            raise FailedError(error_of_status(failure.code, failure.text, self._name))
        if frame.kind is not kind:
            raise WireError(f"a frame of kind {frame.kind.name} came where {kind.name} was due")
        return frame


def _connect(settings: GrpcSettings, port: int, deadline: float) -> socket.socket:
    seconds = max(0.001, min(deadline - time.monotonic(), _CONNECT_SECONDS))
    if not settings.directory:
        sock = socket.create_connection((parse_address(settings.address).host, port), seconds)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return sock
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        sock.settimeout(seconds)
        sock.connect(f"{settings.directory}/{DATA_SOCKET}")
    except BaseException:
        sock.close()
        raise
    return sock


def _read(data: bytes, kind: type[Any]) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise WireError(f"a header cannot be read ({error})") from error


def _described(
    header: pb.GetHeader, items: Sequence[GetItem], first: int, payload: int
) -> tuple[list[Outcome], Iterator[bytes]]:
    """Return the outcomes in a header, and the checksums of the hits, in order.

    Raises WireError unless the header, with so many bytes of payload, tells of the first of `items`, of which
    `first` is the number in the request.
    """
    count = len(header.items)
    if not 0 < count <= len(items) or not count == len(header.outcomes) == len(header.sizes):
        raise WireError("the columns of a header do not have the same length, or there are too many objects")
    found = [messages.read_outcome(number) for number in header.outcomes]
    lengths = [
        item.length if outcome is Outcome.HIT else 0 for item, outcome in zip(items, found, strict=False)
    ]
    if list(header.items) != list(range(first, first + count)) or list(header.sizes) != lengths:
        raise WireError("objects come out of order, or with other sizes than were asked for")
    if sum(lengths) != payload:
        raise WireError(f"objects of {sum(lengths)} bytes come with {payload} bytes")
    if len(header.checksums) != CHECKSUM_BYTES * found.count(Outcome.HIT):
        raise WireError("a header has not one checksum for each object")
    starts = range(0, len(header.checksums), CHECKSUM_BYTES)
    return found, (header.checksums[at : at + CHECKSUM_BYTES] for at in starts)


class DataPool:
    """Data connections beside one connection to gRPC.

    Thread safety: any thread may call.
    """

    def __init__(self, settings: GrpcSettings, port: pb.DataPort) -> None:
        """Make a pool without connections; `port` is what the daemon offers."""
        self._settings = settings
        self._port = port
        self._changed = Condition()
        self._idle: list[DataConnection] = []
        self._count = 0
        """Number of connections, idle or lent."""
        self._closed = False

    def perform(self, work: Callable[[DataConnection], T], deadline: float) -> T:
        """Return the result of `work` on a data connection, which may be tried on two.

        `deadline`: in seconds of the monotonic clock. Raises CallError.
        """
        while True:
            connection, is_new = self._borrow(deadline)
            try:
                result = work(connection)
            except FailedError as failed:
                self._give_back(connection)
                raise failed.error from None
            except WireError as error:
                self._drop(connection)
                text = f"{self._settings}: {error}; is the daemon another version?"
                raise CallError(Kind.INVALID, text) from error
            except OSError as error:
                self._drop(connection, *self._take_idle())
                if isinstance(error, TimeoutError) or time.monotonic() >= deadline:
                    text = f"{self._settings} does not answer in time"
                    raise CallError(Kind.UNREACHABLE, text) from error
                if is_new:
                    raise CallError(Kind.UNREACHABLE, f"{self._settings}: {error}") from error
                continue
            except BaseException:  # the connection is in the middle of something
                self._drop(connection)
                raise
            self._give_back(connection)
            return result

    def close(self) -> None:
        """Close every connection; calls that have one end soon."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._drop(*self._take_idle())

    def _borrow(self, deadline: float) -> tuple[DataConnection, bool]:
        """Return a connection, and whether it is new; raises CallError."""
        with self._changed:
            free = self._changed.wait_for(
                lambda: self._closed or self._idle or self._count < self._port.connections,
                deadline - time.monotonic(),
            )
            if self._closed or not free:
                text = "the connection is closed" if self._closed else "all data connections are in use"
                raise CallError(Kind.UNREACHABLE if self._closed else Kind.BUSY, f"{self._settings}: {text}")
            if self._idle:
                return self._idle.pop(), False
            self._count += 1
        try:
            return DataConnection(self._settings, self._port, deadline), True
        except BaseException as error:
            self._forget(1)
            if isinstance(error, FailedError):
                raise error.error from None
            if isinstance(error, ConfigError):
                raise CallError(Kind.REFUSED, str(error)) from error
            if isinstance(error, OSError | WireError):
                place = f"its data port {self._port.port}" if self._port.port else f"its socket {DATA_SOCKET}"
                text = f"{self._settings}: {place} cannot be reached ({error})"
                raise CallError(Kind.UNREACHABLE, text) from error
            raise

    def _give_back(self, connection: DataConnection) -> None:
        with self._changed:
            is_wanted = not self._closed
            if is_wanted:
                self._idle.append(connection)
                self._changed.notify()
        if not is_wanted:
            self._drop(connection)

    def _drop(self, *connections: DataConnection) -> None:
        for connection in connections:
            connection.close()
        self._forget(len(connections))

    def _take_idle(self) -> list[DataConnection]:
        with self._changed:
            idle, self._idle = self._idle, []
        return idle

    def _forget(self, count: int) -> None:
        with self._changed:
            self._count -= count
            self._changed.notify_all()
