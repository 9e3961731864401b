"""The gate in front of gRPC: it accepts connections whose caller is not known yet, and passes them on to gRPC by a unix socket.

    waiting ──▶ opening ──▶ settled ──▶ known
    (nothing is read)  (`opening` counts)  (little is passed)  (bytes move through the kernel, uncounted)

A connection is settled once it has acknowledged gRPC's SETTINGS. In TLS the acknowledgement cannot be seen; a connection is settled there
once it is older than gRPC's timeouts for handshake and acknowledgement together, or once a caller was recognised on it. A connection is
known once a caller was recognised on it. Only a few connections are opening at once. Of the waiting ones, those whose origin has the fewest
opening connections go first, then those whose origin was served the fewest bytes of late, then the oldest. At the limit on
connections, a new one displaces one without a recognised caller: the oldest of the origin that has most of these.

Calls without a known caller are refused, but each refusal takes a turn of the event loop, and delays the calls of known callers. Therefore
settled connections without a known caller share one rate of forwarding (`Allowance`), the least served first. The rate applies neither
to unix sockets nor where gRPC requires client certificates: without a permitted user id or a certificate, no connection gets as far as a
call.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import suppress
from errno import EMFILE, ENFILE, ENOBUFS, ENOMEM
from threading import Event, Lock, Thread
from typing import Final, NamedTuple

from tiercache.daemon.allowance import Allowance
from tiercache.daemon.opening import Opening
from tiercache.daemon.splice import PIPE_BYTES, Flow, widen

_PRESSED_SECONDS: Final = 1.0
"""Seconds that a connection may be opening while others wait for their turn."""
_TICK_SECONDS: Final = 0.1
"""Seconds between two rounds of the work that depends on time: timeouts, paused listeners, throttled connections."""
_BACKLOG: Final = 1024
_CREDENTIALS: Final = struct.Struct("iII")
"""`struct ucred` of SO_PEERCRED: process id, user id, group id."""
_EXHAUSTED: Final = (EMFILE, ENFILE, ENOBUFS, ENOMEM)
"""Errors of accept(2) that say that descriptors or memory ran out; the connection stays in the backlog."""
_SEND_BYTES: Final = 1 << 20
"""Send buffer in bytes of either end of a connection to gRPC, as far as the system allows; with less, both ends wait for each other."""
_ALLOWED_BYTES: Final = 64 << 10
"""Size of the allowance in bytes: enough for the first calls of 256 clients that connect at once, or of some hundred in TLS."""
_ALLOWED_BYTES_PER_SECOND: Final = 16 << 10
"""Rate of the allowance: a thousand calls per second of the least size, 16 bytes, which the event loop can refuse beside its other work.

At twice this rate known callers waited for seconds (measured with "short calls without end" of tests/daemon/attacks.py)."""
_TURN_BYTES: Final = 1 << 10
"""Most bytes that a settled connection without a known caller forwards at a time."""
_CALL_BYTES: Final = 256
"""Bytes charged to the allowance for each call in an opening, where calls can be counted (not in TLS)."""
_READ, _WRITE = select.EPOLLIN, select.EPOLLOUT


class _Door(NamedTuple):
    """A listening socket, and the unix socket on which gRPC takes its connections."""

    listener: socket.socket
    backend: str
    """Path of a unix socket of gRPC's that only this user can reach."""
    tls: bool
    uids: AbstractSet[int] | None
    """User ids whose processes may connect to a unix socket; None for a TCP address."""
    trusted: bool
    """Whether a client is authenticated before it can make a call, by its user id or by a certificate."""


class _Connection:
    """A client's connection and, once its turn to open has come, the connection to gRPC that belongs to it."""

    def __init__(self, number: int, client: socket.socket, origin: bytes, door: _Door) -> None:
        self.number: Final = number
        self.client: Final = client
        self.origin: Final = origin
        self.door: Final = door
        self.name = ""
        """Peer name of the connection in gRPC; empty while it waits."""
        self.since = time.monotonic()
        """Time when it was accepted, and from its opening on the time of that, in seconds of the monotonic clock."""
        self.backend: socket.socket | None = None
        self.up: Flow
        self.down: Flow
        self.opening: Opening | None = None
        self.forwarded = 0
        """Bytes forwarded to gRPC before a caller was recognised."""
        self.known = False
        """Whether a caller was recognised on it."""
        self.watched: dict[int, int] = {}
        """Epoll events that are waited for, by descriptor; 0 for a descriptor that is not registered."""


class Gate:
    """Acceptor of connections for a gRPC server that listens on unix sockets of its own.

    Thread safety: `listen` and `listen_local` before `start`; `start` and `close` from one thread; the other public methods from any.
    """

    def __init__(self, *, most: int, most_opening: int, most_streams: int, settling: float, refused: Callable[[str], None]) -> None:
        """Prepare for at most `most` connections, of which at most `most_opening` are opening at once.

        `most_streams`: calls that a client may begin before it acknowledges the SETTINGS. `settling`: seconds after which gRPC itself has
        cut a connection without handshake or acknowledgement, and after which the gate cuts throttled connections. `refused` is called with
        "unauthenticated", "busy" or "idle" for each connection that is turned away, displaced or too late, and not for one that breaks.
        """
        self._most: Final = most
        self._most_opening: Final = most_opening
        self._most_streams: Final = most_streams
        self._settling: Final = settling
        self._refused: Final = refused
        self._prefix: Final = f"tiercache-{secrets.token_hex(8)}"
        self._epoll = select.epoll()
        self._doors: dict[int, _Door] = {}
        self._paused: list[int] = []
        """Descriptors of listeners that are not watched until the next tick, because `accept` ran out of descriptors or memory."""
        self._connections: dict[int, _Connection] = {}
        """All connections by number, so that the oldest comes first."""
        self._unsettled: dict[int, _Connection] = {}
        """The connections that wait or are opening, by number."""
        self._by_descriptor: dict[int, _Connection] = {}
        self._names: dict[str, _Connection] = {}
        self._numbers = 0
        self._wakeup, self._alarm = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._scratch: Final = memoryview(bytearray(PIPE_BYTES))
        self._told: set[_Connection] = set()
        self._allowance = Allowance(_ALLOWED_BYTES, _ALLOWED_BYTES_PER_SECOND, time.monotonic())
        self._throttled: dict[int, _Connection] = {}
        """Settled connections without a known caller that are not read until the allowance has bytes left, by number."""
        self._lock: Final = Lock()
        self._leaving = Event()
        self._closing = Event()
        self._thread = Thread(target=self._run, name="tiercache-gate", daemon=True)

    def listen(self, host: str, port: int, backend: str, *, tls: bool, mutual: bool = False) -> int:
        """Listen on a TCP address and return its port; raises OSError. `mutual`: whether gRPC requires certificates of clients."""
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        dual = host == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
        self._add(_Door(listener, backend, tls, None, trusted=tls and mutual))
        return int(listener.getsockname()[1])

    def listen_local(self, path: str, mode: int, uids: AbstractSet[int], backend: str) -> None:
        """Listen on a unix socket at `path` with this file mode, for processes of the users `uids`; raises OSError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
            os.chmod(path, mode)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        self._add(_Door(listener, backend, False, uids, trusted=True))

    def start(self) -> None:
        """Begin to accept; gRPC's server must listen before."""
        self._epoll.register(self._wakeup, _READ)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the gate's thread runs, or was not started yet."""
        return self._thread.ident is None or self._thread.is_alive()

    def leave(self) -> None:
        """Accept no more connections; those that exist go on."""
        self._leaving.set()
        self._wake()

    def close(self) -> None:
        """End every connection and the thread. Harmless before `start`."""
        self._leaving.set()
        self._closing.set()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        for door in self._doors.values():
            door.listener.close()
        self._epoll.close()
        os.close(self._wakeup)
        os.close(self._alarm)

    def passed(self, peer: str) -> bool | None:
        """Return True if the connection that gRPC calls `peer` came in here by a unix socket, False if by TCP, None if not here.

        The names are addresses of abstract unix sockets: as long as one is in use here, no other process on this machine can have it.
        """
        found = self._names.get(peer)
        return None if found is None else found.door.uids is not None

    def recognised(self, peer: str) -> None:
        """Mark the connection that gRPC calls `peer` as known: a caller with credentials calls on it."""
        found = self._names.get(peer)
        if found is not None and not found.known:
            found.known = True
            with self._lock:
                self._told.add(found)
            self._wake()

    # --- the thread --------------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._closing.is_set():
            for descriptor, _ in self._epoll.poll(_TICK_SECONDS if self._unsettled or self._paused or self._throttled else None):
                self._happened(descriptor)
            if time.monotonic() - looked > _TICK_SECONDS:
                looked = time.monotonic()
                self._cut_the_late(looked)
                for descriptor in self._paused:
                    self._epoll.modify(descriptor, _READ)
                self._paused.clear()
                self._serve_throttled()
            if self._unsettled:
                self._open_next()
        for connection in list(self._connections.values()):
            self._end(connection)

    def _happened(self, descriptor: int) -> None:
        if descriptor == self._wakeup:
            self._obey()
        elif (door := self._doors.get(descriptor)) is not None:
            self._accept(door)
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

    def _obey(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wakeup, 4096)
        if self._leaving.is_set():
            for descriptor, door in self._doors.items():
                self._epoll.unregister(descriptor)
                door.listener.close()
            self._doors.clear()
            self._paused.clear()
        # A connection that `recognised` adds after this swap comes with another byte in the pipe, and so with another round.
        with self._lock:
            told, self._told = self._told, set()
        for connection in told:
            if connection.number in self._connections:
                if connection.door.tls and connection.opening is not None:
                    self._settle(connection)
                self._throttled.pop(connection.number, None)
                self._try_to_advance(connection)
                widen(f"\0{self._prefix}/{connection.number}".encode(), _SEND_BYTES)

    def _add(self, door: _Door) -> None:
        door.listener.setblocking(False)
        self._doors[door.listener.fileno()] = door
        self._epoll.register(door.listener, _READ)

    def _accept(self, door: _Door) -> None:
        try:
            client, address = door.listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:  # epoll would report the listener again at once, and again, until there is a descriptor
                self._epoll.modify(door.listener, 0)
                self._paused.append(door.listener.fileno())
            return
        try:
            client.setblocking(False)
            origin = self._origin(client, address, door.uids)
        except OSError:
            client.close()
            return
        if origin is None or (len(self._connections) >= self._most and not self._make_room()):
            self._refused("busy" if origin else "unauthenticated")
            client.close()
            return
        self._numbers += 1
        self._connections[self._numbers] = self._unsettled[self._numbers] = _Connection(self._numbers, client, origin, door)

    def _origin(self, client: socket.socket, address: tuple[str, int], uids: AbstractSet[int] | None) -> bytes | None:
        """Return the key under which connections are counted together; None for a user who may not connect. Raises OSError.

        The key is the user id on a unix socket, else the IPv4 address or the first 64 bits of the IPv6 address (one machine may have all).
        """
        if uids is None:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            packed = socket.inet_pton(client.family, address[0].partition("%")[0])
            # An IPv4 address on a dual-stack listener is ::ffff:a.b.c.d, which starts with ten zero bytes, and stays whole.
            return packed[:8] if len(packed) == 16 and not packed.startswith(bytes(10)) else packed
        _, uid, _ = _CREDENTIALS.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        return b"uid %d" % uid if uid in uids else None

    def _make_room(self) -> bool:
        unknown = [connection for connection in self._connections.values() if not connection.known]
        if not unknown:
            return False
        origin, _ = Counter(connection.origin for connection in unknown).most_common(1)[0]
        self._cut(next(connection for connection in unknown if connection.origin == origin), "busy")
        return True

    def _open_next(self) -> None:
        """Open waiting connections until `most_opening` are opening, or the allowance is used up."""
        opening = Counter(connection.origin for connection in self._unsettled.values() if connection.opening is not None)
        while opening.total() < self._most_opening and self._allowed and (waiting := list(self._waiting())):
            chosen = min(waiting, key=lambda connection: (opening[connection.origin], self._allowance.had(connection.origin)))
            try:
                self._open(chosen)
            except OSError:
                self._cut(chosen, "busy")
            opening[chosen.origin] += 1

    def _serve_throttled(self) -> None:
        """Forward once for each throttled connection, the least served first, while the allowance lasts."""
        for connection in sorted(self._throttled.values(), key=lambda waiting: (self._allowance.had(waiting.origin), waiting.forwarded)):
            if not self._allowed:
                return
            del self._throttled[connection.number]
            self._try_to_advance(connection)

    @property
    def _allowed(self) -> int:
        """Bytes that may be forwarded now on connections without a known caller."""
        return self._allowance.left(time.monotonic())

    def _waiting(self) -> Iterator[_Connection]:
        return (connection for connection in self._unsettled.values() if connection.backend is None)

    def _open(self, connection: _Connection) -> None:
        backend = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            backend.bind(f"\0{self._prefix}/{connection.number}")
            backend.connect(connection.door.backend)
            backend.setblocking(False)
            backend.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
            connection.up = Flow(connection.client, backend)
            try:
                connection.down = Flow(backend, connection.client, self._scratch)
            except OSError:
                connection.up.close()
                raise
        except OSError:
            backend.close()
            raise
        connection.backend = backend
        connection.since = time.monotonic()
        connection.opening = Opening(tls=connection.door.tls, most_streams=self._most_streams)
        connection.name = f"unix-abstract:{self._prefix}/{connection.number}"
        self._names[connection.name] = connection
        self._by_descriptor[connection.client.fileno()] = connection
        self._by_descriptor[backend.fileno()] = connection
        self._advance(connection)

    def _advance(self, connection: _Connection) -> None:
        """Move what can be moved now on this connection; raises OSError if it is broken."""
        assert connection.backend is not None
        connection.down.move()
        if connection.opening is not None:
            self._listen_to(connection, connection.opening, connection.backend)
        if connection.opening is None:
            self._forward_throttled(connection, connection.backend) if not connection.known else connection.up.move()
        if connection.down.over or (connection.up.over and connection.opening is None):
            self._end(connection)
        else:
            self._watch(connection)

    def _listen_to(self, connection: _Connection, opening: Opening, backend: socket.socket) -> None:
        if not opening.room:
            return  # in TLS nothing more is read until a caller is recognised, or the connection is settled by its age
        seen = _receive(connection, opening.room, socket.MSG_PEEK)
        before = opening.calls
        data = connection.client.recv(opening.take(seen)) if seen else b""
        if opening.excessive or (opening.acknowledged and not connection.down.moved):
            raise ConnectionAbortedError("it says more than there is to say before the SETTINGS are acknowledged")
        self._forward(connection, backend, data, len(data) if connection.door.tls else _CALL_BYTES * (opening.calls - before))
        if opening.acknowledged:
            self._settle(connection)

    def _forward_throttled(self, connection: _Connection, backend: socket.socket) -> None:
        """Forward at most _TURN_BYTES, and no more than the allowance has left unless the door is trusted.

        The rest waits in the client's socket.
        """
        allowed = _TURN_BYTES if connection.door.trusted else min(self._allowed, _TURN_BYTES)
        if allowed:
            data = _receive(connection, allowed)
            self._forward(connection, backend, data, len(data))
        else:
            self._throttled[connection.number] = connection

    def _forward(self, connection: _Connection, backend: socket.socket, data: bytes, cost: int) -> None:
        connection.forwarded += len(data)
        if not connection.door.trusted:
            self._allowance.take(connection.origin, cost)
        if backend.send(data) < len(data):  # a buffer of _SEND_BYTES holds the allowance of a minute
            raise ConnectionAbortedError("gRPC does not read")

    def _settle(self, connection: _Connection) -> None:
        connection.opening = None
        del self._unsettled[connection.number]
        self._watch(connection)

    def _watch(self, connection: _Connection) -> None:
        """Register the events with which this connection can go on.

        A descriptor that waits for none is unregistered: epoll would report a side that has hung up even so, again and again.
        """
        assert connection.backend is not None
        up, down, opening = connection.up, connection.down, connection.opening
        reads = opening.room > 0 if opening is not None else not (up.held or up.ended or connection.number in self._throttled)
        wanted = {
            connection.client.fileno(): (_READ if reads else 0) | (_WRITE if down.held else 0),
            connection.backend.fileno(): (_READ if not down.held and not down.ended else 0) | (_WRITE if up.held else 0),
        }
        for descriptor, events in wanted.items():
            before = connection.watched.get(descriptor, 0)
            if events and not before:
                self._epoll.register(descriptor, events)
            elif events != before:
                (self._epoll.modify(descriptor, events) if events else self._epoll.unregister(descriptor))
        connection.watched = wanted

    def _cut_the_late(self, now: float) -> None:
        self._end_abandoned()
        pressed = next(self._waiting(), None) is not None
        for connection in [found for found in self._unsettled.values() if found.opening is not None]:
            age = now - connection.since
            if connection.door.tls and age > self._settling:
                self._settle(connection)
            elif age > (_PRESSED_SECONDS if pressed else self._settling):
                self._cut(connection, "idle")
        for connection in [found for found in self._throttled.values() if not found.known and now - found.since > self._settling]:
            self._cut(connection, "idle")  # no POLLRDHUP comes if the client closed behind more data than the kernel takes in

    def _end_abandoned(self) -> None:
        """End waiting and throttled connections whose client has closed; they are not read, so the end of their data goes unnoticed."""
        unread = {connection.client.fileno(): connection for connection in (*self._waiting(), *self._throttled.values())}
        poll = select.poll()
        for descriptor in unread:
            poll.register(descriptor, select.POLLRDHUP)
        for descriptor, _ in poll.poll(0):
            self._end(unread[descriptor])

    def _cut(self, connection: _Connection, reason: str) -> None:
        self._refused(reason)
        self._end(connection)

    def _end(self, connection: _Connection) -> None:
        if self._connections.pop(connection.number, None) is None:
            return
        self._unsettled.pop(connection.number, None)
        self._throttled.pop(connection.number, None)
        self._names.pop(connection.name, None)  # before `backend` is closed, which frees the name for other processes
        for descriptor, events in connection.watched.items():
            if events:
                self._epoll.unregister(descriptor)
        self._by_descriptor.pop(connection.client.fileno(), None)
        connection.client.close()
        if connection.backend is not None:
            self._by_descriptor.pop(connection.backend.fileno(), None)
            connection.backend.close()
            connection.up.close()
            connection.down.close()


def _receive(connection: _Connection, most: int, flags: int = 0) -> bytes:
    """Return up to `most` bytes of what the client has sent, b"" if nothing is there yet. Raises OSError if it has closed."""
    try:
        data = connection.client.recv(most, flags)
    except BlockingIOError:
        return b""
    if not data:
        raise ConnectionResetError("closed before a caller was known")
    return data
