"""Writes to a `file` store.

    set        reserve blocks -> write the bytes -> append to the catalog -> publish
    removal    take the objects out of the state -> remove their records -> free their blocks

An object is removed when it is evicted, deleted or found damaged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from errno import EDQUOT, EIO, ENOSPC
from threading import Lock
from typing import Final

from tiercache.core import Outcome
from tiercache.storage.base import SetItem
from tiercache.storage.checksum import MacKey
from tiercache.storage.env import Env
from tiercache_backends.file.catalog import Catalog
from tiercache_backends.file.claims import Claim, Claims, Pins, Removal, Shortage
from tiercache_backends.file.io_engine import IoEngine
from tiercache_backends.file.records import MAX_EXTENTS, NO_RECORDS, Places, Records, pack
from tiercache_backends.file.runs import IoBatch
from tiercache_backends.file.slabs import Slabs
from tiercache_backends.file.state import StoreState

_log = logging.getLogger(__name__)

BATCH: Final = 4096
"""Maximum number of objects that one change of the catalog adds or removes."""
_LOW_WATER: Final = 64
"""Divisor of the number of blocks: up to 1/64 of the blocks is freed ahead.

If fewer blocks are free than a set has just written, the set also evicts objects, and removes their records
in a write of the catalog of its own. The next set like it then finds free blocks and need not wait.
"""
_MAX_AHEAD: Final = 1024
"""Maximum number of objects that a set evicts in such a write, so that it returns soon."""


class Remover:
    """Remover of the records and blocks of objects that were taken out of the state. Counts failures.

    An object that was taken out can no longer be found by any call.

    Thread safety: any thread may call.
    """

    def __init__(self, path: str, catalog: Catalog, state: StoreState) -> None:
        self._path = path
        self._catalog = catalog
        self._state = state

    def remove(self, removal: Removal, *, keep: bool = True, durable: bool = False) -> bool:
        """Remove the records of objects that were taken out; return whether that succeeded.

        After a failure, the objects become resident again if `keep` is set. Otherwise they stay unreadable.
        `durable`: the removal is on the medium when the call returns.
        """
        if removal.objects:
            try:
                self._catalog.apply(removals=removal.numbers, durable=durable)
            except OSError as error:
                self.failed("remove", error)
                (self._state.undo_removal if keep else self._state.abandon)(removal)
                return False
        self._state.finish_removal(removal)
        return True

    def remove_damaged(self, pins: Pins, positions: Sequence[int], *, keep_blocks: bool = False) -> int:
        """Remove the damaged ones of pinned objects and return their number.

        `keep_blocks`: nothing is stored in their blocks until the store is opened again, because the medium
        refused to read them.
        """
        removal = self._state.take_out_damaged(pins, positions, keep_blocks=keep_blocks)
        self.remove(removal, keep=False)
        return len(removal.objects)

    def failed(self, call: str, error: OSError) -> Outcome:
        """Log and count a failure; return THROTTLED for a full disk or quota, otherwise ERROR.

        The caller of a throttled set tries again later.
        """
        _log.warning("a %s in %s failed: %s", call, self._path, error)
        self._state.count(f"{call}_failures", 1)
        return Outcome.THROTTLED if error.errno in (ENOSPC, EDQUOT) else Outcome.ERROR


class ObjectWriter:
    """Writer of claimed objects. With `power`, a set returns only when its bytes are on the medium.

    Thread safety: any thread may call.
    """

    def __init__(
        self,
        env: Env,
        catalog: Catalog,
        slabs: Slabs,
        io: IoEngine,
        state: StoreState,
        remover: Remover,
        mac_key: MacKey,
        *,
        power: bool,
    ) -> None:
        self._env = env
        self._catalog = catalog
        self._slabs = slabs
        self._io = io
        self._state = state
        self._remover = remover
        self._mac_key = mac_key
        self._power = power
        self._growth = Lock()
        """Held while a slab grows. Lock order: first this lock, then the mutex of the state."""
        self._cramped = False
        """Whether the last attempt to grow a slab failed because the disk had no room."""

    def store(self, items: Sequence[SetItem], claims: Claims, outcomes: list[Outcome]) -> None:
        """Write claimed objects and set their outcomes by item index. In any case, end every claim."""
        stored: tuple[Sequence[Claim], Records] = [], NO_RECORDS
        try:
            for group in self._state.by_owner(claims.fresh):
                self._reserve(group)
            placed = _with_stored_parents(
                claims.fresh,
                {claim.index for claim in claims.fresh if not 0 < len(claim.extents) <= MAX_EXTENTS},
            )
            # An object stays THROTTLED if this object or its parent got no blocks. `_write` sets the outcomes
            # of the other objects.
            throttled = Outcome.THROTTLED
            for claim in claims.fresh:
                outcomes[claim.index] = throttled
            stored = self._write(items, placed, outcomes)
        finally:
            self._state.publish(claims, *stored)
        # Remove the objects that the last eviction made useless, but that its write did not remove.
        while self._remove_evicted(self._state.sweep(BATCH)):
            pass

    def _reserve(self, claims: Sequence[Claim]) -> None:
        """Reserve a record, quota and blocks for the claims of one owner: grow the slabs first, then evict.

        A claim without room keeps its empty `extents`.
        """
        left = self._worthy([c for c in claims if c.blocks <= self._slabs.budget_blocks])
        while True:
            lack = self._state.reserve(left, room := self._catalog.room())
            if not any(lack):
                break
            # First try to grow: growing is cheaper than evicting, and loses no stored object. Other calls may
            # take the new room first, so reserve again in a loop.
            if (lack.blocks and self._grow()) or self._evict(lack, left):
                continue
            # The next unit is worth more than at least one of the objects. Go on with the other objects.
            before, left = left, self._worthy(left, for_quota=lack.nbytes > 0)
            if len(left) == len(before):
                if not lack.nbytes:
                    break
                left = self._within_quota(left)
        if self._state.is_shared:
            self._within_quota(left[: max(0, room)])

    def _within_quota(self, claims: Sequence[Claim]) -> list[Claim]:
        """Return the claims whose bytes the quota of their owner has room for, and count the others."""
        within = [claim for claim in claims if claim.is_charged]
        if len(within) < len(claims):
            self._state.count_for_quota(claims, throttled=len(claims) - len(within))
        return within

    def _evict(self, lack: Shortage, claims: Sequence[Claim]) -> bool:
        """Evict what the claims lack, in a separate write of the catalog.

        Less is evicted if one write may not remove more, or nothing is left to evict. Returns False if no
        object was removed.
        """
        waiting = [c for c in claims if not (c.is_charged if lack.nbytes else c.extents)]
        removal = self._state.evict(lack, BATCH, waiting)
        if not self._remove_evicted(removal):
            return False
        if lack.nbytes:
            self._state.count_for_quota(claims, evicted=len(removal.objects))
        return True

    def _worthy(self, claims: Sequence[Claim], *, for_quota: bool = False) -> list[Claim]:
        """Return the claims without those that are not worth what must be evicted for them.

        Nothing is left out while there is room, also for the blocks that are kept free for later sets.
        `for_quota`: there is no room in the quota of their owner.
        """
        waiting = [c for c in claims if not (c.is_charged if for_quota else c.extents)]
        valued = [c for c in waiting if c.value is not None]
        if not valued or (
            not for_quota
            and self._state.shortage(None if self._cramped else self._slabs.budget_blocks, _LOW_WATER)
            + sum(c.blocks for c in waiting)
            <= 0
        ):
            return list(claims)
        refused = self._state.not_worth(valued, for_quota=for_quota)
        if not refused:
            return list(claims)
        self._state.count("not_worth", len(refused))
        return _with_stored_parents(claims, {c.index for c in refused})

    def trim(self) -> None:
        """Evict what owners have beyond their quotas, as far as no call uses it."""
        while self._remove_evicted(self._state.evict_beyond(BATCH)):
            pass

    def _grow(self) -> bool:
        """Preallocate a new slab or the missing end of a slab; return False if budget or disk is used up."""
        with self._growth:
            try:
                extent = self._slabs.grow()
            except OSError as error:
                if not self._cramped:
                    self._remover.failed("grow", error)
                self._cramped = True
                return False
            if extent is None:
                return False
            self._cramped = False
            self._state.grow(extent)
            return True

    def _remove_evicted(self, removal: Removal) -> bool:
        """Remove and count what was evicted; return False if no object was removed."""
        if not removal.objects or not self._remover.remove(removal):
            return False
        self._state.count("evicted", len(removal.objects))
        return True

    def _evict_ahead(self, written: Sequence[Claim]) -> Removal:
        """Take objects out of the state if another set like this one would find too few free blocks.

        This set stores `written`. Its write of the catalog also removes the records of the objects taken out.
        """
        short = self._state.shortage(
            None if self._cramped else self._slabs.budget_blocks, _LOW_WATER, sum(c.blocks for c in written)
        )
        return self._state.evict(Shortage(short, 1), _MAX_AHEAD) if short > 0 else Removal()

    def _write(
        self, items: Sequence[SetItem], claims: Sequence[Claim], outcomes: list[Outcome]
    ) -> tuple[Sequence[Claim], Records]:
        """Write the bytes and the records of the claims; return what is stored, with the records."""
        if not claims:
            return [], NO_RECORDS
        with ExitStack() as stack:
            try:
                fds = (
                    stack.enter_context(self._slabs.open_for_sync(e for c in claims for e in c.extents))
                    if self._power
                    else []
                )
                # Order: (1) write the bytes, (2) with `power`, sync them, (3) write the records. So a record
                # never names blocks that were not written.
                written, records = self._write_payloads(items, claims, outcomes)
                self._slabs.sync(fds)
                if written:
                    self._acknowledge(written, records, outcomes)
                return written, records
            except OSError as error:
                outcome = self._remover.failed("set", error)
                for claim in claims:
                    outcomes[claim.index] = outcome
                return [], NO_RECORDS

    def _write_payloads(
        self, items: Sequence[SetItem], claims: Sequence[Claim], outcomes: list[Outcome]
    ) -> tuple[Sequence[Claim], Records]:
        """Write the bytes; return the claims whose objects can be stored, and their records."""
        claimed = [items[claim.index] for claim in claims]
        places = Places.of([claim.extents for claim in claims])
        batch = IoBatch(
            [item.key for item in claimed],
            [item.buffers for item in claimed],
            [item.meta.length for item in claimed],
            places,
            self._mac_key,
            given=[item.meta.checksum for item in claimed],
        )
        self._io.write(batch)
        namespaces = [claim.namespace_id for claim in claims]
        records = pack(claimed, places, batch.checksums, batch.macs, namespaces, self._env.time_ns())
        if not batch.errors:
            return claims, records
        for position, error in batch.errors.items():
            claim = claims[position]
            outcomes[claim.index] = self._remover.failed("set", error)
            # The medium refused to write these blocks, so they are used no more.
            if error.errno == EIO:
                extents, claim.extents = claim.extents, ()
                self._state.abandon_blocks(extents)
        writable = _with_stored_parents(claims, {claims[position].index for position in batch.errors})
        left = {claim.index for claim in writable}
        return writable, records[[claim.index in left for claim in claims]]

    def _acknowledge(self, written: Sequence[Claim], records: Records, outcomes: list[Outcome]) -> None:
        """Add the records of written objects and remove the records of evicted ones, in one write.

        Raises OSError if the write fails.
        """
        further = {i: claim.extents[1:] for i, claim in enumerate(written) if len(claim.extents) > 1}
        removal = self._evict_ahead(written)
        try:
            self._catalog.apply(records, further, removals=removal.numbers)
        except OSError:
            self._state.undo_removal(removal)
            raise
        self._state.count("evicted", len(removal.objects))
        self._state.finish_removal(removal)
        stored = Outcome.STORED
        for claim in written:
            outcomes[claim.index] = stored


def _with_stored_parents(claims: Sequence[Claim], failed: AbstractSet[int]) -> list[Claim]:
    """Return the claims that did not fail and do not depend on a page that failed.

    `claims` must be in an order in which parents come before the pages that follow them. `failed` has item
    indices.
    """
    if not failed:
        return list(claims)
    writable: list[Claim] = []
    missing: set[int] = set()
    for claim in claims:
        if claim.index not in failed and claim.parent not in missing:
            writable.append(claim)
        elif claim.is_page:
            missing.add(claim.node)
    return writable
