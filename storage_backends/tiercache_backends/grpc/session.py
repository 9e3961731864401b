"""The client's end of the attach socket.

One connection to the socket is one session with the daemon on this host. During a session the client attaches
memory: it sends memfds, which the daemon maps. When a call gets no answer, the client ends the session, and
`AbandonedCalls` waits until the daemon has stopped using the memory.
"""

from __future__ import annotations

import os
import select
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

_POLL_MS: Final = 200
"""Maximum number of milliseconds until the thread of `AbandonedCalls` notices an added session."""

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

    def closed_by_daemon(self) -> bool:
        """Return, without waiting, whether the daemon has closed its end or died; if so, close the socket."""
        if self.socket.fileno() < 0:
            return True
        if not self._lock.acquire(blocking=False):
            return False  # another thread is in `attach`, and reads the socket; ask again later
        try:
            self.socket.settimeout(0)
            while self.socket.recv(attachment.PACKET_BYTES):
                pass  # a late answer; an empty packet means that the daemon has closed its end
        except ConnectionError:
            pass  # the daemon's process has ended
        except OSError:  # nothing has arrived, or the call failed, so the daemon may still be connected
            return False
        finally:
            self._lock.release()
        self.socket.close()
        return True

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

    A daemon that has closed its end of the session, or has died, no longer touches the memory. A thread waits
    until the daemon does either. The thread runs only while there is a session to wait for.

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
        self._pending: list[tuple[Session, Sequence[Callable[[], None]]]] = []
        """Sessions that the daemon has not closed yet, each with the functions to call when it is closed."""
        self._watching = False
        """Whether the thread runs and will see what is added to `_pending`."""

    def __len__(self) -> int:
        with self._lock:
            return len(self._pending)

    def add(self, session: Session, releases: Sequence[Callable[[], None]]) -> None:
        """End the session; call each of `releases` when the daemon no longer touches the session's memory."""
        with self._lock:
            session.watched = True
            session.end()
            self._pending.append((session, releases))
            if not self._watching:
                self._watching = True
                try:
                    Thread(target=self._watch, name="tiercache-grpc-abandoned", daemon=True).start()
                except RuntimeError:  # no thread could be started; the next `add` tries again
                    self._watching = False

    def _watch(self) -> None:
        while sessions := self._sessions():
            poll = select.poll()
            for session in sessions:
                if session.socket.fileno() >= 0:
                    poll.register(session.socket, select.POLLIN)
            # Wait until a daemon closes its end, but not longer than `_POLL_MS`, because `add` may have added
            # a session that this poll does not know.
            poll.poll(_POLL_MS)
            closed = {session for session in sessions if session.closed_by_daemon()}
            with self._lock:
                over = [releases for session, releases in self._pending if session in closed]
                self._pending = [entry for entry in self._pending if entry[0] not in closed]
            for releases in over:
                for release in releases:
                    release()

    def _sessions(self) -> set[Session]:
        # `add` takes the same lock. Without it: (1) This thread finds no session. (2) `add` adds a session,
        # and starts no thread because this thread still runs. (3) This thread ends, and no thread
        # watches the session.
        with self._lock:
            found = {session for session, _ in self._pending}
            self._watching = bool(found)
        return found


def _seconds_left(deadline: float) -> float:
    """Return the seconds until `deadline`, at least 0.001: a socket with a timeout of 0 never waits."""
    return max(0.001, deadline - time.monotonic())
