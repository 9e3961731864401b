"""Metrics of a restore: which tier gave how many objects, and why a tier gave none."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from tiercache.controller.state import ControllerState
from tiercache.core import PoolName, Reason, Tier
from tiercache.metrics import HIT, MISS


@dataclass
class Sources:
    """Number of objects by the tier that a restore took them from, and by pool."""

    objects: dict[tuple[Tier, PoolName], int] = field(default_factory=dict)

    def add(self, tier: Tier, pool: PoolName, count: int) -> None:
        """Add `count` objects of `pool` from `tier`."""
        self.objects[tier, pool] = self.objects.get((tier, pool), 0) + int(count)

    def slowest(self) -> Tier | None:
        """Return the lowest tier that was needed; None if nothing was restored."""
        return max((tier for (tier, _), n in self.objects.items() if n), default=None)


def count_restore(
    state: ControllerState,
    sources: Sources,
    held: Mapping[Tier, frozenset[PoolName]],
    storage_reason: Reason | None,
    tokens: int,
    restored: int,
) -> None:
    """Count one restore of `restored` out of `tokens` prompt tokens.

    A tier is counted when it was consulted; the host was, unless the device had everything. `held`: pools of which a tier held something
    of this prompt. `storage_reason`: None if storage was not consulted because nothing was left to ask for, NONE if it answered, otherwise
    what went wrong.
    """
    metrics = state.metrics
    below_device = restored < tokens - 1 - (tokens - 1) % state.page_size or sources.slowest() is not Tier.DEVICE
    for tier in Tier:
        if (tier is Tier.STORAGE and storage_reason is None) or (tier is Tier.HOST and not below_device):
            continue
        for pool in state.pools:
            count = sources.objects.get((tier, pool), 0)
            if count:
                result, reason = HIT, Reason.NONE
                metrics.increment("restored_objects_total", str(tier), pool, by=count)
                metrics.increment("restored_bytes_total", str(tier), pool, by=count * state.host[pool].geometry.nbytes)
                metrics.set("tier_last_read_seconds", str(tier), to=time.time())
            elif tier is Tier.STORAGE and storage_reason not in (None, Reason.NONE):
                result, reason = MISS, storage_reason
            else:
                result, reason = MISS, Reason.PARTIAL_POOLS if pool in held.get(tier, frozenset()) else Reason.ABSENT
            metrics.increment("lookups_total", str(tier), pool, result, reason)
    metrics.increment("tokens_total", "restored", by=restored)
    metrics.increment("tokens_total", "computed", by=tokens - restored)
