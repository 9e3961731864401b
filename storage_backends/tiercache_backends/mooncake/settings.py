"""Settings of the `mooncake` backend, as a URL gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from tiercache.config.urls import SERVED, Address, parse_address, storage_url
from tiercache.core import BLOCK_ALIGN
from tiercache.errors import ConfigError
from tiercache.settings import Kind, duration, matching, one_of, read_section, size, whole
from tiercache.text import shown

KIND: Final = "mooncake"
_EXAMPLE: Final = "mooncake://10.0.0.1:50051?prefix=main&replicas=1&state_replicas=2"
_WORD: Final = matching(
    "[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "is no name; use 1 to 64 letters, digits, dots, - or _"
)
_HOST: Final = Kind(lambda value: parse_address(f"{value}:1").host)
_WORDS: Final = Kind(lambda value: ",".join(map(_WORD.parse, str(value).split(","))))
_METADATA: Final = matching(
    r"P2PHANDSHAKE|(?:https?|etcd|redis)://[!-~]{1,500}|[!-~]{1,253}:[0-9]{1,5}",
    "is no metadata server; use P2PHANDSHAKE, or a URL such as http://10.0.0.1:8080/metadata",
)
_SECONDS: Final = duration(0.01, 3600)
_MIN_SEGMENT: Final = 16 << 20
"""Smallest memory to lend; Mooncake's allocator takes some of it for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeSettings:
    """Address of the master, what this process lends and asks for, and deadlines."""

    address: Annotated[Address, SERVED]
    """Address at which the master serves its clients."""
    prefix: Annotated[str, _WORD] = "main"
    """Name of the store: stores of different prefixes see nothing of each other."""
    segment: Annotated[int, size(_MIN_SEGMENT, or_zero=True)] = 0
    """Bytes of this process's memory that are lent to the pool; 0 makes a pure client."""
    replicas: Annotated[int, whole(1, 16, "copies")] = 1
    """Number of hosts that get a copy of a page; Mooncake makes fewer if it has no room."""
    state_replicas: Annotated[int, whole(1, 16, "copies")] = 2
    """Number of hosts that get a copy of a state."""
    tenant: Annotated[str, _WORD] = "default"
    """Tenant of the master, for masters that keep tenants apart."""
    deadline: Annotated[float, _SECONDS] = 2.0
    """Seconds that a call of Mooncake may take; a call moves at most 16 MiB."""
    hostname: Annotated[str, _HOST] = ""
    """Address of this host for the other hosts of the pool; empty: the one by which it reaches the master."""
    protocol: Annotated[str, one_of("tcp", "rdma")] = "tcp"
    devices: Annotated[str, _WORDS] = ""
    """Names of RDMA devices, separated by commas; empty: Mooncake chooses."""
    metadata: Annotated[str, _METADATA] = "P2PHANDSHAKE"
    """Metadata server, the same for all clients of a master."""
    http: Annotated[Address | None, SERVED] = None
    """Address of the master's figures and of the list of its keys; None: the store cannot list."""
    staging: Annotated[int, size(1 << 20, multiple=BLOCK_ALIGN)] = 64 << 20
    """Bytes of the backend's own registered memory."""
    threads: Annotated[int, whole(1, 64, "threads")] = 4
    """Number of calls that may be under way at once."""
    breaker_failures: Annotated[int, whole(1, 1000, "failures")] = 3
    """Number of calls in a row without an answer after which calls fail at once."""
    breaker_pause: Annotated[float, _SECONDS] = 1.0
    """Seconds until the store is tried again."""

    def __post_init__(self) -> None:
        if self.devices and self.protocol == "tcp":
            raise ConfigError(
                f"{self}: devices={self.devices} are for RDMA; add protocol=rdma or omit devices"
            )
        if self.state_replicas < self.replicas:
            raise ConfigError(
                f"{self}: a state needs at least as many copies as its pages; set state_replicas to"
                f" {self.replicas} or more, or lower replicas"
            )
        if self.segment and self.hostname in ("127.0.0.1", "localhost") and not self.address.loopback:
            raise ConfigError(
                f"{self}: other hosts cannot reach the memory of hostname={self.hostname}; give the"
                " address of this host in the pool's network, or omit segment"
            )

    def __str__(self) -> str:
        return storage_url(KIND, address=str(self.address), prefix=self.prefix)


def read_settings(section: Mapping[str, Any]) -> MooncakeSettings:
    """Return the settings in a section of the configuration; raises ConfigError."""
    if path := section.get("path"):
        raise ConfigError(
            f"storage type {KIND!r}: {shown(path)} follows the address; write prefix={str(path).strip('/')}"
            " instead"
        )
    return read_section(MooncakeSettings, f"storage type {KIND!r}", section, _EXAMPLE)
