"""Connections of the HTTP port: few at once, each for a short time, on a thread of their own.

aiohttp parses requests and writes answers. It neither limits the number of connections nor the time of a
silent one, so an `Acceptor` hands connections to it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any, Final

from aiohttp import web

from tiercache.daemon.acceptor import AcceptedConnection, Acceptor
from tiercache.daemon.admission import Admission
from tiercache.daemon.certificates import Certificates
from tiercache.daemon.sockets import listen_tcp
from tiercache.errors import StorageError

MAX_CONNECTIONS: Final = 512
"""Maximum number of connections, most of which wait. A further connection displaces one of them."""
MAX_SERVED: Final = {False: 64, True: 32}
"""Maximum number of connections that are served at once, in clear and in TLS, where each holds 300 KB."""
_SECONDS: Final = 5.0
"""Maximum duration of a connection in seconds; while others wait, `admission` ends it after one."""
_SHUTDOWN_SECONDS: Final = 1.0
"""Maximum seconds that the end of a TLS connection may take."""
_LINE_BYTES: Final = 4096
"""Maximum bytes of a request's first line, and of each header."""


class HttpPort:
    """Server of `app` on one address, on its own thread, from construction until `close`.

    Raises StorageError if the address cannot be served.

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
        admission: Admission[_Connection] = Admission(
            max_connections=MAX_CONNECTIONS, max_opening=MAX_SERVED[certificates is not None],
            settling=seconds, now=time.monotonic(),
        )  # fmt: skip
        self._acceptor = Acceptor(admission, _Connection, self._converse)
        self._protocol: Callable[[], Any]
        """Maker of aiohttp's protocol for a connection; set when the thread serves."""
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
        self._protocol = runner.server
        self._acceptor.listen(self._listener)
        await self._closing.wait()
        await self._acceptor.close()
        await runner.cleanup()

    async def _converse(self, connection: _Connection) -> None:
        """Let aiohttp serve a connection."""
        connection.begun = True
        with suppress(OSError):  # the client disconnected
            tls: dict[str, Any] = {}
            if self._certificates is not None:
                tls = {"ssl": self._certificates.now.http_context, "ssl_shutdown_timeout": _SHUTDOWN_SECONDS}
            connection.transport, tracked = await self._loop.connect_accepted_socket(
                lambda: _Tracked(self._protocol()), connection.client, **tls
            )
            await tracked.lost.wait()
        connection.known = True  # it was answered


class _Connection(AcceptedConnection):
    """A connection, which waits or is served; its caller is known with its first and last request only.

    Thread safety: the port's thread.
    """

    def __init__(self, number: int, origin: bytes, client: socket.socket) -> None:
        super().__init__(number, origin, time.monotonic(), tls=False, trusted=False)
        self.client: Final = client
        self.begun = False
        """Whether asyncio has taken the socket over."""
        self.transport: asyncio.Transport | None = None
        """None while a TLS handshake is under way."""

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()
        elif not self.begun:
            self.client.close()
        else:
            # A handshake was under way, whose transport closes the socket when it reads the end.
            with suppress(OSError):
                self.client.shutdown(socket.SHUT_RDWR)


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
