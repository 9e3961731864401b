"""A process's knowledge of the bucket: what lies there, where each object is, and in which order objects go.

    ledger        names -> bytes
    tombstones    which entries of which packs were removed
    objects       packs, and the entry that is the object of each key
    claims        what sets of this process are writing

The bucket is the truth. This is a copy of it, which may lag behind: an object that is gone is a miss when it
is read, and an object that others have written is found by the next refresh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Lock
from typing import Final

import numpy as np

from tiercache.core import ObjectKey, Outcome
from tiercache.events.base import ChangeNote
from tiercache.policy import Lru
from tiercache.storage.base import ScanEntry, SetItem
from tiercache.storage.eviction import EvictionOrder
from tiercache.storage.residents import RESIDENT
from tiercache_backends.s3.directory.changes import PackEvicter, PackTaker, WriteClaims
from tiercache_backends.s3.directory.ledger import Ledger, Tombstones
from tiercache_backends.s3.directory.objects import (
    ObjectPlace,
    Pack,
    PackClaim,
    PackedObjects,
    PackRemoval,
    WritePlan,
)

_SCAN_PAGE: Final = 1024


class BucketDirectory:
    """The objects that this process knows.

    Thread safety: any thread may call; one mutex guards everything, and is never held during a request.
    """

    def __init__(self, limit: int, clock: Callable[[], float], *, bounded: bool = False) -> None:
        """`limit`: objects, and removed entries, that may be known."""
        self._limit = limit
        self._mutex = Lock()
        self._ledger = Ledger()
        self._tombstones = Tombstones(limit)
        self._objects = PackedObjects(clock)
        self._residents = self._objects.residents
        self._order = EvictionOrder(self._residents, Lru())
        self._claims = WriteClaims(self._objects, limit, bounded=bounded)
        self.counts: dict[str, int] = dict.fromkeys(
            ("corrupt", "evicted", "not_worth", "loaded", "vanished", "unreadable", "not_indexed"), 0
        )

    # --- reading
    # --------------------------------------------------------------------------------------------------------

    def present(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return for each key whether its object is known."""
        with self._mutex:
            return [row >= 0 for row in self._residents.find_many([key.digest for key in keys])]

    def find(self, keys: Sequence[ObjectKey]) -> list[ObjectPlace | None]:
        """Return the place of each object, or None if it is not known."""
        with self._mutex:
            rows = self._residents.find_many([key.digest for key in keys])
            return [self._objects.place(row) if row >= 0 else None for row in rows]

    def read(self, keys: Iterable[ObjectKey]) -> None:
        """Record that these objects are read now."""
        with self._mutex:
            rows = [row for key in keys if (row := self._residents.find(key.digest)) >= 0]
            self._residents.read(np.array(rows, np.int64))

    def entries(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        """Return the scan entry of each object, or None if it is not known."""
        with self._mutex:
            rows = self._residents.find_many([key.digest for key in keys])
            return [self._objects.scan_entry(row) if row >= 0 else None for row in rows]

    def scan(self, namespace: bytes | None, start: int) -> tuple[list[ScanEntry], int]:
        """Return entries from the row `start` on, and the row at which the next part starts; 0: the end."""
        with self._mutex:
            stop = min(start + _SCAN_PAGE, self._residents.used)
            rows = np.flatnonzero(self._residents.columns["state"][start:stop] == RESIDENT) + start
            found = [self._objects.scan_entry(row) for row in rows.tolist()]
            return (
                [entry for entry in found if namespace in (None, entry.meta.namespace)],
                stop if stop < self._residents.used else 0,
            )

    def coldest(self, nbytes: int) -> list[ScanEntry]:
        """Return the objects that are evicted next; see `StorageBackend.coldest`."""
        with self._mutex:
            survey = self._order.survey()
        found = survey.coldest(nbytes)
        with self._mutex:
            return [self._objects.scan_entry(row) for row in self._residents.still_there(*found).tolist()]

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int) -> None:
        """Take values; see `StorageBackend.advise`."""
        with self._mutex:
            self._residents.advise([key.digest for key in keys], values, worker)

    def watch(self, note: ChangeNote | None) -> None:
        """Call `note` for objects that this process knows from now on, or no longer."""
        with self._mutex:
            self._residents.note = note

    def require_states(self, namespace: bytes) -> None:
        """Record that prefixes of this namespace need states."""
        with self._mutex:
            self._residents.pages.require_states(self._objects.namespace_id(namespace))

    def figures(self) -> tuple[int, int, int, dict[str, int]]:
        """Return the number of objects, their payload bytes, all bytes in the bucket, and further figures."""
        with self._mutex:
            more = {
                **self.counts,
                "packs": len(self._objects.packs),
                "copies": sum(map(len, self._objects.copies.values())),
                **self._residents.pages.worth()._asdict(),
            }
            return self._residents.count, self._residents.payload, self._ledger.used, more

    @property
    def used(self) -> int:
        """All bytes in the bucket that are known."""
        return self._ledger.used

    # --- names
    # --------------------------------------------------------------------------------------------------------

    def unknown(self, names: Iterable[str]) -> set[str]:
        """Return those of these names that are not known yet."""
        with self._mutex:
            return {name for name in names if name not in self._ledger}

    def known(self) -> set[str]:
        """Return all names that are known, without those that this process is writing."""
        with self._mutex:
            return self._ledger.settled()

    def expect(self, name: str, size: int, limit: int = 0) -> bool:
        """Count the bytes of a pack or tombstone that this process is about to write.

        Returns False, with nothing changed, if all bytes would be more than `limit` (0: no limit). Otherwise
        `publish`, `bury` or `fail` follows.
        """
        with self._mutex:
            return self._ledger.expect(name, size, limit)

    def load(self, pack: Pack) -> None:
        """Take in a pack that another process wrote; entries that contradict known objects are left out."""
        with self._mutex:
            if pack.name in self._objects.packs:
                return
            if self._residents.count + len(pack.index) > self._limit:
                self.counts["not_indexed"] += 1
                self._ledger.enter_rubbish(pack.name, pack.size)
                return
            self.counts["loaded"] += 1
            self._ledger.enter(pack.name, pack.size)
            pack.dead |= self._tombstones.of(pack.name)
            self._objects.load(pack)

    def unreadable(self, name: str, size: int) -> None:
        """Remember that a pack or tombstone cannot be read, so that it is not read again."""
        with self._mutex:
            self._ledger.enter_rubbish(name, size)
            self.counts["unreadable"] += 1

    def bury(self, name: str, size: int, dead: Mapping[str, set[int]]) -> None:
        """Take in a tombstone."""
        with self._mutex:
            if self._tombstones.add(name, dead):
                self._ledger.enter(name, size)
            else:
                self.counts["not_indexed"] += 1
                self._ledger.enter_rubbish(name, size)
            for pack_name, numbers in dead.items():
                if (pack := self._objects.packs.get(pack_name)) is not None:
                    fresh = {number for number in numbers if number < len(pack.index)} - pack.dead
                    pack.dead |= fresh
                    for number in fresh:
                        self._objects.lose(pack, number)

    def forget(self, names: Iterable[str]) -> None:
        """Take out packs and tombstones that are not in the bucket any more."""
        with self._mutex:
            for name in names:
                self._ledger.strike(name)
                self._tombstones.remove(name)
                if (pack := self._objects.packs.get(name)) is not None:
                    self.counts["vanished"] += 1
                    self._objects.lose_all(pack)

    def forsaken_tombstones(self) -> dict[str, set[str]]:
        """Return the tombstones none of whose packs is known any more, and the names of these packs."""
        with self._mutex:
            return self._tombstones.forsaken(self._objects.packs)

    # --- writing
    # --------------------------------------------------------------------------------------------------------

    def plan(self, items: Sequence[SetItem]) -> WritePlan:
        """Sort the items of a set, of different keys, and claim those that are to be written.

        `finish` must be called with the plan when the set is over.
        """
        with self._mutex:
            return self._claims.plan(items)

    def publish(self, pack: Pack, claims: Sequence[PackClaim]) -> None:
        """Make the objects of a pack visible that was written for these claims, in the order of its index."""
        with self._mutex:
            self._ledger.enter(pack.name, pack.size)
            self._objects.enlist(pack)
            for number, claim in enumerate(claims):
                self._objects.add(pack, number, pack.index[number])
                self._claims.end(claim, Outcome.STORED)

    def fail(self, claims: Iterable[PackClaim], outcome: Outcome, name: str = "") -> None:
        """End claims that were not written.

        The pack `name` may still come, and is then found by a refresh.
        """
        with self._mutex:
            self._ledger.strike(name)
            for claim in claims:
                self._claims.end(claim, outcome)

    def finish(self, plan: WritePlan) -> None:
        """Let go of the pages that the plan held."""
        with self._mutex:
            self._claims.release(plan)

    # --- removing
    # --------------------------------------------------------------------------------------------------------

    def take_out(self, digests: Iterable[bytes], only: Mapping[bytes, Pack] | None = None) -> PackRemoval:
        """Take objects out, so that no call finds them, and say what is to be done in the bucket.

        `only`: the packs in which the objects must lie. `removed` or `undo` follows.
        """
        with self._mutex:
            taker = PackTaker(self._objects)
            taker.take(
                [
                    row
                    for digest in dict.fromkeys(digests)
                    if (row := self._residents.find(digest)) >= 0
                    and (only is None or self._objects.place_of(row)[0] is only[digest])
                ]
            )
            return taker.removal()

    def evict(self, nbytes: int, limit: int, claims: Sequence[PackClaim] = ()) -> tuple[PackRemoval, bool]:
        """Take out what is worth least, until so many more bytes fit into `limit`.

        Returns the removal, and whether it makes enough room. Only whole packs are removed from the bucket:
        entries of others are forgotten here, and their bytes are won back when the pack is rewritten. If
        nothing more can be evicted, and that is not enough, nothing is taken out.
        """
        with self._mutex:
            pages = self._residents.pages
            values = [claim.item.meta.value for claim in claims]
            ranks = [self._residents.rank(value) for value in values if value is not None]
            taker = PackEvicter(
                self._objects, self._ledger, nbytes=nbytes, limit=limit, count=len(claims), most=self._limit
            )
            self._order.evict(
                taker,
                [claim.parent for claim in claims if claim.parent is not None],
                promising=not claims
                or any(
                    pages.is_promising(
                        claim.node,
                        self._objects.namespace_id(claim.item.meta.namespace),
                        attached=not claim.is_page,
                    )
                    for claim in claims
                ),
                rank=max(ranks) if len(ranks) == len(values) and ranks else None,
            )
            self.counts["not_worth"] += self._order.not_worth
            removal = taker.removal()
            if not taker.enough() and not taker.full():
                self._undo(removal)
                return PackRemoval([], [], {}), False
            self.counts["evicted"] += len(removal.objects)
            return removal, taker.enough()

    def mostly_dead(self) -> tuple[Pack, list[int]] | None:
        """Return a pack of which at most half is of use, and its live entries; None if there is none."""
        with self._mutex:
            for pack in self._objects.packs.values():
                if not pack.condemned and 0 < pack.live <= len(pack.index) * 3 // 4:
                    live = self._objects.live(pack)
                    if 2 * sum(pack.index[number].stored for number in live) <= pack.size:
                        return pack, live
            return None

    def moved(self, old: Pack, numbers: Sequence[int], new: Pack) -> PackRemoval:
        """Let objects be found in a new pack, where they are in this order; return the removal of the old."""
        with self._mutex:
            self._ledger.enter(new.name, new.size)
            self._objects.enlist(new)
            for at, number in enumerate(numbers):
                row = self._residents.find(new.index[at].key.digest)
                if row < 0 or self._objects.place_of(row) != (old, number):
                    new.dead.add(at)  # removed meanwhile
                else:
                    self._objects.move(row, new, at)
            old.condemned = not old.live
            return PackRemoval([], [old] if old.condemned else [], {})

    def removed(self, removal: PackRemoval) -> None:
        """Note that the bucket has done what a removal asked for."""
        with self._mutex:
            for found in removal.objects:
                self._residents.drop(found.row)
            for name in removal.names:
                self._ledger.strike(name)
            for pack in removal.packs:
                self._objects.delist(pack)

    def undo(self, removal: PackRemoval, *, keep: bool) -> None:
        """Note that the bucket could not be changed. With `keep` the objects are found again."""
        with self._mutex:
            if keep:
                self._undo(removal)
                return
            for pack in removal.packs:
                pack.condemned = False
            for found in removal.objects:
                self._residents.drop(found.row)

    def count_corrupt(self, objects: int) -> None:
        """Count objects whose bytes were wrong."""
        with self._mutex:
            self.counts["corrupt"] += objects

    def check_integrity(self) -> None:
        """Raise AssertionError unless all counts add up; call it only while no other call is running."""
        self._ledger.check_integrity()
        self._claims.check_integrity()
        self._objects.check_integrity()

    def _undo(self, removal: PackRemoval) -> None:
        for pack in removal.packs:
            pack.condemned = False
        for found in reversed(removal.objects):
            self._objects.put_back(found)
