"""The client's end of the attach socket.

One connection to the socket is one session with the daemon on this host. During a session the client attaches
memory: it sends memfds, which the daemon maps. When a call gets no answer, the client ends the session, and
`AbandonedCalls` waits until the daemon has stopped using the memory.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock, Thread
from typing import Final, TypeVar

from google.protobuf.message import Message

from tiercache.errors import WireError
from tiercache.wire import attachment
from tiercache.wire.v1 import attach_pb2 as pb
from tiercache_backends.grpc.failures import CallError, Kind

M = TypeVar("M", bound=Message)


class Session:
    """Session with a daemon, from the daemon's greeting to the end of the connection.

    Thread safety: any thread may call.
    """

    def __init__(self, path: str, deadline: float) -> None:
        """Connect to the socket at `path` and receive the greeting.

        `deadline`: in seconds of the monotonic clock. Raises CallError if the daemon refuses the client, or
        does not answer in time.
        """
        self._path = path
        self._lock = Lock()
        self.socket: Final = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self.over = False
        """Whether the client has ended the session, or knows that the daemon has ended it."""
        self.watched = False
        """Whether `AbandonedCalls` will close the socket, after the daemon has closed its end."""
        try:
            self.socket.settimeout(_seconds_left(deadline))
            self.socket.connect(path)
            greeting = self._receive(pb.Session, deadline)
            if greeting.refusal:
                raise CallError(Kind.REFUSED, f"{path}: {greeting.refusal}")
        except BaseException as error:
            self.socket.close()
            if isinstance(error, PermissionError):
                uid = os.getuid()
                refusal = (
                    f"{path}: user {uid} may not access this path; ask the operator for a principal with"
                    f" uid = {uid}"
                )
                raise CallError(Kind.REFUSED, refusal) from error
            if isinstance(error, OSError | WireError):
                raise CallError(Kind.UNREACHABLE, f"{path}: {error}") from error
            raise
        self.token: Final = greeting.token

    def attach(self, fd: int, nbytes: int, deadline: float) -> int:
        """Attach a memfd of `nbytes` bytes, and return its number in this session.

        Raises WireError with the reason if the daemon refuses, CallError if the daemon does not answer.
        """
        with self._lock:
            if self.over:
                raise CallError(Kind.UNREACHABLE, f"{self._path}: the session has ended")
            try:
                self.socket.settimeout(_seconds_left(deadline))
                attachment.send(self.socket, pb.Request(attach=pb.Attach(bytes=nbytes)), fd)
                answer = self._receive(pb.Answer, deadline)
            except (OSError, WireError) as error:
                self.end()  # otherwise a late answer would be mistaken for the answer to the next request
                raise CallError(Kind.UNREACHABLE, f"{self._path}: {error}") from error
        if answer.refusal:
            raise WireError(answer.refusal)
        return answer.region

    def end(self) -> None:
        """Announce the end of the session.

        The daemon closes its end when nothing in the daemon touches the client's memory any more.
        """
        self.over = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def wait_closed(self) -> None:
        """Wait until the daemon has closed its end or died, and close the socket."""
        with self._lock:  # an `attach` that has begun reads its answer; no other begins any more
            self.over = True
        with suppress(OSError):
            self.socket.settimeout(None)
            while self.socket.recv(attachment.PACKET_BYTES):
                pass  # a late answer; an empty packet means that the daemon has closed its end
        self.socket.close()

    def close(self) -> None:
        """Close the socket; the daemon sees the end of the connection."""
        self.over = True
        self.socket.close()

    def _receive(self, kind: type[M], deadline: float) -> M:
        self.socket.settimeout(_seconds_left(deadline))
        message, _ = attachment.receive(self.socket, kind)
        if message is None:
            raise ConnectionResetError("the daemon closed the connection")
        return message


class AbandonedCalls:
    """Calls for which the client no longer waits, and whose memory the daemon may still touch.

    A daemon that has closed its end of the session, or has died, no longer touches the memory. A thread for
    each such session waits until the daemon does either.

    Without a quarantine, a late read could damage another object:

    1. The client sends GetInto with places in block 7. The deadline of the call passes.
    2. The item gets its outcome. The caller frees block 7 and allocates it for another object.
    3. The daemon's disk answers, and the daemon writes the first object into block 7.

    With the quarantine, block 7 cannot be allocated in step 2. The quarantine ends when the daemon closes its
    end, and the daemon does so only after step 3, or after it has dropped the call.

    Thread safety: any thread may call.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._pending: dict[Session, list[Callable[[], None]]] = {}
        """Sessions that the daemon has not closed yet, each with the functions to call when it is closed."""

    def __len__(self) -> int:
        with self._lock:
            return len(self._pending)

    def add(self, session: Session, releases: Sequence[Callable[[], None]]) -> None:
        """End the session; call each of `releases` when the daemon no longer touches the session's memory."""
        session.watched = True
        session.end()
        with self._lock:
            is_new = session not in self._pending
            self._pending.setdefault(session, []).extend(releases)
        if is_new:
            Thread(target=self._wait, args=(session,), name="tiercache-grpc-abandoned", daemon=True).start()

    def _wait(self, session: Session) -> None:
        session.wait_closed()
        with self._lock:
            releases = self._pending.pop(session)
        for release in releases:
            release()


def _seconds_left(deadline: float) -> float:
    """Return the seconds until `deadline`, at least 0.001: a socket with a timeout of 0 never waits."""
    return max(0.001, deadline - time.monotonic())
