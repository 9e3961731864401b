"""HTTP endpoint for Prometheus, which answers `GET /metrics` only.

The server of prometheus_client starts a thread for every connection, without a limit, and waits for a silent
client for ever. This endpoint is one thread with an event loop. It limits the number of connections, the
duration of each connection, and the size of a request.
"""

from __future__ import annotations

import asyncio
import socket
import time
from asyncio import StreamReader, StreamWriter
from contextlib import suppress
from threading import Thread
from typing import Final

from prometheus_client import CollectorRegistry

from tiercache.errors import StorageError
from tiercache.metrics.exposition import render

PATH: Final = "/metrics"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
MAX_CONNECTIONS: Final = 16
"""Maximum number of open connections. A further connection ends the oldest one."""
_SECONDS: Final = 5.0
"""Maximum duration of a connection in seconds."""
_MAX_HEAD_BYTES: Final = 8 << 10
"""Maximum size of a request in bytes."""
FRESH_SECONDS: Final = 0.2
"""Age in seconds up to which a rendered text is sent again, so that frequent scrapes cost little."""
_BACKLOG: Final = 128
"""Maximum number of connections that wait to be accepted."""


class Endpoint:
    """HTTP server of the metrics in `registry`, on its own thread, from construction until `close`.

    If there are too many connections, the oldest one is closed. A client that reads at all has long received
    its answer on that connection. Raises StorageError if the address cannot be served.

    `seconds`: maximum duration of a connection.

    Thread safety: any thread. The registry is collected in the endpoint's thread.
    """

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, *, seconds: float = _SECONDS
    ) -> None:
        try:
            self._socket = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=_BACKLOG
            )
        except OSError as error:
            shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            raise StorageError(
                f"metrics.listen: {shown} cannot be served ({error.strerror or error}); is the port in use,"
                " or the address not of this machine?"
            ) from error
        self.port: Final = int(self._socket.getsockname()[1])
        self._registry: Final = registry
        self._seconds: Final = seconds
        self._open: dict[StreamWriter, None] = {}
        """Open connections, oldest first."""
        self._text = b""
        self._rendered = -FRESH_SECONDS
        """Time at which `_text` was rendered, by the monotonic clock."""
        self._loop: Final = asyncio.new_event_loop()
        self._closing: Final = asyncio.Event()
        self._thread = Thread(target=self._run, name="tiercache-metrics", daemon=True)
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
        server = await asyncio.start_server(
            self._handle, sock=self._socket, limit=_MAX_HEAD_BYTES, backlog=_BACKLOG
        )
        await self._closing.wait()
        server.close()
        # The handlers of connections that were just accepted begin only in the next rounds of the loop.
        for _ in range(3):
            for writer in list(self._open):
                writer.transport.abort()
            await asyncio.sleep(0)

    async def _handle(self, reader: StreamReader, writer: StreamWriter) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]  # at once, because the handler of the oldest notices the abort only later
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(self._seconds):
                writer.write(await self._answer(reader))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass  # the client disconnected, was too slow, or was displaced by another; or the endpoint closes
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    async def _answer(self, reader: StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _reply("431 Request Header Fields Too Large")
        words = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _reply("400 Bad Request")
        method, target, _ = words
        if target.partition("?")[0] != PATH:
            return _reply("404 Not Found", b"the metrics are at /metrics\n")
        if method != "GET":
            return _reply("405 Method Not Allowed", extra="Allow: GET\r\n")
        return _reply("200 OK", self._render(), kind=CONTENT_TYPE)

    def _render(self) -> bytes:
        if time.monotonic() - self._rendered >= FRESH_SECONDS:
            self._text = render(self._registry)
            self._rendered = time.monotonic()
        return self._text


def _reply(
    status: str, body: bytes = b"", *, kind: str = "text/plain; charset=utf-8", extra: str = ""
) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\n{extra}Content-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection:"
        " close\r\n\r\n"
    )
    return head.encode("ascii") + body
