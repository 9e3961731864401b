"""Our end of the attach socket: one connection is one session with the daemon on this host."""

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
    """A session, from the daemon's greeting to the end of the connection.

    Thread safety: any thread.
    """

    def __init__(self, path: str, deadline: float) -> None:
        """Connect; raises CallError. `deadline` on the monotonic clock."""
        self._path = path
        self._lock = Lock()
        self.socket: Final = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self.over = False
        """Did we end it, or learn that it has ended?"""
        self.watched = False
        """Does somebody wait for the daemon to close it? He closes our end then."""
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
        """The number of a memfd in this session. Raises WireError with the daemon's reason, CallError where it does not answer."""
        with self._lock:
            try:
                self.socket.settimeout(_left(deadline))
                memory.send(self.socket, pb.Request(attach=pb.Attach(bytes=nbytes)), fd)
                answer = self._receive(pb.Answer, deadline)
            except (OSError, WireError) as error:
                self.end()  # an answer that comes later would be taken for the next one's
                raise CallError(Kind.AWAY, f"{self._path}: {error}") from error
        if answer.refusal:
            raise WireError(answer.refusal)
        return answer.region

    def end(self) -> None:
        """Say that it is over. The daemon closes the connection when nothing touches our memory any more."""
        self.over = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def landed(self) -> bool:
        """Has the other end closed the connection, or died? Takes no time; once it was True, the socket is closed."""
        if self.socket.fileno() < 0:
            return True
        if not self._lock.acquire(blocking=False):
            return False  # somebody waits for an answer, and would have the end of the connection taken from him
        try:
            self.socket.settimeout(0)
            while self.socket.recv(memory.PACKET_BYTES):
                pass
        except ConnectionError:
            pass  # reset: the process is gone
        except OSError:
            return False  # nothing there yet; no other failure is a proof
        finally:
            self._lock.release()
        self.socket.close()
        return True

    def close(self) -> None:
        """Let go; the daemon sees the end of the connection."""
        self.over = True
        self.socket.close()

    def _receive(self, kind: type[M], deadline: float) -> M:
        self.socket.settimeout(_left(deadline))
        message, _ = memory.receive(self.socket, kind)
        if message is None:
            raise ConnectionResetError("the daemon closed the connection")
        return message


def _left(deadline: float) -> float:
    """Seconds until then; never 0, which would mean not to wait at all."""
    return max(0.001, deadline - time.monotonic())
