"""Results of a replay: one `Result` for each source, policy and capacity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from tiercache.errors import ConfigError

NO_CACHE: Final = "no cache"
"""Name of the run in which every prompt is computed, which stands beside the policies of a queue."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Service level objective of a request. Raises ConfigError for a time that is not positive."""

    ttft: float | None = None
    """Most seconds from a request's arrival to its first token; None for any number."""
    tpot: float | None = None
    """Most seconds per token after the first; None for any number."""

    def __post_init__(self) -> None:
        for name, value in (("time to the first token", self.ttft), ("time per token", self.tpot)):
            if value is not None and not value > 0:
                raise ConfigError(f"a {name} of {value:g} s is no objective; use a positive time, such as 2s")

    @property
    def is_given(self) -> bool:
        """Whether there is an objective at all."""
        return self.ttft is not None or self.tpot is not None


@dataclass(frozen=True, slots=True)
class Serving:
    """Times of the requests of one run. Rates are per second from the first arrival to the last token."""

    objective: Objective
    wait_ms_mean: float
    """Mean time that a request waited for a place, in milliseconds."""
    load_ms_mean: float
    """Mean time of a request's loads, in milliseconds."""
    prefill_ms_mean: float
    """Mean time from the end of the loads to the first token, in milliseconds; waits for the engine count."""
    tpot_ms_mean: float
    """Mean time per token after the first, in milliseconds, over the requests with more than one token."""
    arrived_per_second: float
    """Requests that arrived per second from the first arrival to the last."""
    served_per_second: float
    within: float | None
    """Fraction of the requests that met the objective; None without an objective."""
    goodput: float | None
    """Requests per second that met the objective; None without an objective."""
    busy: Mapping[str, float] = field(default_factory=dict)
    """Fraction of the time in which the engine computed, and in which each tier was read, by name."""


@dataclass(frozen=True, slots=True)
class TierUse:
    """Usage of one tier in one run."""

    capacity: int
    peak: int
    """Highest number of bytes in use."""
    read_bytes: int
    """Bytes copied from this tier to the tier above it; 0 for the device."""
    written_bytes: int
    """Bytes written to this tier."""
    evicted: int
    tokens: int
    """Number of prompt tokens that were restored from this tier. All restored tokens of a request count for
    one tier: the slowest from which an object came."""

    @property
    def written_per_read(self) -> float | None:
        """Bytes written to this tier for each byte read; None if nothing was read."""
        return self.written_bytes / self.read_bytes if self.read_bytes else None


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one run."""

    source: str
    policy: str
    capacity: float | None
    """Size of the cache as a fraction of the infinite cache's peak; None for tiers given in bytes."""
    capacity_bytes: int
    token_hit_rate: float
    """Restored prompt tokens divided by all prompt tokens."""
    flops_saved: float
    """FLOPs of the restored prefixes divided by the FLOPs of all prompts."""
    ttft_ms_mean: float
    """Mean of the modelled time to the first token, in milliseconds."""
    ttft_ms_p95: float
    """95th percentile of the modelled time to the first token, in milliseconds."""
    peak_bytes: int
    """Highest number of bytes in use in each tier, added up over the tiers."""
    requests: int
    seconds: float
    """Time that the run took."""
    seed: int
    profile: str
    write: str
    """When the host writes to storage: `write_through` or `write_back` (see `ControllerOptions.write`)."""
    write_chance: float
    """With `write_back`, the least chance of a hit with which a unit is written."""
    is_bound: bool = False
    """Whether the run is a bound on what policies can reach, and not the run of a policy. There are four such
    runs: the infinite cache, the clairvoyant policy, one pool of the bytes of all tiers, and no cache."""
    working_bytes: int = 0
    """Highest number of bytes that running requests held on the device outside of every tier. These are one
    state for each request, which the engine advances. If the device is no tier, the pages and checkpointed
    states of the requests belong to them as well. `capacity_bytes` does not count them."""
    cuts: float = 0.0
    """Cuts of the prefill per request, at the checkpoints before the prompt's end."""
    ttft_ms_p50: float = math.nan
    """Median of the modelled time to the first token, in milliseconds."""
    serving: Serving | None = None
    """Times of the requests in the queue; None for a run without one."""
    tiers: Mapping[str, TierUse] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)
    """Figures that others published for this source, by the name of what each figure measures."""

    def served_by(self, tier: str) -> float:
        """Return the share of all prompt tokens that a tier served."""
        tokens = sum(use.tokens for use in self.tiers.values())
        return self.token_hit_rate * self.tiers[tier].tokens / tokens if tokens else 0.0

    def row(self) -> dict[str, Any]:
        """Return this result as plain JSON values."""
        row = asdict(self)
        for name, use in self.tiers.items():
            row["tiers"][name]["written_per_read"] = use.written_per_read
        return row
