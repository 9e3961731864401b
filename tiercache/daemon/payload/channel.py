"""The daemon's end of one data connection: whole buffers in and out, without blocking the event loop."""

from __future__ import annotations

import asyncio
import socket
import ssl
from asyncio import Future
from collections.abc import Callable, Iterable
from typing import Any, Final

from grpc import StatusCode

from tiercache.daemon.access import Refusal
from tiercache.wire.data import FRAME_BYTES, VECTOR, Frame, skip, unpack

_TURN_BYTES: Final = 1 << 20
"""Bytes that one connection may move before other work of the event loop has its turn."""


class DisconnectedError(Exception):
    """The client has closed the connection, or it broke."""


class Channel:
    """Non-blocking socket, plain or TLS; every wait for the client ends after `idle` seconds.

    Thread safety: the event loop's thread; one coroutine at a time.
    """

    def __init__(self, sock: socket.socket, idle: float, context: ssl.SSLContext | None = None) -> None:
        """Take a connected socket; with `context`, `handshake` must follow."""
        sock.setblocking(False)
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._sock: Any = sock
        self._context = context
        self.partial = False
        """Whether a frame was sent in part, so that no other frame can follow."""

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
        except (OSError, ValueError) as error:  # the client has gone
            raise DisconnectedError(str(error)) from error
        while await self._step(self._sock.do_handshake) is None:
            pass

    async def arrival(self) -> None:
        """Wait, without limit, until the client has sent something or has gone."""
        if not (self._context and self._sock.pending()):
            await self._until_ready(self._loop.add_reader, self._loop.remove_reader, None)

    async def frame(self, max_header: int, max_payload: int = 0) -> Frame:
        """Receive the first bytes of a frame; raises WireError for one beyond these limits."""
        data = bytearray(FRAME_BYTES)
        await self.fill([memoryview(data)])
        return unpack(data, max_header, max_payload)

    async def receive(self, nbytes: int) -> bytes:
        """Receive so many bytes, whose number was compared with a limit before."""
        data = bytearray(nbytes)
        await self.fill([memoryview(data)])
        return bytes(data)

    async def fill(self, views: Iterable[memoryview]) -> None:
        """Receive bytes until these buffers are full.

        Raises DisconnectedError, and Refusal for a client that stands still.
        """
        left = [view for view in views if view.nbytes]
        turn = 0
        while left:
            got = await self._step(self._receive, left)
            if got is None:
                turn = 0
                continue
            if not got:
                raise DisconnectedError("the client closed the connection")
            skip(left, got)
            turn = await self._let_others(turn + got)

    async def discard(self, nbytes: int) -> None:
        """Receive so many bytes and forget them; raises what `fill` raises."""
        scratch = memoryview(bytearray(min(nbytes, 64 << 10)))
        while nbytes:
            step = min(nbytes, scratch.nbytes)
            await self.fill([scratch[:step]])
            nbytes -= step

    async def send(self, views: Iterable[memoryview]) -> None:
        """Send all bytes of these buffers: one whole frame, or what cannot be followed by another.

        Raises what `fill` raises.
        """
        left = [view for view in views if view.nbytes]
        turn = 0
        self.partial = True
        while left:
            sent = await self._step(self._send, left)
            if sent is None:
                turn = 0
                continue
            skip(left, sent)
            turn = await self._let_others(turn + sent)
        self.partial = False

    def close(self) -> None:
        """Close the connection; no coroutine may use it any more."""
        self._sock.close()

    async def _let_others(self, moved: int) -> int:
        if moved < _TURN_BYTES:
            return moved
        await asyncio.sleep(0)
        return 0

    def _receive(self, views: list[memoryview]) -> int:
        if self._context is not None:
            return int(self._sock.recv_into(views[0]))
        return int(self._sock.recvmsg_into(views[:VECTOR])[0])

    def _send(self, views: list[memoryview]) -> int:
        if self._context is not None:
            return int(self._sock.send(views[0][:_TURN_BYTES]))
        return int(self._sock.sendmsg(views[:VECTOR]))

    async def _step(self, work: Callable[..., int | None], *arguments: Any) -> int | None:
        """Return the result of `work`; return None after a wait for the client, to repeat `work`."""
        try:
            found = work(*arguments)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as wait:
            # TLS may have to write before it can read, and the other way round.
            plain = isinstance(wait, BlockingIOError)
            if isinstance(wait, ssl.SSLWantWriteError) or (plain and work == self._send):
                await self._until_ready(self._loop.add_writer, self._loop.remove_writer, self._idle)
            else:
                await self._until_ready(self._loop.add_reader, self._loop.remove_reader, self._idle)
            return None
        except (OSError, ValueError) as error:  # SSLError is an OSError
            raise DisconnectedError(str(error)) from error
        return 0 if found is None else found

    async def _until_ready(
        self, watch: Callable[..., None], forget: Callable[[int], bool], seconds: float | None
    ) -> None:
        ready: Future[None] = self._loop.create_future()
        descriptor = self._sock.fileno()
        watch(descriptor, _wake, ready)
        timer = None if seconds is None else self._loop.call_later(seconds, self._expire, ready)
        try:
            await ready
        finally:
            forget(descriptor)
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


def _wake(ready: Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
