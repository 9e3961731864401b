"""Forwarding of bytes from one socket to another.

Bytes that the other socket does not accept yet wait in a kernel pipe, never in this process.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from fcntl import F_GETPIPE_SZ, F_SETPIPE_SZ, fcntl
from typing import Final

PIPE_BYTES: Final = 256 << 10
"""Size of a pipe in bytes.

This is four times Linux's default, because the gate's thread and gRPC spend time on each piece."""
_FLAGS: Final = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE


class Flow:
    """One direction of a connection between two non-blocking sockets.

    A flow holds at most as many bytes as its pipe:

        source ── splice or copy ──▶ pipe (`held` bytes) ── splice ──▶ sink

    Thread safety: one thread.
    """

    def __init__(self, source: socket.socket, sink: socket.socket, scratch: memoryview | None = None) -> None:
        """Make the pipe; raises OSError if there are no descriptors for it.

        Bytes are copied through `scratch` if it is given, else spliced. From TCP to a unix socket splicing
        takes half the time of copying. From a unix socket to TCP splicing takes twice the time of copying,
        because unix sockets hold small fragments.
        """
        self._scratch = scratch
        self._source = source
        self._sink = sink
        self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(OSError):  # the kernel limits the total size of an unprivileged user's pipes
            fcntl(self._in, F_SETPIPE_SZ, PIPE_BYTES)
        self._room = fcntl(self._in, F_GETPIPE_SZ)
        self.held = 0
        """Bytes in the pipe that wait for the sink."""
        self.moved = False
        """Whether any byte has been read from the source."""
        self.ended = False
        """Whether the source has ended."""

    @property
    def over(self) -> bool:
        """Whether the source has ended and the sink has all of its bytes."""
        return self.ended and not self.held

    def move(self) -> None:
        """Move the bytes that can be moved now; raises OSError if either connection is broken."""
        if self.over:
            return
        if not self.held:  # an empty pipe has room for everything that is taken at once
            try:
                taken = self._splice() if self._scratch is None else self._copy(self._scratch)
            except BlockingIOError:
                return
            self.moved = self.moved or taken > 0
            self.ended = not taken
        with suppress(BlockingIOError):
            while self.held:
                self.held -= os.splice(self._out, self._sink.fileno(), self.held, flags=_FLAGS)
        if self.ended and not self.held:
            self._sink.shutdown(socket.SHUT_WR)

    def _splice(self) -> int:
        """Splice bytes of the source into the pipe and return their number; 0 if the source has ended.

        Raises BlockingIOError if there are no bytes yet.
        """
        self.held = os.splice(self._source.fileno(), self._in, self._room, flags=_FLAGS)
        return self.held

    def _copy(self, scratch: memoryview) -> int:
        """Copy bytes of the source to the sink and return their number; 0 if the source has ended.

        Bytes that the sink does not accept go into the pipe. Raises BlockingIOError if the source has no
        bytes yet.
        """
        taken = self._source.recv_into(scratch[: self._room])
        sent = 0
        with suppress(BlockingIOError):
            sent = self._sink.send(scratch[:taken])
        if sent < taken:  # the pipe has room: it is empty, and `taken` is at most its size
            self.held = os.write(self._in, scratch[sent:taken])
        return taken

    def close(self) -> None:
        """Close the pipe. Call this only once."""
        os.close(self._out)
        os.close(self._in)


def widen(peer: bytes, nbytes: int) -> None:
    """Set the size of the send buffer of the socket that is connected to the abstract unix address `peer`.

    Without such a socket nothing happens. The function is meant for sockets that gRPC has accepted: gRPC sets
    only the receive buffers of these.
    """
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            descriptor = os.dup(int(name))  # duplicated, because gRPC may close its descriptor at any time
            try:
                found = socket.socket(fileno=descriptor)
            except OSError:  # not a socket
                os.close(descriptor)
                continue
            with found:
                if found.family == socket.AF_UNIX and found.getpeername() == peer:
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)
                    return
