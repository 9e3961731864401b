"""Settings of the `grpc` backend, parsed from text.

Settings name the files with credentials; every new connection reads these files again.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from tiercache.config import parse_duration, parse_size
from tiercache.config.addresses import parse_address
from tiercache.config.files import read_secret, read_token
from tiercache.config.urls import storage_url, unix_target
from tiercache.core import BLOCK_ALIGN
from tiercache.errors import ConfigError
from tiercache.storage.registry import settings_of
from tiercache.wire.methods import ATTACH_SOCKET, GRPC_SOCKET
from tiercache_backends.local.settings import absolute_path, between, one_of

KIND: Final = "grpc"
_EXAMPLE: Final = (
    "grpc://cache.example:7070?token_file=/etc/tiercache/token&tls=true or grpc:///var/lib/tiercache/run"
)
_SOCKET_PATH: Final = 107
"""Maximum bytes of a unix socket's path (`sun_path` without its terminating zero)."""
_MIN_SECONDS: Final = 0.01
"""Shortest timeout or pause that a configuration may set."""
_TLS: Final = ("tls", "ca", "certificate", "key", "server_name")
_MAX_CERTIFICATE: Final = 1 << 20
"""Maximum number of bytes that are read of a file of certificates or keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcSettings:
    """Address of the daemon, credentials of the client, and timeouts.

    Exactly one of `directory` and `address` is set.
    """

    address: str = ""
    """`host:port` of the daemon."""
    directory: str = ""
    """Directory of the daemon's unix sockets."""
    timeout: float = 2.0
    """Seconds that a call without payload may take, and that opening a connection may take."""
    transfer_timeout: float = 10.0
    """Seconds that a call with payload may take; a call has at most 128 MiB of payload."""
    tls: bool = False
    """Whether the connection over TCP uses TLS."""
    ca: str = ""
    """File with the certificates of accepted authorities; if empty, the system's authorities are accepted."""
    certificate: str = ""
    """File with the client's certificate, for daemons that require one."""
    key: str = ""
    """File with the private key of `certificate`."""
    server_name: str = ""
    """Name that the daemon's certificate must have; if empty, the host in `address`."""
    token_file: str = ""
    """File with the token that identifies the client."""
    data: bool = False
    """Whether payloads travel on data connections where the daemon offers them."""
    shared: bool = False
    """Whether payloads go through shared memory."""
    staging: int = 64 << 20
    """Bytes of the client's own shared memory, for payloads whose buffers are not in attached memory."""
    breaker_failures: int = 3
    """Number of calls in a row without an answer after which the breaker opens and calls fail at once."""
    breaker_pause: float = 1.0
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
        ca = _public(self.ca, "ca") if self.ca else None
        if not self.certificate:
            return grpc.ssl_channel_credentials(ca)
        return grpc.ssl_channel_credentials(
            ca,
            read_secret(Path(self.key), 1, _MAX_CERTIFICATE, "key"),
            _public(self.certificate, "certificate"),
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
    values = settings_of(KIND, section, _PARSERS)
    address, directory = values.pop("address", ""), values.pop("path", "").rstrip("/")
    if bool(address) == bool(directory):
        raise ConfigError(
            f"storage type {KIND!r} needs an address or a directory of sockets, and not both, as in"
            f" {_EXAMPLE}"
        )
    wanted = values.pop("plane", "auto")
    if address and wanted == "shared":
        raise ConfigError(
            f"grpc://{address} cannot share memory with another host; remove plane=shared, or name a"
            " directory of sockets"
        )
    chosen = [name for name in _TLS if values.get(name)]
    # A setting that only TLS uses, such as a certificate or a CA, implies tls=true.
    values["tls"] = values.get("tls", bool(chosen))
    _check_tls(values, chosen, address)
    settings = GrpcSettings(
        address=address, directory=directory, shared=bool(directory) and wanted != "stream",
        data=bool(address) and wanted != "stream", **values,
    )  # fmt: skip
    if directory:
        _check_directory(settings)
    elif settings.token_file and not settings.tls and not parse_address(address).loopback:
        raise ConfigError(
            f"grpc://{address}: the token would travel in the clear; add tls=true (system roots) or"
            " ca=/path/to/ca.pem"
        )
    settings.metadata(), settings.credentials()  # raise ConfigError now, not at the first connection
    return settings


def _check_tls(values: Mapping[str, Any], chosen: list[str], address: str) -> None:
    if chosen and not values["tls"]:
        raise ConfigError(f"storage type {KIND!r}: tls=false contradicts {chosen[0]}; remove one of them")
    if bool(values.get("certificate")) != bool(values.get("key")):
        raise ConfigError(f"storage type {KIND!r}: certificate and key are one pair; give both or neither")
    if chosen and not address:
        raise ConfigError(
            f"storage type {KIND!r}: {chosen[0]} is for TCP; remove it, because on unix sockets the kernel"
            " identifies the client"
        )


def _check_directory(settings: GrpcSettings) -> None:
    if settings.token_file:
        raise ConfigError(
            f"{settings}: a token is for TCP; on the unix sockets the daemon knows this process's user"
        )
    unix_target(settings.directory)
    longest = f"{settings.directory}/{ATTACH_SOCKET}"
    if len(os.fsencode(longest)) > _SOCKET_PATH:
        raise ConfigError(
            f"{longest} is longer than the {_SOCKET_PATH} bytes of a socket's path; use a shorter directory"
        )


def _address(value: Any) -> str:
    found = parse_address(value)
    if not found.port:
        raise ConfigError(f"{value!r} has port 0, on which no daemon listens; give the daemon's port")
    return str(found)


def _directory(value: Any) -> str:
    path = absolute_path(value)
    if path.strip("/"):
        return path
    raise ConfigError(f"{value!r} is no directory of sockets; write it like {_EXAMPLE}")


def _seconds(value: Any) -> float:
    found = parse_duration(value)
    if not _MIN_SECONDS <= found <= 3600:
        raise ConfigError(f"{value!r} is out of range; use {_MIN_SECONDS:g} s to 1 h")
    return found


def _staging(value: Any) -> int:
    return parse_size(value) // BLOCK_ALIGN * BLOCK_ALIGN


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    return str(one_of("true", "false")(value)) == "true"


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) < 254:
        raise ConfigError(f"{value!r} is not a host's name")
    return value


def _public(path: str, what: str) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_CERTIFICATE)
    except OSError as error:
        raise ConfigError(
            f"{what}: {path} cannot be read ({error.strerror}); name a PEM file of certificates"
        ) from error
    if b"-----BEGIN CERTIFICATE-----" not in data:
        raise ConfigError(f"{what}: {path} holds no certificate; name a PEM file of certificates")
    return data


_PARSERS: Final = {
    "address": _address,
    "path": _directory,
    "timeout": _seconds,
    "transfer_timeout": _seconds,
    "tls": _flag,
    "ca": absolute_path,
    "certificate": absolute_path,
    "key": absolute_path,
    "server_name": _name,
    "token_file": absolute_path,
    "plane": one_of("auto", "stream", "shared"),
    "staging": _staging,
    "breaker_failures": between(1, 1000, "failures"),
    "breaker_pause": _seconds,
}
