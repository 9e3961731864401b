"""Results of a replay: one `Result` per source, policy and capacity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class TierUse:
    """Usage of one tier in one run.

    `capacity`, `peak`, `read_bytes` and `written_bytes` are in bytes. `evicted`: objects. `tokens`: prompt tokens whose slowest object came
    from this tier.
    """

    capacity: int
    peak: int
    read_bytes: int
    written_bytes: int
    evicted: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Kept:
    """States and pages that a policy had kept at the end of a run, for one kind of checkpoint.

    `states`: number of states. `state_bytes` and `page_bytes`: bytes of those states and of the KV of their pages.
    """

    kind: str
    states: int
    state_bytes: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One point of a run: `requests` so far, and the rates over the window that ends here. `bytes_held`: bytes in use on the host."""

    requests: int
    token_hit_rate: float
    flops_saved: float
    bytes_held: int


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one run.

    `capacity`: fraction of the infinite cache's footprint, None where tiers were given in bytes. Rates are fractions.
    """

    source: str
    policy: str
    capacity: float | None
    capacity_bytes: int
    token_hit_rate: float
    flops_saved: float
    ttft_ms_mean: float
    ttft_ms_p95: float
    peak_bytes: int
    requests: int
    seconds: float
    seed: int
    profile: str
    is_bound: bool = False
    """Whether the run is a bound (the infinite cache, the clairvoyant, the upper bound) and not a policy."""
    tiers: Mapping[str, TierUse] = field(default_factory=dict)
    kept: tuple[Kept, ...] = ()
    over_time: tuple[Sample, ...] = ()
    by_round: tuple[float, ...] = ()
    """Token hit rate of the n-th requests of all sessions; empty where every session has only one request."""
    published: Mapping[str, float] = field(default_factory=dict)
    """Figures published for this source, by the name of what they measure."""

    def row(self) -> dict[str, Any]:
        """Return this result as plain JSON values."""
        published = dict(self.published)  # it may be a mapping proxy, which `asdict` cannot copy
        return asdict(replace(self, published=published))
