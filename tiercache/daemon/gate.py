"""The gate in front of gRPC, which accepts connections and forwards their bytes to gRPC.

The gate accepts TCP connections, and unix-socket connections of users other than the daemon's own. It
forwards the bytes of each connection through a unix socket on which gRPC listens. `admission` explains the
states of a connection and decides which connection is served next; this module moves the bytes.

gRPC's event loop recognises the caller in another thread:

    1. The gate's thread forwards the first call of a settled connection, and throttles the connection.
    2. gRPC's thread reads the call and recognises the caller: `mark_known` sets `known` and wakes the gate.
    3. The gate's thread may cut stalled connections before it handles this wake-up. It spares the connection,
       because `known` is set.
    4. The gate's thread handles the wake-up: it stops throttling the connection, and stops counting bytes.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import Final, NamedTuple

from tiercache.daemon.admission import Admission, ConnectionState, OpeningCounter
from tiercache.daemon.sockets import EXHAUSTED, FLOW_BYTES, Flow, listen_tcp, listen_unix, origin_of, peer_of

_TICK_SECONDS: Final = 0.1
"""Seconds between two rounds of the work that depends on time: timeouts, paused listeners, throttled
connections.
"""
_DELIVERY_SECONDS: Final = 2.0
"""Seconds, at most, in which clients can receive the last bytes of gRPC after the gate is told to close."""
_SEND_BYTES: Final = 1 << 20
"""Size in bytes of the send buffer of a connection to gRPC; the system may lower it."""
_OPENING_EACH: Final = 16
"""Number of connections that may be opening at once for each that may be wide.

What one that is not wide can make gRPC hold is less than a sixteenth."""
_READ, _WRITE = select.EPOLLIN, select.EPOLLOUT


class _Listener(NamedTuple):
    """Listening socket, and the unix socket of gRPC to which its connections are forwarded."""

    socket: socket.socket
    backend: str
    """Path of the unix socket on which gRPC listens; only the daemon's user can connect to it."""
    tls: bool
    uids: AbstractSet[int] | None
    """User ids whose processes may connect to a unix socket; None for a TCP address."""
    trusted: bool
    """Whether a client is authenticated before it can make a call, by its user id or by a certificate."""
    port: int = 0
    """TCP port; 0 for a unix socket."""


class GateClient(NamedTuple):
    """Client of a connection, as the gate knows it."""

    shown: str
    """The client's address, or its process, for people."""
    local: bool
    """Whether the connection came through a unix socket."""
    port: int
    """TCP port through which the connection came; 0 for a unix socket."""


class _Connection(ConnectionState):
    """A client's connection, and the connection to gRPC that carries the client's bytes.

    The connection to gRPC is made when the client's connection begins to open.

    Thread safety: the gate's thread; any thread may set `known`.
    """

    def __init__(
        self, number: int, client: socket.socket, origin: bytes, listener: _Listener, shown: str
    ) -> None:
        super().__init__(number, origin, time.monotonic(), tls=listener.tls, trusted=listener.trusted)
        self.client: Final = client
        self.shown: Final = shown
        """The client's address, or its process, for people."""
        self.listener: Final = listener
        self.name = ""
        """Name that gRPC gives the connection (`context.peer()`); empty while it waits to open."""
        self.backend: socket.socket | None = None
        """Socket to gRPC; None while the connection waits to open."""
        self.up: Flow
        """Bytes from the client to gRPC."""
        self.down: Flow
        """Bytes from gRPC to the client."""
        self.unheard = False
        """Whether gRPC has closed its end, so that bytes of the client are not forwarded any more."""
        self.watched: dict[int, int] = {}
        """Epoll events that are watched for each descriptor; 0 for a descriptor that is not registered."""


class Gate:
    """Acceptor of connections for a gRPC server that listens on unix sockets of its own.

    Thread safety: call `listen` and `listen_local` before `start`, and `start` and `close` from one thread;
    any thread may call the other public methods.
    """

    def __init__(
        self,
        *,
        max_connections: int,
        max_wide: int,
        max_streams: int,
        settling: float,
        count_refusal: Callable[[str], None],
        ended: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Prepare for at most `max_connections` connections, `max_wide` of which are wide at once.

        A client may begin `max_streams` calls before it acknowledges gRPC's SETTINGS. gRPC itself cuts a
        connection whose handshake and acknowledgement take longer than `settling` seconds. The gate cuts a
        throttled connection if no caller is recognised on it within `settling` seconds.

        The gate calls `count_refusal` for each connection that it refuses or cuts, but not for connections
        that break. The argument is "unauthenticated" (unknown user), "busy" (no room, or displaced by another
        connection) or "idle" (too slow).

        When a connection to gRPC has ended, the gate's thread calls `ended` with the connection's name.
        """
        self._admission: Admission[_Connection] = Admission(
            max_connections=max_connections,
            max_opening=_OPENING_EACH * max_wide,
            max_wide=max_wide,
            settling=settling,
            now=time.monotonic(),
        )
        self._max_streams: Final = max_streams
        self._count_refusal: Final = count_refusal
        self._ended: Final = ended
        self._prefix: Final = f"tiercache-{secrets.token_hex(8)}"
        """Start of the abstract addresses to which the gate's ends of connections to gRPC are bound."""
        self._epoll = select.epoll()
        self._listeners: dict[int, _Listener] = {}
        self._paused: list[int] = []
        """Descriptors of listeners that are not watched until the next tick, because `accept` was refused."""
        self._by_descriptor: dict[int, _Connection] = {}
        self._names: dict[str, _Connection] = {}
        self._numbers = 0
        self._wakeup, self._alarm = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._scratch: Final = memoryview(bytearray(FLOW_BYTES))
        self._newly_known: set[_Connection] = set()
        """Connections on which a caller was recognised since the gate's thread last looked."""
        self._lock: Final = Lock()
        self._not_accepting = Event()
        self._closing = Event()
        self._thread = Thread(target=self._run, name="tiercache-gate", daemon=True)

    def listen(self, host: str, port: int, backend: str, *, tls: bool, mutual: bool = False) -> int:
        """Listen on a TCP address and return its port; raises OSError.

        `mutual` says whether gRPC requires certificates of clients.
        """
        server = listen_tcp(host, port)
        bound = int(server.getsockname()[1])
        self._add(_Listener(server, backend, tls, None, trusted=tls and mutual, port=bound))
        return bound

    def listen_local(self, path: str, mode: int, uids: AbstractSet[int], backend: str) -> None:
        """Listen on a unix socket at `path` with this file mode, for processes of the users `uids`.

        Raises OSError.
        """
        server = listen_unix(path, mode, socket.SOCK_STREAM)
        self._add(_Listener(server, backend, False, uids, trusted=True))

    def start(self) -> None:
        """Begin to accept connections; gRPC's server must listen already."""
        self._epoll.register(self._wakeup, _READ)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the gate's thread runs, or has not been started yet."""
        return self._thread.ident is None or self._thread.is_alive()

    def stop_accepting(self) -> None:
        """Stop accepting connections; existing connections continue."""
        self._not_accepting.set()
        self._wake()

    def close(self) -> None:
        """Deliver what gRPC has sent, end every connection and the gate's thread.

        `start` need not have been called."""
        self._not_accepting.set()
        self._closing.set()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        for listener in self._listeners.values():
            listener.socket.close()
        self._epoll.close()
        os.close(self._wakeup)
        os.close(self._alarm)

    def find(self, peer: str) -> GateClient | None:
        """Return the client of the connection that gRPC calls `peer`; None if there is no such connection.

        gRPC names a connection after the abstract address to which the gate's end is bound. While the gate
        has this address, no other process on this machine can bind it, so that no other connection to gRPC
        can have the same name.
        """
        found = self._names.get(peer)
        if found is None:
            return None
        return GateClient(found.shown, found.listener.uids is not None, found.listener.port)

    def mark_known(self, peer: str) -> None:
        """Mark the connection that gRPC calls `peer` as known, because a caller was recognised on it."""
        found = self._names.get(peer)
        if found is not None and not found.known:
            found.known = True
            with self._lock:
                self._newly_known.add(found)
            self._wake()

    def _run(self) -> None:
        """Run the gate's thread. All methods below run in this thread, except for `_wake` and `_add`."""
        looked = time.monotonic()
        while not self._closing.is_set():
            ticking = self._admission.has_unsettled or self._admission.has_throttled or self._paused
            for descriptor, _ in self._epoll.poll(_TICK_SECONDS if ticking else None):
                self._handle_event(descriptor)
            if time.monotonic() - looked > _TICK_SECONDS:
                looked = time.monotonic()
                self._cut_overdue(looked)
                for descriptor in self._paused:
                    self._epoll.modify(descriptor, _READ)
                self._paused.clear()
                for connection in self._admission.to_serve(time.monotonic):
                    self._try_to_advance(connection)
            if self._admission.has_unsettled:
                self._open_next()
        self._deliver()
        for connection in list(self._admission.connections.values()):
            self._end(connection)

    def _deliver(self) -> None:
        """Forward what gRPC has sent before it ended, for at most `_DELIVERY_SECONDS`."""
        deadline = time.monotonic() + _DELIVERY_SECONDS
        while (connections := self._admission.connections) and time.monotonic() < deadline:
            events = self._epoll.poll(_TICK_SECONDS)
            if not events and not any(c.backend and c.down.held for c in connections.values()):
                return
            for descriptor, _ in events:
                self._handle_event(descriptor)

    def _handle_event(self, descriptor: int) -> None:
        """Handle an epoll event of the wake-up pipe, a listener or a connection."""
        if descriptor == self._wakeup:
            self._handle_wakeup()
        elif (listener := self._listeners.get(descriptor)) is not None:
            self._accept(listener)
        elif (connection := self._by_descriptor.get(descriptor)) is not None:
            self._try_to_advance(connection)

    def _try_to_advance(self, connection: _Connection) -> None:
        try:
            self._advance(connection)
        except OSError:
            self._end(connection)

    def _wake(self) -> None:
        with suppress(OSError):
            os.write(self._alarm, b"!")

    def _handle_wakeup(self) -> None:
        """Do the part of `stop_accepting` and `mark_known` that belongs to the gate's thread."""
        with suppress(BlockingIOError):
            os.read(self._wakeup, 4096)
        if self._not_accepting.is_set():
            for descriptor, listener in self._listeners.items():
                self._epoll.unregister(descriptor)
                listener.socket.close()
            self._listeners.clear()
            self._paused.clear()
        # `mark_known` adds a connection, and then writes a byte to the pipe. A connection that `mark_known`
        # adds after this swap is not lost: its byte comes after the read above, and wakes the gate again.
        with self._lock:
            recognised, self._newly_known = self._newly_known, set()
        for connection in recognised:
            if connection.number in self._admission.connections:
                if connection.tls and connection.opening is not None:
                    self._settle(connection)
                self._admission.release(connection)
                self._try_to_advance(connection)

    def _add(self, listener: _Listener) -> None:
        self._listeners[listener.socket.fileno()] = listener
        self._epoll.register(listener.socket, _READ)

    def _accept(self, listener: _Listener) -> None:
        try:
            client, address = listener.socket.accept()
        except OSError as error:
            if error.errno in EXHAUSTED:
                # Pause the listener: epoll would report it again and again until a descriptor is free.
                self._epoll.modify(listener.socket, 0)
                self._paused.append(listener.socket.fileno())
            return
        try:
            client.setblocking(False)
            origin, shown = _origin(client, address, listener.uids)
        except OSError:
            client.close()
            return
        displaced = self._admission.to_displace() if origin and self._admission.is_full else None
        if origin is None or (self._admission.is_full and displaced is None):
            self._count_refusal("busy" if origin else "unauthenticated")
            client.close()
            return
        if displaced is not None:
            self._cut(displaced, "busy")
        self._numbers += 1
        self._admission.add(_Connection(self._numbers, client, origin, listener, shown))

    def _open_next(self) -> None:
        for connection in self._admission.to_open(time.monotonic):
            try:
                self._open(connection)
            except OSError:
                self._cut(connection, "busy")
        for connection in self._admission.to_widen():
            self._try_to_advance(connection)

    def _open(self, connection: _Connection) -> None:
        backend = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # gRPC names the connection after the address of this end (`context.peer()`).
            backend.bind(f"\0{self._prefix}/{connection.number}")
            backend.connect(connection.listener.backend)
            backend.setblocking(False)
            backend.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        except OSError:
            backend.close()
            raise
        connection.up = Flow(connection.client, backend, self._scratch)
        connection.down = Flow(backend, connection.client, self._scratch)
        connection.backend = backend
        connection.since = time.monotonic()
        connection.opening = OpeningCounter(tls=connection.tls, max_streams=self._max_streams)
        connection.name = f"unix-abstract:{self._prefix}/{connection.number}"
        self._names[connection.name] = connection
        self._by_descriptor[connection.client.fileno()] = connection
        self._by_descriptor[backend.fileno()] = connection
        self._advance(connection)

    def _advance(self, connection: _Connection) -> None:
        """Move as many bytes of a connection as can be moved now; raises OSError for a broken connection."""
        connection.down.move()
        try:
            if not connection.unheard:
                self._advance_up(connection)
        except BrokenPipeError:
            # gRPC can answer and close between the two moves, as at the end of a drain: its last bytes are
            # still in the socket, and go to the client.
            connection.unheard = True
        if connection.down.over or (connection.up.over and connection.opening is None):
            with suppress(OSError):  # a close with bytes unread would reset the connection: the client
                connection.client.recv_into(self._scratch)  # could lose what it has not received yet
            self._end(connection)
        else:
            self._watch(connection)

    def _advance_up(self, connection: _Connection) -> None:
        """Move bytes of the client to gRPC; raises BrokenPipeError only if gRPC has closed its end."""
        assert connection.backend is not None
        if connection.opening is not None:
            self._forward_opening(connection, connection.opening, connection.backend)
        if connection.opening is None and connection.known:
            connection.up.move()
        elif connection.opening is None:
            self._forward_throttled(connection, connection.backend)

    def _forward_opening(
        self, connection: _Connection, opening: OpeningCounter, backend: socket.socket
    ) -> None:
        """Forward bytes of an opening connection; raises OSError if the client has sent more than it may."""
        if not opening.room:
            return  # reading goes on when the connection is wide or, in TLS, settled
        # Peek first: the bytes behind the acknowledgement stay in the socket for `_forward_throttled`.
        seen = _receive(connection, opening.room, socket.MSG_PEEK)
        before = opening.cost
        data = connection.client.recv(opening.take(seen)) if seen else b""
        # An acknowledgement that comes before gRPC has sent any byte acknowledges nothing: it is forged.
        if opening.excessive or (opening.acknowledged and not connection.down.moved):
            raise ConnectionAbortedError(
                "the client sent more than it may before it acknowledges the SETTINGS"
            )
        self._forward(connection, backend, data, opening.cost - before)
        if opening.acknowledged:
            self._settle(connection)

    def _forward_throttled(self, connection: _Connection, backend: socket.socket) -> None:
        """Forward bytes of a settled connection that is not known, as many as the shared rate allows now.

        The rest waits in the client's socket.
        """
        allowed = self._admission.may_forward(connection, time.monotonic())
        if allowed:
            data = _receive(connection, allowed)
            self._forward(connection, backend, data, len(data))
        else:
            self._admission.throttle(connection)

    def _forward(self, connection: _Connection, backend: socket.socket, data: bytes, cost: int) -> None:
        self._admission.record_forwarded(connection, len(data), cost)
        # The send buffer (_SEND_BYTES) holds as much as the shared rate lets through in a minute.
        if backend.send(data) < len(data):
            raise ConnectionAbortedError("gRPC does not read")

    def _settle(self, connection: _Connection) -> None:
        self._admission.settle(connection)
        self._watch(connection)

    def _watch(self, connection: _Connection) -> None:
        """Register with epoll the events for which this connection waits.

        A descriptor that waits for no event is unregistered. Otherwise epoll would report again and again
        that the other side of the descriptor has hung up.
        """
        assert connection.backend is not None
        up, down, opening = connection.up, connection.down, connection.opening
        # A flow waits for bytes from its source or, while it holds some, for its sink.
        if connection.unheard:
            reads = writes = False
        else:
            writes = up.held > 0
            reads = (
                opening.room > 0
                if opening is not None
                else not (writes or up.ended or self._admission.is_throttled(connection))
            )
        wanted = {
            connection.client.fileno(): (_READ if reads else 0) | (_WRITE if down.held else 0),
            connection.backend.fileno(): (
                (_READ if not down.held and not down.ended else 0) | (_WRITE if writes else 0)
            ),
        }
        for descriptor, events in wanted.items():
            before = connection.watched.get(descriptor, 0)
            if events and not before:
                self._epoll.register(descriptor, events)
            elif before and not events:
                self._epoll.unregister(descriptor)
            elif events != before:
                self._epoll.modify(descriptor, events)
        connection.watched = wanted

    def _cut_overdue(self, now: float) -> None:
        # The gate does not read connections that wait or are throttled, and so does not see the end of their
        # data: ask for those that the client has closed.
        unread = {connection.client.fileno(): connection for connection in self._admission.unread()}
        poll = select.poll()
        for descriptor in unread:
            poll.register(descriptor, select.POLLRDHUP)
        for descriptor, _ in poll.poll(0):
            self._end(unread[descriptor])
        overdue = self._admission.overdue(now)
        for connection in overdue.settled:
            self._settle(connection)
        for connection in overdue.late:
            self._cut(connection, "idle")
        # If a client closes while the receive buffer of its connection is full, the kernel does not report
        # POLLRDHUP, and the poll above misses the client. Such a connection is cut here when it is too old.
        for connection in self._admission.stalled(now):
            self._cut(connection, "idle")

    def _cut(self, connection: _Connection, reason: str) -> None:
        self._count_refusal(reason)
        self._end(connection)

    def _end(self, connection: _Connection) -> None:
        if not self._admission.remove(connection):
            return
        # Forget the name before `backend` is closed. After the close, another process can bind the address
        # of `backend`, and would get the same name.
        if self._names.pop(connection.name, None) is not None:
            self._ended(connection.name)
        for descriptor, events in connection.watched.items():
            if events:
                self._epoll.unregister(descriptor)
        self._by_descriptor.pop(connection.client.fileno(), None)
        connection.client.close()
        if connection.backend is not None:
            self._by_descriptor.pop(connection.backend.fileno(), None)
            connection.backend.close()


def _origin(
    client: socket.socket, address: tuple[str, int], uids: AbstractSet[int] | None
) -> tuple[bytes | None, str]:
    """Return the key under which connections are counted together, and the client in words.

    The key is the user id on a unix socket, None for a user who may not connect, and that of `origin_of`
    on TCP. Raises OSError.
    """
    if uids is None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return origin_of(client, address), f"{address[0]}:{address[1]}"
    pid, uid = peer_of(client)
    return b"uid %d" % uid if uid in uids else None, f"pid {pid}, uid {uid}"


def _receive(connection: _Connection, max_bytes: int, flags: int = 0) -> bytes:
    """Return up to `max_bytes` bytes that the client has sent; b"" if there are none yet.

    Raises OSError if the client has closed the connection.
    """
    try:
        data = connection.client.recv(max_bytes, flags)
    except BlockingIOError:
        return b""
    if not data:
        raise ConnectionResetError("the client closed the connection before a caller was known")
    return data
