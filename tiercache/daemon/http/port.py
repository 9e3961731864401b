"""Connections of the HTTP port: few at once, each for a short time, on a thread of their own.

aiohttp parses requests and writes answers. It neither limits the number of connections nor the time of a
silent one, so connections are accepted here and handed to it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from asyncio import Task
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any, Final

from aiohttp import web

from tiercache.daemon.certificates import Certificates
from tiercache.daemon.sockets import listen_tcp
from tiercache.errors import StorageError

MAX_CONNECTIONS: Final = 16
"""Maximum number of open connections. A further connection ends the oldest one."""
_SECONDS: Final = 5.0
"""Maximum duration of a connection in seconds."""
_SHUTDOWN_SECONDS: Final = 1.0
"""Maximum seconds that the end of a TLS connection may take."""
_LINE_BYTES: Final = 4096
"""Maximum bytes of a request's first line, and of each header."""
_PAUSE_SECONDS: Final = 0.25
"""Seconds to wait after descriptors ran out, before connections are accepted again."""


class HttpPort:
    """Server of `app` on one address, on its own thread, from construction until `close`.

    If there are too many connections, the oldest one is closed. A client that reads at all has long received
    its answer on that connection. Raises StorageError if the address cannot be served.

    `certificates`: make all connections TLS. `seconds`: maximum duration of a connection.

    Thread safety: any thread. The handlers of `app` run in the port's thread.
    """

    def __init__(
        self,
        host: str,
        port: int,
        app: web.Application,
        *,
        certificates: Certificates | None = None,
        seconds: float = _SECONDS,
    ) -> None:
        try:
            self._listener = listen_tcp(host, port)
        except OSError as error:
            shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            raise StorageError(
                f"http.listen: {shown} cannot be served ({error.strerror or error}); is the port in use,"
                " or the address not of this machine?"
            ) from error
        self.port: Final = int(self._listener.getsockname()[1])
        self._app: Final = app
        self._certificates: Final = certificates
        self._seconds: Final = seconds
        self._open: dict[Task[None], None] = {}
        """Tasks of the open connections, the oldest first."""
        self._loop: Final = asyncio.new_event_loop()
        self._closing: Final = asyncio.Event()
        self._thread = Thread(target=self._run, name="tiercache-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving. A second call does nothing."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(_SECONDS)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        # What aiohttp logs of malformed requests is the clients' noise; the handlers log what is ours.
        quiet = logging.getLogger(f"{__name__}.requests")
        quiet.setLevel(logging.CRITICAL)
        runner = web.AppRunner(
            self._app, access_log=None, logger=quiet, max_line_size=_LINE_BYTES,
            max_field_size=_LINE_BYTES, lingering_time=0, shutdown_timeout=0,
        )  # fmt: skip
        await runner.setup()
        assert runner.server is not None
        accepting = asyncio.create_task(self._accept(runner.server))
        await self._closing.wait()
        for task in [accepting, *self._open]:
            task.cancel()
        await asyncio.wait([accepting, *self._open])
        self._listener.close()
        await runner.cleanup()

    async def _accept(self, protocol: Callable[[], Any]) -> None:
        while True:
            try:
                client, _ = await self._loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]  # at once, because the task notices its end only later
                oldest.cancel()
            connection = _Connection(client)
            task = self._loop.create_task(self._converse(connection, protocol))
            self._open[task] = None
            task.add_done_callback(partial(self._end, connection))

    async def _converse(self, connection: _Connection, protocol: Callable[[], Any]) -> None:
        """Let aiohttp serve a connection for `seconds` at most."""
        connection.begun = True
        with suppress(OSError, TimeoutError):  # the client disconnected, or was too slow
            async with asyncio.timeout(self._seconds):
                tls: dict[str, Any] = {}
                if self._certificates is not None:
                    tls = {"ssl": self._certificates.http_context, "ssl_shutdown_timeout": _SHUTDOWN_SECONDS}
                connection.transport, tracked = await self._loop.connect_accepted_socket(
                    lambda: _Tracked(protocol()), connection.client, **tls
                )
                await tracked.lost.wait()

    def _end(self, connection: _Connection, task: Task[None]) -> None:
        """End the connection of a task that is over, also of one that was cancelled before it began."""
        self._open.pop(task, None)
        if connection.transport is not None:
            connection.transport.abort()
        elif not connection.begun:
            connection.client.close()
        else:
            # A handshake was under way, whose transport closes the socket when it reads the end.
            with suppress(OSError):
                connection.client.shutdown(socket.SHUT_RDWR)


@dataclass(slots=True)
class _Connection:
    client: socket.socket
    begun: bool = False
    """Whether asyncio has taken the socket over."""
    transport: asyncio.Transport | None = None
    """None while a TLS handshake is under way."""


class _Tracked(asyncio.Protocol):
    """A protocol that passes everything on to another one, and tells when its connection is lost."""

    def __init__(self, inner: asyncio.Protocol) -> None:
        self.lost: Final = asyncio.Event()
        self._inner: Final = inner

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._inner.connection_lost(error)
        self.lost.set()
