"""What a replay found: one `Result` per source, policy and capacity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class TierUse:
    """One tier of one run. Bytes; `tokens`: prompt tokens whose slowest object came from here; `evicted`: objects."""

    capacity: int
    peak: int
    read_bytes: int
    written_bytes: int
    evicted: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Kept:
    """What a policy had kept at the end of a run, by kind of checkpoint: states and their pages' KV, in bytes."""

    kind: str
    states: int
    state_bytes: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One point of a run: `requests` so far, and the rates over the window that ends here."""

    requests: int
    token_hit_rate: float
    flops_saved: float
    bytes_held: int


@dataclass(frozen=True, slots=True)
class Result:
    """One run. `capacity`: fraction of the infinite cache's footprint, None where tiers were given in bytes; rates are fractions."""

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
    """Not a policy but a bound: the infinite cache, the clairvoyant, the upper bound."""
    tiers: Mapping[str, TierUse] = field(default_factory=dict)
    kept: tuple[Kept, ...] = ()
    over_time: tuple[Sample, ...] = ()
    by_round: tuple[float, ...] = ()
    """Token hit rate of the n-th requests of all sessions; empty where sessions have one request."""
    published: Mapping[str, float] = field(default_factory=dict)
    """Figures published for this source, by what they are of."""

    def row(self) -> dict[str, Any]:
        """This result as plain JSON values."""
        published = dict(self.published)  # which may be a view that `asdict` cannot copy
        return asdict(replace(self, published=published))
