"""Places: storage URLs as sections of a configuration, and TCP addresses (127.0.0.1:7070, [::1]:7070).

    storage_url("file", Path("my store #1"), capacity="200GiB")
        file:///current/directory/my%20store%20%231?capacity=200GiB
    section_of("grpc://node7:7070?tls=true")
        {"type": "grpc", "address": "node7:7070", "tls": "true"}

Paths are kept byte for byte: characters with a meaning in URLs (# ? % &) are escaped, and so are bytes that
are not UTF-8.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Any, Final
from urllib.parse import quote, unquote_to_bytes

from tiercache.errors import ConfigError
from tiercache.settings import Kind
from tiercache.text import shown

SOCKETS: Final = ("grpc.sock", "attach.sock", "data.sock")
_SOCKET_PATH: Final = 107
"""Bytes of `sun_path` (unix(7)) without the terminating zero."""
_FORM: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)([^?#]*)(?:\?([^#]*))?(#.*)?", re.DOTALL)
_LONE_PERCENT: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")


def storage_url(
    kind: str, path: str | os.PathLike[str] = "", *, address: str = "", **settings: object
) -> str:
    """Return the URL of a store of type `kind`, in the directory `path` or at `address` (host:port).

    `path` is made absolute. `section_of` is the inverse function.
    """
    where = f"{kind}://{address}{_escaped(os.path.abspath(path)) if path else ''}"
    return (
        where
        + "?" * bool(settings)
        + "&".join(f"{name}={_escaped(str(value))}" for name, value in settings.items())
    )


def section_of(url: str) -> dict[str, Any]:
    """Return the section of a configuration that has the same meaning as a storage URL.

    The section has `type`, the settings of the query and, if the URL has them, `address` (the text that
    follows //) and `path`. Raises ConfigError for a text that is not a URL, or is ambiguous.
    """
    match = _FORM.fullmatch(url)
    if match is None:
        raise ConfigError(
            f"storage {_without_query(url)} is not a URL; write type://..., such as"
            " file:///var/lib/tiercache?capacity=200GiB"
        )
    kind, address, path, query, fragment = match.groups()
    if fragment is not None:
        raise ConfigError(
            f"storage {_without_query(url)} has a #, which ends a URL; write %23 for a # in a name"
        )
    if not all(c.isprintable() or "\udc80" <= c <= "\udcff" for c in url):
        raise ConfigError(
            f"storage {_without_query(url)} has characters that cannot be printed; write them as % and"
            " two hex digits"
        )
    section: dict[str, Any] = {"type": kind.lower()}
    if address:
        section["address"] = address
    if path:
        section["path"] = _unescaped(path, url)
    for part in query.split("&") if query else ():
        escaped_name, _, value = part.partition("=")
        name = _unescaped(escaped_name, url)
        if name in section:
            raise ConfigError(f"storage {_without_query(url)} gives {name!r} twice; keep one")
        section[name] = _unescaped(value, url)
    return section


def check_sockets(directory: str | os.PathLike[str]) -> None:
    """Raise ConfigError if a daemon's sockets in this directory would have paths that are not possible."""
    unix_target(directory)
    longest = max(len(os.fsencode(os.path.join(directory, name))) for name in SOCKETS)
    if longest > _SOCKET_PATH:
        raise ConfigError(
            f"a path in {os.fspath(directory)} would have {longest} bytes, and the path of a unix socket has"
            f" at most {_SOCKET_PATH}; use a directory with a shorter path, such as /run/tiercache"
        )


def unix_target(path: str | os.PathLike[str]) -> str:
    """Return gRPC's name for the unix socket at `path`, which gRPC parses as a URL.

    Raises ConfigError if the path has a comma, because gRPC separates addresses by commas.
    """
    if "," in os.fspath(path):
        raise ConfigError(
            f"{shown(os.fspath(path))} has a comma, which gRPC does not accept in a unix socket's path; name"
            " another directory"
        )
    return f"unix:{_escaped(os.fspath(path))}"


def _without_query(url: str) -> str:
    # Messages do not show the query, because it may contain a secret.
    return shown(url.partition("?")[0])


def _escaped(text: str) -> str:
    return quote(os.fsencode(text), safe="/:,")


def _unescaped(text: str, url: str) -> str:
    if _LONE_PERCENT.search(text):
        raise ConfigError(
            f"storage {_without_query(url)} has a % without two hex digits after it; write %25 for a %"
            " in a name"
        )
    found = os.fsdecode(unquote_to_bytes(os.fsencode(text)))
    if "\0" in found:
        raise ConfigError(f"storage {_without_query(url)} has %00, which no name can contain; remove it")
    return found


_ADDRESS: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([0-9A-Za-z.-]{1,253})):([0-9]{1,5})")
_LABEL: Final = re.compile(r"[0-9A-Za-z](?:[0-9A-Za-z-]{0,61}[0-9A-Za-z])?")


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port to listen on; port 0 stands for any free port."""

    host: str
    """Name or IP address of the host, without brackets."""
    port: int
    loopback: bool
    """Whether only this machine can reach the address.

    False for a name other than `localhost`, because names are not resolved here.
    """

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: object) -> Address:
    """Return the address that `text` describes; raises ConfigError if `text` is not an address."""
    match = _ADDRESS.fullmatch(text) if isinstance(text, str) else None
    if match is None or int(match[3]) > 0xFFFF or not (match[1] or _possible(match[2])):
        raise ConfigError(
            f"{shown(text)} is not an address; write host:port with a port from 0 to 65535, such as"
            " 127.0.0.1:7070 or [::1]:7070"
        )
    try:
        return Address(match[1] or match[2], int(match[3]), _loopback(match[1], match[2]))
    except AddressValueError as error:
        raise ConfigError(
            f"{shown(text)} is not an address: {error}; write host:port, such as 127.0.0.1:7070 or [::1]:7070"
        ) from error


def _possible(host: str) -> bool:
    return all(_LABEL.fullmatch(label) for label in host.split("."))


def _loopback(v6: str | None, host: str) -> bool:
    """Return whether only this machine can reach a host.

    The host is the IPv6 address `v6` or, without one, the name or IPv4 address `host`. Raises
    AddressValueError for a malformed IP address.
    """
    if v6:
        return IPv6Address(v6).is_loopback
    # RFC 1123: a host whose last label is a number is an IPv4 address. IPv4Address rejects short forms such
    # as "127.1", which resolvers accept.
    if host.rpartition(".")[2].isdigit():
        return IPv4Address(host).is_loopback
    return host.lower() == "localhost"


def _served(value: object) -> Address:
    found = parse_address(value)
    if not found.port:
        raise ConfigError(f"{value!r} has port 0, on which nobody listens; give the port of the other side")
    return found


SERVED: Final = Kind(_served, str)
"""Kind of the addresses at which another process serves."""
