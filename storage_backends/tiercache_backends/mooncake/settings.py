"""Settings of the `mooncake` backend, parsed from text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tiercache.config import parse_duration, parse_size
from tiercache.config.addresses import Address, parse_address
from tiercache.config.urls import storage_url
from tiercache.core import BLOCK_ALIGN
from tiercache.errors import ConfigError
from tiercache.storage.registry import settings_of
from tiercache.text import shown
from tiercache_backends.local.settings import between, one_of

KIND: Final = "mooncake"
_EXAMPLE: Final = "mooncake://10.0.0.1:50051?prefix=main&replicas=1&state_replicas=2"
_WORD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_METADATA: Final = re.compile(r"P2PHANDSHAKE|(?:https?|etcd|redis)://[!-~]{1,500}|[!-~]{1,253}:[0-9]{1,5}")
_MIN_STAGING: Final = 1 << 20
_MIN_SEGMENT: Final = 16 << 20
"""Smallest memory to lend; Mooncake's allocator takes some of it for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeSettings:
    """Address of the master, what this process lends and asks for, and deadlines."""

    address: Address
    """Address at which the master serves its clients."""
    prefix: str = "main"
    """Name of the store: stores of different prefixes see nothing of each other."""
    segment: int = 0
    """Bytes of this process's memory that are lent to the pool; 0 makes a pure client."""
    replicas: int = 1
    """Number of hosts that get a copy of a page; Mooncake makes fewer if it has no room."""
    state_replicas: int = 2
    """Number of hosts that get a copy of a state."""
    tenant: str = "default"
    """Tenant of the master, for masters that keep tenants apart."""
    deadline: float = 2.0
    """Seconds that a call of Mooncake may take; a call moves at most 16 MiB."""
    hostname: str = ""
    """Address of this host for the other hosts of the pool; empty: the one by which it reaches the master."""
    protocol: str = "tcp"
    devices: str = ""
    """Names of RDMA devices, separated by commas; empty: Mooncake chooses."""
    metadata: str = "P2PHANDSHAKE"
    """Metadata server, the same for all clients of a master."""
    http: Address | None = None
    """Address of the master's figures and of the list of its keys; None: the store cannot list."""
    staging: int = 64 << 20
    """Bytes of the backend's own registered memory."""
    threads: int = 4
    """Number of calls that may be under way at once."""
    breaker_failures: int = 3
    """Number of calls in a row without an answer after which calls fail at once."""
    breaker_pause: float = 1.0
    """Seconds until the store is tried again."""

    def __str__(self) -> str:
        return storage_url(KIND, address=str(self.address), prefix=self.prefix)


def read_settings(section: Mapping[str, Any]) -> MooncakeSettings:
    """Return the settings in a section of the configuration; raises ConfigError."""
    values = settings_of(KIND, section, _PARSERS)
    if "address" not in values:
        raise ConfigError(f"storage type {KIND!r} needs the master's address, as in {_EXAMPLE}")
    settings = MooncakeSettings(**values)
    if settings.devices and settings.protocol == "tcp":
        raise ConfigError(
            f"{settings}: devices={settings.devices} are for RDMA; add protocol=rdma or omit devices"
        )
    if settings.state_replicas < settings.replicas:
        raise ConfigError(
            f"{settings}: a state needs at least as many copies as its pages; set state_replicas to"
            f" {settings.replicas} or more, or lower replicas"
        )
    if settings.segment and settings.hostname in ("127.0.0.1", "localhost") and not settings.address.loopback:
        raise ConfigError(
            f"{settings}: other hosts cannot reach the memory of hostname={settings.hostname}; give the"
            " address of this host in the pool's network, or omit segment"
        )
    return settings


def _address(value: Any) -> Address:
    found = parse_address(value)
    if not found.port:
        raise ConfigError(f"{value!r} has port 0, on which no master listens; give the master's port")
    return found


def _path(value: Any) -> str:
    raise ConfigError(
        f"{shown(str(value))} follows the address; write prefix={str(value).strip('/')} instead"
    )


def _word(value: Any) -> str:
    if not isinstance(value, str) or not _WORD.fullmatch(value):
        raise ConfigError(f"{shown(str(value))} is no name; use 1 to 64 letters, digits, dots, - or _")
    return value


def _host(value: Any) -> str:
    return parse_address(f"{value}:1").host


def _metadata(value: Any) -> str:
    if not isinstance(value, str) or not _METADATA.fullmatch(value):
        raise ConfigError(
            f"{shown(str(value))} is no metadata server; use P2PHANDSHAKE, or a URL such as"
            " http://10.0.0.1:8080/metadata"
        )
    return value


def _segment(value: Any) -> int:
    nbytes = parse_size(value)
    if nbytes and nbytes < _MIN_SEGMENT:
        raise ConfigError(f"{value!r} is too little to lend; use 16MiB or more, or 0 to lend none")
    return nbytes


def _staging(value: Any) -> int:
    nbytes = parse_size(value) // BLOCK_ALIGN * BLOCK_ALIGN
    if nbytes < _MIN_STAGING:
        raise ConfigError(f"{value!r} is too little; use 1MiB or more")
    return nbytes


def _seconds(value: Any) -> float:
    found = parse_duration(value)
    if not 0.01 <= found <= 3600:
        raise ConfigError(f"{value!r} is out of range; use 10ms to 1h")
    return found


_PARSERS: Final = {
    "address": _address,
    "path": _path,
    "prefix": _word,
    "segment": _segment,
    "replicas": between(1, 16, "copies"),
    "state_replicas": between(1, 16, "copies"),
    "tenant": _word,
    "deadline": _seconds,
    "hostname": _host,
    "protocol": one_of("tcp", "rdma"),
    "devices": lambda value: ",".join(map(_word, str(value).split(","))),
    "metadata": _metadata,
    "http": _address,
    "staging": _staging,
    "threads": between(1, 64, "threads"),
    "breaker_failures": between(1, 1000, "failures"),
    "breaker_pause": _seconds,
}
