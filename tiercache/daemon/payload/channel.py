"""The daemon's end of one data connection: whole buffers in and out, without blocking the event loop."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
import time
from asyncio import Future
from collections.abc import Callable, Iterable
from contextlib import suppress
from select import EPOLLIN, EPOLLOUT
from threading import Lock
from typing import Any, Final

from grpc import StatusCode

from tiercache.daemon.access import Refusal
from tiercache.steps import enter_loop, in_loop, park
from tiercache.wire.data import FRAME_BYTES, VECTOR, Frame, place, skip, unpack

READABLE: Final = EPOLLIN
WRITABLE: Final = EPOLLOUT
_TURN_BYTES: Final = 1 << 20
"""Bytes that one connection may move before other work of the event loop has its turn."""
_AHEAD_BYTES: Final = 2 << 10
"""Maximum bytes that are received before they are asked for: most requests, and some bytes of a payload."""


class DisconnectedError(Exception):
    """The client has closed the connection, or it broke."""


class Channel:
    """Socket, plain or TLS; every wait for the client ends after `idle` seconds.

    Thread safety: one coroutine at a time, whose steps the event loop runs, or a thread until it has to wait.
    """

    def __init__(self, sock: socket.socket, idle: float, context: ssl.SSLContext | None = None) -> None:
        """Take a connected socket; with `context`, `handshake` must follow."""
        sock.setblocking(False)
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._sock: Any = sock
        self._context = context
        self._ahead = memoryview(b"")
        """Bytes that were received ahead."""
        self.partial = False
        """Whether a frame was sent in part, so that no other frame can follow."""
        self._answering = Lock()
        """Held by the thread that sends."""
        self._late = False
        """Whether another thread has told the client that its call took too long."""

    @property
    def descriptor(self) -> int:
        """File descriptor of the socket."""
        return int(self._sock.fileno())

    @property
    def pending(self) -> bool:
        """Whether bytes were received that no wait for the socket would tell of."""
        return bool(self._ahead) or (self._context is not None and self._sock.pending() > 0)

    @property
    def names(self) -> list[bytes]:
        """Subject alternative names of the client's certificate; none without one."""
        if self._context is None:
            return []
        found = (self._sock.getpeercert() or {}).get("subjectAltName", ())
        return [str(value).encode() for _, value in found]

    async def handshake(self) -> None:
        """Make the TLS handshake, if the connection is to have one; raises DisconnectedError."""
        if self._context is None:
            return
        try:
            self._sock = self._context.wrap_socket(
                self._sock, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True
            )
        except (OSError, ValueError) as error:  # the client has gone, and the socket was closed
            raise DisconnectedError(str(error)) from error
        while awaited := self._attempt(self._sock.do_handshake)[1]:
            await self._wait(awaited)

    async def frame(self, max_header: int, max_payload: int = 0) -> Frame:
        """Receive the first bytes of a frame within `idle` seconds.

        Raises WireError for a frame beyond these limits, and what `fill` raises.
        """
        return unpack(await self.receive(FRAME_BYTES), max_header, max_payload)

    async def receive(self, nbytes: int) -> bytes:
        """Receive so many bytes, whose number was compared with a limit before, within `idle` seconds."""
        until = self._loop.time() + self._idle
        if nbytes > _AHEAD_BYTES:
            room = bytearray(nbytes)
            await self.fill([memoryview(room)], until)
            return bytes(room)
        await self._get_ahead(nbytes, until)
        data = bytes(self._ahead[:nbytes])
        self._ahead = self._ahead[nbytes:]
        return data

    async def fill(self, views: Iterable[memoryview], until: float | None = None) -> None:
        """Receive bytes until these buffers are full, all of them before `until` (clock of the event loop).

        Raises DisconnectedError, and Refusal for a client that stands still.
        """
        left = [view for view in views if view.nbytes]
        self._ahead = place(self._ahead, left)
        turn = 0
        while left:
            got, awaited = self._attempt(self._receive, left)
            if awaited:
                await self._wait(awaited, until)
                turn = 0
                continue
            if not got:
                raise DisconnectedError("the client closed the connection")
            skip(left, got)
            turn = await self._let_others(turn + got)

    async def discard(self, nbytes: int, until: float | None = None) -> None:
        """Receive so many bytes, all of them before `until`, and forget them; raises what `fill` raises."""
        scratch = memoryview(bytearray(min(nbytes, 64 << 10)))
        while nbytes:
            step = min(nbytes, scratch.nbytes)
            await self.fill([scratch[:step]], until)
            nbytes -= step

    async def send(self, views: Iterable[memoryview]) -> None:
        """Send all bytes of these buffers: one whole frame, or what cannot be followed by another.

        Raises what `fill` raises.
        """
        left = [view for view in views if view.nbytes]
        turn = 0
        self.partial = True
        while left:
            sent, awaited = self._attempt(self._send, left)
            if awaited:
                await self._wait(awaited)
                turn = 0
                continue
            skip(left, sent)
            turn = await self._let_others(turn + sent)
        self.partial = False

    def close(self) -> None:
        """Close the connection; no coroutine may use it any more. A second call does nothing."""
        self._sock.close()

    def cut(self) -> None:
        """End the connection, which a thread uses and must close."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def tell_late(self, frame: bytes) -> None:
        """Send `frame` in place of an answer for which a thread still works, and end the connection."""
        with self._answering:
            if not self.partial:
                self._late = True
                with suppress(OSError):
                    self._sock.send(frame)
                self.cut()

    async def _get_ahead(self, nbytes: int, until: float) -> None:
        """Receive until so many bytes are there ahead."""
        while (had := self._ahead.nbytes) < nbytes:
            room = bytearray(_AHEAD_BYTES)
            got, awaited = self._attempt(self._sock.recv_into, memoryview(room)[had:])
            if awaited:
                await self._wait(awaited, until)
            elif not got:
                raise DisconnectedError("the client closed the connection")
            else:
                room[:had] = self._ahead
                self._ahead = memoryview(room)[: had + got]

    async def _let_others(self, moved: int) -> int:
        if moved < _TURN_BYTES or not in_loop():
            return moved
        await asyncio.sleep(0)
        return 0

    def _receive(self, views: list[memoryview]) -> int:
        if self._context is not None:
            return int(self._sock.recv_into(views[0]))
        return int(self._sock.recvmsg_into(views[:VECTOR])[0])

    def _send(self, views: list[memoryview]) -> int:
        with self._answering:
            if self._late:
                raise ConnectionAbortedError("the call took too long")
            if self._context is not None:
                return int(self._sock.send(views[0][:_TURN_BYTES]))
            return int(self._sock.sendmsg(views[:VECTOR]))

    def _attempt(self, work: Callable[..., int | None], *arguments: Any) -> tuple[int, int]:
        """Return what `work` has moved, and for which change to wait before it can move anything, or 0."""
        try:
            return work(*arguments) or 0, 0
        except ssl.SSLWantReadError:  # TLS may have to read before it can write, and the other way round
            return 0, READABLE
        except ssl.SSLWantWriteError:
            return 0, WRITABLE
        except BlockingIOError:
            return 0, WRITABLE if work == self._send else READABLE
        except (OSError, ValueError) as error:  # SSLError is an OSError
            raise DisconnectedError(str(error)) from error

    async def _wait(self, awaited: int, until: float | None = None) -> None:
        """Wait for a change; raises Refusal after `idle` seconds, or at the time `until`.

        A thread does not wait: a change wakes the next thread that is free.
        """
        if not in_loop() and (until is None or time.monotonic() < until):
            await park(awaited)
            return
        await enter_loop()
        ready: Future[None] = self._loop.create_future()
        is_read = awaited == READABLE
        watch = self._loop.add_reader if is_read else self._loop.add_writer
        forget = self._loop.remove_reader if is_read else self._loop.remove_writer
        timer = None
        if until != math.inf:
            idle = self._loop.time() + self._idle
            timer = self._loop.call_at(idle if until is None else min(until, idle), self._expire, ready)
        watch(self.descriptor, _end_wait, ready)
        try:
            await ready
        finally:
            forget(self.descriptor)
            if timer is not None:
                timer.cancel()

    def _expire(self, ready: Future[None]) -> None:
        if not ready.done():
            ready.set_exception(
                Refusal(
                    StatusCode.DEADLINE_EXCEEDED,
                    f"the call made no progress for {self._idle:g} s (limits.idle)",
                )
            )


def _end_wait(ready: Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
