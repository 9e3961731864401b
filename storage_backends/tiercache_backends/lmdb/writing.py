"""Sets: a batch goes into the store in small transactions, which make room first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from tiercache.core import Outcome
from tiercache.storage.base import SetItem, checksum_of
from tiercache.storage.checksum import Seal, Sealed
from tiercache.storage.residents import Standing, parents_first
from tiercache_backends.lmdb.budget import Budget
from tiercache_backends.lmdb.chores import Chores, Done
from tiercache_backends.lmdb.disk import Disk
from tiercache_backends.lmdb.environment import Environment, MapFullError
from tiercache_backends.lmdb.ledger import Ledger
from tiercache_backends.lmdb.mirror import Eviction, Mirror
from tiercache_backends.lmdb.payload import PART_PAGES, pages_for
from tiercache_backends.lmdb.records import HALF
from tiercache_backends.lmdb.tally import Tally
from tiercache_backends.local.failures import DamagedError, is_full

_SHORTER_PART_PAGES: Final = 4
_SINGLE_PAGES: Final = 1
"""Pages of a piece where long runs cannot be found: a single one is always found where any is free."""
_MOST_OBJECTS: Final = 256
"""Objects of one transaction."""
_MOST_DAMAGED: Final = 4096
_WARY: Final = 32
"""Transactions that begin with the short pieces that the last one needed, before longer ones are tried again."""


T = TypeVar("T")


class Wish(NamedTuple):
    """One object that is to be stored. `page`: the key of the page that it is, or `hangs` on."""

    place: bytes
    item: SetItem
    sealed: Sealed
    pages: int
    page: bytes
    hangs: bool


class Room(NamedTuple):
    """How a transaction may use the file: pages in use at most, pages of a piece, objects to evict at most.

    `patient`: store only what earlier transactions made room for.
    """

    limit: int
    part_pages: int
    evictions: int
    patient: bool


class Attempt(NamedTuple):
    """What a transaction did. `outcomes` None: it only evicted, and another must follow."""

    done: Done
    outcomes: Mapping[bytes, Outcome] | None
    used: int


class Batch:
    """The pages of one call's objects and those that they follow, which stay; and what became of those that were missing.

    Thread safety: the thread of the call.
    """

    def __init__(self, places: Sequence[bytes], items: Iterable[SetItem]) -> None:
        # What comes first in a batch begins a sequence, and what comes last is worth nothing without it: it never evicts its own.
        self.held: Final = list({*(place[:HALF] for place in places), *(item.meta.parent for item in items if item.meta.parent)})
        self.outcomes: dict[bytes, Outcome] = {}
        self.missing: set[bytes] = set()
        """Pages that came along and were not stored."""


class _BehindError(Exception):
    """The mirror must be read before this transaction can evict; it is undone."""


class Writer:
    """Stores batches.

    Thread safety: any thread may call; the environment lets one transaction through at a time.
    """

    def __init__(self, environment: Environment, mirror: Mirror, disk: Disk, seal: Seal, chores: Chores, tally: Tally) -> None:
        self._environment = environment
        self._mirror = mirror
        self._disk = disk
        self._seal = seal
        self._chores = chores
        self._tally = tally
        self._used = 0
        self._scarce, self._wary = PART_PAGES, 0
        self._damaged: set[bytes] = set()
        """Objects that cannot be evicted, because they lie on a damaged page."""

    def store(self, items: Mapping[bytes, SetItem], places: Sequence[bytes]) -> dict[bytes, Outcome]:
        """Store what is missing of a batch that has `places`; says by place how it went."""
        batch = Batch(places, items.values())
        self._mirror.note((place for place in places if place not in items), brought=True)
        missing = list(items)
        ordered = (missing[i] for i in parents_first([(place[:HALF], items[place].meta.parent) for place in missing]))
        for chunk in self._chunks(self._wish(place, items[place]) for place in ordered):
            self._store(chunk, batch)
        while self._mirror.unfinished and self._sweep():
            pass
        return batch.outcomes

    def _sweep(self) -> bool:
        """Give up a part of what is left of a conversation that was more than one transaction could take; False where that fails."""

        def work(txn: Any) -> int:
            if not self._mirror.keep_up(txn):
                return 0
            ledger, eviction = Ledger(self._environment, txn), Eviction(0, self._disk.budget().changes, self._damaged)
            self._mirror.sweep(ledger, eviction)
            ledger.facts = ledger.facts._replace(evicted=ledger.facts.evicted + eviction.objects)
            ledger.save()
            return eviction.objects

        try:
            return self._written(work) > 0
        except OSError as error:
            self._tally.failed("an eviction", error)
            return False

    def _wish(self, place: bytes, item: SetItem) -> Wish:
        length = item.meta.length
        # Checksum and MAC are passes over the payload, so they are made before anybody waits for our transaction.
        sealed = Sealed(checksum_of(item), self._seal.stamp(item.key, item.buffers, length))
        page = place[:HALF]
        return Wish(place, item, sealed, pages_for(length, self._environment.page_bytes), page, item.meta.parent == page)

    def _chunks(self, wishes: Iterable[Wish], budget: Budget | None = None) -> Iterator[list[Wish]]:
        """Cut a batch into transactions: long ones where much is free, short ones where the file is nearly full."""
        chunk: list[Wish] = []
        room = 0
        for wish in wishes:
            now = budget or self._disk.budget()
            if chunk and (now.cost(wish.pages) > room or len(chunk) == _MOST_OBJECTS):
                yield chunk
                chunk = []
            if not chunk:
                room = now.burst(self._used)
            chunk.append(wish)
            room -= now.cost(wish.pages)
        if chunk:
            yield chunk

    def _store(self, chunk: Sequence[Wish], batch: Batch) -> None:
        try:
            self._store_around(chunk, batch)
        except OSError as error:
            left = (wish.place for wish in chunk if wish.place not in batch.outcomes)
            batch.outcomes.update(dict.fromkeys(left, self._tally.failed("a set", error)))

    def _store_around(self, chunk: Sequence[Wish], batch: Batch) -> None:
        """Store a chunk; where a damaged page is in the way of it, what does not need that page."""
        known = -1
        while True:
            try:
                self._store_now(chunk, batch)
                return
            except DamagedError as error:
                damage = error
            if known == len(self._damaged) or known >= _MOST_DAMAGED:
                break
            known = len(self._damaged)
            self._chores.sift()
        if len(chunk) == 1:
            raise damage
        middle = len(chunk) // 2
        for half in (chunk[:middle], chunk[middle:]):
            self._store(half, batch)

    def _store_now(self, chunk: Sequence[Wish], batch: Batch) -> None:
        if self._disk.is_short():
            self._replace(chunk, batch)
        else:
            self._grow(chunk, batch)

    def _grow(self, chunk: Sequence[Wish], batch: Batch) -> None:
        """Store a chunk in all of the map, or, where the disk is full, in what it has of the file."""
        try:
            self._climb(chunk, batch, self._disk.whole)
        except OSError as error:
            if not is_full(error):
                raise
            self._disk.refused()
            self._squeeze(chunk, batch)

    def _replace(self, chunk: Sequence[Wish], batch: Batch) -> None:
        """Store a chunk in what the disk has of the file; where nothing of it fits there, see whether there is more now."""
        self._squeeze(chunk, batch)
        throttled = [wish for wish in chunk if batch.outcomes[wish.place] is Outcome.THROTTLED]
        if len(throttled) == len(chunk):
            self._disk.lift()
            self._grow(chunk, batch)

    def _squeeze(self, chunk: Sequence[Wish], batch: Batch) -> None:
        for small in self._chunks(chunk, self._disk.budget()):
            try:
                self._climb(small, batch, self._disk.budget())
            except OSError as error:
                if not is_full(error):
                    raise
                # An eviction changes pages as well: the less at once, the sooner it finds what it needs.
                room = Room(self._disk.refused().limit, _SINGLE_PAGES, evictions=1, patient=True)
                self._transact(small, batch, room)

    def _climb(self, chunk: Sequence[Wish], batch: Batch, budget: Budget) -> None:
        """Store a chunk, with one room after the other while LMDB finds no free pages."""
        large = sum(budget.cost(wish.pages) for wish in chunk) > budget.burst(self._used)
        for room in self._rooms(budget, large):
            try:
                self._transact(chunk, batch, room)
                self._went(room)
                return
            except MapFullError:
                self._environment.clear_readers()
                if self._environment.lagging():
                    # Evicting more helps where the free pages are scattered. Where a reader keeps them from being used it only costs.
                    self._turn()
                    self._transact(chunk, batch, room._replace(part_pages=_SHORTER_PART_PAGES, patient=True))
                    return
                self._turn()
        if len(chunk) > 1:
            for wish in chunk:
                self._climb([wish], batch, budget)
            return
        self._lower(chunk, batch, budget)

    def _lower(self, chunk: Sequence[Wish], batch: Batch, budget: Budget) -> None:
        """Store a chunk with more pages free than the arithmetic asks for."""
        *limits, last = (Room(limit, _SINGLE_PAGES, budget.changes, patient=True) for limit in budget.lower_limits)
        for room in limits:
            try:
                self._transact(chunk, batch, room)
                return
            except MapFullError:
                self._turn()
        self._transact(chunk, batch, last)

    def _rooms(self, budget: Budget, large: bool) -> list[Room]:
        if self._disk.is_short():  # a run that is not found would make the file grow
            return [Room(budget.limit, _SINGLE_PAGES, budget.changes, patient=True)]
        self._wary -= 1
        usual = self._scarce if self._wary > 0 else PART_PAGES
        shorter = [pages for pages in (PART_PAGES, _SHORTER_PART_PAGES, _SINGLE_PAGES) if pages <= usual]
        # Twice with the first: what the last transaction gave up may have been all that was missing.
        first = Room(budget.limit, usual, budget.changes, patient=large)
        return [first, *(first._replace(part_pages=pages, patient=True) for pages in shorter)]

    def _went(self, room: Room) -> None:
        """A room was enough; where it was one of short pieces the next transactions begin with them."""
        if self._wary <= 0 and room.part_pages < PART_PAGES:
            self._scarce, self._wary = room.part_pages, _WARY

    def _transact(self, chunk: Sequence[Wish], batch: Batch, room: Room) -> None:
        while True:
            try:
                attempt = self._written(lambda txn: self._attempt(txn, chunk, batch, room))
            except _BehindError:
                self._mirror.read()
                continue
            self._chores.settled(attempt.done)
            self._used = attempt.used
            self._disk.keep_reserve()
            if attempt.outcomes is not None:
                batch.outcomes.update(attempt.outcomes)
                pages = (wish for wish in chunk if not wish.hangs)
                batch.missing.update(wish.page for wish in pages if attempt.outcomes[wish.place] in (Outcome.THROTTLED, Outcome.ERROR))
                return
            if room.patient:
                self._turn()

    def _written(self, work: Callable[[Any], T]) -> T:
        """Do `work`, which may evict, in a write transaction; the mirror follows it, or stays as it was."""
        with self._mirror.lock:
            try:
                result = self._environment.write(work)
            except BaseException:
                self._mirror.undone()
                raise
            self._mirror.settled()
            return result

    def _turn(self) -> None:
        """Let a transaction pass: what one gave up can be used by the next but one."""
        self._environment.write(lambda txn: Ledger(self._environment, txn).save())

    def _attempt(self, txn: Any, chunk: Sequence[Wish], batch: Batch, room: Room) -> Attempt:
        """One transaction: evict for a chunk, and store it if there is room then."""
        if self._mirror.is_read and not self._mirror.keep_up(txn):
            raise _BehindError
        ledger = Ledger(self._environment, txn)
        done = self._chores.do(ledger)
        missing = [wish for wish in chunk if not self._is_there(ledger, wish)]
        refused = self._refused(ledger, missing, batch)
        needs = {wish.place: self._pages(wish, room) for wish in missing if wish.place not in refused}
        fitting = [wish for wish in missing if needs.get(wish.place, room.limit + 1) <= room.limit]
        outcomes: dict[bytes, Outcome] | None = None
        if self._make_room(ledger, fitting, sum(needs[wish.place] for wish in fitting), batch, room):
            outcomes = dict.fromkeys((wish.place for wish in chunk), Outcome.HIT)
            outcomes |= dict.fromkeys(needs, Outcome.THROTTLED)
            outcomes |= refused
            outcomes |= dict.fromkeys(self._add(ledger, fitting, needs, room), Outcome.STORED)
        ledger.save()
        return Attempt(done, outcomes, ledger.used_pages())

    def _add(self, ledger: Ledger, fitting: Sequence[Wish], needs: Mapping[bytes, int], room: Room) -> Iterator[bytes]:
        """Store what fits, but for what would follow something that does not; yields the places."""
        used = ledger.used_pages()
        left: set[bytes] = {wish.page for wish in fitting if not wish.hangs}
        for wish in fitting:
            if used + needs[wish.place] <= room.limit and wish.item.meta.parent not in left:
                used += needs[wish.place]
                ledger.add(wish.item, wish.place, wish.sealed, room.part_pages)
                left.discard(wish.page)
                yield wish.place

    def _refused(self, ledger: Ledger, wishes: Sequence[Wish], batch: Batch) -> dict[bytes, Outcome]:
        """What can never be read where it would be stored (THROTTLED), or contradicts what is stored (ERROR). Parents come first."""
        refused: dict[bytes, Outcome] = {}
        coming: dict[bytes, SetItem] = {}
        lost: set[bytes] = set()
        for wish in wishes:
            standing = self._standing(ledger, wish, coming)
            if standing is Standing.FINE and wish.hangs and (wish.page in lost or wish.page in batch.missing):
                standing = Standing.ABSENT_PARENT
            if standing is not Standing.FINE:
                if not wish.hangs:
                    lost.add(wish.page)
                refused[wish.place] = Outcome.ERROR if standing is Standing.IMPOSSIBLE else Outcome.THROTTLED
                self._tally.count(f"refused_{standing.value}")
            elif not wish.hangs:
                coming[wish.page] = wish.item
        return refused

    def _standing(self, ledger: Ledger, wish: Wish, coming: Mapping[bytes, SetItem]) -> Standing:
        """See `Residents.standing`: the same, asked of the database, of objects that have the same layout."""
        meta, parent = wish.item.meta, None if wish.hangs else wish.item.meta.parent
        known = self._mirror.depth(wish.page) if self._mirror.is_read else 0
        if meta.depth and known and meta.depth != known:
            return Standing.IMPOSSIBLE
        if parent is None:
            return Standing.FINE
        before = parent + wish.place[HALF:]
        beside = coming.get(parent)
        if beside is not None and beside.meta.namespace == meta.namespace:
            depth = beside.meta.depth
        elif (above := ledger.find(before)) is not None and above.namespace == ledger.namespace_id(meta.namespace):
            depth = above.depth
        else:
            return Standing.ABSENT_PARENT
        if meta.depth and depth and meta.depth != depth + 1:
            return Standing.IMPOSSIBLE
        if ledger.dependents(wish.page) and ledger.follows(before, wish.place):
            return Standing.IMPOSSIBLE
        return Standing.FINE

    def _pages(self, wish: Wish, room: Room) -> int:
        if room.part_pages == PART_PAGES:
            return wish.pages
        return pages_for(wish.item.meta.length, self._environment.page_bytes, room.part_pages)

    def _is_there(self, ledger: Ledger, wish: Wish) -> bool:
        """Did another process, or another thread, store the object meanwhile? A damaged one makes way."""
        record = ledger.find(wish.place)
        if record is None:
            return False
        if self._chores.is_spoiled(wish.place, record.number):
            ledger.remove(wish.place, record)
            return False
        ledger.touch(wish.place)
        return True

    def _make_room(self, ledger: Ledger, fresh: Sequence[Wish], pages: int, batch: Batch, room: Room) -> bool:
        """Evict for what is to be stored. False where another transaction must evict more, or store it."""
        target = room.limit - pages
        if ledger.used_pages() <= target:
            return True
        if not self._mirror.is_read:
            raise _BehindError
        eviction = Eviction(target - self._disk.whole.slack, room.evictions, self._damaged)
        promising = {self._is_promising(ledger, wish, fresh) for wish in fresh}
        self._mirror.evict(ledger, eviction, batch.held, promising=True in promising)
        ledger.facts = ledger.facts._replace(evicted=ledger.facts.evicted + eviction.objects)
        if room.patient and eviction.objects:
            return False
        return eviction.objects < eviction.most or ledger.used_pages() <= target

    def _is_promising(self, ledger: Ledger, wish: Wish, fresh: Sequence[Wish]) -> bool:
        namespace = wish.item.meta.namespace
        space = ledger.namespace_id(namespace)
        if ledger.has_states(namespace):
            self._mirror.require_states(space)
        if wish.hangs and any(other.page == wish.page and not other.hangs for other in fresh):
            return True
        return self._mirror.is_promising(wish.page, space, hangs=wish.hangs)
