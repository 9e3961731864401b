"""TCP addresses as they are configured: 127.0.0.1:7070, [::1]:7070, node-1.example:7070."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Final

from tiercache.config.quantities import shown
from tiercache.errors import ConfigError

_FORM: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([0-9A-Za-z.-]{1,253})):([0-9]{1,5})")
_LABEL: Final = re.compile(r"[0-9A-Za-z](?:[0-9A-Za-z-]{0,61}[0-9A-Za-z])?")


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port to listen on; port 0 is any free one."""

    host: str
    """Without brackets."""
    port: int
    loopback: bool
    """Whether only this machine can reach it. A name other than `localhost` counts as reachable: nobody knows what it resolves to."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: object) -> Address:
    """The address that `text` names; raises ConfigError, with the form, for anything else."""
    match = _FORM.fullmatch(text) if isinstance(text, str) else None
    if match is None or int(match[3]) > 0xFFFF or not (match[1] or _possible(match[2])):
        raise ConfigError(
            f"{shown(text)} is not an address; write host:port with a port from 0 to 65535, such as 127.0.0.1:7070 or [::1]:7070"
        )
    try:
        return Address(match[1] or match[2], int(match[3]), _loopback(match[1], match[2]))
    except AddressValueError as error:
        raise ConfigError(f"{shown(text)} is not an address: {error}; write host:port, such as 127.0.0.1:7070 or [::1]:7070") from error


def _possible(host: str) -> bool:
    return all(_LABEL.fullmatch(label) for label in host.split("."))


def _loopback(v6: str | None, host: str) -> bool:
    """Whether the host is this machine alone. Raises AddressValueError for a malformed IP address."""
    if v6:
        return IPv6Address(v6).is_loopback
    # As in RFC 1123: what ends in a number is an IPv4 address, and not "127.1", which resolvers take for one.
    if host.rpartition(".")[2].isdigit():
        return IPv4Address(host).is_loopback
    return host.lower() == "localhost"
