"""HTTP endpoint for Prometheus: `GET /metrics`, and nothing else.

prometheus_client's own server starts a thread for every connection, without a bound, and waits for a silent client for ever. This one is a
single thread with an event loop, which bounds how many connections there are, how long one lives and how much it may say.
"""

from __future__ import annotations

import asyncio
import socket
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Iterator
from contextlib import suppress
from threading import Thread
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Exposed

from tiercache.errors import StorageError

PATH: Final = "/metrics"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_CONNECTIONS: Final = 16
_SECONDS: Final = 5.0
"""From a connection's first byte to its last."""
_HEAD_BYTES: Final = 8 << 10
_FRESH_SECONDS: Final = 0.2
"""Seconds for which the same text is given out again, so that frequent scrapes cost next to nothing."""
_BACKLOG: Final = 128


class Endpoint:
    """Serves the metrics of `registry` over HTTP on a thread of its own, from now until `close`.

    Where there are too many connections the oldest goes, since whoever means it has had its answer by then. Raises StorageError where the
    address cannot be served.

    Thread safety: any thread. The registry is collected in the endpoint's.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        try:
            self._socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=_BACKLOG)
        except OSError as error:
            shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            raise StorageError(
                f"metrics.listen: {shown} cannot be served ({error.strerror or error}); is the port in use, or not of this machine?"
            ) from error
        self.port: Final = int(self._socket.getsockname()[1])
        self._registry: Final = registry
        self._open: dict[StreamWriter, None] = {}
        self._text = b""
        self._rendered = -_FRESH_SECONDS
        self._loop: Final = asyncio.new_event_loop()
        self._closing: Final = asyncio.Event()
        self._thread = Thread(target=self._run, name="tiercache-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; twice is harmless."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(_SECONDS)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._converse, sock=self._socket, limit=_HEAD_BYTES, backlog=_BACKLOG)
        await self._closing.wait()
        server.close()
        for _ in range(3):  # those that were accepted just now begin in the next rounds of the loop
            for writer in list(self._open):
                writer.transport.abort()
            await asyncio.sleep(0)

    async def _converse(self, reader: StreamReader, writer: StreamWriter) -> None:
        if len(self._open) >= _CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]  # here, for it takes a moment until it has noticed
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(_SECONDS):
                writer.write(await self._answer(reader))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass  # the client went away, was too slow, or had to make room; or this ends
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
        if time.monotonic() - self._rendered >= _FRESH_SECONDS:
            self._text = render(self._registry)
            self._rendered = time.monotonic()
        return self._text


def render(registry: CollectorRegistry) -> bytes:
    """All metrics as Prometheus reads them."""
    return generate_latest(_Plain(registry))


class _Plain:
    """A registry without the time stamps that prometheus_client adds to every label set: they would double the text, and nobody asks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Exposed]:
        for family in self._registry.collect():
            plain = Exposed(family.name, family.documentation, family.type)
            plain.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield plain


def _reply(status: str, body: bytes = b"", *, kind: str = "text/plain; charset=utf-8", extra: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\n{extra}Content-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode("ascii") + body
