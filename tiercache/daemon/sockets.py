"""Sockets of the daemon: those that listen, their other ends, their directory, and flows between two."""

from __future__ import annotations

import os
import socket
import stat
import struct
from contextlib import suppress
from errno import EMFILE, ENFILE, ENOBUFS, ENOMEM
from pathlib import Path
from typing import Final

from tiercache.errors import ConfigError, StorageError, TierCacheError
from tiercache.wire.methods import ATTACH_SOCKET, DATA_SOCKET, GRPC_SOCKET

PLAIN_SOCKET: Final = "plain.sock"
"""Name of the unix socket on which gRPC listens without TLS; only the gate connects to it."""
TLS_SOCKET: Final = "tls.sock"
"""Name of the unix socket on which gRPC listens with TLS; only the gate connects to it."""
SOCKETS: Final = (GRPC_SOCKET, ATTACH_SOCKET, DATA_SOCKET, PLAIN_SOCKET, TLS_SOCKET)
"""Names of all sockets that a daemon may have in its directory."""
EXHAUSTED: Final = (EMFILE, ENFILE, ENOBUFS, ENOMEM)
"""Errors of accept(2) when descriptors or memory ran out; the connection stays in the backlog."""
_BACKLOG: Final = 1024
_CREDENTIALS: Final = struct.Struct("iII")
"""`struct ucred` of SO_PEERCRED: process id, user id, group id."""
FLOW_BYTES: Final = 32 << 10
"""Maximum bytes that one direction of a connection holds in this process."""


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id at the other end of a connected unix socket; raises OSError.

    The process id is 0 for a process in another PID namespace.
    """
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid


def origin_of(connection: socket.socket, address: tuple[str, int]) -> bytes:
    """Return the key under which connections from this address are counted together; raises OSError.

    On a unix socket it is the user id at the other end. For IPv4 it is the whole address. For IPv6 it is the
    first 64 bits, because one machine may use every address with the same first 64 bits.
    """
    if connection.family == socket.AF_UNIX:
        return b"uid %d" % peer_of(connection)[1]
    packed = socket.inet_pton(connection.family, address[0].partition("%")[0])
    # IPv6   | 8 bytes: the key | 8 bytes                        |
    # IPv4 on a dual-stack listener (::ffff:a.b.c.d)
    #        | 10 zero bytes            | ff ff | 4 bytes: a.b.c.d |   the key is the whole address
    return packed[:8] if len(packed) == 16 and not packed.startswith(bytes(10)) else packed


def listen_tcp(host: str, port: int) -> socket.socket:
    """Return a non-blocking socket that listens on a TCP address; raises OSError.

    The address "::" accepts IPv4 connections as well, where the system supports that.
    """
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    dual = host == "::" and socket.has_dualstack_ipv6()
    listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
    listener.setblocking(False)
    return listener


def listen_unix(path: str, mode: int, kind: socket.SocketKind) -> socket.socket:
    """Return a non-blocking socket that listens on a unix socket with this file mode.

    Raises OSError if that fails.
    """
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        listener.setblocking(False)
        listener.bind(path)
        os.chmod(path, mode)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def make_way(directory: Path, sockets: Path) -> None:
    """Let other users pass through `directory` if the directory `sockets` lies in it.

    The store in `directory` stays closed to other users. Call this before a store makes `directory`. The mode
    of an existing directory is changed only if the directory belongs to this user, and contains only the
    store and the sockets. With other files in it, the change would let other users reach these files.

    Raises ConfigError if the directory must be changed but may not be. Raises StorageError if the directory
    cannot be made or changed.
    """
    if not sockets.is_relative_to(directory):
        return
    try:
        if not directory.exists():
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(0o711)
        found = directory.stat()
        if found.st_mode & 0o001:  # other users can pass through already
            return
        if found.st_uid != os.getuid() or not {entry.name for entry in directory.iterdir()} <= {
            "store",
            sockets.name,
        }:
            raise ConfigError(
                f"sockets: other users are principals, and cannot pass through {directory} (mode"
                f" {stat.S_IMODE(found.st_mode):o}); allow it with chmod o+x {directory}, or set sockets to a"
                " directory such as /run/tiercache"
            )
        directory.chmod(stat.S_IMODE(found.st_mode) | 0o011)
    except OSError as error:
        raise StorageError(f"{directory} cannot be made: {error}") from error


def prepare(directory: Path, *, others: bool) -> None:
    """Make the directory of the sockets or take it over, and remove sockets that a killed daemon left there.

    `others` says whether other users can pass through the directory; they can never list its files.

    Raises ConfigError if the path is not a directory or belongs to another user, if a file that is not a
    socket has the name of a socket, or if another daemon uses the directory. Raises StorageError if the
    system refuses a change.
    """
    mode = 0o711 if others else 0o700
    try:
        directory.mkdir(mode=mode, parents=True, exist_ok=True)
        found = os.lstat(directory)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ConfigError(
                f"sockets: {directory} is not a directory of this user's; remove it, or name another one"
            )
        directory.chmod(mode)
        for name in SOCKETS:
            path = directory / name
            with suppress(FileNotFoundError):
                if not stat.S_ISSOCK(os.lstat(path).st_mode):
                    raise ConfigError(f"sockets: {path} is no socket; remove it, or name another directory")
                if _answers(path):
                    raise ConfigError(
                        f"sockets: another daemon serves {directory}; stop it, or give this one a directory"
                        " of its own"
                    )
                path.unlink()
    except OSError as error:
        if isinstance(error, TierCacheError):
            raise
        raise StorageError(f"the sockets in {directory} cannot be made: {error}") from error


def _answers(path: Path) -> bool:
    """Return whether a process listens on the socket at `path`; a killed daemon leaves its sockets."""
    kind = socket.SOCK_SEQPACKET if path.name == ATTACH_SOCKET else socket.SOCK_STREAM
    with socket.socket(socket.AF_UNIX, kind) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
    return True


def remove(directory: Path) -> None:
    """Remove the sockets from `directory`; errors are ignored."""
    for name in SOCKETS:
        with suppress(OSError):
            (directory / name).unlink()


class Flow:
    """One direction of a connection between two non-blocking sockets.

    A flow reads only when the sink has taken what was read before, so it holds at most FLOW_BYTES bytes.

    Thread safety: one thread.
    """

    def __init__(self, source: socket.socket, sink: socket.socket, scratch: memoryview) -> None:
        """Read through `scratch`, which flows of the same thread may share; its size is FLOW_BYTES."""
        self._scratch = scratch
        self._source = source
        self._sink = sink
        self._rest = b""
        self.moved = False
        """Whether any byte has been read from the source."""
        self.ended = False
        """Whether the source has ended."""

    @property
    def held(self) -> int:
        """Bytes that wait for the sink."""
        return len(self._rest)

    @property
    def over(self) -> bool:
        """Whether the source has ended and the sink has all of its bytes."""
        return self.ended and not self._rest

    def move(self) -> None:
        """Move the bytes that can be moved now; raises OSError if either connection is broken."""
        if self.over:
            return
        data = memoryview(self._rest)
        if not data:
            try:
                taken = self._source.recv_into(self._scratch)
            except BlockingIOError:
                return
            self.moved = self.moved or taken > 0
            self.ended = not taken
            data = self._scratch[:taken]
        sent = 0
        with suppress(BlockingIOError):
            sent = self._sink.send(data) if data else 0
        self._rest = bytes(data[sent:])
        if self.ended and not self._rest:
            self._sink.shutdown(socket.SHUT_WR)
