"""In-memory state of a `file` store: where objects lie, which calls use them, and which blocks are free.

Every state change of an object happens here, under one mutex, and nothing here does I/O. The table names the
methods that lead into each state and out of it. `publish` ends a claim after a successful or a failed write:

    state      entered by                             left by
    absent     finish_removal, publish (failed)       claim
    claimed    claim                                  publish
    resident   publish (successful), undo_removal     evict, sweep, take_out
    leaving    evict, sweep, take_out                 finish_removal, undo_removal, abandon

An object that is "taken out" changes from resident to leaving, and no call finds the object from then on. An
abandoned object stays unreadable, and its blocks unused, until the store is opened again.

Blocks return to the free space only when the object's record is removed from the catalog *and* the last
reader has finished (race 1). In the three races, R reads, E removes, V and W write; A and B are objects:

Race 1. (1) R pins A. (2) E takes A out and removes its record. (3) W claims B. (4) R reads A's blocks.
    If step 2 freed the blocks, W could write B into them before step 4. So `finish_removal` keeps the row in
    `_leaving`, and R's `unpin` frees it.
Race 2. (1) E takes A out. (2) W stores A again. (3) E's write of the catalog fails, and `undo_removal`
    restores A. A would then be stored twice. So A stays in `_busy` with an event until E has ended its
    removal, and W waits for this event (`Claims.waits`).
Race 3. (1) V claims A. (2) W claims B. (3) V needs B, and W needs A.
    If both waited with unpublished claims, neither would end. So a call publishes its own claims before it
    waits, and claims the remaining items after that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Event, Lock
from typing import Final

from tiercache.core import Outcome
from tiercache.events.base import ChangeNote
from tiercache.storage.base import ScanEntry
from tiercache.storage.eviction import EvictionOrder
from tiercache.storage.residents import RESIDENT, parents_first
from tiercache.storage.restorable import Admissibility, hold_new
from tiercache.storage.shares import OwnerUse, Shares, Writer
from tiercache_backends.file.claims import Claim, Claims, Pins, Removal, Removed, Shortage
from tiercache_backends.file.extents import ExtentAllocator
from tiercache_backends.file.objects import ObjectTable
from tiercache_backends.file.records import FOOTPRINT, CatalogContents, Extent, Places, Records

_FEW: Final = 8
"""If a call reads fewer objects than this, pinning them one by one is faster than using NumPy."""


class StoreState:
    """Objects, pins, claims and free blocks of a store, and the methods that change them.

    Thread safety: any thread may call. Each method holds the mutex from start to end. This takes
    microseconds, or milliseconds when many objects are evicted.
    """

    def __init__(
        self, slab_blocks: int, *, with_macs: bool, clock: Callable[[], float] | None = None
    ) -> None:
        self._mutex: Final = Lock()
        self._objects = ObjectTable(with_macs=with_macs, clock=clock)
        self._order = EvictionOrder(self._objects)
        self._writing: dict[int, Claims] = {}
        """Unpublished claims, by `id` of the `Claims`."""
        self._busy: dict[bytes, Event] = {}
        """Events by digest of objects that are being stored or removed.

        An event is set when the work ends.
        """
        self._leaving: dict[int, Removed] = {}
        """Removed objects that a reader still has pinned, by row. They have no catalog record any more."""
        self._allocator = ExtentAllocator(slab_blocks)
        self._abandoned = 0
        """Number of blocks that stay unused until the store is opened again."""
        self._counts = {
            "corrupt": 0,
            "evicted": 0,
            "not_worth": 0,
            "refused_absent_parent": 0,
            "refused_impossible": 0,
        }

    def load(self, sound: CatalogContents, slabs: Sequence[Extent], gaps: Sequence[Extent]) -> None:
        """Take the sound records of a catalog, and the free blocks of the slabs (see `sound_records`)."""
        self._objects.load_catalog(sound)
        self._allocator.size += sum(slab.blocks for slab in slabs)
        self._allocator.give(gaps)

    def present(self, digests: Sequence[bytes]) -> list[bool]:
        """Return, for each digest, whether the object can be read."""
        with self._mutex:
            return [row >= 0 for row in self._objects.find_many(digests)]

    def numbers(self, digests: Sequence[bytes]) -> list[int]:
        """Return the number of each object's catalog record; 0 where the object cannot be read.

        This does not count as a use of the objects.
        """
        with self._mutex:
            return [self._objects.number[row] if row >= 0 else 0 for row in self._objects.find_many(digests)]

    def pin(self, digests: Sequence[bytes], *, is_use: bool = True) -> Pins:
        """Hold the blocks of these objects until `unpin`; record a use of each if `is_use`.

        Objects that cannot be read are left out.
        """
        objects = self._objects
        columns = objects.columns
        with self._mutex:
            if len(digests) < _FEW:
                return self._pin_few(digests, is_use=is_use)
            found = objects.rows_of_all(digests)
            [items] = (found >= 0).nonzero()
            if is_use:
                objects.read(found[items])
            items = items[columns["start"][found[items]].argsort()]
            rows = found[items]
            pins = Pins(
                items.tolist(),
                rows.tolist(),
                columns["length"][rows].tolist(),
                objects.places(rows),
                *objects.checksums(rows),
                (columns["hits"][rows] > is_use).tolist(),
            )
            for row in pins.rows:
                objects.pins[row] += 1
        return pins

    def unpin(self, pins: Pins) -> None:
        """Undo one pin of each object."""
        with self._mutex:
            for row in pins.rows:
                self._objects.pins[row] -= 1
                if row in self._leaving:
                    self._free_row(row)

    def require_states(self, namespace_id: int) -> None:
        """Note that a restore in the namespace with this id needs a state."""
        with self._mutex:
            self._objects.pages.require_states(namespace_id)

    def claim(
        self,
        batch: Sequence[Claim],
        limit: int,
        missing: Iterable[bytes] = (),
        most_blocks: int = sys.maxsize,
    ) -> Claims:
        """Sort a batch: claim some objects for writing, and leave the others for `Claims.later`.

        At most `limit` objects are claimed, with at most `most_blocks` blocks or a single object.

        No restore can use a page without its parent. So a page is THROTTLED if its parent is not stored, not
        being written and not in the batch. The objects that depend on a throttled page are THROTTLED too. An
        item that contradicts stored objects is an ERROR.

        `missing`: keys of pages that earlier rounds of the same set have failed to store.
        """
        claims = Claims(missing=set(missing))
        later: set[bytes] = set()
        ordered = [batch[i] for i in parents_first([(one.page, one.parent_page) for one in batch])]
        with self._mutex:
            left, too_large = most_blocks, sum([one.blocks for one in batch]) > most_blocks
            if too_large or not self._claim_new(ordered, limit, claims):
                rows = self._objects.find_many([one.digest for one in ordered])
                for one, row in zip(ordered, rows, strict=True):
                    if row >= 0:
                        self._objects.renew(row)
                        self._objects.hint(row, one.value, one.worker)
                        claims.hits.append(one.index)
                        self._hold(one.page, claims)
                    # Leave the item for later in three cases: (1) this object is being stored or removed. (2)
                    # The batch has enough claims. (3) The parent was left for later.
                    elif (
                        one.digest in self._busy
                        or len(claims.fresh) == limit
                        or (claims.fresh and one.blocks > left)
                        or one.parent_page in later
                    ):
                        claims.later.append(one.index)
                        if one.is_page:
                            later.add(one.page)
                        if (event := self._busy.get(one.digest)) not in (None, claims.done):
                            claims.waits.add(event)
                    else:
                        self._claim(one, claims)
                        left -= one.blocks
            if claims.fresh:
                self._writing[id(claims)] = claims
        return claims

    def advise(self, digests: Sequence[bytes], values: Sequence[float], worker: int) -> None:
        """Take values for these objects from `worker`; see `StorageBackend.advise`."""
        with self._mutex:
            self._objects.advise(digests, values, worker)

    def watch(self, note: ChangeNote | None) -> None:
        """Call `note` for objects that can be read from now on, or no longer; see `StorageBackend.watch`."""
        with self._mutex:
            self._objects.note = note

    def valued(self, entries: Sequence[ScanEntry | None]) -> list[ScanEntry | None]:
        """Return the entries with the present values of their objects."""
        with self._mutex:
            if not self._objects.pages.hinted:
                return list(entries)
            rows = self._objects.find_many([b"" if entry is None else entry.key.digest for entry in entries])
            return [
                entry
                if entry is None or row < 0
                else entry._replace(meta=self._objects.valued(row, entry.meta))
                for entry, row in zip(entries, rows, strict=True)
            ]

    def share(self, shares: Shares, name_of: Callable[[int], bytes]) -> None:
        """Keep these shares; `name_of` gives the namespace with an id. See `StorageBackend.share`."""
        with self._mutex:
            self._objects.share(shares, name_of)
            for claims in self._writing.values():
                for claim in claims.fresh:
                    if claim.extents or claim.is_charged:
                        self._charge(claim)
            self._order.restart()

    def owners(self) -> dict[str, OwnerUse]:
        """Return what each owner has; empty before `share`."""
        with self._mutex:
            return self._objects.owners.use()

    @property
    def is_shared(self) -> bool:
        """Whether shares were given."""
        return self._objects.owners.active

    def by_owner(self, claims: Sequence[Claim]) -> list[list[Claim]]:
        """Return the claims in one list for each owner."""
        with self._mutex:
            owners = self._objects.owners
            if not owners.active:
                return [list(claims)]
            groups: dict[int, list[Claim]] = {}
            for claim in claims:
                groups.setdefault(owners.of(claim.namespace_id), []).append(claim)
            return list(groups.values())

    def reserve(self, claims: Sequence[Claim], room: int) -> Shortage:
        """Reserve quota and blocks for one owner's claims, in order, as far as they reach; return what lacks.

        `room`: number of records that fit into the catalog; the claims beyond get nothing. A claim keeps what
        it got in an earlier call. A claim that is larger than the whole quota gets nothing, and nothing lacks
        for it, because no eviction makes room for it.
        """
        some, nbytes = claims[: max(0, room)], 0
        with self._mutex:
            owners = self._objects.owners
            if owners.active and some:
                owner = owners.of(some[0].namespace_id)
                for claim in some:
                    if claim.is_charged or claim.taken > owners.quotas[owner]:
                        continue
                    if nbytes or claim.taken > owners.room(owner):
                        nbytes += claim.taken
                    else:
                        self._charge(claim)
                nbytes = int(nbytes - owners.room(owner)) if nbytes else 0
            without = [c for c in some if not c.extents and (c.is_charged or not owners.active)]
            for claim, extents in zip(
                without, self._allocator.allocate_all([claim.blocks for claim in without]), strict=True
            ):
                claim.extents = extents
            blocks = sum(claim.blocks for claim in without if not claim.extents) - self._allocator.free
        return Shortage(max(0, blocks), len(claims) - len(some), nbytes)

    def count_for_quota(self, claims: Sequence[Claim], *, evicted: int = 0, throttled: int = 0) -> None:
        """Count objects of the owner of these claims that were evicted or THROTTLED because of its quota."""
        with self._mutex:
            owners = self._objects.owners
            owner = owners.of(claims[0].namespace_id)
            owners.evicted[owner] += evicted
            owners.throttled[owner] += throttled

    def evict_beyond(self, max_objects: int) -> Removal:
        """Take out objects of an owner that has more than its quota; counts them."""
        removal = Removal()
        with self._mutex:
            owners = self._objects.owners
            for owner in owners.beyond():
                taker = _Evicting(self, removal, 0, 0, max_objects, -owners.room(owner))
                self._order.evict(taker, self._write_parents(), writer=Writer(owner, for_quota=True))
                if removal.objects:
                    owners.evicted[owner] += len(removal.objects)
                    break
        return removal

    def not_worth(self, claims: Sequence[Claim], *, for_quota: bool = False) -> list[Claim]:
        """Return the claims whose objects have values below those of all objects that can be evicted.

        `for_quota`: only those of the claims' owner can be.
        """
        with self._mutex:
            writer = self._writer(claims, for_quota=for_quota)
            ranks = [(claim, self._rank(claim)) for claim in claims]
            return [
                claim for claim, rank in ranks if rank is not None and not self._order.is_worth(rank, writer)
            ]

    def release_nodes(self, nodes: Iterable[int]) -> None:
        """Release nodes (rows of the page table) that a call held; their objects may be evicted now."""
        with self._mutex:
            for node in nodes:
                self._objects.pages.release(node)

    def publish(self, claims: Claims, stored: Sequence[Claim], records: Records) -> None:
        """End a batch: the objects of the claims `stored` become resident, as their records describe them.

        The blocks of all other claims are freed.
        """
        objects = self._objects
        with self._mutex:
            objects.pages.expected_all([claim.node for claim in claims.fresh if claim.is_page])
            for claim in claims.fresh:
                del self._busy[claim.digest]
                if claim.is_charged:  # what is stored counts as `used` instead
                    objects.owners.extra[objects.owners.of(claim.namespace_id)] -= claim.taken
            rows = objects.store(
                records,
                [claim.digest for claim in stored],
                [claim.node for claim in stored],
                [claim.parent for claim in stored],
                {i: claim.extents[1:] for i, claim in enumerate(stored) if len(claim.extents) > 1},
            )
            objects.hint_all(rows, [claim.value for claim in stored], [claim.worker for claim in stored])
            if len(stored) < len(claims.fresh):
                kept = {claim.index for claim in stored}
                for claim in claims.fresh:
                    if claim.index not in kept:
                        self._allocator.give(claim.extents)
                        # The write failed. Without this page, no restore could use the pages that follow it.
                        if claim.is_page:
                            claims.missing.add(claim.page)
                            objects.pages.refuse([claim.page])
            self._writing.pop(id(claims), None)
        claims.done.set()

    def shortage(self, budget_blocks: int | None, share: int, most: int = sys.maxsize) -> int:
        """Return how many blocks must be freed so that 1/`share` of all blocks, or `most`, is available.

        Available blocks are free or can still be preallocated. A result of 0 or less means that enough are
        available. `budget_blocks`: maximum number of blocks of all slabs; None if the slabs cannot grow.
        """
        with self._mutex:
            size = self._allocator.size if budget_blocks is None else budget_blocks
            # result = wanted free blocks - free blocks - blocks that can still be preallocated
            wanted = min(size // share, most)
            return wanted - self._allocator.free - max(0, size - self._allocator.size)

    def evict(self, lack: Shortage, max_objects: int, claims: Sequence[Claim] = ()) -> Removal:
        """Take out objects in eviction order until what lacks is taken out.

        Stops earlier after `max_objects` objects, or when nothing is left to evict.

        `claims`: the writes that need the room. They are promising if a restore can use at least one of the
        new objects as soon as this object is stored. Unpromising writes may evict less, and writes of low
        value too (see `EvictionOrder.evict`). They all have one owner, if the store has shares. While its
        quota lacks bytes, only its own objects are taken out.
        """
        removal, residents = Removal(), self._objects
        for_quota = lack.nbytes > 0
        blocks, objects = (0, 0) if for_quota else lack[:2]
        with self._mutex:
            promising = any(
                residents.pages.is_promising(c.node, c.namespace_id, attached=not c.is_page) for c in claims
            )
            taker = _Evicting(self, removal, blocks, objects, max_objects, lack.nbytes)
            # Only the units that are worth less than every one of the new objects make room for all of them.
            ranks = [rank for claim in claims if (rank := self._rank(claim)) is not None]
            lowest = min(ranks, default=None)
            self._order.evict(
                taker,
                self._write_parents(),
                promising=promising,
                rank=lowest,
                writer=self._writer(claims, for_quota=for_quota),
            )
        return removal

    def coldest(self, nbytes: int) -> list[int]:
        """Return the record numbers of the objects that are evicted next (see `StorageBackend.coldest`)."""
        with self._mutex:
            survey = self._order.survey()
        found = survey.coldest(nbytes)
        with self._mutex:
            rows = self._objects.still_there(*found)
            numbers: list[int] = self._objects.columns["number"][rows].tolist()
        return numbers

    def sweep(self, max_objects: int) -> Removal:
        """Take out at most `max_objects` objects that the last eviction made useless and left in place."""
        removal = Removal()
        with self._mutex:
            if self._order.unfinished:
                self._order.sweep(_Evicting(self, removal, 0, 0, max_objects))
        return removal

    def take_out(self, digests: Iterable[bytes]) -> Removal:
        """Take out the resident objects among these digests."""
        removal = Removal()
        with self._mutex:
            for digest in dict.fromkeys(digests):
                row = self._objects.find(digest)
                if row >= 0:
                    self._leave(removal, row)
        return removal

    def take_out_damaged(self, pins: Pins, positions: Iterable[int], *, keep_blocks: bool) -> Removal:
        """Take out the damaged ones of pinned objects; skip those that are taken out already.

        `keep_blocks`: see `Removed`.
        """
        removal = Removal()
        with self._mutex:
            for row in map(pins.rows.__getitem__, positions):
                if self._objects.state[row] == RESIDENT:
                    self._leave(removal, row, keep_blocks=keep_blocks)
        return removal

    def finish_removal(self, removal: Removal) -> None:
        """Free the blocks of a removal: now, or when the last reader unpins them.

        Call this after the records were removed from the catalog.
        """
        with self._mutex:
            for removed in removal.objects:
                self._leaving[removed.row] = removed
                del self._busy[removed.digest]
                self._objects.pins[removed.row] -= 1  # the pin that `_leave` took
                self._free_row(removed.row)
        removal.done.set()

    def undo_removal(self, removal: Removal) -> None:
        """Make the objects of a removal resident again, because their records could not be removed."""
        with self._mutex:
            # An eviction takes out a page after the pages that follow it. In reverse order, each page is
            # restored before the pages that follow it.
            for removed in reversed(removal.objects):
                del self._busy[removed.digest]
                self._objects.pins[removed.row] -= 1
                self._objects.enter(removed.row, removed.digest, removed.parent)
        removal.done.set()

    def abandon(self, removal: Removal) -> None:
        """End a removal whose records could not be removed, and leave its objects unreadable.

        Their blocks cannot be used until the store is opened again.
        """
        with self._mutex:
            for removed in removal.objects:
                del self._busy[removed.digest]
                self._abandoned += self._objects.blocks(removed.row)
        removal.done.set()

    def grow(self, extent: Extent) -> None:
        """Add a slab's new blocks to the free space."""
        with self._mutex:
            self._allocator.grow(extent)

    def abandon_blocks(self, extents: Iterable[Extent]) -> None:
        """Leave blocks of a failed write unused until the store is opened again."""
        with self._mutex:
            self._abandoned += sum(extent.blocks for extent in extents)

    def count(self, name: str, n: int) -> None:
        """Add `n` to the counter of this name."""
        with self._mutex:
            self._counts[name] = self._counts.get(name, 0) + n

    def figures(self) -> dict[str, int]:
        """Return the figures for `usage`: counts of objects, bytes and blocks, `Worth`, and all counters."""
        with self._mutex:
            return {
                "objects": self._objects.count,
                "payload_bytes": self._objects.payload,
                "blocks_used": self._allocator.size - self._allocator.free,
                "blocks_free": self._allocator.free,
                "blocks_stranded": self._abandoned,
                "memory_bytes": self._objects.memory_bytes(),
                **self._objects.pages.worth()._asdict(),
                **self._counts,
            }

    def _pin_few(self, digests: Sequence[bytes], *, is_use: bool) -> Pins:
        """Do the same as `pin`, one object after another."""
        objects = self._objects
        found = [(row, item) for item, row in enumerate(objects.find_many(digests)) if row >= 0]
        for row, _ in found:
            objects.pins[row] += 1
            if is_use:
                objects.hits[row] = min(objects.hits[row] + 1, 2**32 - 1)
                objects.touch(row)
        found.sort(key=lambda pair: objects.start[pair[0]])
        rows = [row for row, _ in found]
        return Pins(
            [item for _, item in found],
            rows,
            [objects.length[row] for row in rows],
            Places.of([objects.extents(row) for row in rows]),
            *objects.checksums(rows),
            [objects.hits[row] > is_use for row in rows],
        )

    def _charge(self, claim: Claim) -> None:
        owners = self._objects.owners
        owners.extra[owners.of(claim.namespace_id)] += claim.taken
        claim.is_charged = True

    def _writer(self, claims: Sequence[Claim], *, for_quota: bool) -> Writer | None:
        owners = self._objects.owners
        if not owners.active or not claims:
            return None
        uncharged = sum(claim.taken for claim in claims if not claim.is_charged)
        return Writer(owners.of(claims[0].namespace_id), uncharged, for_quota)

    def _rank(self, claim: Claim) -> float | None:
        """Return the rank of an object to write; None if it has no value."""
        value = claim.value
        return None if value is None else self._objects.rank(value)

    def _write_parents(self) -> Iterator[int]:
        """Yield the nodes of the parents of all objects that calls are writing now."""
        for claims in self._writing.values():
            for claim in claims.fresh:
                if claim.parent is not None:
                    yield claim.parent

    def _claim_new(self, batch: list[Claim], limit: int, claims: Claims) -> bool:
        """Claim a batch of which all is new, in columns; return False, with nothing changed, if it is not.

        This does the same as the loop in `claim`, several times as fast.
        """
        pages, busy = self._objects.pages, self._busy
        if not _FEW <= len(batch) <= limit or self._objects.find(batch[0].digest) >= 0:
            return False
        digests = [one.digest for one in batch]
        namespace_id = batch[0].namespace_id
        if not all(one.is_page and one.namespace_id == namespace_id for one in batch) or not (
            busy.keys().isdisjoint(digests)
        ):
            return False
        held = hold_new(
            pages,
            [one.page for one in batch],
            [one.parent_page for one in batch],
            [one.depth for one in batch],
            namespace_id,
        )
        if held is None:
            return False
        for one in batch:
            one.node = held[one.page]
            if one.parent_page is not None:
                one.parent = held[one.parent_page]
        claims.held, claims.fresh = held, batch
        busy.update(dict.fromkeys(digests, claims.done))
        return True

    def _claim(self, one: Claim, claims: Claims) -> None:
        """Add an item to `claims.fresh`, or to `claims.refused` if its object must not be stored."""
        pages, page = self._objects.pages, one.page
        parent = None if one.parent_page is None else self._hold(one.parent_page, claims)
        node = self._hold(page, claims)
        admissibility = pages.admissibility(
            node, parent, one.depth, one.namespace_id, refused=page in claims.missing
        )
        if admissibility is not Admissibility.FINE:
            claims.refused[one.index] = (
                Outcome.ERROR if admissibility is Admissibility.IMPOSSIBLE else Outcome.THROTTLED
            )
            self._counts[f"refused_{admissibility.value}"] += 1
            if one.is_page:
                claims.missing.add(page)
                pages.refuse([page])
            return
        self._busy[one.digest] = claims.done
        if one.is_page:
            pages.expect(node, one.depth, one.namespace_id)
        one.node, one.parent = node, parent
        claims.fresh.append(one)

    def _hold(self, page: bytes, claims: Claims) -> int:
        """Return the node of a page. The call with these claims holds the node until `release_nodes`."""
        node = claims.held.get(page)
        if node is None:
            node = claims.held[page] = self._objects.pages.hold(page)
        return node

    def _leave(self, removal: Removal, row: int, *, keep_blocks: bool = False) -> None:
        """Take out the object in a row and add it to the removal."""
        number = self._objects.number[row]
        digest, parent = self._objects.leave(row)
        # The object stays busy until the removal has ended (race 2 at the top). Without the extra pin, a
        # reader's `unpin` could free the blocks before the record is removed (race 1).
        self._busy[digest] = removal.done
        self._objects.pins[row] += 1
        removal.objects.append(Removed(row, number, digest, parent, keep_blocks))

    def _free_row(self, row: int) -> None:
        """Free the row and the blocks of an object that was taken out, unless a reader has it pinned."""
        if self._objects.pins[row]:
            return
        removed = self._leaving.pop(row)
        extents = self._objects.extents(row)
        self._objects.drop(row)
        if removed.keep_blocks:
            self._abandoned += sum(extent.blocks for extent in extents)
        else:
            self._allocator.give(extents)


class _Evicting:
    """Receiver of the objects that one eviction takes out (see `eviction.Taker`).

    The eviction needs `blocks` blocks, `objects` objects and `nbytes` bytes, and may take out
    `max_objects` objects.

    Thread safety: used only under the state's mutex.
    """

    def __init__(
        self,
        state: StoreState,
        removal: Removal,
        blocks: int,
        objects: int,
        max_objects: int,
        nbytes: float = 0,
    ) -> None:
        self._state = state
        self._removal = removal
        self._blocks = blocks
        self._objects = objects
        self._max_objects = max_objects
        self._nbytes = nbytes
        self._gained = 0

    def take(self, rows: list[int]) -> None:
        """Take out the objects in these rows."""
        for row in rows:
            self._gained += self._state._objects.blocks(row)
            self._nbytes -= FOOTPRINT.of(self._state._objects.length[row])
            self._state._leave(self._removal, row)

    def enough(self) -> bool:
        """Return whether the wanted blocks, objects and bytes have been taken out."""
        return (
            self._gained >= self._blocks and len(self._removal.objects) >= self._objects and self._nbytes <= 0
        )

    def full(self) -> bool:
        """Return whether as many objects were taken out as one write of the catalog may remove."""
        return len(self._removal.objects) >= self._max_objects
