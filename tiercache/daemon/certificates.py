"""The daemon's certificates, for gRPC, data connections and HTTP, which may change while it serves."""

from __future__ import annotations

import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from tiercache.config.models import Settings, Tls
from tiercache.errors import ConfigError


def check_certificates(settings: Settings) -> None:
    """Raise ConfigError unless the TLS files hold certificates, and that of the daemon is valid now."""
    if settings.tls is not None:
        CertificateFiles.read(settings.tls)


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
        """Read the files; raises ConfigError if they are no certificate with its key, or not valid now."""
        assert tls.certificate is not None
        assert tls.key is not None
        first = _contents(tls)
        end = _certificate_end(tls.certificate, tls.key)
        context, http_context = _context(tls, ssl.CERT_REQUIRED), _context(tls, ssl.CERT_OPTIONAL)
        # The contexts have read the files themselves, and gRPC takes these bytes: all must have one pair.
        if _contents(tls) != first:
            raise ConfigError("the files of [tls] changed while they were read; reload again")
        key, certificate, authority = first
        configuration = grpc.ssl_server_certificate_configuration([(key, certificate)], authority)
        return cls(context, http_context, configuration, tls.client_ca is not None, end)


def _contents(tls: Tls) -> tuple[bytes, bytes, bytes | None]:
    """Return the bytes of the key, of the certificate and of the authority of clients."""
    assert tls.certificate is not None
    assert tls.key is not None
    try:
        authority = None if tls.client_ca is None else tls.client_ca.read_bytes()
        return tls.key.read_bytes(), tls.certificate.read_bytes(), authority
    except OSError as error:
        raise ConfigError(f"the files of [tls] cannot be read ({error}); give one pair") from error


def _context(tls: Tls, mode: ssl.VerifyMode) -> ssl.SSLContext:
    """Return a context for connections; with `client_ca`, clients show certificates as `mode` says."""
    assert tls.certificate is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # a session is resumed by its token, and one of HTTP not at all
    context.load_cert_chain(tls.certificate, tls.key, password="")
    if tls.client_ca is not None:
        try:
            context.load_verify_locations(tls.client_ca)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"tls.client_ca: {tls.client_ca} holds no certificate in PEM ({_reason(error)}); give the"
                " CA's certificate"
            ) from error
        context.verify_mode = mode
    return context


def _certificate_end(certificate: Path, key: Path) -> float:
    """Return when a certificate ends, in seconds since 1970.

    Raises ConfigError for one that is not valid now, and for files that are no certificate with its key.
    """
    # Python's ssl shows the fields of a certificate only to the other end of a handshake. These two ends are
    # in memory, and the client trusts this one certificate.
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        # With an empty password, OpenSSL does not ask for a password at the terminal.
        server.load_cert_chain(certificate, key, password="")
        client.load_verify_locations(certificate)
        caller = client.wrap_bio(to_client, to_server)
        answerer = server.wrap_bio(to_server, to_client, server_side=True)
        for end in (caller, answerer, caller):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
        shown = caller.getpeercert()
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"tls.certificate: no client would accept {certificate} now: {error.verify_message}; give one"
            " that is valid, and look at the clock"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tls.certificate: {certificate} and {key} are not a certificate and its"
            f" unencrypted key in PEM ({_reason(error)}); give the two files of one pair"
        ) from error
    assert shown is not None
    return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or type(error).__name__


class Certificates:
    """Certificates in use; a connection keeps those with which it was made.

    Thread safety: any thread.
    """

    def __init__(self, files: CertificateFiles) -> None:
        self.now = files
        """Files of the next connection."""
        self._is_new = False  # gRPC takes the first configuration itself
        self.credentials: Final = grpc.dynamic_ssl_server_credentials(
            files.configuration, self._fetch, require_client_authentication=files.mutual
        )
        """For gRPC's server."""

    def use(self, files: CertificateFiles) -> None:
        """Use other files from the next handshake on; they must be as `mutual` as those of the start."""
        assert files.mutual == self.now.mutual
        self.now = files
        self._is_new = True

    def _fetch(self) -> Any:
        """Return the configuration for the next handshake, or None if it has not changed; gRPC's threads."""
        if not self._is_new:
            return None
        # Reset first: if the files change in between, gRPC gets the same ones twice, but never old ones.
        self._is_new = False
        return self.now.configuration
