"""Payload on connections of its own, beside gRPC: one connection, and the plane that lends and reopens them.

The caller's thread moves every byte. So when a call has returned or raised, nothing touches its buffers. A
call that finds no data connection, or loses it, is made over gRPC at once. After a loss, a thread in the
background says Hello for a new token and opens one connection again, after a pause that doubles:

    open ── a connection breaks, or a call gets no answer ──▶ closed ── pause, Hello, connect ──▶ open
"""

from __future__ import annotations

import logging
import math
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Lock, Thread
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError

from tiercache.config.urls import parse_address
from tiercache.core import Outcome
from tiercache.errors import ConfigError, WireError
from tiercache.storage.base import GetItem, SetItem
from tiercache.storage.checksum import CHECKSUM_BYTES, checksum
from tiercache.storage.vectors import take
from tiercache.wire import messages
from tiercache.wire.data import FRAME_BYTES, VECTOR, Frame, FrameKind, pack, skip, unpack
from tiercache.wire.v1 import data_pb2
from tiercache.wire.v1 import storage_pb2 as pb
from tiercache_backends.grpc.failures import CallError, Kind, error_of_status
from tiercache_backends.grpc.settings import GrpcSettings

_MAX_HEADER: Final = 4 << 20
"""Maximum bytes of a header that a daemon may send; a thousand objects take a tenth of it."""
_SLACK: Final = 0.01
"""Seconds by which a step may end after the deadline of its call, or has to be repeated before it."""
_TIMEVAL: Final = struct.Struct("@ll")
"""C's `struct timeval`."""


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

    def __init__(
        self,
        where: tuple[str, int],
        opening: data_pb2.DataOpen,
        deadline: float,
        name: str,
        context: ssl.SSLContext | None = None,
        server_name: str = "",
    ) -> None:
        """Connect and open; `name` is the daemon's in error messages, `server_name` in its certificate."""
        self._name = name
        self._tls = context is not None
        self._limit = math.inf
        """Seconds that the kernel, or TLS, lets one step take."""
        self._sock: Any = socket.create_connection(where, _left(deadline))
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if context is not None:
                self._sock.settimeout(_left(deadline))
                self._sock = context.wrap_socket(self._sock, server_hostname=server_name)
            else:
                self._sock.settimeout(None)
            self._send([memoryview(pack(FrameKind.OPEN, opening.SerializeToString()))], deadline)
            self._expect(FrameKind.OPENED, deadline)
        except BaseException:
            self._sock.close()
            raise

    def close(self) -> None:
        """Close the connection, also if a process that was forked meanwhile has its descriptor."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def exists(self, request: pb.ExistsRequest, deadline: float) -> pb.BitmapReply:
        """Return the reply to a call of Exists."""
        self._call("Exists", request.SerializeToString(), deadline)
        reply: pb.BitmapReply = self._reply(pb.BitmapReply, deadline)
        return reply

    def get(
        self, request: pb.GetRequest, items: Sequence[GetItem], outcomes: list[Outcome], deadline: float
    ) -> None:
        """Fill the buffers of `items`, and append to `outcomes` what became of each, as the objects come."""
        self._call("Get", request.SerializeToString(), deadline)
        while len(outcomes) < len(items):
            rest = sum(item.length for item in items[len(outcomes) :])
            frame = self._expect(FrameKind.OBJECTS, deadline, rest)
            header = _read(self._receive(frame.header, deadline), pb.GetHeader)
            if sum(header.sizes) != frame.payload:
                raise WireError(f"objects of {sum(header.sizes)} bytes come with {frame.payload} bytes")
            receive_items(header, items, outcomes, partial(self._fill, deadline=deadline))

    def set(self, items: Sequence[SetItem], sums: Sequence[bytes], deadline: float) -> list[Outcome]:
        """Send objects and their checksums, and return what became of each."""
        payload = [view for item in items for view in take(item.buffers, 0, item.meta.length)]
        self._call("Set", set_header(items, sums).SerializeToString(), deadline, payload)
        return messages.read_outcomes(self._reply(pb.OutcomesReply, deadline).outcomes, len(items))

    def _call(self, method: str, request: bytes, deadline: float, payload: Sequence[memoryview] = ()) -> None:
        call = data_pb2.DataCall(method=method, seconds=_left(deadline), request=request)
        first = pack(FrameKind.CALL, call.SerializeToString(), sum(view.nbytes for view in payload))
        self._send([memoryview(first), *payload], deadline)

    def _reply(self, kind: type[Any], deadline: float) -> Any:
        frame = self._expect(FrameKind.REPLY, deadline)
        return _read(self._receive(frame.header, deadline), kind)

    def _expect(self, kind: FrameKind, deadline: float, max_payload: int = 0) -> Frame:
        """Receive the start of a frame of this kind; raises FailedError if the daemon says so instead."""
        frame = unpack(self._receive(FRAME_BYTES, deadline), _MAX_HEADER, max_payload)
        if frame.kind is FrameKind.FAILED and not frame.payload:
            failure = _read(self._receive(frame.header, deadline), data_pb2.DataFailure)
            raise FailedError(error_of_status(failure.code, failure.text, self._name))
        if frame.kind is not kind:
            raise WireError(f"a frame of kind {frame.kind.name} came where {kind.name} was due")
        return frame

    def _receive(self, nbytes: int, deadline: float) -> bytearray:
        data = bytearray(nbytes)
        self._fill([memoryview(data)], deadline)
        return data

    def _fill(self, views: Iterable[memoryview], deadline: float) -> None:
        left = [view for view in views if view.nbytes]
        while left:
            got = self._try(self._receive_into, left, deadline)
            if got == 0:
                raise ConnectionResetError(f"{self._name} closed a data connection")
            skip(left, got or 0)

    def _send(self, views: Iterable[memoryview], deadline: float) -> None:
        left = [view for view in views if view.nbytes]
        while left:
            skip(left, self._try(self._send_from, left, deadline) or 0)

    def _receive_into(self, views: list[memoryview]) -> int:
        if self._tls:
            return int(self._sock.recv_into(views[0]))
        # The kernel returns when the buffers are full, so that the interpreter is not asked for each packet.
        return int(self._sock.recvmsg_into(views[:VECTOR], 0, socket.MSG_WAITALL)[0])

    def _send_from(self, views: list[memoryview]) -> int:
        return int(self._sock.send(views[0]) if self._tls else self._sock.sendmsg(views[:VECTOR]))

    def _try(
        self, work: Callable[[list[memoryview]], int], views: list[memoryview], deadline: float
    ) -> int | None:
        """Return the bytes that `work` has moved; None if the time that was set for it is over.

        Calls have the same time, as a rule, so that it is seldom set anew.
        """
        left = _left(deadline)
        if abs(left - self._limit) > _SLACK:
            self._limit = left
            if self._tls:
                self._sock.settimeout(left)
            else:
                _set_time_limit(self._sock, left)
        try:
            return work(views)
        except (BlockingIOError, TimeoutError):
            return None


def _set_time_limit(sock: socket.socket, seconds: float) -> None:
    """Let the kernel end each wait of a blocking socket after so many seconds, with BlockingIOError.

    `settimeout` would make every step three system calls instead of one.
    """
    micros = max(1, int(seconds * 1e6))
    limit = _TIMEVAL.pack(*divmod(micros, 10**6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, limit)


def _left(deadline: float) -> float:
    """Return the seconds until a deadline; raises TimeoutError after it."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline of a call on a data connection has passed")
    return left


def _read(data: bytearray, kind: type[Any]) -> Any:
    try:
        return kind.FromString(bytes(data))
    except DecodeError as error:
        raise WireError(f"a header cannot be read ({error})") from error


def set_header(items: Sequence[SetItem], sums: Sequence[bytes]) -> pb.SetHeader:
    """Return the header of a Set, with the checksums of the items."""
    metas = [replace(item.meta, checksum=found) for item, found in zip(items, sums, strict=True)]
    return pb.SetHeader(
        keys=messages.keys([item.key for item in items]), metas=[messages.meta(meta) for meta in metas]
    )


def receive_items(
    header: pb.GetHeader,
    items: Sequence[GetItem],
    outcomes: list[Outcome],
    fill: Callable[[list[memoryview]], None],
) -> None:
    """Let `fill` put the bytes of the objects of a header into buffers, and append to `outcomes`.

    Raises WireError unless the header tells of the items behind those that have outcomes already.
    """
    rest = items[len(outcomes) :]
    count = len(header.items)
    if not 0 < count <= len(rest) or not count == len(header.outcomes) == len(header.sizes):
        raise WireError("the columns of a header do not have the same length, or there are too many objects")
    found = [messages.read_outcome(number) for number in header.outcomes]
    hits: list[GetItem] = []
    for number, (item, outcome) in enumerate(zip(rest, found, strict=False)):
        length = item.length if outcome is Outcome.HIT else 0
        if header.items[number] != len(outcomes) + number or header.sizes[number] != length:
            raise WireError(
                f"an object of {item.length} bytes comes with {header.sizes[number]} bytes, or out of order"
            )
        if outcome is Outcome.HIT:
            hits.append(item)
    if len(header.checksums) != CHECKSUM_BYTES * len(hits):
        raise WireError(f"{len(hits)} objects come with {len(header.checksums)} bytes of checksums")
    fill([view for item in hits for view in take(item.buffers, 0, item.length)])
    sums = (header.checksums[n : n + CHECKSUM_BYTES] for n in range(0, len(header.checksums), CHECKSUM_BYTES))
    outcomes += [
        Outcome.ERROR
        if outcome is Outcome.HIT and checksum(item.key, item.buffers, item.length) != next(sums)
        else outcome
        for item, outcome in zip(rest, found, strict=False)
    ]


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
