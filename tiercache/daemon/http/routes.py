"""Answers of the HTTP port: /metrics, /healthz, /readyz, /status and /status.json; / leads to /status."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web
from grpc import StatusCode
from prometheus_client import CollectorRegistry

from tiercache.daemon.access import Permissions, Refusal
from tiercache.daemon.call_log import CallLog
from tiercache.daemon.http.page import PAGE, POLICY
from tiercache.daemon.http.readers import Readers
from tiercache.daemon.status.board import StatusBoard
from tiercache.metrics.exposition import CONTENT_TYPE, render

_log = logging.getLogger(__name__)

FRESH_SECONDS: Final = 0.2
"""Age in seconds up to which an answer is sent again, so that frequent requests cost little."""
_STATUS: Final = {
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.INVALID_ARGUMENT: 421,
}
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": "tiercache",
}
"""Headers of every answer, unless the answer has its own."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    board: StatusBoard, registry: CollectorRegistry, readers: Readers, calls: CallLog
) -> web.Application:
    """Return the application that answers from `board` and `registry` whom `readers` knows.

    Refusals are told to `calls`.
    """
    routes = _Routes(board, registry, readers, calls)
    app = web.Application(middlewares=[routes.guard])
    for path, handler in (
        ("/", routes.start),
        ("/healthz", routes.health),
        ("/readyz", routes.ready),
        ("/metrics", routes.metrics),
        ("/status", routes.page),
        ("/status.json", routes.status),
    ):
        app.router.add_get(path, handler)
    return app


class _Routes:
    """Handlers of all paths.

    Thread safety: the port's thread.
    """

    def __init__(
        self, board: StatusBoard, registry: CollectorRegistry, readers: Readers, calls: CallLog
    ) -> None:
        self._board: Final = board
        self._registry: Final = registry
        self._readers: Final = readers
        self._calls: Final = calls
        self._fresh: dict[tuple[str, str | None], tuple[float, bytes]] = {}
        """Answers by path and principal, each with the time when it was made."""

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the host, turn refusals into answers, and give every answer its headers."""
        try:
            self._readers.check_host(request)
            answer = await handler(request)
        except Refusal as refusal:
            with self._calls.follow("HTTP", request.remote or ""):
                self._calls.refused(refusal)
            answer = _text(_STATUS[refusal.code], refusal.message)
            if refusal.code is StatusCode.UNAUTHENTICATED:
                answer.headers["WWW-Authenticate"] = 'Basic realm="tiercache", charset="UTF-8"'
        except web.HTTPException as error:
            answer = _text(error.status, "there are /metrics, /healthz, /readyz and /status, for GET")
            if "Allow" in error.headers:
                answer.headers["Allow"] = error.headers["Allow"]
        except Exception:  # noqa: BLE001
            # A bug in the daemon fails this request and is logged. It never ends the port.
            _log.exception("%s failed", request.path)
            answer = _text(500, "the answer could not be made; the daemon's log has the details")
        for name, value in _HEADERS.items():
            answer.headers.setdefault(name, value)
        answer.force_close()
        return answer

    async def start(self, _: web.Request) -> web.Response:
        """Lead to the page, which asks who it is for."""
        return web.Response(status=302, headers={"Location": "status"})

    async def health(self, _: web.Request) -> web.Response:
        """Answer that the process is alive, to everyone."""
        return _text(200, "alive")

    async def ready(self, request: web.Request) -> web.Response:
        """Answer everyone whether the daemon can serve, and those who may know it why not."""
        found = self._board.readiness()
        told: dict[str, object] = {"ready": found.ready}
        try:
            self._readers.identify_observer(request)
            told |= {"state": found.state, "reasons": found.reasons}
        except Refusal:
            pass  # a stranger learns one word, as from gRPC's health check
        return _json(json.dumps(told).encode(), 200 if found.ready else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """Answer with all metrics, in Prometheus's text format."""
        self._readers.identify_observer(request)
        body = self._cached("metrics", None, lambda: render(self._registry))
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def page(self, request: web.Request) -> web.Response:
        """Answer with the page, or with the document if the reader asks for JSON."""
        if "application/json" in request.headers.get("Accept", ""):
            return await self.status(request)
        self._readers.identify(request)  # so that a browser asks for the token
        return web.Response(
            body=PAGE, content_type="text/html", charset="utf-8", headers={"Content-Security-Policy": POLICY}
        )

    async def status(self, request: web.Request) -> web.Response:
        """Answer with the status document, as far as the reader may know it."""
        reader = self._readers.identify(request)
        return _json(self._cached("status", reader, lambda: self._board.encoded(reader)))

    def _cached(self, what: str, reader: Permissions | None, make: Callable[[], bytes]) -> bytes:
        key = what, None if reader is None else reader.name
        made, body = self._fresh.get(key, (-FRESH_SECONDS, b""))
        if time.monotonic() - made >= FRESH_SECONDS:
            body = make()
            self._fresh[key] = time.monotonic(), body
        return body


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def _text(status: int, sentence: str) -> web.Response:
    return web.Response(text=sentence + "\n", status=status)
