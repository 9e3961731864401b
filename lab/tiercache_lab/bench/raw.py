"""Plain TCP sockets that only move bytes. `bench rpc` and the benchmarks compare data connections with these.

The server runs as a separate process and prints its port. A call says in 16 bytes how many bytes it sends and
how many it wants back; both ends move them with sendmsg and recv_into, out of one memory and into another.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
from collections.abc import Iterable
from typing import Final, Self

from tiercache.wire.data import VECTOR, skip

_CALL: Final = struct.Struct("<QQ")
_MEMORY_BYTES: Final = 1 << 20
"""Bytes of the server's memory, which it sends again and again for larger calls."""


class RawClient:
    """Connection to the server of this module. Thread safety: one thread."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def call(self, up: memoryview, down: memoryview) -> None:
        """Send the bytes of `up`, and fill `down`."""
        left = [memoryview(_CALL.pack(up.nbytes, down.nbytes)), up]
        while left:
            skip(left, self._sock.sendmsg(left))
        _fill(self._sock, [down])

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _fill(sock: socket.socket, views: Iterable[memoryview]) -> None:
    left = [view for view in views if view.nbytes]
    while left:
        got = sock.recvmsg_into(left[:VECTOR])[0]
        if not got:
            raise ConnectionResetError("the other end closed the connection")
        skip(left, got)


def _parts(memory: memoryview, nbytes: int) -> list[memoryview]:
    return [memory[: min(nbytes - at, memory.nbytes)] for at in range(0, nbytes, memory.nbytes)]


def _serve(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = memoryview(bytearray(b"x" * _MEMORY_BYTES))
    while len(head := sock.recv(_CALL.size, socket.MSG_WAITALL)) == _CALL.size:
        up, down = _CALL.unpack(head)
        _fill(sock, _parts(memory, up))
        left = _parts(memory, down) or [memory[:0]]
        while left:
            skip(left, sock.sendmsg(left[:VECTOR]))


def main() -> None:
    """Serve every connection on a thread of its own, until the process is ended."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_serve, args=(sock,), daemon=True).start()


if __name__ == "__main__":
    main()
