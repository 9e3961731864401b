"""Client's end of the attach socket: one connection is one session with the daemon on this host."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from threading import Lock
from typing import Final, TypeVar

from google.protobuf.message import Message

from tiercache.errors import WireError
from tiercache.wire import memory
from tiercache.wire.v1 import attach_pb2 as pb
from tiercache_backends.grpc.failures import CallError, Kind

M = TypeVar("M", bound=Message)


class Session:
    """Session with a daemon, from its greeting to the end of the connection.

    Thread safety: any thread may call.
    """

    def __init__(self, path: str, deadline: float) -> None:
        """Connect and receive the greeting; raise CallError. `deadline`: in seconds, on the monotonic clock."""
        self._path = path
        self._lock = Lock()
        self.socket: Final = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self.over = False
        """Whether the client has ended the session, or learned that it has ended."""
        self.watched = False
        """Whether `Hazards` waits for the daemon to close the connection, and then closes the client's end."""
        try:
            self.socket.settimeout(_left(deadline))
            self.socket.connect(path)
            greeting = self._receive(pb.Session, deadline)
            if greeting.refusal:
                raise CallError(Kind.REFUSED, f"{path}: {greeting.refusal}")
        except BaseException as error:
            self.socket.close()
            if isinstance(error, PermissionError):
                who = f"user {os.getuid()}"
                refusal = f"{path}: the file system keeps {who} out; ask the operator for a principal with uid = {os.getuid()}"
                raise CallError(Kind.REFUSED, refusal) from error
            if isinstance(error, OSError | WireError):
                raise CallError(Kind.AWAY, f"{path}: {error}") from error
            raise
        self.token: Final = greeting.token

    def attach(self, fd: int, nbytes: int, deadline: float) -> int:
        """Attach a memfd of `nbytes` bytes, and return its number in this session.

        Raises WireError with the daemon's reason if it refuses, CallError if it does not answer.
        """
        with self._lock:
            try:
                self.socket.settimeout(_left(deadline))
                memory.send(self.socket, pb.Request(attach=pb.Attach(bytes=nbytes)), fd)
                answer = self._receive(pb.Answer, deadline)
            except (OSError, WireError) as error:
                self.end()  # a late answer would be taken for that of the next request
                raise CallError(Kind.AWAY, f"{self._path}: {error}") from error
        if answer.refusal:
            raise WireError(answer.refusal)
        return answer.region

    def end(self) -> None:
        """Announce the end; the daemon closes the connection once nothing on its side touches the client's memory any more."""
        self.over = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def landed(self) -> bool:
        """Return, without waiting, whether the daemon has closed the connection or died; if so, the socket is closed as well."""
        if self.socket.fileno() < 0:
            return True
        if not self._lock.acquire(blocking=False):
            return False  # a thread waits for an answer, and must receive the end of the connection itself
        try:
            self.socket.settimeout(0)
            while self.socket.recv(memory.PACKET_BYTES):
                pass
        except ConnectionError:
            pass  # reset: the process is gone
        except OSError:
            return False  # nothing has arrived yet, or a failure that proves nothing
        finally:
            self._lock.release()
        self.socket.close()
        return True

    def close(self) -> None:
        """Close the socket; the daemon sees the end of the connection."""
        self.over = True
        self.socket.close()

    def _receive(self, kind: type[M], deadline: float) -> M:
        self.socket.settimeout(_left(deadline))
        message, _ = memory.receive(self.socket, kind)
        if message is None:
            raise ConnectionResetError("the daemon closed the connection")
        return message


def _left(deadline: float) -> float:
    """Return the seconds until `deadline`; never 0, which would mean not to wait at all."""
    return max(0.001, deadline - time.monotonic())
