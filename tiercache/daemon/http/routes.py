"""Answers of the HTTP port: /metrics, /healthz, /readyz, /status, /status.json, /score; / leads to /status.

The page at /status is one file with its style and its script, which shows status.json and asks again.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from ipaddress import ip_address
from typing import Any, Final

import numpy as np
from aiohttp import web
from grpc import StatusCode
from prometheus_client import CollectorRegistry, generate_latest

from tiercache.config.models import Settings
from tiercache.core import TokenArray, as_tokens
from tiercache.daemon.access import Access, Permissions, Refusal
from tiercache.daemon.call_log import CallLog
from tiercache.daemon.fleet import Fleet
from tiercache.daemon.status import StatusBoard
from tiercache.errors import InputError
from tiercache.keys import KEY_BYTES

_log = logging.getLogger(__name__)

FRESH_SECONDS: Final = 0.2
"""Age in seconds up to which an answer is sent again, so that frequent requests cost little."""
_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of metrics in Prometheus's text format."""
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
_NEITHER: Final = "give the header `authorization: Bearer TOKEN`, or in a browser the token as the password"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


PAGE: Final = files(__package__ or "").joinpath("status.html").read_bytes()
"""The page. It is the same for everyone: it has no figures of its own."""


def _hash_of(element: bytes) -> str:
    """Return the source expression that allows an inline element of the page, and nothing else."""
    [inside] = re.findall(rb"<%b>(.*?)</%b>" % (element, element), PAGE, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside).digest()).decode()}'"


POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        f"script-src {_hash_of(b'script')}",
        f"style-src {_hash_of(b'style')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Content security policy of the page."""


def make_app(
    board: StatusBoard, registry: CollectorRegistry, readers: Readers, calls: CallLog, fleet: Fleet | None
) -> web.Application:
    """Return the application that answers from `board`, `registry` and `fleet` whom `readers` knows.

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
    if fleet is not None:
        app.router.add_post("/score", partial(routes.score, fleet))
    return app


def read_prompt(namespace: str, what: str, body: bytes) -> tuple[bytes, TokenArray | list[bytes]]:
    """Return the namespace and the prompt of a request for scores; raises InputError.

    `what` the body has: `tokens`, 4 bytes each, little-endian, or `keys` of pages, 32 bytes each.
    """
    if not re.fullmatch("[0-9a-fA-F]{64}", namespace):
        raise InputError("the query names no namespace; give its 64 hex digits: /score?namespace=...")
    size = {"tokens": 4, "keys": KEY_BYTES}.get(what)
    if size is None or len(body) % size:
        raise InputError("the body is not as the query says; give tokens of 4 bytes, or of=keys of 32 bytes")
    if what == "tokens":
        return bytes.fromhex(namespace), as_tokens(np.frombuffer(body, "<u4"))
    return bytes.fromhex(namespace), [body[at : at + size] for at in range(0, len(body), size)]


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
            answer = _text(
                error.status, "there are /metrics, /healthz, /readyz and /status, for GET; /score for POST"
            )
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
        body = self._cached("metrics", None, lambda: generate_latest(self._registry))
        return web.Response(body=body, headers={"Content-Type": _CONTENT_TYPE})

    async def page(self, request: web.Request) -> web.Response:
        """Answer with the page, which shows the document."""
        self._readers.identify(request)  # so that a browser asks for the token
        return web.Response(
            body=PAGE, content_type="text/html", charset="utf-8", headers={"Content-Security-Policy": POLICY}
        )

    async def status(self, request: web.Request) -> web.Response:
        """Answer with the status document, as far as the reader may know it."""
        reader = self._readers.identify(request)
        return _json(self._cached("status", reader, lambda: self._board.encoded(reader)))

    async def score(self, fleet: Fleet, request: web.Request) -> web.Response:
        """Answer how many tokens of a prompt each worker can restore, and from where."""
        self._readers.identify_observer(request)
        query = request.query
        try:
            asked = read_prompt(query.get("namespace", ""), query.get("of", "tokens"), await request.read())
        except InputError as error:
            return _text(400, str(error))
        return _json(json.dumps({"workers": fleet.score(*asked)}).encode())

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


class Readers:
    """Recogniser of the callers of one port, by the principals of the TCP addresses.

    A browser has no bearer token, so the token is also accepted as the password of HTTP's basic
    authentication, with any user name. There are no cookies, and so nothing that another site could use.

    Thread safety: any thread.
    """

    def __init__(self, settings: Settings, access: Access) -> None:
        self._access: Final = access
        self._public: Final = settings.http.public
        self._hosts: Final = frozenset({"localhost", *settings.http.hosts})
        self._needs_certificate: Final = bool(settings.tls and settings.tls.client_ca) and not any(
            principal.token_file for principal in settings.principals
        )
        """Whether callers without a token must show a certificate, as they must over gRPC."""

    def check_host(self, request: web.Request) -> None:
        """Raise Refusal if the request is addressed to a name that is not this daemon's.

        A page in a browser can make its own name lead to this port (DNS rebinding). It cannot do so with an
        IP address.
        """
        host = _host_of(request.headers.get("Host", ""))
        if host not in self._hosts and not _is_ip(host):
            raise Refusal(
                StatusCode.INVALID_ARGUMENT,
                "the Host header names no host of this daemon; use its IP address, or add the name to"
                " http.hosts",
            )

    def identify(self, request: web.Request) -> Permissions | None:
        """Return the principal that makes a request; None for a public port, which anyone may read.

        Raises Refusal if the caller is not known.
        """
        given = request.headers.get("Authorization", "")
        if self._public and not given:
            return None
        certificate: Mapping[str, Any] = request.get_extra_info("peercert") or {}
        if self._needs_certificate and not certificate:
            raise Refusal(StatusCode.UNAUTHENTICATED, "this port wants a client certificate; show one")
        names: Sequence[tuple[str, str]] = certificate.get("subjectAltName", ())
        identity = {"x509_subject_alternative_name": [name.encode() for _, name in names]}
        try:
            return self._access.authenticate(_bearer(given), identity)
        except Refusal as refusal:
            raise Refusal(refusal.code, f"{refusal.message}; {_NEITHER}") from None

    def identify_observer(self, request: web.Request) -> Permissions | None:
        """Return what `identify` returns; raise Refusal if that principal may not know the whole daemon."""
        reader = self.identify(request)
        if reader is not None and not reader.observes:
            raise Refusal(
                StatusCode.PERMISSION_DENIED,
                f"the metrics tell of objects that {reader.name} cannot see; they need a principal of no"
                " tenant with the verb observe",
            )
        return reader


def _host_of(header: str) -> str:
    """Return the host of a Host header in lower case, without its port and without brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower().rstrip(".")


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _bearer(authorization: str) -> str:
    """Return the header with a bearer token that says the same."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() != "basic":
        return authorization
    try:
        _, _, password = base64.b64decode(value, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return ""
    return f"Bearer {password}"
