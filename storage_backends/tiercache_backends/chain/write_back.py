"""Write-back: what the tier above will evict soon is copied to a tier ahead of its eviction."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from tiercache.storage.base import ScanEntry
from tiercache.storage.shares import NEAR_SHARE
from tiercache_backends.chain.settings import CANARY, WritePolicy

if TYPE_CHECKING:
    from tiercache_backends.chain.tier import Tier

_WATERMARK: Final = 0.8
"""Part of its capacity above which a tier is nearly full; the coldest objects beyond this part are copied."""
_SHARE: Final = 4
"""A tier is looked at again when this fraction of the bytes that were copied ahead may be evicted."""
_LEAST: Final = 1 << 20
"""Bytes that are written to a large tier before it is looked at again, even if hardly anything was copied."""
_NEVER: Final = 1 << 62
_SHARED_S: Final = 1.0
"""Seconds after which a tier is looked at again if other processes may write to it too."""


class ColdestWatch:
    """Watch over the tier above `target`, to copy what will be evicted there soon.

    The tier is looked at when so many bytes were written to it, or read and so kept for longer, that it may
    have evicted or kept a quarter of what was copied ahead:

        capacity     |................................ 0.8 ........ 1|
        used         |======================================>        the next look comes one step later
        evicted next |<-- coldest, copied -->|
                     one step  |             `spare` = 0.2 of the capacity

    What other processes write to a shared tier is not counted here, so such a tier is also looked at every
    second.

    Thread safety: `look` on one thread, the others on any.
    """

    def __init__(self, target: Tier) -> None:
        self._target: Final = target
        self._source: Tier | None = None
        """Tier that was looked at last."""
        self._moved = 0
        """Bytes that had been written to or read from that tier when it was looked at."""
        self.step = 1
        """Bytes that are written or read there before it is looked at again."""
        self._looked_at = 0.0

    def reset(self) -> None:
        """Look at the tier above again as soon as possible, because copies may have failed."""
        self._source = None

    def watches(self, source: Tier, above: Sequence[Tier]) -> bool:
        """Return whether `source` is the tier whose objects are copied ahead."""
        return self._target.settings.writes_back and _nearest(above) is source

    def is_due(self, above: Sequence[Tier]) -> bool:
        """Return whether the nearest readable one of the tiers above is to be looked at now."""
        if not self._target.settings.writes_back or not self._target.is_writable:
            return False
        source = _nearest(above)
        if source is None or source is not self._source:
            return source is not None
        if source.capabilities.shared and time.monotonic() - self._looked_at >= _SHARED_S:
            return True
        return source.figures.moved_bytes - self._moved >= self.step

    def look(self, above: Sequence[Tier]) -> tuple[Tier, list[ScanEntry]] | None:
        """Return the nearest tier above, and what must be copied from it now; None if there is no such tier.

        Raises StorageError if a tier cannot be asked.
        """
        if (source := _nearest(above)) is None:
            return None
        moved = source.figures.moved_bytes
        usage = source.call("usage", lambda store: store.usage())
        spare = int((1 - _WATERMARK) * usage.capacity_bytes)
        entries: Sequence[ScanEntry] = ()
        step = max(1, spare // _SHARE) if spare else _NEVER
        # An owner evicts its own objects because of its quota, however much room there is.
        quotas = [(use.quota_bytes, use.used_bytes) for use in usage.owners.values()]
        spares = [(quota // NEAR_SHARE, quota - used) for quota, used in quotas if quota is not None]
        if spares:
            step = min(step, max(1, min(limit for limit, _ in spares) // _SHARE))
        near = any(room < limit for limit, room in spares)
        full = usage.used_bytes > usage.capacity_bytes - spare
        if spare and (near or full):
            coldest = source.call("coldest", lambda store: store.coldest(spare if full else 0))
            entries = coldest or ()
            ahead = sum(entry.meta.length for entry in entries)
            # The answer may be short: little can be restored, or the store ended it early.
            step = _NEVER if coldest is None else max(min(ahead, spare) // _SHARE, min(step, _LEAST))
        policy = self._target.settings.write_policy
        wanted = [e for e in entries if policy(e.key.pool) is WritePolicy.BACK and e.meta.namespace != CANARY]
        held = self._target.exists([entry.key for entry in wanted])
        missing = [entry for entry, there in zip(wanted, held, strict=True) if not there]
        self._source, self._moved, self.step = source, moved, step
        self._looked_at = time.monotonic()
        return source, missing


def _nearest(above: Sequence[Tier]) -> Tier | None:
    """Return the last of the tiers that is asked."""
    return next((tier for tier in reversed(above) if tier.is_readable), None)
