"""A process's knowledge of the packs in the bucket: where each object lies, and in which order objects go.

    packs       name -> Pack (its index, and how many of its entries are the object of their key here)
    residents   digest -> row -> number of the pack, number of the entry
    copies      digest -> further entries with the same key, from writers who did not know of each other

The bucket is the truth. This is a copy of it, which may lag behind: an object that is gone is a miss when it
is read, and an object that others have written is found by the next refresh.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from threading import Lock
from typing import Final

import numpy as np

from tiercache.core import ObjectKey, ObjectMeta, Outcome
from tiercache.policy import Lru
from tiercache.storage.base import ScanEntry, SetItem
from tiercache.storage.eviction import EvictionOrder
from tiercache.storage.residents import RESIDENT, Residents, parents_first
from tiercache.storage.restorable import Admissibility
from tiercache_backends.s3.notes import (
    ObjectPlace,
    Pack,
    PackClaim,
    PackRemoval,
    RemovedObject,
    WritePlan,
    Writing,
)
from tiercache_backends.s3.pack import PackEntry

_SCAN_PAGE: Final = 1024
_SPREAD: Final = 8 << 20
"""Bytes of objects in packs with others that one eviction may forget without winning any room."""
_PACKS: Final = 1 << 32
"""Number of packs that can have a number; the column has 32 bits."""


class BucketDirectory:
    """The objects that this process knows.

    Thread safety: any thread may call; one mutex guards everything, and is never held during a request.
    """

    def __init__(self, limit: int, clock: Callable[[], float], *, bounded: bool = False) -> None:
        self._limit = limit
        self._bounded = bounded
        self._mutex = Lock()
        self._residents = Residents({"pack": np.uint32, "entry": np.uint32}, clock)
        self._order = EvictionOrder(self._residents, Lru())
        self._namespace_ids: dict[bytes, int] = {}
        self._packs: dict[str, Pack] = {}
        self._by_number: dict[int, Pack] = {}
        self._next_number = 0
        self._copies: dict[bytes, list[tuple[Pack, int]]] = {}
        self._writing: dict[bytes, Writing] = {}
        self._tombstones: dict[str, dict[str, set[int]]] = {}
        self._sizes: dict[str, int] = {}
        """Bytes of every name under the prefix that is known, tombstones and unreadable packs included."""
        self._coming: set[str] = set()
        """Names that this process is writing."""
        self._rubbish: set[str] = set()
        """Names of packs of which no object is known here."""
        self._used = 0
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
            return [self._place(row) if row >= 0 else None for row in rows]

    def read(self, keys: Iterable[ObjectKey]) -> None:
        """Record that these objects are read now."""
        with self._mutex:
            rows = [row for key in keys if (row := self._residents.find(key.digest)) >= 0]
            self._residents.read(np.array(rows, np.int64))

    def entries(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        """Return the scan entry of each object, or None if it is not known."""
        with self._mutex:
            rows = self._residents.find_many([key.digest for key in keys])
            return [self._scan_entry(row) if row >= 0 else None for row in rows]

    def scan(self, namespace: bytes | None, start: int) -> tuple[list[ScanEntry], int]:
        """Return entries from the row `start` on, and the row at which the next part starts; 0: the end."""
        with self._mutex:
            stop = min(start + _SCAN_PAGE, self._residents.used)
            rows = np.flatnonzero(self._residents.columns["state"][start:stop] == RESIDENT) + start
            found = [self._scan_entry(row) for row in rows.tolist()]
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
            return [self._scan_entry(row) for row in self._residents.still_there(*found).tolist()]

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int) -> None:
        """Take values; see `StorageBackend.advise`."""
        with self._mutex:
            self._residents.advise([key.digest for key in keys], values, worker)

    def require_states(self, namespace: bytes) -> None:
        """Record that prefixes of this namespace need states."""
        with self._mutex:
            self._residents.pages.require_states(self._namespace_id(namespace))

    def figures(self) -> tuple[int, int, int, dict[str, int]]:
        """Return the number of objects, their payload bytes, all bytes in the bucket, and further figures."""
        with self._mutex:
            more = {
                **self.counts,
                "packs": len(self._packs),
                "copies": sum(map(len, self._copies.values())),
                **self._residents.pages.worth()._asdict(),
            }
            return self._residents.count, self._residents.payload, self._used, more

    @property
    def used(self) -> int:
        """All bytes in the bucket that are known."""
        return self._used

    # --- packs
    # --------------------------------------------------------------------------------------------------------

    def unknown(self, names: Mapping[str, int]) -> list[str]:
        """Return those of these names that are not known yet, in their order."""
        with self._mutex:
            return [name for name in names if name not in self._sizes]

    def known(self) -> set[str]:
        """Return all names that are known, without those that this process is writing."""
        with self._mutex:
            return self._sizes.keys() - self._coming

    def expect(self, name: str, size: int, limit: int = 0) -> bool:
        """Count the bytes of a pack or tombstone that this process is about to write.

        Returns False, with nothing changed, if all bytes would be more than `limit` (0: no limit). Otherwise
        `publish`, `bury` or `fail` follows.
        """
        with self._mutex:
            if limit and self._used + size > limit:
                return False
            self._count(name, size)
            self._coming.add(name)
            return True

    def load(self, pack: Pack) -> None:
        """Take in a pack that another process wrote; entries that contradict known objects are left out."""
        with self._mutex:
            if pack.name in self._packs:
                return
            self._count(pack.name, pack.size)
            if self._residents.count + len(pack.index) > self._limit:
                self.counts["not_indexed"] += 1
                self._rubbish.add(pack.name)
                return
            self.counts["loaded"] += 1
            self._enlist(pack)
            for dead in self._tombstones.values():
                pack.dead |= dead.get(pack.name, set())
            entries = [(i, pack.index[i]) for i in range(len(pack.index)) if i not in pack.dead]
            batch = [(entry.key.page_key, entry.meta.parent) for _, entry in entries]
            for at in parents_first(batch):
                self._add(pack, *entries[at])

    def unreadable(self, name: str, size: int) -> None:
        """Remember that a pack or tombstone cannot be read, so that it is not read again."""
        with self._mutex:
            self._count(name, size)
            self._rubbish.add(name)
            self.counts["unreadable"] += 1

    def bury(self, name: str, size: int, dead: dict[str, set[int]]) -> None:
        """Take in a tombstone."""
        with self._mutex:
            self._count(name, size)
            self._coming.discard(name)
            if len(self._tombstones) >= self._limit:
                self._rubbish.add(name)
                return
            self._tombstones[name] = dead
            for pack_name, numbers in dead.items():
                pack = self._packs.get(pack_name)
                for number in numbers if pack is not None else ():
                    if pack is not None and number < len(pack.index) and number not in pack.dead:
                        pack.dead.add(number)
                        self._lose(pack, number)

    def forget(self, names: Iterable[str]) -> None:
        """Take out packs and tombstones that are not in the bucket any more."""
        with self._mutex:
            for name in names:
                self._discount(name)
                self._rubbish.discard(name)
                self._tombstones.pop(name, None)
                pack = self._packs.get(name)
                if pack is not None:
                    self.counts["vanished"] += 1
                    pack.condemned = True  # so that no entry of it takes the place of another
                    for number in range(len(pack.index)):
                        if number not in pack.dead:
                            self._lose(pack, number)
                    self._delist(pack)

    def needless_tombstones(self, listed: Collection[str]) -> list[str]:
        """Return the tombstones whose packs are all gone from a listing that began after they were known."""
        with self._mutex:
            return [
                name
                for name, dead in self._tombstones.items()
                if name in listed and not any(pack in listed or pack in self._packs for pack in dead)
            ]

    # --- writing
    # --------------------------------------------------------------------------------------------------------

    def plan(self, items: Sequence[SetItem]) -> WritePlan:
        """Sort the items of a set, of different keys, and claim those that are to be written.

        `finish` must be called with the plan when the set is over.
        """
        plan = WritePlan([None] * len(items))
        batch = [(item.key.page_key, item.meta.parent) for item in items]
        missing: set[bytes] = set()
        with self._mutex:
            pages = self._residents.pages
            nodes: dict[bytes, int] = {}
            for page in {page for pair in batch for page in pair if page is not None}:
                nodes[page] = pages.hold(page)
            plan.held += nodes.values()
            for i in parents_first(batch):
                item, (page, above) = items[i], batch[i]
                node, parent = nodes[page], None if above is None else nodes[above]
                plan.outcomes[i] = outcome = self._verdict(plan, i, item, node, parent, page in missing)
                if outcome in (Outcome.THROTTLED, Outcome.ERROR) and node != parent:
                    missing.add(page)
        return plan

    def publish(self, pack: Pack, claims: Sequence[PackClaim]) -> None:
        """Make the objects of a pack visible that was written for these claims, in the order of its index."""
        with self._mutex:
            self._coming.discard(pack.name)
            self._enlist(pack)
            for number, claim in enumerate(claims):
                self._add(pack, number, pack.index[number])
                self._end(claim, Outcome.STORED)

    def fail(self, claims: Iterable[PackClaim], outcome: Outcome, name: str = "") -> None:
        """End claims that were not written.

        The pack `name` may still come, and is then found by a refresh.
        """
        with self._mutex:
            if name:
                self._coming.discard(name)
                self._discount(name)
            for claim in claims:
                self._end(claim, outcome)

    def finish(self, plan: WritePlan) -> None:
        """Let go of the pages that the plan held."""
        with self._mutex:
            for node in plan.held:
                self._residents.pages.release(node)

    # --- removing
    # --------------------------------------------------------------------------------------------------------

    def take_out(self, digests: Iterable[bytes], only: Mapping[bytes, Pack] | None = None) -> PackRemoval:
        """Take objects out, so that no call finds them, and say what is to be done in the bucket.

        `only`: the packs in which the objects must lie. `removed` or `undo` follows.
        """
        with self._mutex:
            rows = [(digest, self._residents.find(digest)) for digest in digests]
            chosen = [
                row
                for digest, row in dict(rows).items()
                if row >= 0 and (only is None or self._place_of(row)[0] is only[digest])
            ]
            taker = _Taker(self, 0, 0)
            taker.take(chosen)
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
            taker = _Taker(self, nbytes, limit, len(claims))
            self._order.evict(
                taker,
                [claim.parent for claim in claims if claim.parent is not None],
                promising=not claims
                or any(
                    pages.is_promising(
                        claim.node, self._namespace_id(claim.item.meta.namespace), attached=not claim.is_page
                    )
                    for claim in claims
                ),
                rank=max(ranks) if len(ranks) == len(values) and ranks else None,
            )
            self.counts["not_worth"] += self._order.not_worth
            removal = taker.removal()._replace(dead={})
            if not taker.enough() and not taker.full():
                self._undo(removal)
                return PackRemoval([], [], {}), False
            self.counts["evicted"] += len(removal.objects)
            return removal, taker.enough()

    def mostly_dead(self) -> tuple[Pack, list[int]] | None:
        """Return a pack of which at most half is of use, and its live entries; None if there is none."""
        with self._mutex:
            for pack in self._packs.values():
                if pack.condemned or not 0 < pack.live <= len(pack.index) * 3 // 4:
                    continue
                live = [
                    number
                    for number in range(len(pack.index))
                    if number not in pack.dead
                    and (row := self._residents.find(pack.index[number].key.digest)) >= 0
                    and self._place_of(row) == (pack, number)
                ]
                if 2 * sum(pack.index[number].stored for number in live) <= pack.size:
                    return pack, live
            return None

    def moved(self, old: Pack, numbers: Sequence[int], new: Pack) -> PackRemoval:
        """Let objects be found in a new pack, where they are in this order; return the removal of the old."""
        with self._mutex:
            self._coming.discard(new.name)
            self._enlist(new)
            for at, number in enumerate(numbers):
                row = self._residents.find(new.index[at].key.digest)
                if row < 0 or self._place_of(row) != (old, number):
                    new.dead.add(at)  # removed meanwhile
                    continue
                columns = self._residents.columns
                columns["pack"][row], columns["entry"][row] = new.number, at
                old.live -= 1
                new.live += 1
            old.condemned = not old.live
            return PackRemoval([], [old] if old.condemned else [], {})

    def removed(self, removal: PackRemoval) -> None:
        """Note that the bucket has done what a removal asked for."""
        with self._mutex:
            for found in removal.objects:
                self._residents.drop(found.row)
            for name in removal.names:
                self._discount(name)
                self._rubbish.discard(name)
            for pack in removal.packs:
                self._delist(pack)

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
        self._residents.check_integrity()
        assert not self._writing, "nothing is being written"
        assert self._used == sum(self._sizes.values())
        live: dict[str, int] = dict.fromkeys(self._packs, 0)
        for row in self._residents.residents().tolist():
            pack, number = self._place_of(row)
            assert pack.index[number].key.digest == self._residents.digest(row), "a row leads to its entry"
            assert number not in pack.dead, "an object that is found is not dead"
            live[pack.name] += 1
        assert live == {name: pack.live for name, pack in self._packs.items()}, "live entries are counted"

    # --- under the mutex
    # --------------------------------------------------------------------------------------------------------

    def _verdict(
        self, plan: WritePlan, i: int, item: SetItem, node: int, parent: int | None, refused: bool
    ) -> Outcome | None:
        """Return the outcome of an item that is not written; None if it was claimed, or waits for another."""
        residents, meta = self._residents, item.meta
        row = residents.find(item.key.digest)
        if row >= 0:
            residents.renew(row)
            residents.hint(row, meta.value, meta.worker)
            return Outcome.HIT
        writing = self._writing.get(item.key.digest)
        if writing is not None:
            plan.waits.append((i, writing))
            return None
        namespace_id = self._namespace_id(meta.namespace)
        admissibility = residents.pages.admissibility(
            node, parent, meta.depth or 0, namespace_id, refused=refused
        )
        if admissibility is Admissibility.FINE and residents.count >= self._limit and not self._bounded:
            return Outcome.THROTTLED
        if admissibility is not Admissibility.FINE:
            return Outcome.ERROR if admissibility is Admissibility.IMPOSSIBLE else Outcome.THROTTLED
        claim = PackClaim(i, item, node, parent, Writing())
        self._writing[item.key.digest] = claim.writing
        plan.claims.append(claim)
        if claim.is_page:
            residents.pages.expect(node, meta.depth or 0, namespace_id)
        return None

    def _end(self, claim: PackClaim, outcome: Outcome) -> None:
        claim.writing.outcome = outcome
        del self._writing[claim.item.key.digest]
        if claim.is_page:
            self._residents.pages.expected(claim.node)
        claim.writing.ended.set()

    def _add(self, pack: Pack, number: int, entry: PackEntry) -> None:
        """Let the object of an entry be found, unless the key has an object already."""
        residents, meta = self._residents, entry.meta
        if residents.find(entry.key.digest) >= 0:
            self._copies.setdefault(entry.key.digest, []).append((pack, number))
            return
        pages = residents.pages
        node = pages.hold(entry.key.page_key)
        parent = None if meta.parent is None else pages.hold(meta.parent)
        namespace_id = self._namespace_id(meta.namespace)
        sound = pages.admissibility(node, parent, meta.depth or 0, namespace_id)
        if sound is not Admissibility.IMPOSSIBLE:
            row = residents.add(
                entry.key.digest,
                node,
                parent,
                residents.newest + 1,
                meta.length,
                namespace_id,
                meta.depth or 0,
            )
            residents.columns["pack"][row], residents.columns["entry"][row] = pack.number, number
            residents.hint(row, meta.value, meta.worker)
            pack.live += 1
        for held in (node, parent):
            if held is not None:
                pages.release(held)

    def _lose(self, pack: Pack, number: int) -> None:
        """Take out the object of an entry that is gone; a copy of it takes its place."""
        entry = pack.index[number]
        digest = entry.key.digest
        row = self._residents.find(digest)
        copies = self._copies.pop(digest, [])
        if row < 0 or self._place_of(row) != (pack, number):
            left = [copy for copy in copies if copy != (pack, number)]
            if left:
                self._copies[digest] = left
            return
        self._residents.leave(row)
        self._residents.drop(row)
        pack.live -= 1
        for other, i in copies:
            if other.name in self._packs and not other.condemned and i not in other.dead:
                self._add(other, i, other.index[i])

    def _undo(self, removal: PackRemoval) -> None:
        for pack in removal.packs:
            pack.condemned = False
        for found in reversed(removal.objects):
            if self._residents.find(found.digest) >= 0:
                self._residents.drop(found.row)
                continue
            self._residents.enter(found.row, found.digest, found.parent)
            (pack, _), *copies = found.places
            pack.live += 1
            for other, i in found.places:
                other.dead.discard(i)
            if copies:
                self._copies[found.digest] = copies

    def _enlist(self, pack: Pack) -> None:
        while self._next_number in self._by_number:  # after 2**32 packs the numbers begin again
            self._next_number = (self._next_number + 1) % _PACKS
        pack.number = self._next_number
        self._next_number = (self._next_number + 1) % _PACKS
        self._packs[pack.name] = self._by_number[pack.number] = pack

    def _delist(self, pack: Pack) -> None:
        if self._packs.pop(pack.name, None) is pack:
            del self._by_number[pack.number]
            pack.condemned = True

    def _count(self, name: str, size: int) -> None:
        self._used += size - self._sizes.get(name, 0)
        self._sizes[name] = size

    def _discount(self, name: str) -> None:
        self._used -= self._sizes.pop(name, 0)

    def _place_of(self, row: int) -> tuple[Pack, int]:
        columns = self._residents.columns
        return self._by_number[int(columns["pack"][row])], int(columns["entry"][row])

    def _place(self, row: int) -> ObjectPlace:
        pack, number = self._place_of(row)
        return ObjectPlace(pack, number, pack.index[number])

    def _scan_entry(self, row: int) -> ScanEntry:
        pack, _, entry = self._place(row)
        meta: ObjectMeta = self._residents.valued(row, entry.meta)
        return ScanEntry(entry.key, meta, pack.stored_at)

    def _namespace_id(self, namespace: bytes) -> int:
        return self._namespace_ids.setdefault(namespace, len(self._namespace_ids))


class _Taker:
    """Objects that are taken out of a directory, to make room. See `eviction.Taker`.

    Thread safety: used only under the mutex of the directory.
    """

    def __init__(self, directory: BucketDirectory, nbytes: int, limit: int, objects: int = 0) -> None:
        self._directory = directory
        self._nbytes = nbytes
        self._limit = limit
        self._new = objects
        self._objects: list[RemovedObject] = []
        self._touched: dict[str, Pack] = {}
        self._rubbish = [*directory._rubbish] if limit else []
        self._whole: list[Pack] = []
        if limit and directory._copies:  # else each pack has the object of one of its keys
            self._whole = [p for p in directory._packs.values() if not p.live and not p.condemned]
        self._freed = sum(directory._sizes[name] for name in [*self._rubbish, *(p.name for p in self._whole)])
        for pack in self._whole:
            pack.condemned = True
        self._taken = 0

    def take(self, rows: Sequence[int]) -> None:
        """Take out these objects, all copies included."""
        directory = self._directory
        for row in rows:
            digest = directory._residents.digest(row)
            copies = [c for c in directory._copies.pop(digest, []) if c[0].name in directory._packs]
            places = [directory._place_of(row), *copies]
            self._taken += directory._residents.length[row]
            _, parent = directory._residents.leave(row)
            places[0][0].live -= 1
            for pack, number in places:
                pack.dead.add(number)
                self._touched[pack.name] = pack
                if not pack.live and not pack.condemned:
                    pack.condemned = True
                    self._whole.append(pack)
                    self._freed += pack.size
            self._objects.append(RemovedObject(row, digest, parent, places))

    def enough(self) -> bool:
        """Return whether there is room for the new objects."""
        directory = self._directory
        return (
            directory._used - self._freed + self._nbytes <= self._limit
            and directory._residents.count + self._new <= directory._limit
        )

    def full(self) -> bool:
        """Return whether much more was taken out than is needed, without a pack that is dead as a whole."""
        return self._taken > 4 * (self._nbytes + _SPREAD) + self._freed

    def removal(self) -> PackRemoval:
        """Return what was taken out."""
        dead: dict[str, set[int]] = {
            name: set() for name, pack in self._touched.items() if not pack.condemned
        }
        for found in self._objects:
            for pack, number in found.places:
                if pack.name in dead:
                    dead[pack.name].add(number)
        return PackRemoval(self._objects, self._whole, dead, self._rubbish)
