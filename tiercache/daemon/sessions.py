"""The attach socket: sessions of clients on this host, and the memory that they attach.

One connection is one session. It ends when the client closes the connection, or shuts down its sending side. The daemon then waits until no
call touches the session's memory any more, drops the memory, and closes its end of the connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
from asyncio import CancelledError, Event, Task, get_running_loop
from contextlib import suppress
from errno import EMFILE, ENFILE, ENOBUFS, ENOMEM
from typing import Final

from grpc import StatusCode

from tiercache.core import BLOCK_ALIGN
from tiercache.daemon.access import Access, Caller, Refusal
from tiercache.daemon.mappings import Inode, Mapping, Mappings
from tiercache.daemon.meters import LimitError, Meters
from tiercache.errors import WireError
from tiercache.wire import memory
from tiercache.wire.v1 import attach_pb2 as pb

_log = logging.getLogger(__name__)

_CREDENTIALS: Final = struct.Struct("iII")
"""`struct ucred` of SO_PEERCRED: process id, user id, group id."""
_TOKEN_BYTES: Final = 32
_MOST_REGIONS: Final = 16
"""Most regions of one session."""
_BACKLOG: Final = 1024
_EXHAUSTED: Final = (EMFILE, ENFILE, ENOBUFS, ENOMEM)
"""Errors of accept(2) that say that descriptors or memory ran out; the connection stays in the backlog."""
_PAUSE_SECONDS: Final = 0.25
"""Seconds until connections are accepted again after one of these errors."""


class Session:
    """Session of one client on this host, with the regions that it attached.

    Thread safety: the event loop's thread. Views of regions may be used from any thread between `begin` and `finish`.
    """

    def __init__(self, uid: int, pid: int, mappings: Mappings) -> None:
        self.uid: Final = uid
        self.pid: Final = pid
        self._mappings = mappings
        self.token: Final = secrets.token_bytes(_TOKEN_BYTES)
        self.caller: Caller
        self.ended = False
        self._regions: dict[int, Mapping] = {}
        self._numbers = 0
        self._under_way = 0
        self._quiet = Event()
        self._quiet.set()

    @property
    def attached(self) -> int:
        """Bytes of all regions of this session; any thread may ask."""
        return sum(mapping.region.nbytes for mapping in list(self._regions.values()))

    def view(self, region: int, offset: int, size: int) -> memoryview:
        """Return `size` bytes of a region from `offset`; raises WireError if they are not attached or not whole blocks of BLOCK_ALIGN."""
        found = self._regions.get(region)
        if found is None or size == 0 or offset + size > found.region.nbytes or (offset | size) % BLOCK_ALIGN:
            raise WireError(f"bytes [{offset}, {offset + size}) of region {region} are not attached, or not whole pages of {BLOCK_ALIGN}")
        return found.region.view[offset : offset + size]

    def add(self, mapping: Mapping) -> int:
        """Add a region and return its number; raises LimitError for more than _MOST_REGIONS."""
        if len(self._regions) >= _MOST_REGIONS:
            raise LimitError(f"a session has at most {_MOST_REGIONS} regions; detach one first")
        self._numbers += 1
        self._regions[self._numbers] = mapping
        return self._numbers

    def drop(self, number: int) -> None:
        """Release a region; raises WireError for one that is not attached.

        Its memory stays mapped for a while after the last session has released it (`Mappings`), and as long as there are views of it.
        """
        mapping = self._regions.pop(number, None)
        if mapping is None:
            raise WireError(f"region {number} is not attached")
        self._mappings.release(mapping, self.pid)

    def begin(self) -> None:
        """Count one more user of the regions; raises Refusal in a session that has ended.

        The end of the connection promises the client that nothing touches its memory any more.
        """
        if self.ended:
            raise Refusal(StatusCode.UNAUTHENTICATED, "the session has ended; connect to the attach socket again")
        self._under_way += 1
        self._quiet.clear()

    def finish(self) -> None:
        """Count one user of the regions less."""
        self._under_way -= 1
        if not self._under_way:
            self._quiet.set()

    async def quiet(self) -> None:
        """Wait until nothing touches the regions."""
        while self._under_way:  # another call may begin between the event and this coroutine's waking up
            await self._quiet.wait()

    def end(self) -> None:
        """Release all regions; to be called when nothing touches them."""
        for number in list(self._regions):
            self.drop(number)


class Attachments:
    """All sessions, and the attach socket through which they come.

    Thread safety: the event loop's thread.
    """

    def __init__(self, access: Access, *, most_clients: int, most_bytes: int, meters: Meters | None = None) -> None:
        self._access = access
        self._meters = meters or Meters()
        self._most_clients = most_clients
        self._most_bytes = most_bytes
        self._sessions: dict[bytes, Session] = {}
        self._mappings = Mappings()
        self._tasks: set[Task[None]] = set()
        self._listener: socket.socket | None = None

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def attached(self) -> int:
        """Bytes of all regions of all sessions. Any thread may ask: `list` copies a dict's values in one step."""
        return sum(session.attached for session in list(self._sessions.values()))

    def find(self, token: bytes) -> Session | None:
        """Return the session with this token; None if there is none or it has ended."""
        found = self._sessions.get(token)
        return None if found is None or found.ended else found

    def listen(self, path: str, mode: int) -> None:
        """Open the attach socket at `path` with this file mode; raises OSError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listener.bind(path)
            os.chmod(path, mode)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        get_running_loop().add_reader(listener, self._accept)

    async def close(self) -> None:
        """End every session, each once no call touches its memory any more."""
        if self._listener is not None:
            get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for task in list(self._tasks):
            task.cancel()
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        self._mappings.clear()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:  # the event loop would try again at once, and again, until there is a descriptor
                get_running_loop().remove_reader(self._listener)
                get_running_loop().call_later(_PAUSE_SECONDS, self._resume)
            return  # otherwise the client has gone again
        connection.setblocking(False)
        task = get_running_loop().create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _resume(self) -> None:
        if self._listener is not None:
            get_running_loop().add_reader(self._listener, self._accept)

    def _room_for(self, uid: int) -> bool:
        """Return whether this user may have one more session; if several users are allowed, none may have more than half of all."""
        most = self._most_clients // (2 if len(self._access.uids) > 1 else 1)
        return len(self._sessions) < self._most_clients and sum(s.uid == uid for s in self._sessions.values()) < max(1, most)

    async def _serve(self, connection: socket.socket) -> None:
        session: Session | None = None
        try:
            pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            grants = self._access.of_uid(uid)
            if grants is None:
                self._meters.refused("unauthenticated")
                memory.send(connection, pb.Session(refusal=f"user {uid} is no principal here; the operator can add one with uid = {uid}"))
                return
            if not self._room_for(uid):
                self._meters.refused("busy")
                memory.send(connection, pb.Session(refusal=f"there are {len(self._sessions)} clients already; raise limits.clients"))
                return
            session = Session(uid, pid, self._mappings)
            session.caller = self._access.client(grants, session)
            self._sessions[session.token] = session
            memory.send(connection, pb.Session(token=session.token))
            await self._converse(connection, session)
        except ConnectionError:
            pass  # the client has gone, perhaps after a mere probe of the socket; not worth a line in the log
        except (OSError, WireError) as error:
            _log.info("a client of the attach socket was cut off: %s", error)
        except CancelledError:
            pass  # the daemon is shutting down
        finally:
            if session is not None:
                session.ended = True
                # A store call under way cannot be cancelled; until it is done, the memory stays mapped and the connection open.
                # The end of the connection promises that nothing touches the memory, so even the daemon's shutdown must not cut this wait.
                quiet = get_running_loop().create_task(session.quiet())
                while not quiet.done():
                    with suppress(CancelledError):
                        await asyncio.shield(quiet)
                session.end()
                del self._sessions[session.token]
            connection.close()

    async def _converse(self, connection: socket.socket, session: Session) -> None:
        while True:
            request, fds = await self._next(connection)
            try:
                if request is None:
                    return
                answer = await self._answer(request, fds, session)
            except WireError as error:
                self._meters.refused_for(error)
                answer = pb.Answer(refusal=str(error))
            finally:
                for fd in fds:
                    os.close(fd)
            memory.send(connection, answer)

    async def _next(self, connection: socket.socket) -> tuple[pb.Request | None, list[int]]:
        readable = Event()
        loop = get_running_loop()
        loop.add_reader(connection, readable.set)
        try:
            while True:
                await readable.wait()
                readable.clear()
                with suppress(BlockingIOError):
                    return memory.receive(connection, pb.Request, most_fds=1)
        finally:
            loop.remove_reader(connection)

    async def _answer(self, request: pb.Request, fds: list[int], session: Session) -> pb.Answer:
        what = request.WhichOneof("what")
        if what == "attach":
            return pb.Answer(region=await self._attach(request.attach.bytes, fds, session))
        if what == "detach":
            await session.quiet()
            session.drop(request.detach.region)
            return pb.Answer(region=request.detach.region)
        raise WireError("a request says neither attach nor detach; the other end may be newer")

    async def _attach(self, declared: int, fds: list[int], session: Session) -> int:
        if len(fds) != 1:
            raise WireError("an attach carries one memfd")
        inode, room = Inode.of(session.uid, fds[0]), self._most_bytes - session.attached
        mapping = self._mappings.find(inode)
        if mapping is None:
            # In a thread, because it takes long. The thread gets its own descriptor, as it goes on when this coroutine is cancelled.
            region = await get_running_loop().run_in_executor(None, _adopt, os.dup(fds[0]), declared, room)
            mapping = self._mappings.add(inode, region)
        try:
            if mapping.region.nbytes > room or mapping.region.nbytes != declared:
                raise WireError(f"{mapping.region.nbytes} bytes are beyond the {room} that may be attached, or are not those declared")
            return session.add(mapping)
        except WireError:
            self._mappings.release(mapping, session.pid)
            raise


def _adopt(fd: int, declared: int, most: int) -> memory.Region:
    """Map a client's memfd and close `fd`; runs in a thread. Raises WireError."""
    try:
        return memory.adopt(fd, declared, most)
    finally:
        os.close(fd)
