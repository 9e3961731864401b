"""Results such as a replay could have found: ten sources, six policies, three bounds, three capacities; the same every time."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from tiercache.replay.results import Kept, Result, Sample, TierUse

GIB: Final = 1 << 30
CAPACITIES: Final = (0.02, 0.05, 0.10)
SOURCES: Final = {
    # Saved by the infinite cache, and how much a policy can get wrong.
    "shared-prefix": (0.897, 0.42),
    "shared-prefix-zipf": (0.789, 0.38),
    "multi-turn": (0.869, 0.06),
    "multi-turn-stripped": (0.838, 0.24),
    "agent": (0.951, 0.02),
    "agent-collapse": (0.540, 0.05),
    "sharegpt": (0.059, 0.02),
    "mixed": (0.927, 0.07),
    "mooncake-conversation": (0.322, 0.20),
    "mooncake-synthetic": (0.602, 0.40),
}
POLICIES: Final = {"lru": 1.0, "seglen": 0.72, "marconi": 0.6, "gdsf": 0.45, "hvd": 0.2, "portfolio": 0.17}
BOUNDS: Final = ("infinite", "clairvoyant", "upper bound")
KINDS: Final = ("prompt end", "request end", "branch", "ghost branch", "interval")


def study(sources: int = 10, windows: int = 200) -> list[Result]:
    """Everything, for the first so many sources."""
    chance = np.random.default_rng(20457)
    made: list[Result] = []
    for name, (best, risk) in list(SOURCES.items())[:sources]:
        requests = 12_031 if name.startswith("mooncake-c") else int(chance.integers(1_500, 4_000))
        footprint = float(chance.uniform(180, 1900)) * GIB
        made.append(_run(chance, name, "infinite", None, footprint, best, requests, windows, is_bound=True))
        for capacity in CAPACITIES:
            tight = risk * math.log(0.5 / capacity) / math.log(0.5 / 0.02)
            for policy, share in POLICIES.items():
                saved = max(0.001, best - tight * share * float(chance.uniform(0.85, 1.15)))
                made.append(_run(chance, name, policy, capacity, footprint, saved, requests, windows))
            for bound, share in (("clairvoyant", 0.08), ("upper bound", 0.03)):
                made.append(_run(chance, name, bound, capacity, footprint, best - tight * share, requests, windows, is_bound=True))
    return made


def alone(**changes: object) -> Result:
    """One run whose tiers were given in bytes, without anything that may be left out."""
    fields: dict[str, object] = {
        "source": "seed-20457", "policy": "lru", "capacity": None, "capacity_bytes": 12 * GIB, "token_hit_rate": 0.547, "flops_saved": 0.531,
        "ttft_ms_mean": 212.0, "ttft_ms_p95": 611.0, "peak_bytes": 11 * GIB, "requests": 120, "seconds": 0.4, "seed": 20457, "profile": "qwen3.5-9b",
    }  # fmt: skip
    return Result(**{**fields, **changes})  # type: ignore[arg-type]


def _run(
    chance: np.random.Generator, source: str, policy: str, capacity: float | None, footprint: float, saved: float, requests: int, windows: int, *, is_bound: bool = False,
) -> Result:  # fmt: skip
    room = int(footprint * (capacity or 1.0))
    hits = min(0.99, saved * float(chance.uniform(1.0, 1.04)))
    profile = "qwen3-next-80b-a3b"
    limits = policy in {"infinite", "upper bound"}
    rounds = 12 if source.startswith("multi-turn") else 0
    return Result(
        source=source, policy=policy, capacity=capacity, capacity_bytes=room, token_hit_rate=hits, flops_saved=saved,
        ttft_ms_mean=1400 * (1 - saved) + 40, ttft_ms_p95=(1400 * (1 - saved) + 40) * float(chance.uniform(2.2, 3.4)), peak_bytes=int(room * 0.999),
        requests=requests, seconds=float(chance.uniform(4, 40)), seed=7, profile=profile, is_bound=is_bound,
        tiers={} if limits else _tiers(chance, room, requests, hits),
        kept=() if limits else _kept(chance, room),
        over_time=_course(chance, requests, windows, hits, saved, room),
        by_round=tuple(min(0.99, hits * (1 - 0.9 * math.exp(-index / 1.5)) * float(chance.uniform(0.98, 1.02))) for index in range(rounds)),
        published={"Infinite cache": 0.8976, "Without offload of states": 0.547} if source == "multi-turn" else {},
    )  # fmt: skip


def _tiers(chance: np.random.Generator, room: int, requests: int, hits: float) -> dict[str, TierUse]:
    tokens = requests * 6_200 * hits
    shares, rooms = chance.dirichlet((5, 3, 2)), (0.05, 0.15, 0.80)
    return {
        name: TierUse(
            int(room * part), int(room * part * chance.uniform(0.86, 1.0)), int(tokens * share * 24_576), int(tokens * share * 24_576 * chance.uniform(0.4, 1.3)),
            int(chance.integers(200, 90_000)), int(tokens * share),
        )
        for name, share, part in zip(("device", "host", "storage"), shares, rooms, strict=True)
    }  # fmt: skip


def _kept(chance: np.random.Generator, room: int) -> tuple[Kept, ...]:
    shares = chance.dirichlet((4, 6, 3, 1, 1))
    return tuple(
        Kept(kind, int(room * 0.4 * share / 77e6), int(room * 0.4 * share), int(room * 0.58 * share))
        for kind, share in zip(KINDS, shares, strict=True)
    )


def _course(chance: np.random.Generator, requests: int, windows: int, hits: float, saved: float, room: int) -> tuple[Sample, ...]:
    made: list[Sample] = []
    for index in range(windows):
        ramp = 1 - math.exp(-(index + 1) / windows * 9)
        wave = float(chance.normal(0, 0.02))
        made.append(
            Sample(
                requests * (index + 1) // windows,
                max(0.0, min(1.0, hits * ramp + wave)),
                max(0.0, min(1.0, saved * ramp + wave)),
                int(room * min(1.0, (index + 1) / windows * 4)),
            )
        )
    return tuple(made)
