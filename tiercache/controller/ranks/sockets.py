"""A group of ranks over TCP: the leader listens, and every other rank keeps one connection to it.

Each message is a frame: 4 bytes with its length (little-endian), then the message. The first frame of a
connection is the key and the number of the rank; a connection without the right key is closed.
"""

from __future__ import annotations

import hmac
import logging
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from tiercache.controller.ranks.base import LEADER, MAX_MESSAGE_BYTES, check_rank
from tiercache.errors import InputError, RankError

_log = logging.getLogger(__name__)
KEY_BYTES: Final = 32
"""Length of the key that all ranks of a group share."""
_LENGTH: Final = struct.Struct("<I")
_RANK: Final = struct.Struct("<i")
_MAX_UNSENT: Final = 16 << 20
"""Maximum number of bytes that wait to be sent to one rank. What is beyond it is lost."""
_MAX_STRANGERS: Final = 64
"""Maximum number of connections that have not shown the key. For one beyond it, the oldest is closed."""
_LEAST_QUIET_S: Final = 10.0
"""Least time in seconds between two warnings about connections and messages."""
_GREETING_S: Final = 5.0
"""Seconds in which a connection must show the key."""
_BACKLOG: Final = 128
"""Number of connections that may wait until they are accepted. One beyond it tries again after a second."""
_PAUSE_S: Final = 0.05
"""Seconds between two attempts to connect."""


class _Connection:
    """One connection, whose bytes are cut into frames."""

    def __init__(self, sock: socket.socket, now: float) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.since = now
        self.rank: int | None = None
        """Rank at the other end; None for a connection that has not shown the key."""
        self._unsent = bytearray()
        self._unread = bytearray()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def queue(self, message: bytes) -> None:
        if len(self._unsent) < _MAX_UNSENT:
            self._unsent += _LENGTH.pack(len(message)) + message

    def write(self) -> None:
        """Send what the socket takes. Raises OSError if the connection is broken."""
        while self._unsent:
            try:
                sent = self.sock.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:sent]

    def read(self) -> None:
        """Take what has arrived. Raises OSError if the connection has ended or is broken."""
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("the other end closed the connection")
        self._unread += data

    def next_frame(self) -> bytes | None:
        """Return the next frame that is complete, if any. Raises OSError for one that is too long."""
        if len(self._unread) < _LENGTH.size:
            return None
        [length] = _LENGTH.unpack_from(self._unread)
        if length > (KEY_BYTES + _RANK.size if self.rank is None else MAX_MESSAGE_BYTES):
            raise ConnectionAbortedError(f"the other end announced a message of {length} bytes")
        end = _LENGTH.size + length
        if len(self._unread) < end:
            return None
        frame = bytes(self._unread[_LENGTH.size : end])
        del self._unread[:end]
        return frame


class SocketRankGroup:
    """Ranks of one model, connected by TCP (a `RankGroup`).

    Rank 0 listens at `address`, a host and a port; with port 0, the system chooses one, and `address` says
    which. The other ranks connect to that address, and connect again whenever the connection ends. `key` are
    32 secret bytes that all ranks share. The messages are not encrypted: use a network that the ranks may
    trust, as their model's own collectives do.

    Thread safety: as `RankGroup`.
    """

    def __init__(self, rank: int, size: int, address: tuple[str, int], key: bytes) -> None:
        """Listen, or prepare to connect; nothing is sent before `open`.

        Raises InputError for a rank, a size or a key that is not possible, and RankError if rank 0 cannot
        listen.
        """
        check_rank(rank, size)
        if len(key) != KEY_BYTES:
            raise InputError(f"the key has {len(key)} bytes; all ranks need the same {KEY_BYTES}")
        self.rank = rank
        self.size = size
        self.address = address
        """Host and port at which rank 0 listens."""
        self._key = key
        self._listener: socket.socket | None = None
        if rank == LEADER:
            try:
                self._listener = socket.create_server(address, backlog=_BACKLOG)
            except OSError as error:
                raise RankError(f"rank 0 cannot listen at {address[0]}:{address[1]}: {error}") from None
            self._listener.setblocking(False)
            self.address = (address[0], self._listener.getsockname()[1])
        self._deliver: Callable[[bytes], None] = lambda _: None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._waking, self._woken = socket.socketpair()
        for end in (self._waking, self._woken):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._connections: set[_Connection] = set()
        # `_lock` guards `_by_rank`, and what waits to be sent. Nothing waits under it.
        self._lock = threading.Lock()
        self._by_rank: dict[int, _Connection] = {}
        self._next_attempt = self._next_warning = 0.0

    def open(self, deliver: Callable[[bytes], None]) -> None:  # noqa: D102
        self._deliver = deliver
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tiercache-ranks", daemon=True)
            self._thread.start()

    def send(self, to: int, message: bytes) -> None:  # noqa: D102
        if len(message) > MAX_MESSAGE_BYTES:  # the other end would end the connection
            self._warn(f"a message of {len(message)} bytes for rank {to} is too long, and is lost")
            return
        # Sent from here, and not by the thread, which would then take the interpreter lock from the caller.
        with self._lock:
            each = self._by_rank.get(to)
            if each is None:
                return
            each.queue(message)
            with suppress(OSError):  # the thread finds that the connection is broken, and drops it
                each.write()
            is_left = each.has_unsent
        if is_left:
            self._wake()

    def close(self) -> None:  # noqa: D102
        self._is_closed = True
        self._wake()
        if self._thread is not None:
            self._thread.join(1.0)
        else:
            self._end()

    def _wake(self) -> None:
        with suppress(OSError):  # the thread is awake already, or has ended
            self._waking.send(b"\0")

    def _run(self) -> None:
        self._selector.register(self._woken, selectors.EVENT_READ)
        if self._listener is not None:
            self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            while not self._is_closed:
                self._turn()
        finally:
            self._end()

    def _turn(self) -> None:
        """Wait for something to do, and do it."""
        if self.rank != LEADER and not self._connections:
            self._connect()
        lonely = self.rank != LEADER and not self._connections
        for key, _ in self._selector.select(_PAUSE_S if lonely else 1.0):
            if key.fileobj is self._woken:
                self._woken.recv(1 << 12)
            elif key.fileobj is self._listener:
                self._accept()
            else:
                self._read(key.data)
        for each in list(self._connections):
            self._write(each)
            if each.rank is None and time.monotonic() - each.since > _GREETING_S:
                self._drop(each)

    def _connect(self) -> None:
        if time.monotonic() < self._next_attempt:
            return
        try:
            sock = socket.create_connection(self.address, timeout=1.0)
        except OSError:
            return
        finally:  # also after a success: rank 0 may end the connection at once, again and again
            self._next_attempt = time.monotonic() + _PAUSE_S
        each = self._add(sock)
        each.queue(self._key + _RANK.pack(self.rank))
        each.rank = LEADER
        with self._lock:
            self._by_rank[LEADER] = each
        self._write(each)  # rank 0 cannot send before it has read this, and would lose its messages

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it has gone again
        # The ranks show the key at once, so that the oldest stranger is the least likely to be one.
        strangers = [each for each in self._connections if each.rank is None]
        if len(strangers) >= _MAX_STRANGERS:
            self._drop(min(strangers, key=lambda each: each.since))
        self._add(sock)

    def _add(self, sock: socket.socket) -> _Connection:
        each = _Connection(sock, time.monotonic())
        self._connections.add(each)
        self._selector.register(sock, selectors.EVENT_READ, each)
        return each

    def _read(self, each: _Connection) -> None:
        try:
            each.read()
            while each in self._connections and (frame := each.next_frame()) is not None:
                if each.rank is None:
                    self._greet(each, frame)
                else:
                    self._deliver(frame)
        except OSError as error:
            if each.rank is not None and each in self._connections:
                self._warn(f"the connection to rank {each.rank} ended: {error}")
            self._drop(each)

    def _greet(self, each: _Connection, frame: bytes) -> None:
        """Take a connection as that of the rank that it names, in place of an earlier one."""
        key, number = frame[:KEY_BYTES], frame[KEY_BYTES:]
        rank = _RANK.unpack(number)[0] if len(number) == _RANK.size else LEADER
        if rank <= LEADER or not hmac.compare_digest(key, self._key):
            self._warn("a connection to the ranks of this group showed a wrong key, or no rank")
            self._drop(each)
            return
        each.rank = rank
        with self._lock:
            before, self._by_rank[rank] = self._by_rank.get(rank), each
        if before is not None:
            self._drop(before)

    def _warn(self, what: str) -> None:
        """Log a warning, but not so often that strangers can fill a log."""
        if time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + _LEAST_QUIET_S
            _log.warning("%s", what)

    def _write(self, each: _Connection) -> None:
        try:
            with self._lock:
                each.write()
                is_left = each.has_unsent
        except OSError:
            self._drop(each)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_left else 0)
        self._selector.modify(each.sock, wanted, each)

    def _drop(self, each: _Connection) -> None:
        if each not in self._connections:
            return
        self._connections.discard(each)
        self._selector.unregister(each.sock)
        with self._lock:
            if each.rank is not None and self._by_rank.get(each.rank) is each:
                del self._by_rank[each.rank]
            each.sock.close()

    def _end(self) -> None:
        for each in list(self._connections):
            self._drop(each)
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        self._waking.close()
        self._woken.close()
