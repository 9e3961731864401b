"""Data connections: who may open them, and the ports on which they are accepted and served call by call.

Hello offers a token to the caller that it has recognised. The token is as good as the connection on which it
was given, of which the gate sees the end:

    1. Hello: the gate's connection 7 belongs to worker-1. `offer` makes a session, and its token.
    2. Data connections bring the token, and the credentials of worker-1 once more: `admit`.
    3. Connection 7 ends. The gate calls `end`: the token is worth nothing, and the data connections end.

Until a connection has brought a valid token it can use very little, by the rules that `admission` has for
connections to gRPC: few are opening at once, each for a few seconds, all share one rate, and if there is no
room, the oldest of the origin that has most of them is closed in favour of a new one.
"""

from __future__ import annotations

import secrets
import socket
import time
from asyncio import get_running_loop
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import partial
from typing import Final

from google.protobuf.message import DecodeError
from grpc import StatusCode

from tiercache.daemon.acceptor import AcceptedConnection, Acceptor
from tiercache.daemon.access import Access, Caller, Permissions, Refusal
from tiercache.daemon.admission import Admission
from tiercache.daemon.call import PARSED, request_bytes
from tiercache.daemon.call_log import CallLog
from tiercache.daemon.certificates import Certificates
from tiercache.daemon.gate import Gate
from tiercache.daemon.payload.call_threads import LOOK_SECONDS, CallThreads, Conversation, Unfinished
from tiercache.daemon.payload.channel import Channel, DisconnectedError
from tiercache.daemon.payload.streams import DataCall
from tiercache.daemon.sockets import listen_tcp
from tiercache.errors import WireError
from tiercache.wire import data, messages
from tiercache.wire.data import FrameKind
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


_LATE: Final = data.pack(
    FrameKind.FAILED,
    data_pb2.DataFailure(
        code=StatusCode.DEADLINE_EXCEEDED.value[0],
        text="the store has not answered within the call's deadline",
    ).SerializeToString(),
)


class DataSession:
    """Session of one client, from its Hello to the end of its connection to gRPC.

    Thread safety: the event loop's thread.
    """

    def __init__(self, peer: str, caller: Caller) -> None:
        self.peer: Final = peer
        self.caller = caller
        self.token: Final = secrets.token_bytes(_TOKEN_BYTES)
        self.over = False
        """Whether the session has ended."""
        self.ends: Final[set[Callable[[], object]]] = set()
        """Functions that end the data connections of the session."""


class DataSessions:
    """All sessions, by the names of their connections to gRPC, and by token.

    Thread safety: the event loop's thread.
    """

    def __init__(self, access: Access, gate: Gate, max_connections: int) -> None:
        self._access = access
        self._gate = gate
        self._max_connections = min(MAX_CONNECTIONS, max_connections)
        self._by_peer: dict[str, DataSession] = {}
        self._by_token: dict[bytes, DataSession] = {}
        self.draining = False
        """Whether a session that ends leaves its data connections to `port.DataPort.drain`."""
        self.ports: dict[int, int] = {}
        """Ports for data connections, by the ports on which their clients reach gRPC; empty while there are
        none."""

    def __len__(self) -> int:
        return len(self._by_peer)

    @property
    def connections(self) -> int:
        """Number of data connections of all sessions; any thread may read this."""
        return sum(len(session.ends) for session in list(self._by_peer.values()))

    def offer(self, caller: Caller, peer: str) -> pb.DataPort | None:
        """Return what a caller needs to open data connections; None if there are none for its connection."""
        client = self._gate.find(peer)
        port = None if client is None else self.ports.get(client.port)
        if port is None:
            return None
        session = self._by_peer.get(peer)
        if session is None or session.caller.permissions is not caller.permissions:
            self.end(peer)
            session = self._by_peer[peer] = DataSession(peer, caller)
            self._by_token[session.token] = session
            # The gate forgets a connection before it calls `end`. So a session of a connection that ended
            # meanwhile is either seen here, or by an `end` that is still to come.
            if self._gate.find(peer) is None:
                self.end(peer)
                return None
        session.caller = caller
        return pb.DataPort(port=port, token=session.token, connections=self._max_connections)

    def admit(self, opening: data_pb2.DataOpen, names: Sequence[bytes]) -> DataSession:
        """Return the session whose token a new connection brings; raises Refusal.

        `names`: the subject alternative names of the connection's certificate. The credentials must be those
        of the session's principal, so that a token alone, if another principal got it, opens nothing.
        """
        session = self._by_token.get(opening.token)
        if session is None:
            raise Refusal(StatusCode.UNAUTHENTICATED, "there is no such session, or it has ended; say Hello")
        identity: Mapping[str, Sequence[bytes]] = {"x509_subject_alternative_name": names}
        if self._access.authenticate(opening.authorization, identity) is not session.caller.permissions:
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
        for session in list(self._by_peer.values()):
            if session.caller.permissions in principals:
                self.end(session.peer)

    def end(self, peer: str) -> None:
        """End the session of a connection to gRPC, if it has one, and all of its data connections."""
        session = self._by_peer.pop(peer, None)
        if session is not None:
            session.over = True
            del self._by_token[session.token]
            for end in () if self.draining else list(session.ends):
                end()


class _Connection(AcceptedConnection):
    """A data connection.

    Thread safety: the event loop's thread.
    """

    def __init__(
        self, number: int, origin: bytes, channel: Channel, threads: CallThreads, *, trusted: bool
    ) -> None:
        super().__init__(number, origin, time.monotonic(), tls=False, trusted=trusted)
        self.channel: Final = channel
        self._threads: Final = threads
        self.conversation: Conversation | None = None
        """Its calls, once it is open."""

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way."""
        return self.conversation is not None and not self.conversation.is_idle

    def close(self) -> None:
        if self.conversation is not None:
            self._threads.end(self.conversation)
        else:
            self.channel.close()


class DataPort:
    """Acceptor of data connections, and their conversations.

    Thread safety: the event loop's thread.
    """

    def __init__(
        self,
        sessions: DataSessions,
        answer: Callable[[DataCall], Awaitable[None]],
        calls: CallLog,
        limits: pb.Limits,
        *,
        max_connections: int,
        idle: float,
        workers: int,
        certificates: Certificates | None,
    ) -> None:
        """Prepare for at most `max_connections` connections; with `certificates` they are in TLS.

        `answer` serves one call; up to `workers` threads call the store. A client that stands still for
        `idle` seconds within a call is cut.
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
        self._threads: CallThreads | None = None
        self._workers = workers

    def listen(self, host: str, port: int) -> int:
        """Listen on a TCP address and return its port; raises OSError."""
        listener = listen_tcp(host, port)
        if self._threads is None:
            self._threads = CallThreads(self._workers)
            self._look_at_threads()
        self._acceptor.listen(listener)
        return int(listener.getsockname()[1])

    async def drain(self, seconds: float) -> None:
        """Accept nothing more, let calls under way end within `seconds`, and close every connection."""
        self._draining = self._sessions.draining = True
        if self._threads is not None:
            self._threads.draining = True
        await self._acceptor.close(seconds, lambda connection: connection.is_busy)
        if self._threads is not None:
            self._threads.close()

    def _look_at_threads(self) -> None:
        if self._threads is not None and not self._draining:
            self._threads.look(_LATE)
            get_running_loop().call_later(LOOK_SECONDS, self._look_at_threads)

    def _make(self, number: int, origin: bytes, client: socket.socket) -> _Connection:
        assert self._threads is not None
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        certificates = self._certificates
        context = None if certificates is None else certificates.context
        channel = Channel(client, self._idle, context)
        mutual = certificates is not None and certificates.mutual
        return _Connection(number, origin, channel, self._threads, trusted=mutual)

    async def _serve(self, connection: _Connection) -> None:
        try:
            session = await self._greet(connection)
        except Refusal as refusal:
            self._calls.refused(refusal)
            self._charge(connection)
            failure = data_pb2.DataFailure(code=refusal.code.value[0], text=refusal.message)
            with suppress(DisconnectedError, Refusal):
                frame = data.pack(FrameKind.FAILED, failure.SerializeToString())
                await connection.channel.send([memoryview(frame)])
            return
        except WireError as error:
            self._calls.refused(error)
            self._charge(connection)
            return
        except DisconnectedError:
            return
        end = partial(self._acceptor.end, connection)
        session.ends.add(end)
        try:
            await connection.channel.send([memoryview(data.pack(FrameKind.OPENED, b""))])
            await self._converse(connection, session)
        except DisconnectedError:
            pass
        except (WireError, Refusal) as error:
            self._calls.refused(error)
        finally:
            session.ends.discard(end)

    def _charge(self, connection: _Connection) -> None:
        """Let a connection that was refused take bytes of the rate that all of them share."""
        self._acceptor.admission.record_forwarded(connection, 0, _OPEN_COSTS[self._certificates is not None])

    async def _converse(self, connection: _Connection, session: DataSession) -> None:
        """Let the calls of a connection be served, by threads and, where one has to wait, here."""
        assert self._threads is not None
        conversation = connection.conversation = Conversation(
            connection.channel,
            session.caller.budgets.workers,
            partial(self._call, connection.channel, session),
        )
        while not self._draining and not session.over:
            unfinished = await self._threads.lend(conversation)
            try:
                await get_running_loop().create_task(_finish(unfinished), context=conversation.context)
            finally:
                conversation.give_up(unfinished)

    async def _greet(self, connection: _Connection) -> DataSession:
        """Make the handshake and return the session whose token the client brings."""
        channel = connection.channel
        await channel.handshake()
        frame = await channel.frame(_OPEN_BYTES)
        if frame.kind is not FrameKind.OPEN:
            raise Refusal(StatusCode.UNAUTHENTICATED, "the first frame of a data connection must open it")
        packed = await channel.receive(frame.header)
        try:
            opening = data_pb2.DataOpen.FromString(packed)
        except DecodeError as error:
            raise WireError(f"the first frame of a data connection cannot be read ({error})") from error
        session = self._sessions.admit(opening, channel.names)
        self._acceptor.admission.settle(connection)
        connection.known = True
        self._acceptor.open_next()
        return session

    async def _call(self, channel: Channel, session: DataSession) -> None:
        """Receive one call and serve it."""
        caller, most = session.caller, request_bytes(self._limits.keys)
        frame = await channel.frame(most + _CALL_BYTES, _SET_BYTES + self._limits.object_bytes)
        if frame.kind is not FrameKind.CALL:
            raise WireError(f"a frame of kind {frame.kind.name} came where a call was due")
        held = min(PARSED * frame.header, caller.budgets.requests.largest)
        await caller.budgets.requests.take(held)
        try:
            packed = await channel.receive(frame.header)
            called = messages.read_message(packed, data_pb2.DataCall, most + _CALL_BYTES)
            if called.method not in data.METHODS:
                raise WireError(f"data connections carry no calls of {called.method[:64]!r}")
            if frame.payload and called.method != "Set":
                raise WireError(f"a call of {called.method} came with a payload of {frame.payload} bytes")
            await self._answer(DataCall(caller, channel, called, frame.payload, self._limits, most))
        finally:
            caller.budgets.requests.give(held)


async def _finish(unfinished: Unfinished) -> None:
    await unfinished
