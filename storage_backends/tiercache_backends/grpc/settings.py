"""Settings of the `grpc` backend, as a URL gives them.

Settings name the files with credentials; every new connection reads these files again.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import grpc

from tiercache.config.files import read_certificates, read_secret, read_token
from tiercache.config.urls import SERVED, check_sockets, parse_address, storage_url, unix_target
from tiercache.errors import ConfigError
from tiercache.settings import FLAG, PATH, Kind, Named, duration, matching, read_section, whole
from tiercache.wire.methods import GRPC_SOCKET

KIND: Final = "grpc"
_EXAMPLE: Final = (
    "grpc://cache.example:7070?token_file=/etc/tiercache/token&tls=true or grpc:///var/lib/tiercache/run"
)
_SECONDS: Final = duration(0.01, 3600)
_ADDRESS: Final = Kind(lambda value: str(SERVED.parse(value)))
_HOST: Final = matching("[ -~]{1,253}", "is not a host's name; write it without a port")
_TLS: Final = ("tls", "ca", "certificate", "key", "server_name")
_MAX_CERTIFICATE: Final = 1 << 20
"""Maximum number of bytes that are read of a file of certificates or keys."""
CALL_BYTES: Final = 128 << 20
"""Maximum payload bytes of one call.

A call of this size takes about a second even over TCP, well within the deadline of a call.
"""


def _directory(value: Any) -> str:
    path = str(PATH.parse(value)).rstrip("/")
    if not path:
        raise ConfigError(f"{value!r} is no directory of sockets; write it like {_EXAMPLE}")
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcSettings:
    """Address of the daemon, credentials of the client, and timeouts.

    Exactly one of `directory` and `address` is set.
    """

    address: Annotated[str, _ADDRESS] = ""
    """`host:port` of the daemon."""
    directory: Annotated[str, Kind(_directory), Named("path")] = ""
    """Directory of the daemon's unix sockets."""
    timeout: Annotated[float, _SECONDS] = 2.0
    """Seconds that a call without payload may take, and that opening a connection may take."""
    transfer_timeout: Annotated[float, _SECONDS] = 10.0
    """Seconds that a call with payload may take; a call has at most 128 MiB of payload."""
    tls: Annotated[bool, FLAG] = False
    """Whether the connection over TCP uses TLS."""
    ca: Annotated[str, PATH] = ""
    """File with the certificates of accepted authorities; if empty, the system's authorities are accepted."""
    certificate: Annotated[str, PATH] = ""
    """File with the client's certificate, for daemons that require one."""
    key: Annotated[str, PATH] = ""
    """File with the private key of `certificate`."""
    server_name: Annotated[str, _HOST] = ""
    """Name that the daemon's certificate must have; if empty, the host in `address`."""
    token_file: Annotated[str, PATH] = ""
    """File with the token that identifies the client."""
    breaker_failures: Annotated[int, whole(1, 1000, "failures")] = 3
    """Number of calls in a row without an answer after which the breaker opens and calls fail at once."""
    breaker_pause: Annotated[float, _SECONDS] = 1.0
    """Seconds until an open breaker lets the client try again."""

    @property
    def target(self) -> str:
        """Target to which gRPC connects."""
        return unix_target(f"{self.directory}/{GRPC_SOCKET}") if self.directory else self.address

    @property
    def transport(self) -> str:
        """`unix`, `tls` or `tcp`."""
        return "unix" if self.directory else "tls" if self.tls else "tcp"

    def __str__(self) -> str:
        return storage_url(KIND, self.directory, address=self.address)

    def metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Return the metadata that identifies the client in each call over TCP.

        Raises ConfigError if the token file cannot be used.
        """
        if not self.token_file:
            return ()
        return (("authorization", f"Bearer {read_token(Path(self.token_file), 'token_file').decode()}"),)

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return the credentials for TLS, or None without TLS.

        Raises ConfigError if a file of certificates or keys cannot be used.
        """
        if not self.tls:
            return None
        ca = read_certificates(Path(self.ca), "ca") if self.ca else None
        if not self.certificate:
            return grpc.ssl_channel_credentials(ca)
        return grpc.ssl_channel_credentials(
            ca,
            read_secret(Path(self.key), 1, _MAX_CERTIFICATE, "key"),
            read_certificates(Path(self.certificate), "certificate"),
        )

    def context(self) -> ssl.SSLContext | None:
        """Return the context of data connections in TLS, or None without TLS.

        It accepts the same certificates as `credentials`; without `ca`, those that this system trusts. Raises
        ConfigError if a file of certificates or keys cannot be used.
        """
        if not self.tls:
            return None
        self.credentials()  # raises ConfigError
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            if self.certificate:
                context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"{self}: a certificate or its key cannot be used ({error})") from error
        return context


def read_settings(section: Mapping[str, Any]) -> GrpcSettings:
    """Return the settings in a section of the configuration.

    Raises ConfigError if a setting, or a file that a setting names, cannot be used.
    """
    owner = f"storage type {KIND!r}"
    chosen = [name for name in _TLS if section.get(name)]
    # A setting that only TLS uses, such as a certificate or a CA, implies tls=true.
    settings = read_section(GrpcSettings, owner, {"tls": bool(chosen), **section})
    if bool(settings.address) == bool(settings.directory):
        raise ConfigError(
            f"{owner} needs an address or a directory of sockets, and not both, as in {_EXAMPLE}"
        )
    _check_tls(settings, [name for name in chosen if name != "tls" or settings.tls])
    if settings.directory:
        _check_directory(settings)
    elif settings.token_file and not settings.tls and not parse_address(settings.address).loopback:
        raise ConfigError(
            f"{settings}: the token would travel in the clear; add tls=true (system roots) or"
            " ca=/path/to/ca.pem"
        )
    settings.metadata(), settings.credentials()  # raise ConfigError now, not at the first connection
    return settings


def _check_tls(settings: GrpcSettings, chosen: list[str]) -> None:
    if chosen and not settings.tls:
        raise ConfigError(f"storage type {KIND!r}: tls=false contradicts {chosen[0]}; remove one of them")
    if bool(settings.certificate) != bool(settings.key):
        raise ConfigError(f"storage type {KIND!r}: certificate and key are one pair; give both or neither")
    if chosen and not settings.address:
        raise ConfigError(
            f"storage type {KIND!r}: {chosen[0]} is for TCP; remove it, because on unix sockets the kernel"
            " identifies the client"
        )


def _check_directory(settings: GrpcSettings) -> None:
    if settings.token_file:
        raise ConfigError(
            f"{settings}: a token is for TCP; on the unix sockets the daemon knows this process's user"
        )
    check_sockets(settings.directory)
