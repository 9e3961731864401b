"""Readers of the HTTP port: whether a request is addressed to this daemon, and who makes it."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any, Final

from aiohttp import web
from grpc import StatusCode

from tiercache.config.models import Settings
from tiercache.daemon.access import Access, Permissions, Refusal

_NEITHER: Final = "give the header `authorization: Bearer TOKEN`, or in a browser the token as the password"


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
