"""Bytes from one socket to another; what the other does not take waits in the kernel, and never in this process."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from fcntl import F_GETPIPE_SZ, F_SETPIPE_SZ, fcntl
from typing import Final

PIPE_BYTES: Final = 256 << 10
"""Four times the usual: every piece costs a turn of the thread, and of gRPC."""
_FLAGS: Final = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE


class Flow:
    """One direction of a connection between two sockets that do not block; at most a pipe of bytes is on its way.

    Thread safety: one thread.
    """

    def __init__(self, source: socket.socket, sink: socket.socket, scratch: memoryview | None = None) -> None:
        """Raises OSError where there are no descriptors for a pipe.

        With `scratch` bytes are copied through it, else spliced. From TCP to a unix socket splicing takes half the time of copying, and in
        the other direction twice as long, for unix sockets hold small fragments.
        """
        self._scratch = scratch
        self._source = source
        self._sink = sink
        self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(OSError):  # a user without privileges has only so many pages
            fcntl(self._in, F_SETPIPE_SZ, PIPE_BYTES)
        self._room = fcntl(self._in, F_GETPIPE_SZ)
        self.held = 0
        """Bytes that wait for the sink."""
        self.moved = False
        """Has anything come through?"""
        self.ended = False
        """Has the source ended?"""

    @property
    def over(self) -> bool:
        """Is everything delivered, and the end as well?"""
        return self.ended and not self.held

    def move(self) -> None:
        """Move what can be moved now; raises OSError where either side has broken off."""
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
        self.held = os.splice(self._source.fileno(), self._in, self._room, flags=_FLAGS)
        return self.held

    def _copy(self, scratch: memoryview) -> int:
        taken = self._source.recv_into(scratch[: self._room])
        sent = 0
        with suppress(BlockingIOError):
            sent = self._sink.send(scratch[:taken])
        if sent < taken:
            self.held = os.write(self._in, scratch[sent:taken])
        return taken

    def close(self) -> None:
        """Give the pipe back. Twice is a mistake."""
        os.close(self._out)
        os.close(self._in)


def widen(peer: bytes, nbytes: int) -> None:
    """Let the socket of this process that is connected to the abstract unix address `peer` send so many bytes ahead; none is no error.

    For gRPC's own sockets, of which it sets only the receiving side.
    """
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            descriptor = os.dup(int(name))  # gRPC may close its own meanwhile
            try:
                found = socket.socket(fileno=descriptor)
            except OSError:  # no socket
                os.close(descriptor)
                continue
            with found:
                if found.family == socket.AF_UNIX and found.getpeername() == peer:
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)
                    return
