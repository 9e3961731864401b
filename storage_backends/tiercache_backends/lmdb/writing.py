"""Sets of the `lmdb` store: a batch is written in small transactions, each of which first evicts what it needs."""

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
"""LMDB pages of a payload piece where the file has few long runs of free pages."""
_SINGLE_PAGES: Final = 1
"""LMDB pages of a payload piece where no runs are found: a single page is always found where any is free."""
_MOST_OBJECTS: Final = 256
"""Objects stored in one transaction, at most."""
_MOST_DAMAGED: Final = 4096
"""Number of known damaged objects at which a chunk that meets damage is split instead of tried again."""
_WARY: Final = 32
"""Chunks, at most, that begin with the short pieces that an earlier one needed, before longer pieces are tried again."""


T = TypeVar("T")


class Wish(NamedTuple):
    """One object to store.

    `place`: its key in the database `objects`. `pages`: the LMDB pages that its payload takes. `page`: the key of the page that the object
    is, or on which it hangs (`hangs`).
    """

    place: bytes
    item: SetItem
    sealed: Sealed
    pages: int
    page: bytes
    hangs: bool


class Room(NamedTuple):
    """Limits of one transaction's use of the file.

    `limit`: LMDB pages in use at most. `part_pages`: LMDB pages of a payload piece. `evictions`: objects evicted at most. `patient`: a
    transaction that has evicted stores nothing, so that objects go only into room that earlier transactions made.
    """

    limit: int
    part_pages: int
    evictions: int
    patient: bool


class Attempt(NamedTuple):
    """Result of one transaction.

    `done`: the waiting work that it wrote down. `outcomes`: by place; None if it only evicted, so that another transaction must follow.
    `used`: LMDB pages in use at its end.
    """

    done: Done
    outcomes: Mapping[bytes, Outcome] | None
    used: int


class Batch:
    """State of one `set` call: the pages that it must not evict, and the outcomes of the objects that were missing.

    Thread safety: only the thread of the call uses it.
    """

    def __init__(self, places: Sequence[bytes], items: Iterable[SetItem]) -> None:
        # The first objects of a batch begin a sequence, and the last ones are worth nothing without them: a batch never evicts its own.
        self.held: Final = list({*(place[:HALF] for place in places), *(item.meta.parent for item in items if item.meta.parent)})
        self.outcomes: dict[bytes, Outcome] = {}
        self.missing: set[bytes] = set()
        """Keys of pages that this batch brought and that were not stored."""


class _BehindError(Exception):
    """The mirror must be read, or read again, before this transaction can go on; the transaction is undone."""


class Writer:
    """Writer of batches of objects.

    Thread safety: any thread may call; the environment runs one write transaction at a time.
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
        """Places of objects that cannot be evicted, because they lie on a damaged page."""

    def store(self, items: Mapping[bytes, SetItem], places: Sequence[bytes]) -> dict[bytes, Outcome]:
        """Store `items`, the missing objects of a batch whose places are `places`; return their outcomes by place."""
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
        """Evict more of a conversation that was too long for one transaction; return False where nothing was evicted."""

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
        # Checksum and MAC are passes over the payload, so they are made before other writers wait for our transaction.
        sealed = Sealed(checksum_of(item), self._seal.stamp(item.key, item.buffers, length))
        page = place[:HALF]
        return Wish(place, item, sealed, pages_for(length, self._environment.page_bytes), page, item.meta.parent == page)

    def _chunks(self, wishes: Iterable[Wish], budget: Budget | None = None) -> Iterator[list[Wish]]:
        """Yield the batch cut into chunks, one per transaction: long ones where much is free, short ones where the file is nearly full."""
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
        """Store a chunk; where it meets a damaged page, try again, then store its halves apart, so that only what needs that page fails."""
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
        """Store a chunk within the whole map, or, where the disk is full, within the pages that the file already has on it."""
        try:
            self._climb(chunk, batch, self._disk.whole)
        except OSError as error:
            if not is_full(error):
                raise
            self._disk.refused()
            self._squeeze(chunk, batch)

    def _replace(self, chunk: Sequence[Wish], batch: Batch) -> None:
        """Store a chunk within the pages that the file has on the disk; if all of it is THROTTLED, try whether the disk has more room."""
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
                # An eviction changes pages as well: the fewer at once, the sooner it finds the free pages that it needs.
                room = Room(self._disk.refused().limit, _SINGLE_PAGES, evictions=1, patient=True)
                self._transact(small, batch, room)

    def _climb(self, chunk: Sequence[Wish], batch: Batch, budget: Budget) -> None:
        """Store a chunk, with the next `Room` each time LMDB finds no free pages.

        Where no room is enough the objects are stored one by one, and a single one under lower limits.
        """
        large = sum(budget.cost(wish.pages) for wish in chunk) > budget.burst(self._used)
        for room in self._rooms(budget, large):
            try:
                self._transact(chunk, batch, room)
                self._went(room)
                return
            except MapFullError:
                self._environment.clear_readers()
                if self._environment.lagging():
                    # More evictions help where the free pages are scattered. Where a reader holds them back, they only lose objects.
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
        """Store a chunk under ever lower limits of pages in use, which leave more pages free than the budget asks for."""
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
        # The same piece size twice: the pages that the last transaction gave up may have been all that was missing.
        first = Room(budget.limit, usual, budget.changes, patient=large)
        return [first, *(first._replace(part_pages=pages, patient=True) for pages in shorter)]

    def _went(self, room: Room) -> None:
        """Note that a room was enough; where its pieces were short the next chunks begin with them."""
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
        """Run `work`, which may evict, in a write transaction; the mirror takes over its removals on commit, and none on failure."""
        with self._mirror.lock:
            try:
                result = self._environment.write(work)
            except BaseException:
                self._mirror.undone()
                raise
            self._mirror.settled()
            return result

    def _turn(self) -> None:
        """Commit a transaction that stores nothing: pages that transaction N gives up can be used by N + 2."""
        self._environment.write(lambda txn: Ledger(self._environment, txn).save())

    def _attempt(self, txn: Any, chunk: Sequence[Wish], batch: Batch, room: Room) -> Attempt:
        """Evict for a chunk in one transaction, and store the chunk in it if there is room then."""
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
        """Store the objects that fit, except those whose parent is in `fitting` and was not stored; yield the places stored."""
        used = ledger.used_pages()
        # Pages not stored (yet): parents come first, so a parent found here was left out.
        left: set[bytes] = {wish.page for wish in fitting if not wish.hangs}
        for wish in fitting:
            if used + needs[wish.place] <= room.limit and wish.item.meta.parent not in left:
                used += needs[wish.place]
                ledger.add(wish.item, wish.place, wish.sealed, room.part_pages)
                left.discard(wish.page)
                yield wish.place

    def _refused(self, ledger: Ledger, wishes: Sequence[Wish], batch: Batch) -> dict[bytes, Outcome]:
        """Return the outcomes of the objects that must not be stored, by place.

        THROTTLED: its page or the page before it is absent, so it could never be read. ERROR: it contradicts what is stored. In `wishes`
        parents come first.
        """
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
        """Return what `Residents.standing` would, from the database, among objects of the same layout.

        `coming`: accepted page objects of this transaction, by page key.
        """
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
        """Return whether another process or thread has stored the object meanwhile; mark it as used, or remove it if it is damaged."""
        record = ledger.find(wish.place)
        if record is None:
            return False
        if self._chores.is_spoiled(wish.place, record.number):
            ledger.remove(wish.place, record)
            return False
        ledger.touch(wish.place)
        return True

    def _make_room(self, ledger: Ledger, fresh: Sequence[Wish], pages: int, batch: Batch, room: Room) -> bool:
        """Evict so that `fresh` fits, which takes `pages`; return False where another transaction must evict more, or store it."""
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
