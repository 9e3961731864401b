"""The attach socket, on which clients of this host open sessions and attach memory.

One connection is one session. The session ends when the client closes the connection, or shuts down its
sending side. The daemon then waits until no call touches the session's memory any more, releases the memory,
and closes its own end of the connection (`shared.AttachSession` says why).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from asyncio import CancelledError, Event, get_running_loop
from contextlib import suppress
from typing import Final

from tiercache.daemon.acceptor import AcceptedConnection, Acceptor
from tiercache.daemon.access import Access
from tiercache.daemon.admission import Admission
from tiercache.daemon.call_log import CallLog
from tiercache.daemon.payload.shared import AttachSession, Inode, Mappings
from tiercache.daemon.sockets import listen_unix, peer_of
from tiercache.errors import WireError
from tiercache.memory import Region
from tiercache.wire import attachment
from tiercache.wire.v1 import attach_pb2 as pb

_log = logging.getLogger(__name__)

_MAX_OPENING: Final = 128
"""Maximum number of connections at once of which it is not known yet whether they get a session."""
_SETTLING_SECONDS: Final = 5.0
"""Seconds after which such a connection is cut."""


class _Connection(AcceptedConnection):
    """A connection to the attach socket.

    Thread safety: the event loop's thread.
    """

    def __init__(self, number: int, origin: bytes, client: socket.socket) -> None:
        super().__init__(number, origin, time.monotonic(), tls=False, trusted=True)
        client.setblocking(False)
        self.client: Final = client

    def close(self) -> None:
        self.client.close()


class Attachments:
    """All sessions, and the attach socket through which they come.

    Thread safety: the event loop's thread.
    """

    def __init__(self, access: Access, max_bytes: int, max_clients: int, calls: CallLog) -> None:
        """Serve at most `max_clients` clients, each of which may attach `max_bytes` bytes."""
        self._access = access
        self._calls = calls
        self._max_clients = max_clients
        self._max_bytes = max_bytes
        self._sessions: dict[bytes, AttachSession] = {}
        self._mappings = Mappings()
        admission: Admission[_Connection] = Admission(
            max_connections=max_clients + 2 * _MAX_OPENING, max_opening=_MAX_OPENING,
            settling=_SETTLING_SECONDS, now=time.monotonic(),
        )  # fmt: skip
        self._acceptor = Acceptor(admission, _Connection, self._serve, calls.refused_connection)

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def attached(self) -> int:
        """Total bytes of the regions of all sessions.

        Any thread may read this, because `list` copies a dict's values in one step.
        """
        return sum(session.attached for session in list(self._sessions.values()))

    def find(self, token: bytes) -> AttachSession | None:
        """Return the session with this token; None if there is no such session or it has ended."""
        found = self._sessions.get(token)
        return None if found is None or found.ended else found

    def listen(self, path: str, mode: int) -> None:
        """Open the attach socket at `path` with this file mode; raises OSError if that fails."""
        self._acceptor.listen(listen_unix(path, mode, socket.SOCK_SEQPACKET))

    async def close(self) -> None:
        """End every session as soon as no call touches the memory of the session any more."""
        await self._acceptor.close()
        self._mappings.clear()

    def _room_for(self, uid: int) -> bool:
        """Return whether this user may have one more session.

        If several users are allowed, each of them may have at most half of all sessions.
        """
        limit = self._max_clients // (2 if len(self._access.uids) > 1 else 1)
        return len(self._sessions) < self._max_clients and sum(
            s.uid == uid for s in self._sessions.values()
        ) < max(1, limit)

    async def _serve(self, accepted: _Connection) -> None:
        connection = accepted.client
        session: AttachSession | None = None
        try:
            pid, uid = peer_of(connection)
            client = f"pid {pid}, uid {uid}"
            permissions = self._access.permissions_of_uid(uid)
            if permissions is None or not self._room_for(uid):
                reason, refusal = "busy", f"there are {len(self)} clients already; raise limits.clients"
                if permissions is None:
                    reason, refusal = "unauthenticated", f"user {uid} is not a principal of this daemon"
                    refusal += f"; the operator can add one with uid = {uid}"
                self._calls.refused_connection(reason, client)
                attachment.send(connection, pb.Session(refusal=refusal))
                return
            session = AttachSession(uid, pid, self._mappings)
            session.caller = self._access.new_client(permissions, session, client)
            self._sessions[session.token] = session
            accepted.known = True
            self._acceptor.admission.settle(accepted)
            attachment.send(connection, pb.Session(token=session.token))
            await self._converse(connection, session)
        except ConnectionError:
            pass  # the client has disconnected, perhaps after probing the socket; this is not worth logging
        except (OSError, WireError) as error:
            _log.info("a client of the attach socket was cut off: %s", error)
        except CancelledError:
            pass  # the daemon is shutting down
        finally:
            if session is not None:
                session.ended = True
                session.when_ended()
                # A store call under way cannot be cancelled. Until it is done, the memory must stay mapped,
                # and the connection must stay open: closing it tells the client that nothing touches the
                # memory any more. Therefore even the daemon's shutdown, which cancels this task, must not end
                # this wait.
                unused = get_running_loop().create_task(session.wait_unused())
                while not unused.done():
                    with suppress(CancelledError):
                        await asyncio.shield(unused)
                session.end()
                del self._sessions[session.token]

    async def _converse(self, connection: socket.socket, session: AttachSession) -> None:
        while True:
            request, fds = await self._next(connection)
            try:
                if request is None:
                    return
                if not request.HasField("attach"):
                    raise WireError("a request is not to attach; the client may be newer than the daemon")
                answer = pb.Answer(region=await self._attach(request.attach.bytes, fds, session))
            except WireError as error:
                self._calls.refused(error)
                answer = pb.Answer(refusal=str(error))
            finally:
                for fd in fds:
                    os.close(fd)
            attachment.send(connection, answer)

    async def _next(self, connection: socket.socket) -> tuple[pb.Request | None, list[int]]:
        readable = Event()
        loop = get_running_loop()
        loop.add_reader(connection, readable.set)
        try:
            while True:
                await readable.wait()
                readable.clear()
                with suppress(BlockingIOError):
                    return attachment.receive(connection, pb.Request, max_fds=1)
        finally:
            loop.remove_reader(connection)

    async def _attach(self, declared: int, fds: list[int], session: AttachSession) -> int:
        if len(fds) != 1:
            raise WireError(f"an attach request must carry one memfd; this one carries {len(fds)}")
        inode, room = Inode.of(session.uid, fds[0]), self._max_bytes - session.attached
        mapping = self._mappings.find(inode)
        if mapping is None:
            # A thread maps the memory, because this takes long. The thread goes on when this coroutine is
            # cancelled, so it gets a descriptor of its own.
            region = await get_running_loop().run_in_executor(None, _adopt, os.dup(fds[0]), declared, room)
            mapping = self._mappings.add(inode, region)
        try:
            if mapping.region.nbytes > room or mapping.region.nbytes != declared:
                raise WireError(
                    f"a memfd of {mapping.region.nbytes} bytes cannot be attached: {declared} bytes were"
                    f" declared, and there is room for {room}"
                )
            return session.add(mapping)
        except WireError:
            self._mappings.release(mapping, session.pid)
            raise


def _adopt(fd: int, declared: int, max_bytes: int) -> Region:
    """Map a client's memfd and close `fd`; raises WireError. Runs in a thread."""
    try:
        return attachment.adopt(fd, declared, max_bytes)
    finally:
        os.close(fd)
