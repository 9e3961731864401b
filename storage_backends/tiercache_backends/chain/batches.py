"""Batches of gets and sets, spread over the tiers of a chain, and what they offer to other tiers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Final

from tiercache.core import ObjectKey, Outcome
from tiercache.errors import StorageError
from tiercache.storage.base import GetItem, SetItem, storable
from tiercache.storage.vectors import usable
from tiercache_backends.chain.lineup import Lineup
from tiercache_backends.chain.movement import Digests, Job
from tiercache_backends.chain.settings import Promotion, WritePolicy
from tiercache_backends.chain.tier import Tier

_MAX_COUNTED: Final = 1 << 16
"""Maximum number of objects whose reads are counted; the one that was read longest ago is forgotten."""


class Offers:
    """Decisions which objects go to which other tiers; the movers of these tiers do the copying.

    `deleted`, in both methods, is the watch of the operation: what was deleted meanwhile is not copied.

    Thread safety: any thread.
    """

    def __init__(self) -> None:
        self._lock: Final = Lock()
        self._reads: Final[OrderedDict[int, int]] = OrderedDict()
        """Number of reads of the objects that were read last, by the hash of their digests."""

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
            counts = [self._count(item.key.digest) for item in items]
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

    def _count(self, digest: bytes) -> int:
        """Count a read of an object; return how many there were, this one included."""
        mark = hash(digest)
        count = self._reads.pop(mark, 0) + 1
        self._reads[mark] = count
        if len(self._reads) > _MAX_COUNTED:
            self._reads.popitem(last=False)
        return count


def read_batch(
    lineup: Lineup, offers: Offers, items: Sequence[GetItem], deleted: Digests, *, is_use: bool = True
) -> list[Outcome]:
    """Read objects, each from the first tier that has it; return their outcomes.

    Unless the get `is_use` of the objects, it does not count as a read, and no object goes to other tiers.
    `deleted` is the watch of the call: what was deleted meanwhile goes to no other tier.
    """
    outcomes = [Outcome.ERROR] * len(items)
    tiers = lineup.readable()
    left = [i for i, item in enumerate(items) if usable(item.buffers, item.length, writable=True)]
    for i in left:
        outcomes[i] = Outcome.UNAVAILABLE
    left = _free(tiers[0], items, left) if tiers else []
    for i in left:
        outcomes[i] = Outcome.MISS
    for tier in tiers:
        if not left:
            break
        hits: list[int] = []
        missed: list[int] = []
        answers = tier.get([items[i] for i in left], is_use=is_use)
        for i, outcome in zip(left, answers, strict=True):
            if outcome is Outcome.HIT or outcomes[i] is Outcome.MISS:
                outcomes[i] = outcome
            (hits if outcome is Outcome.HIT else missed).append(i)
        if is_use:
            offers.read(lineup, tier, [items[i] for i in hits], deleted)
        left = _free(tier, items, missed)
    return outcomes


def _free(tier: Tier, items: Sequence[GetItem], wanted: Sequence[int]) -> list[int]:
    """Return those of the objects to whose buffers no call may still write that was given up.

        1. get: tier 1 does not answer in time, and its store puts the buffers under quarantine
        2. get: tier 2 answers HIT, and the caller uses the bytes
        3. tier 1 wakes up, and writes into the buffers

    Therefore no other tier is asked in step 2, nor in a later get with these buffers.
    """
    held = tier.withheld([items[i] for i in wanted])
    return [i for i, is_held in zip(wanted, held, strict=True) if not is_held]


class SetBatch:
    """Objects of one set, each of which goes to the first tier that takes it.

    `deleted` is the watch of the call, as for `read_batch`.

    Thread safety: one thread.
    """

    def __init__(self, lineup: Lineup, offers: Offers, items: Sequence[SetItem], deleted: Digests) -> None:
        self._lineup: Final = lineup
        self._offers: Final = offers
        self._items: Final = items
        self._deleted: Final = deleted
        self._outcomes: Final = [Outcome.ERROR] * len(items)

    def store(self) -> list[Outcome]:
        """Store all objects; return their outcomes."""
        left = [i for i, item in enumerate(self._items) if storable(item)]
        writable = [tier for tier in self._lineup.tiers if tier.is_writable]
        refusal = Outcome.THROTTLED if self._lineup.readable() else Outcome.UNAVAILABLE
        for i in left:
            self._outcomes[i] = refusal
        if writable:
            left = self._renew(writable[0], left)
        for n, tier in enumerate(writable):
            left = self._store(tier, left, first=n == 0)
        self._advise()
        return self._outcomes

    def _advise(self) -> None:
        """Pass on the values of objects that were stored already, which only one tier has got so far."""
        metas = [
            (item.key, item.meta)
            for item, outcome in zip(self._items, self._outcomes, strict=True)
            if outcome is Outcome.HIT and item.meta.value is not None
        ]
        for worker in {meta.worker for _, meta in metas}:
            own = [(key, meta.value or 0.0) for key, meta in metas if meta.worker == worker]
            self._lineup.advise([key for key, _ in own], [value for _, value in own], worker)

    def _renew(self, first: Tier, wanted: Sequence[int]) -> list[int]:
        """Set those of the objects that a tier has, other than the first writable tier, to HIT.

        Returns the others. A set of a known object renews its age where it is.
        """
        left = list(wanted)
        for tier in self._lineup.tiers:
            # What only a leaving tier has is stored again, because its copies may be under way or over.
            if tier is first or not tier.is_readable or tier.leaving or tier.is_busy or not left:
                continue
            try:
                held = tier.exists([self._items[i].key for i in left])
                there = [i for i, held_here in zip(left, held, strict=True) if held_here]
                above = first.exists([self._items[i].key for i in there])
            except StorageError:
                continue
            # What the first writable tier has too stays in `left`: its own set renews it, and says HIT.
            only_here = [i for i, held_above in zip(there, above, strict=True) if not held_above]
            answers = [Outcome.HIT] * len(only_here)
            if only_here and tier.is_writable:
                answers = tier.set([self._items[i] for i in only_here], self._deleted)
            for i, outcome in zip(only_here, answers, strict=True):
                if outcome in (Outcome.HIT, Outcome.STORED):
                    self._outcomes[i] = outcome
                    left.remove(i)
        return left

    def _store(self, tier: Tier, wanted: Sequence[int], *, first: bool) -> list[int]:
        """Store objects in a tier and set their outcomes; return those that it did not take."""
        if not wanted:
            return []
        answers = tier.set([self._items[i] for i in wanted], self._deleted)
        left: list[int] = []
        stored: list[ObjectKey] = []
        for i, outcome in zip(wanted, answers, strict=True):
            if outcome is Outcome.STORED:
                stored.append(self._items[i].key)
            if first or outcome in (Outcome.STORED, Outcome.HIT):
                self._outcomes[i] = outcome
            # An ERROR is about the object itself, so that another tier must not take it.
            if outcome not in (Outcome.STORED, Outcome.HIT, Outcome.ERROR):
                left.append(i)
        self._offers.stored(self._lineup, tier, stored, self._deleted)
        return left
