"""Offers of objects to other tiers, as the write policies and the promotion of the tiers say."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Final

from tiercache.core import ObjectKey
from tiercache.storage.base import GetItem
from tiercache_backends.chain.lineup import Lineup
from tiercache_backends.chain.movement import Digests, Job
from tiercache_backends.chain.settings import Promotion, WritePolicy
from tiercache_backends.chain.tier import Tier

_MAX_COUNTED: Final = 1 << 16
"""Maximum number of objects whose reads are counted; the one that was read longest ago is forgotten."""


class ReadCounts:
    """Number of reads of the objects that were read last.

    Thread safety: under the lock of the offers.
    """

    def __init__(self) -> None:
        self._counts: OrderedDict[int, int] = OrderedDict()

    def add(self, digest: bytes) -> int:
        """Count a read of an object; return how many there were, this one included."""
        mark = hash(digest)
        count = self._counts.pop(mark, 0) + 1
        self._counts[mark] = count
        if len(self._counts) > _MAX_COUNTED:
            self._counts.popitem(last=False)
        return count


class Offers:
    """Decisions which objects go to which other tiers; the movers of these tiers do the copying.

    `deleted`, in both methods, is the watch of the operation: what was deleted meanwhile is not copied.

    Thread safety: any thread.
    """

    def __init__(self) -> None:
        self._lock: Final = Lock()
        self._counts: Final = ReadCounts()

    def stored(self, lineup: Lineup, source: Tier, keys: Sequence[ObjectKey], deleted: Digests) -> None:
        """Offer new objects of a tier to the tiers below it that are written through."""
        for tier in lineup.below(source):
            policy = tier.settings.write_policy
            jobs = [Job(key, source) for key in keys if policy(key.pool) is WritePolicy.THROUGH]
            if jobs and not tier.settings.read_only:
                lineup.movers[tier].offer(jobs, deleted)

    def read(self, lineup: Lineup, tier: Tier, items: Sequence[GetItem], deleted: Digests) -> None:
        """Count reads of a tier's objects, and offer the objects to other tiers as the policies say."""
        if not items or len(lineup.tiers) == 1:
            return
        with self._lock:
            counts = [self._counts.add(item.key.digest) for item in items]
        above = [other for other in lineup.above(tier) if other.is_writable]
        promote = tier.settings.promote
        if above and promote is not Promotion.NEVER:
            least = 2 if promote is Promotion.SECOND else 1
            mover = lineup.movers[above[0]]
            jobs: list[Job] = []
            for item, count in zip(items, counts, strict=True):
                if count >= least and (payload := mover.stage(item)) is not None:
                    jobs.append(Job(item.key, tier, payload))
            mover.offer(jobs, deleted)
        for other in lineup.below(tier):
            if other.is_writable:
                settings = other.settings
                lineup.movers[other].offer(
                    [
                        Job(item.key, tier)
                        for item, count in zip(items, counts, strict=True)
                        if settings.write_policy(item.key.pool) is WritePolicy.SELECTIVE
                        and count == settings.write_after
                    ],
                    deleted,
                )
