"""Requests that are replayed, and the tiers between which they are cached."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tiercache.core import Tier, TokenArray
from tiercache.errors import ConfigError
from tiercache.policy import Ending
from tiercache.text import shown


@dataclass(frozen=True, slots=True)
class Request:
    """Request that is replayed."""

    prompt: TokenArray
    """Token ids: one-dimensional, uint64, at least one."""
    output: TokenArray
    """Token ids: one-dimensional, uint64."""
    arrival: float
    """Seconds since the start. No request has an earlier arrival than the request before it."""
    session: int
    """Number of the session. A request begins only after the previous request of its session has ended."""
    round: int = 0
    """Number of the request in its session, from 0."""
    ending: Ending = Ending.UNKNOWN
    """How the request ended, where the source says it."""


@dataclass(frozen=True, slots=True)
class StorageTier:
    """Tier of the store below the host. Raises ConfigError for a size or bandwidth that is not possible."""

    name: str
    nbytes: int
    """Payload bytes."""
    bandwidth: float | None = None
    """Bytes per second of loads; None: as in `ReplayMachine.storage`."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of a chain's tier as in its URL, without the prefix `tier_`, such as `write`."""

    def __post_init__(self) -> None:
        if self.nbytes <= 0:
            raise ConfigError(f"tier {shown(self.name)} has no bytes; give it a capacity, such as 250GiB")
        if self.bandwidth is not None and not 0 < self.bandwidth < math.inf:
            raise ConfigError(
                f"tier {shown(self.name)}: a bandwidth of {self.bandwidth:g} bytes per second is not"
                " possible; use a positive one, such as 6GB"
            )


@dataclass(frozen=True, slots=True)
class Tiers:
    """Sizes of the tiers. Raises ConfigError for storage tiers of the same name."""

    host_bytes: int
    device_bytes: int | None = None
    """Bytes of the device; None if the device holds only what running requests need and caches nothing."""
    storage: tuple[StorageTier, ...] = ()
    """Tiers of the store, the fastest first; none for no store."""
    device_states: int | None = None
    """Number of state slots of the device. None: the states get a quarter of `device_bytes`. Pages get the
    rest of `device_bytes`."""

    def __post_init__(self) -> None:
        taken = [str(Tier.DEVICE), str(Tier.HOST)]
        for tier in self.storage:
            if tier.name in taken:
                raise ConfigError(f"two tiers are named {shown(tier.name)}; give each a name of its own")
            taken.append(tier.name)

    @property
    def nbytes(self) -> int:
        """Sum of the bytes of all tiers that are caches."""
        return (self.device_bytes or 0) + self.host_bytes + sum(tier.nbytes for tier in self.storage)
