"""The daemon's certificates, for gRPC, data connections and HTTP, which may change while it serves."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any, Final

import grpc

from tiercache.config.files import certificate_end
from tiercache.config.models import Tls
from tiercache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Contents of the files of [tls], in the two forms in which they are used."""

    context: ssl.SSLContext
    """For data connections."""
    http_context: ssl.SSLContext
    """For the HTTP port: clients may show a certificate and need not, because a probe has none."""
    configuration: Any
    """For gRPC."""
    mutual: bool
    """Whether clients must show a certificate."""
    end: float
    """Time when the daemon's certificate ends, in seconds since 1970."""

    @classmethod
    def read(cls, tls: Tls) -> CertificateFiles:
        """Read the files; raises ConfigError if they are no certificate with its key."""
        assert tls.certificate is not None
        assert tls.key is not None
        try:
            first = _contents(tls)
            context, http_context = _context(tls, ssl.CERT_REQUIRED), _context(tls, ssl.CERT_OPTIONAL)
            end = certificate_end(tls.certificate, tls.key)
            last = _contents(tls)
        except OSError as error:
            raise ConfigError(f"the files of [tls] cannot be used ({error}); give one pair") from error
        # The contexts have read the files themselves, and gRPC takes these bytes: all must have one pair.
        if last != first:
            raise ConfigError("the files of [tls] changed while they were read; reload again")
        key, certificate, authority = first
        configuration = grpc.ssl_server_certificate_configuration([(key, certificate)], authority)
        return cls(context, http_context, configuration, tls.client_ca is not None, end)


def _contents(tls: Tls) -> tuple[bytes, bytes, bytes | None]:
    """Return the bytes of the key, of the certificate and of the authority of clients."""
    assert tls.certificate is not None
    assert tls.key is not None
    authority = None if tls.client_ca is None else tls.client_ca.read_bytes()
    return tls.key.read_bytes(), tls.certificate.read_bytes(), authority


def _context(tls: Tls, mode: ssl.VerifyMode) -> ssl.SSLContext:
    """Return a context for connections; with `client_ca`, clients show certificates as `mode` says."""
    assert tls.certificate is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # a session is resumed by its token, and one of HTTP not at all
    context.load_cert_chain(tls.certificate, tls.key, password="")
    if tls.client_ca is not None:
        context.load_verify_locations(tls.client_ca)
        context.verify_mode = mode
    return context


class Certificates:
    """Certificates in use; a connection keeps those with which it was made.

    Thread safety: any thread.
    """

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        self._is_new = False  # gRPC takes the first configuration itself
        self.credentials: Final = grpc.dynamic_ssl_server_credentials(
            files.configuration, self._fetch, require_client_authentication=files.mutual
        )
        """For gRPC's server."""

    @property
    def mutual(self) -> bool:
        """Whether clients must show a certificate."""
        return self._files.mutual

    @property
    def end(self) -> float:
        """Time when the daemon's certificate ends, in seconds since 1970."""
        return self._files.end

    @property
    def context(self) -> ssl.SSLContext:
        """Context of the next data connection."""
        return self._files.context

    @property
    def http_context(self) -> ssl.SSLContext:
        """Context of the next connection to the HTTP port."""
        return self._files.http_context

    def use(self, files: CertificateFiles) -> None:
        """Use other files from the next handshake on; they must be as `mutual` as those of the start."""
        assert files.mutual == self.mutual
        self._files = files
        self._is_new = True

    def _fetch(self) -> Any:
        """Return the configuration for the next handshake, or None if it has not changed; gRPC's threads."""
        if not self._is_new:
            return None
        # Reset first: if the files change in between, gRPC gets the same ones twice, but never old ones.
        self._is_new = False
        return self._files.configuration
