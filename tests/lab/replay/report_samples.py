"""Results that a replay could have found, for the tests of its report."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

import numpy as np

from tiercache_lab.replay.results import Kept, Result, Sample, TierUse

GIB: Final = 1 << 30
SOURCES: Final = {  # Saved by the infinite cache, and how much a policy can get wrong.
    "shared-prefix": (0.897, 0.42), "shared-prefix-zipf": (0.789, 0.38), "multi-turn": (0.869, 0.06),
    "multi-turn-stripped": (0.838, 0.24),
    "agent": (0.951, 0.02), "agent-collapse": (0.540, 0.05), "sharegpt": (0.059, 0.02),
    "mixed": (0.927, 0.07),
    "mooncake-conversation": (0.322, 0.20), "mooncake-synthetic": (0.602, 0.40),
}  # fmt: skip
POLICIES: Final = {"lru": 1.0, "seglen": 0.72, "marconi": 0.6, "gdsf": 0.45, "hvd": 0.2}
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


def study(windows: int = 120, sources: int = len(SOURCES)) -> list[Result]:
    """Invent the results of a replay: six policies, three bounds, three capacities; the same every time."""
    chance, made = np.random.default_rng(20457), []
    for source, (best, risk) in list(SOURCES.items())[:sources]:
        requests = 12_031 if source == "mooncake-conversation" else int(chance.integers(1_500, 4_000))
        footprint = float(chance.uniform(180, 1900)) * GIB
        made.append(run(chance, source, "infinite", None, footprint, best, requests, windows))
        for capacity in (0.02, 0.05, 0.10):
            lost = risk * math.log(0.5 / capacity, 25)
            shares = {name: share * float(chance.uniform(0.85, 1.15)) for name, share in POLICIES.items()}
            for policy, share in {**shares, "clairvoyant": 0.08, "upper bound": 0.03}.items():
                made.append(
                    run(
                        chance,
                        source,
                        policy,
                        capacity,
                        footprint,
                        max(0.001, best - lost * share),
                        requests,
                        windows,
                    )
                )
    return made


def run(
    chance: np.random.Generator,
    source: str,
    policy: str,
    part: float | None,
    footprint: float,
    saved: float,
    requests: int,
    windows: int,
) -> Result:
    room, hits, ttft = int(footprint * (part or 1)), min(0.99, saved * 1.015), 1400 * (1 - saved) + 40
    tokens, kinds = (
        requests * 6_200 * hits,
        ("prompt end", "request end", "branch", "ghost branch", "interval"),
    )
    tiers: dict[str, TierUse] = {}
    for (name, size), share in zip(
        {"device": 0.05, "host": 0.15, "storage": 0.80}.items(), chance.dirichlet((5, 3, 2)), strict=True
    ):
        moved = int(tokens * share * 24_576)
        tiers[name] = TierUse(
            int(room * size), int(room * size * 0.97), moved, int(moved * 0.8), 1_200, int(tokens * share)
        )
    shares = zip(kinds, chance.dirichlet((4, 6, 3, 1, 1)), strict=True)
    kept = [
        Kept(kind, int(room * share / 2e8), int(room * share * 0.4), int(room * share * 0.6))
        for kind, share in shares
    ]
    ramps = [1 - math.exp(-9 * (index + 1) / windows) for index in range(windows)]
    waves = chance.normal(0, 0.02, windows)
    course = [
        Sample(
            requests * (index + 1) // windows,
            max(0, hits * ramp + wave),
            max(0, saved * ramp + wave),
            int(room * min(1, ramp * 1.2)),
        )
        for index, (ramp, wave) in enumerate(zip(ramps, waves.tolist(), strict=True))
    ]
    rounds = range(12 if source.startswith("multi-turn") else 0)
    limit = policy in {"infinite", "upper bound"}
    return result(
        source=source,
        policy=policy,
        capacity=part,
        capacity_bytes=room,
        token_hit_rate=hits,
        flops_saved=saved,
        ttft_ms_mean=ttft,
        ttft_ms_p95=ttft * float(chance.uniform(2.2, 3.4)),
        peak_bytes=int(room * 0.97),
        requests=requests,
        seconds=float(chance.uniform(4, 40)),
        seed=7,
        profile="qwen3-next-80b-a3b",
        write="write_through",
        write_chance=0.02,
        is_bound=limit or policy == "clairvoyant",
        tiers={} if limit else tiers,
        kept=() if limit else tuple(kept),
        over_time=tuple(course),
        by_round=tuple(hits * (1 - 0.9 * math.exp(-index / 1.5)) for index in rounds),
        published=(
            {"Infinite cache": 0.8976, "Without offload of states": 0.547} if source == "multi-turn" else {}
        ),
    )


def hostile() -> list[Result]:
    """Names that are markup wherever a name can be, and figures that are none."""
    bad = result(
        source=HOSTILE,
        policy=HOSTILE,
        profile=HOSTILE,
        capacity=0.05,
        tiers={HOSTILE: TierUse(GIB, GIB, 1, 1, 1, 1), "empty": TierUse(0, 0, 0, 0, 0, 0)},
        kept=(Kept(HOSTILE, 1, 1, 1),),
        by_round=(0.1, math.nan),
        published={HOSTILE: 0.5, "a time": 12.0},
        over_time=(Sample(1, math.nan, 0.1, 5), Sample(2, 0.2, math.inf, 6)),
    )
    missing: Any = None
    none = replace(
        bad,
        policy="none",
        token_hit_rate=missing,
        flops_saved=math.nan,
        ttft_ms_mean=math.inf,
        ttft_ms_p95=missing,
        seconds=math.nan,
    )
    return [bad, none, replace(bad, policy="other", capacity=0.1), replace(bad, source=HOSTILE + "2")]
