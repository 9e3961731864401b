"""Results that a replay could have found, for the tests of its report."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from tiercache_lab.replay.results import Result, TierUse

GIB: Final = 1 << 30
POLICIES: Final = {"lru": 1.0, "seglen": 0.72, "marconi": 0.6, "lpc": 0.45, "hvd": 0.2}
HOSTILE: Final = (
    "<script>window.bad=1</script><img src=x onerror='window.bad=1'>\""
    ' onfocus="window.bad=1"&amp;\x00\u202e\udc80]]>'
)


def result(**changes: object) -> Result:
    """One run whose tiers were given in bytes, without anything that may be left out."""
    fields: dict[str, object] = {
        "source": "seed-20457", "policy": "lru", "capacity": None, "capacity_bytes": 12 * GIB,
        "token_hit_rate": 0.547,
        "flops_saved": 0.531, "ttft_ms_mean": 212.0, "ttft_ms_p95": 611.0, "peak_bytes": 11 * GIB,
        "requests": 120, "seconds": 0.4,
        "seed": 20457, "profile": "9b", "write": "write_through", "write_chance": 0.02,
    }  # fmt: skip
    return Result(**{**fields, **changes})  # type: ignore[arg-type]


def study(policies: int = len(POLICIES), capacities: tuple[float, ...] = (0.02, 0.05, 0.10)) -> list[Result]:
    """Invent the results of a replay: policies, a bound at each capacity and the infinite cache."""
    footprint = 400 * GIB
    names = [*list(POLICIES.items())[:policies], ("clairvoyant", 0.08)]
    made = [run("infinite", 1.0, footprint, 0.869)]
    for capacity in capacities:
        lost = 0.2 * math.log(0.5 / capacity, 25)
        made += [run(name, capacity, footprint, 0.869 - lost * share) for name, share in names]
    return made


def run(policy: str, part: float, footprint: int, saved: float) -> Result:
    room, hits = int(footprint * part), saved * 1.015
    tiers = {
        name: TierUse(int(room * share), int(room * share * 0.97), 1 << 40, 1 << 39, 1_200, int(1e6 * share))
        for name, share in {"device": 0.05, "host": 0.15, "storage": 0.80}.items()
    }
    return result(
        source="multi-turn", policy=policy, capacity=part, capacity_bytes=room, token_hit_rate=hits,
        flops_saved=saved, ttft_ms_mean=1400 * (1 - saved) + 40, ttft_ms_p95=2800 * (1 - saved),
        peak_bytes=int(room * 0.97), requests=2_400, is_bound=policy not in POLICIES, tiers=tiers,
        published={"token_hit_rate": 0.8976},
    )  # fmt: skip


def hostile() -> list[Result]:
    """Names that are markup wherever a name can be, and figures that are none."""
    bad = result(
        source=HOSTILE, policy=HOSTILE, profile=HOSTILE, capacity=0.05,
        tiers={HOSTILE: TierUse(GIB, GIB, 1, 1, 1, 1), "empty": TierUse(0, 0, 0, 0, 0, 0)},
        published={HOSTILE: 0.5, "a time": 12.0},
    )  # fmt: skip
    none = replace(bad, policy="none", flops_saved=math.nan, ttft_ms_mean=math.inf, seconds=math.nan)
    return [bad, none, replace(bad, policy="other", capacity=0.1)]
