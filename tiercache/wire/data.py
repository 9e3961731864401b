"""Frames of data connections, on which payload travels beside gRPC (`proto/tiercache/wire/v1/data.proto`).

A frame is 16 bytes, a header (a protobuf message) and a payload:

    bytes    0      1    4                  8                   16
             kind | 0  | length of header | length of payload | header | payload

Both ends compare the lengths with their limits before they make room for anything. A payload is sent from the
buffers where it lies, and received into the buffers where it belongs.
"""

from __future__ import annotations

import enum
import math
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple

from tiercache.errors import WireError

FRAME_BYTES: Final = 16
"""Bytes of a frame before its header."""
VECTOR: Final = 64
"""Maximum number of buffers of one call of the kernel."""
SEND_BYTES: Final = 1 << 20
"""Size in bytes of the send buffers of a unix socket with payload; the system may lower it."""
METHODS: Final = frozenset({"Exists", "Get", "Set"})
"""Names of the calls that data connections carry."""
_FRAME: Final = struct.Struct("<B3xIQ")
_SLACK: Final = 0.01
"""Seconds by which a step may end after its deadline, or has to be repeated before it."""
_TLS_BYTES: Final = 1 << 20
"""Maximum bytes of one step in TLS, within which all of them must have moved."""
_TIMEVAL: Final = struct.Struct("@ll")
"""C's `struct timeval`."""


class FrameKind(enum.IntEnum):
    """Kinds of frames, by their numbers on the wire."""

    OPEN = 1
    OPENED = 2
    CALL = 3
    OBJECTS = 4
    REPLY = 5
    FAILED = 6


class Frame(NamedTuple):
    """First 16 bytes of a frame."""

    kind: FrameKind
    header: int
    """Bytes of the header."""
    payload: int
    """Bytes of the payload."""


def pack(kind: FrameKind, header: bytes, payload: int = 0) -> bytes:
    """Return the first bytes of a frame, up to its payload of `payload` bytes."""
    return _FRAME.pack(kind, len(header), payload) + header


def unpack(data: bytes | bytearray, max_header: int, max_payload: int = 0) -> Frame:
    """Return the first 16 bytes of a frame, decoded.

    Raises WireError for an unknown kind, and for lengths beyond these maxima.
    """
    kind, header, payload = _FRAME.unpack(data)
    try:
        found = Frame(FrameKind(kind), header, payload)
    except ValueError:
        raise WireError(f"a frame is of kind {kind}, which this version does not know") from None
    if header > max_header or payload > max_payload:
        raise WireError(
            f"a frame has a header of {header} and a payload of {payload} bytes; {max_header} and"
            f" {max_payload} are the most"
        )
    return found


def skip(views: list[memoryview], nbytes: int) -> None:
    """Remove the first `nbytes` bytes, and empty views before the next byte, from a list of views."""
    done = 0
    for view in views:
        if nbytes < view.nbytes:
            break
        nbytes -= view.nbytes
        done += 1
    del views[:done]
    if nbytes:
        views[0] = views[0][nbytes:]


def place(data: memoryview, views: list[memoryview]) -> memoryview:
    """Copy bytes into views, remove those that are full from the list, and return the bytes that are left."""
    while views and data:
        part = data[: views[0].nbytes]
        views[0][: part.nbytes] = part
        skip(views, part.nbytes)
        data = data[part.nbytes :]
    return data


class FrameSocket:
    """Socket of a data connection, plain or in TLS, whose steps the calling thread takes itself.

    Each method raises TimeoutError at its deadline `until` (seconds of the monotonic clock), and after
    `patience` seconds in which the other end has moved no byte; another OSError when the connection is
    broken; and WireError for a frame that breaks the rules.

    Thread safety: one thread at a time; any thread may call `cut`.
    """

    def __init__(self, sock: socket.socket, peer: str, patience: float = math.inf) -> None:
        """Take a connected socket over; `peer` names the other end in errors."""
        sock.settimeout(None)
        self._sock: Any = sock
        self._peer = peer
        self._patience = patience
        self._limit = math.inf
        """Seconds that the kernel, or TLS, lets one step take."""
        self._tls = False
        self.partial = False
        """Whether a frame was sent in part, so that no other frame can follow."""

    def secure(self, context: ssl.SSLContext, until: float, server_name: str | None = None) -> None:
        """Make the TLS handshake, as the client of `server_name` or as the server."""
        self._sock.settimeout(min(_left(until), self._patience))
        try:
            self._sock = context.wrap_socket(
                self._sock, server_side=server_name is None, server_hostname=server_name
            )
        except ValueError as error:  # the other end has gone
            raise ConnectionResetError(str(error)) from error
        self._limit = math.inf
        self._tls = True

    @property
    def names(self) -> list[bytes]:
        """Subject alternative names of the certificate of the other end; none without one."""
        found = (self._sock.getpeercert() or {}).get("subjectAltName", ()) if self._tls else ()
        return [str(value).encode() for _, value in found]

    def wait(self) -> None:
        """Wait without a limit for the next byte, or the end of the connection."""
        if not (self._tls and self._sock.pending()):
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            poll.poll()

    def frame(self, until: float, max_header: int, max_payload: int = 0) -> Frame:
        """Receive the first bytes of a frame."""
        return unpack(self.receive(FRAME_BYTES, until), max_header, max_payload)

    def receive(self, nbytes: int, until: float) -> bytes:
        """Receive so many bytes, whose number was compared with a limit before."""
        data = bytearray(nbytes)
        self.fill([memoryview(data)], until)
        return bytes(data)

    def fill(self, views: Iterable[memoryview], until: float) -> None:
        """Receive bytes until these buffers are full."""
        for got in self._steps(self._receive_into, views, until):
            if got == 0:
                raise ConnectionResetError(f"{self._peer} closed a data connection")

    def discard(self, nbytes: int, until: float) -> None:
        """Receive so many bytes and forget them."""
        scratch = memoryview(bytearray(min(nbytes, 64 << 10)))
        while nbytes:
            step = min(nbytes, scratch.nbytes)
            self.fill([scratch[:step]], until)
            nbytes -= step

    def send(self, views: Iterable[memoryview], until: float) -> None:
        """Send all bytes of these buffers: one whole frame, or what cannot be followed by another."""
        self.partial = True
        for _ in self._steps(self._send_from, views, until):
            pass
        self.partial = False

    def cut(self) -> None:
        """End the connection, also if a thread is in the middle of a step, or a forked process has it too."""
        with suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and close the socket; a second call does nothing."""
        self.cut()
        self._sock.close()

    def _steps(
        self, work: Callable[[list[memoryview]], int], views: Iterable[memoryview], until: float
    ) -> Iterator[int]:
        """Let `work` move the bytes of all views, and yield how many each step has moved.

        Calls have the same time, as a rule, so that the limit of a step is seldom set anew.
        """
        rest = [view for view in views if view.nbytes]
        while rest:
            left = min(_left(until), self._patience)
            if abs(left - self._limit) > _SLACK:
                self._limit = left
                self._set_limit(left)
            try:
                moved = work(rest)
            except (BlockingIOError, TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if left == self._patience:
                    raise TimeoutError(f"{self._peer} has moved no byte for {left:g} s") from None
                continue
            except ConnectionError:
                raise
            except (OSError, ValueError) as error:  # ValueError: the connection was closed in another thread
                raise ConnectionResetError(str(error)) from error
            skip(rest, moved)
            yield moved

    def _set_limit(self, seconds: float) -> None:
        """Let one step take so long: the kernel ends each wait of a blocking socket with BlockingIOError.

        `settimeout` would make every step of a plain socket three system calls instead of one.
        """
        if self._tls:
            self._sock.settimeout(None if seconds == math.inf else seconds)
            return
        limit = _TIMEVAL.pack(*divmod(0 if seconds == math.inf else max(1, int(seconds * 1e6)), 10**6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._sock.setsockopt(socket.SOL_SOCKET, option, limit)

    def _receive_into(self, views: list[memoryview]) -> int:
        if self._tls:
            return int(self._sock.recv_into(views[0]))
        # The kernel returns when the buffers are full, so that the interpreter is not asked for each packet.
        return int(self._sock.recvmsg_into(views[:VECTOR], 0, socket.MSG_WAITALL)[0])

    def _send_from(self, views: list[memoryview]) -> int:
        if self._tls:
            return int(self._sock.send(views[0][:_TLS_BYTES]))
        return int(self._sock.sendmsg(views[:VECTOR]))


def _left(until: float) -> float:
    """Return the seconds until a deadline; raises TimeoutError after it."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline of a call on a data connection has passed")
    return left
