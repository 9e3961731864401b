"""Data connections: who may open them, and the ports on which they are accepted and served call by call.

Hello offers a token to the caller that it has recognised. The token is as good as the connection on which it
was given, of which the gate sees the end:

    1. Hello: the gate's connection 7 belongs to worker-1. `offer` makes a session, and its token.
    2. Data connections bring the token, and the credentials of worker-1 once more: `admit`.
    3. Connection 7 ends. The gate calls `end`: the token is worth nothing, and the data connections end.

On this host the token lives as long as the session of the attach socket, and the credentials are the user id
at the other end of the unix socket.

Until a connection has brought a valid token it can use very little, by the rules that `admission` has for
connections to gRPC: few are opening at once, each for a few seconds, all share one rate, and if there is no
room, the oldest of the origin that has most of them is closed in favour of a new one.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Final, TypeVar

from google.protobuf.message import DecodeError
from grpc import StatusCode

from tiercache.daemon.acceptor import AcceptedConnection, Acceptor
from tiercache.daemon.access import Access, Caller, Permissions, Refusal
from tiercache.daemon.admission import Admission
from tiercache.daemon.call import PARSED, request_bytes
from tiercache.daemon.call_log import CallLog
from tiercache.daemon.certificates import Certificates
from tiercache.daemon.gate import Gate
from tiercache.daemon.payload.data import DataCall
from tiercache.daemon.sockets import listen_tcp, listen_unix, peer_of
from tiercache.daemon.store_threads import fulfil
from tiercache.errors import WireError
from tiercache.wire import data, messages
from tiercache.wire.data import FrameKind, FrameSocket
from tiercache.wire.v1 import data_pb2
from tiercache.wire.v1 import storage_pb2 as pb

_TOKEN_BYTES: Final = 32
MAX_CONNECTIONS: Final = 8
"""Maximum number of data connections of one client; it may have fewer calls under way (`limits`)."""
_OPEN_BYTES: Final = 8 << 10
"""Maximum bytes of the first frame's header; a token file has at most half of them."""
_MAX_OPENING: Final = 128
"""Maximum number of connections that are opening at once; each holds some kilobytes, with TLS some dozens."""
_OPEN_COSTS: Final = {False: 256, True: 1 << 10}
"""Bytes that a connection which is refused takes from the rate of all, without TLS and with it."""
_SETTLING_SECONDS: Final = 5.0
"""Seconds that a client may take to bring its token."""
_CALL_BYTES: Final = 64
"""Bytes of a call's header besides its request."""
_SET_BYTES: Final = 128 << 20
"""Maximum payload of one call, in addition to the size of the largest object."""
T = TypeVar("T")


class DataSession:
    """Right of one client to open data connections, from its Hello to the end of what proves who it is.

    Thread safety: the event loop's thread.
    """

    def __init__(self, key: str, caller: Caller) -> None:
        self.key: Final = key
        self.caller = caller
        self.token: Final = secrets.token_bytes(_TOKEN_BYTES)
        self.over = False
        """Whether the session has ended."""
        self.ends: Final[set[Callable[[], object]]] = set()
        """Functions that end the data connections of the session."""


class DataSessions:
    """All sessions, by token and by what ends them: a connection to gRPC, or a session of the attach socket.

    Thread safety: the event loop's thread.
    """

    def __init__(self, access: Access, gate: Gate, max_connections: int) -> None:
        self._access = access
        self._gate = gate
        self._max_connections = min(MAX_CONNECTIONS, max_connections)
        self._by_key: dict[str, DataSession] = {}
        self._by_token: dict[bytes, DataSession] = {}
        self.draining = False
        """Whether a session that ends leaves its data connections to `port.DataPort.drain`."""
        self.ports: dict[int, int] = {}
        """Ports for data connections, by the ports on which their clients reach gRPC."""

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def connections(self) -> int:
        """Number of data connections of all sessions; any thread may read this."""
        return sum(len(session.ends) for session in list(self._by_key.values()))

    def offer(self, caller: Caller, peer: str) -> pb.DataPort | None:
        """Return what a caller needs to open data connections; None if its connection has ended."""
        local = caller.session
        key = peer if local is None else local.token.hex()
        client = self._gate.find(peer)
        if client is None if local is None else local.ended:
            return None
        session = self._by_key.get(key)
        if session is None or session.caller.permissions is not caller.permissions:
            self.end(key)
            session = self._by_key[key] = DataSession(key, caller)
            self._by_token[session.token] = session
            if local is not None:
                local.when_ended = partial(self.end, key)
            # The gate forgets a connection before it calls `end`. So a session of a connection that ended
            # meanwhile is either seen here, or by an `end` that is still to come.
            elif self._gate.find(peer) is None:
                self.end(key)
                return None
        session.caller = caller
        port = 0 if client is None or local is not None else self.ports[client.port]
        return pb.DataPort(port=port, token=session.token, connections=self._max_connections)

    def admit(self, opening: data_pb2.DataOpen, names: Sequence[bytes], uid: int | None) -> DataSession:
        """Return the session whose token a new connection brings; raises Refusal.

        `names`: the subject alternative names of the connection's certificate; `uid`: the user at the other
        end of a unix socket. The credentials must be those of the session's principal, so that a token alone,
        if another principal got it, opens nothing.
        """
        session = self._by_token.get(opening.token)
        if session is None:
            raise Refusal(StatusCode.UNAUTHENTICATED, "there is no such session, or it has ended; say Hello")
        local = session.caller.session
        if local is not None:
            is_same = uid == local.uid
        else:
            identity: Mapping[str, Sequence[bytes]] = {"x509_subject_alternative_name": names}
            found = self._access.authenticate(opening.authorization, identity)
            is_same = uid is None and found is session.caller.permissions
        if not is_same:
            raise Refusal(StatusCode.UNAUTHENTICATED, "the session belongs to another principal; say Hello")
        if len(session.ends) >= self._max_connections:
            raise Refusal(
                StatusCode.RESOURCE_EXHAUSTED,
                f"{session.caller.permissions.name} has {len(session.ends)} data connections of one client"
                " already; use these",
            )
        return session

    def end_all_of(self, principals: AbstractSet[Permissions]) -> None:
        """End the sessions of these principals; their clients come again with what is valid now."""
        for session in list(self._by_key.values()):
            if session.caller.permissions in principals:
                self.end(session.key)

    def end(self, key: str) -> None:
        """End the session of a connection, if it has one, and all of its data connections."""
        session = self._by_key.pop(key, None)
        if session is not None:
            session.over = True
            del self._by_token[session.token]
            for end in () if self.draining else list(session.ends):
                end()


class _Connection(AcceptedConnection):
    """A data connection, and the thread that serves it.

    Thread safety: the event loop's thread; `is_busy` that of the connection.
    """

    def __init__(
        self, number: int, origin: bytes, channel: FrameSocket, uid: int | None, *, trusted: bool
    ) -> None:
        super().__init__(number, origin, time.monotonic(), tls=False, trusted=trusted)
        self.channel: Final = channel
        self.uid: Final = uid
        """User at the other end of a unix socket; None over TCP."""
        self.is_busy = False
        """Whether a call is under way."""
        self._is_served = False

    async def run(self, work: Callable[[], None]) -> None:
        """Let a thread of its own serve the connection, and wait for its end."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def tell() -> None:
            if not ended.done():
                ended.set_result(None)

        def serve() -> None:
            try:
                work()
            finally:
                self.channel.close()
                with suppress(RuntimeError):  # the event loop has ended
                    loop.call_soon_threadsafe(tell)

        self._is_served = True
        Thread(target=serve, name="tiercache-data", daemon=True).start()
        await ended

    def close(self) -> None:
        if self._is_served:
            self.channel.cut()  # the thread closes it, when no step uses it any more
        else:
            self.channel.close()


class DataPort:
    """Acceptor of data connections, each of which a thread serves.

    A thread for each connection, and no hand-over from one to another: these took a third of the processor
    time of a small call. Threads of idle connections hold some dozen kilobytes.

    Thread safety: the event loop's thread.
    """

    def __init__(
        self,
        sessions: DataSessions,
        answer: Callable[[DataCall], None],
        calls: CallLog,
        limits: pb.Limits,
        *,
        max_connections: int,
        idle: float,
        certificates: Certificates | None,
    ) -> None:
        """Prepare for at most `max_connections` connections; with `certificates` those over TCP are in TLS.

        `answer` serves one call. A client that stands still for `idle` seconds within a call is cut.
        """
        self._sessions = sessions
        self._answer = answer
        self._calls = calls
        self._limits = limits
        self._idle = idle
        self._certificates = certificates
        admission: Admission[_Connection] = Admission(
            max_connections=max_connections, max_opening=_MAX_OPENING, settling=_SETTLING_SECONDS,
            now=time.monotonic(),
        )  # fmt: skip
        self._acceptor = Acceptor(admission, self._make, self._serve, calls.refused_connection)
        self._draining = False
        self._loop: Final = asyncio.get_running_loop()

    def listen_local(self, path: str, mode: int) -> None:
        """Listen on a unix socket at `path` with this file mode; raises OSError."""
        self._acceptor.listen(listen_unix(path, mode, socket.SOCK_STREAM))

    def listen(self, host: str, port: int) -> int:
        """Listen on a TCP address and return its port; raises OSError."""
        listener = listen_tcp(host, port)
        self._acceptor.listen(listener)
        return int(listener.getsockname()[1])

    async def drain(self, seconds: float) -> None:
        """Accept nothing more, let calls under way end within `seconds`, and close every connection."""
        self._draining = self._sessions.draining = True
        await self._acceptor.close(seconds, lambda connection: connection.is_busy)

    def _make(self, number: int, origin: bytes, client: socket.socket) -> _Connection:
        uid = peer_of(client)[1] if client.family == socket.AF_UNIX else None
        if uid is None:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, data.SEND_BYTES)
        mutual = self._certificates is not None and self._certificates.now.mutual
        return _Connection(
            number, origin, FrameSocket(client, "the client", self._idle), uid,
            trusted=mutual and uid is None,
        )  # fmt: skip

    async def _serve(self, connection: _Connection) -> None:
        await connection.run(partial(self._converse, connection))

    def _converse(self, connection: _Connection) -> None:
        """Open a connection and serve its calls, in its thread."""
        with suppress(OSError):  # the client has gone, or is slow
            try:
                opening = self._greet(connection)
                session = self._in_loop(partial(self._open, connection, opening))
            except (Refusal, WireError) as error:
                self._calls.refused(error)
                self._in_loop(partial(self._charge, connection))
                if isinstance(error, Refusal):
                    failure = data_pb2.DataFailure(code=error.code.value[0], text=error.message)
                    self._send(connection.channel, FrameKind.FAILED, failure.SerializeToString())
                return
            try:
                self._send(connection.channel, FrameKind.OPENED, b"")
                while not self._draining and not session.over:
                    connection.channel.wait()
                    connection.is_busy = True
                    self._call(connection, session)
                    connection.is_busy = False
            except (Refusal, WireError) as error:
                self._calls.refused(error)

    def _greet(self, connection: _Connection) -> data_pb2.DataOpen:
        """Make the handshake and return what the client brings."""
        channel, until = connection.channel, time.monotonic() + _SETTLING_SECONDS
        if self._certificates is not None and connection.uid is None:
            channel.secure(self._certificates.now.context, until)
        frame = channel.frame(until, _OPEN_BYTES)
        if frame.kind is not FrameKind.OPEN:
            raise Refusal(StatusCode.UNAUTHENTICATED, "the first frame of a data connection must open it")
        try:
            return data_pb2.DataOpen.FromString(channel.receive(frame.header, until))
        except DecodeError as error:
            raise WireError(f"the first frame of a data connection cannot be read ({error})") from error

    def _open(self, connection: _Connection, opening: data_pb2.DataOpen) -> DataSession:
        """Return the session whose token a client brings."""
        if connection.number not in self._acceptor.admission.connections:
            raise ConnectionAbortedError("the connection was ended meanwhile")
        session = self._sessions.admit(opening, connection.channel.names, connection.uid)
        self._acceptor.admission.settle(connection)
        connection.known = True
        self._acceptor.open_next()
        end = partial(self._acceptor.end, connection)
        session.ends.add(end)
        assert connection.task is not None
        connection.task.add_done_callback(lambda _: session.ends.discard(end))
        return session

    def _charge(self, connection: _Connection) -> None:
        """Let a connection that was refused take bytes of the rate that all of them share."""
        self._acceptor.admission.record_forwarded(connection, 0, _OPEN_COSTS[self._certificates is not None])

    def _call(self, connection: _Connection, session: DataSession) -> None:
        """Receive one call and serve it."""
        channel, caller, most = connection.channel, session.caller, request_bytes(self._limits.keys)
        until = time.monotonic() + self._idle
        frame = channel.frame(until, most + _CALL_BYTES, _SET_BYTES + self._limits.object_bytes)
        if frame.kind is not FrameKind.CALL:
            raise WireError(f"a frame of kind {frame.kind.name} came where a call was due")
        held = min(PARSED * frame.header, caller.budgets.requests.largest)
        caller.budgets.requests.wait(held, self._limits.call_seconds)
        try:
            packed = channel.receive(frame.header, until)
            called = messages.read_message(packed, data_pb2.DataCall, most + _CALL_BYTES)
            if called.method not in data.METHODS:
                raise WireError(f"data connections carry no calls of {called.method[:64]!r}")
            if frame.payload and called.method != "Set":
                raise WireError(f"a call of {called.method} came with a payload of {frame.payload} bytes")
            self._answer(DataCall(caller, channel, called, frame.payload, self._limits, most))
        finally:
            caller.budgets.requests.give(held)

    def _send(self, channel: FrameSocket, kind: FrameKind, header: bytes) -> None:
        channel.send([memoryview(data.pack(kind, header))], time.monotonic() + self._idle)

    def _in_loop(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which the event loop does."""

        done: Future[T] = Future()
        try:
            self._loop.call_soon_threadsafe(fulfil, done, work)
        except RuntimeError as error:
            raise ConnectionAbortedError("the daemon has ended") from error
        return done.result(_SETTLING_SECONDS)
