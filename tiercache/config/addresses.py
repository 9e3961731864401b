"""TCP addresses in the form used in settings: 127.0.0.1:7070, [::1]:7070, node-1.example:7070."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Final

from tiercache.errors import ConfigError
from tiercache.settings import Kind
from tiercache.text import shown

_FORM: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([0-9A-Za-z.-]{1,253})):([0-9]{1,5})")
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
    match = _FORM.fullmatch(text) if isinstance(text, str) else None
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
