"""Settings of a publisher of KV events."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Annotated, Final

from tiercache.errors import ConfigError
from tiercache.events.log import MAX_BATCHES
from tiercache.settings import FLAG, LINE, whole

_BATCHES: Final = whole(1, 1_000_000, "batches")
_TCP: Final = re.compile(r"tcp://(?:\[([0-9A-Fa-f:.]+)\]|([0-9A-Za-z.*-]+)):([0-9]{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSettings:
    """Addresses and limits of a publisher of KV events.

    Raises ConfigError for an endpoint that is not possible, or that other machines can reach without
    `public`.
    """

    endpoint: Annotated[str, LINE]
    """Address of the events: tcp://127.0.0.1:5557, or ipc:///path; port 0 stands for any free port."""
    replay: Annotated[str, LINE] = ""
    """Address for replays and snapshots; empty: none."""
    topic: Annotated[str, LINE] = "kv-events"
    buffer: Annotated[int, _BATCHES] = MAX_BATCHES
    """Number of batches that are kept for replays."""
    token_ids: Annotated[bool, FLAG] = False
    """Tell tokens, and number pages, for routers of llm-d and Dynamo. Whoever reads that can read prompts."""
    public: Annotated[bool, FLAG] = False
    """Allow addresses that other machines can reach. There is no authentication."""

    def __post_init__(self) -> None:
        check_endpoint(self.endpoint, public=self.public)
        if self.replay:
            check_endpoint(self.replay, public=self.public)
            if self.replay == self.endpoint and not self.replay.endswith(":0"):
                raise ConfigError(f"{self.replay} cannot serve both events and replays; give each an address")
        if len(self.topic.encode()) > 255:
            raise ConfigError("the topic of the events is too long; use at most 255 bytes")
        _BATCHES.parse(self.buffer)


def check_endpoint(endpoint: str, *, public: bool = False) -> None:
    """Raise ConfigError unless `endpoint` can be listened on, by this machine only unless `public`."""
    if endpoint.startswith("ipc:///") and len(endpoint) < 108:
        return
    match = _TCP.fullmatch(endpoint)
    if match is None or int(match[3]) > 0xFFFF:
        raise ConfigError(
            f"{endpoint!r:.200} is no address for KV events; write tcp://127.0.0.1:5557 or ipc:///run/events"
        )
    if not (public or _is_loopback(match[1] or match[2])):
        raise ConfigError(
            f"{endpoint} can be reached from other machines, and events have no authentication; use"
            " 127.0.0.1, or set public = true"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
