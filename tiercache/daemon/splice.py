"""Forwarding of bytes from one socket to another; bytes that the other does not take wait in a kernel pipe, never in this process."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from fcntl import F_GETPIPE_SZ, F_SETPIPE_SZ, fcntl
from typing import Final

PIPE_BYTES: Final = 256 << 10
"""Size of a pipe in bytes: four times Linux's default, because every piece costs a turn of the gate's thread and of gRPC."""
_FLAGS: Final = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE


class Flow:
    """One direction of a connection between two non-blocking sockets; at most one pipe of bytes is on its way.

    Thread safety: one thread.
    """

    def __init__(self, source: socket.socket, sink: socket.socket, scratch: memoryview | None = None) -> None:
        """Make the pipe; raises OSError if there are no descriptors for it.

        Bytes are copied through `scratch` if it is given, else spliced. From TCP to a unix socket splicing takes half the time of copying;
        in the other direction it takes twice the time, because unix sockets hold small fragments.
        """
        self._scratch = scratch
        self._source = source
        self._sink = sink
        self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(OSError):  # the kernel limits the pages that all pipes of an unprivileged user may have
            fcntl(self._in, F_SETPIPE_SZ, PIPE_BYTES)
        self._room = fcntl(self._in, F_GETPIPE_SZ)
        self.held = 0
        """Bytes in the pipe that wait for the sink."""
        self.moved = False
        """Whether any byte was taken from the source."""
        self.ended = False
        """Whether the source has ended."""

    @property
    def over(self) -> bool:
        """Whether everything is delivered, including the end."""
        return self.ended and not self.held

    def move(self) -> None:
        """Move the bytes that can be moved now; raises OSError if either side has broken off."""
        if self.over:
            return
        if not self.held:
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
        """Splice bytes of the source into the pipe and return their number; 0 at the end. Raises BlockingIOError if there are none yet."""
        self.held = os.splice(self._source.fileno(), self._in, self._room, flags=_FLAGS)
        return self.held

    def _copy(self, scratch: memoryview) -> int:
        """Copy bytes of the source to the sink, and what that does not take into the pipe; otherwise the same as `_splice`."""
        taken = self._source.recv_into(scratch[: self._room])
        sent = 0
        with suppress(BlockingIOError):
            sent = self._sink.send(scratch[:taken])
        if sent < taken:
            self.held = os.write(self._in, scratch[sent:taken])
        return taken

    def close(self) -> None:
        """Close the pipe; to be called only once."""
        os.close(self._out)
        os.close(self._in)


def widen(peer: bytes, nbytes: int) -> None:
    """Set the send buffer of this process's socket that is connected to the abstract unix address `peer`; do nothing if there is none.

    It is meant for gRPC's own sockets, for which gRPC sets only the receive buffer.
    """
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            descriptor = os.dup(int(name))  # a duplicate, because gRPC may close its own descriptor meanwhile
            try:
                found = socket.socket(fileno=descriptor)
            except OSError:  # it is no socket
                os.close(descriptor)
                continue
            with found:
                if found.family == socket.AF_UNIX and found.getpeername() == peer:
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)
                    return
