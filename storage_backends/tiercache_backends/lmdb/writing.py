"""Sets: a batch goes into the store in small transactions, which make room first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from tiercache.core import Outcome
from tiercache.storage.base import SetItem, checksum_of
from tiercache.storage.checksum import Seal, Sealed
from tiercache_backends.lmdb.budget import Budget
from tiercache_backends.lmdb.chores import Chores, Done
from tiercache_backends.lmdb.environment import Environment, MapFullError
from tiercache_backends.lmdb.eviction import Spared, evict
from tiercache_backends.lmdb.ledger import Ledger
from tiercache_backends.lmdb.payload import PART_PAGES, pages_for
from tiercache_backends.lmdb.tally import Tally

_SCATTERED_PART_PAGES: Final = 4
"""Pages of a piece where the map is so full that long runs cannot be found."""


class Wish(NamedTuple):
    """One object that is to be stored; `tick` counts from the batch's first."""

    place: bytes
    item: SetItem
    sealed: Sealed
    pages: int
    tick: int

    @property
    def parent(self) -> bytes | None:
        """The page on which the object depends."""
        return self.item.meta.parent


class Room(NamedTuple):
    """How many pages may be in use, how long runs may be, and whether to store only what earlier transactions made room for."""

    limit: int
    part_pages: int
    patient: bool


class Attempt(NamedTuple):
    """What a transaction did. `outcomes` None: it only evicted, and another must follow."""

    first_tick: int
    done: Done
    outcomes: Mapping[bytes, Outcome] | None


class Batch:
    """The places of one call's objects, and what became of those that were missing.

    Thread rule: the thread of the call.
    """

    def __init__(self, places: Sequence[bytes]) -> None:
        self.places: Final = frozenset(places)
        """What comes first in a batch begins a sequence, and what comes last is worth nothing without it: it never evicts its own."""
        self.size: Final = len(places)
        self.first_tick: int | None = None
        self.outcomes: dict[bytes, Outcome] = {}


class Writer:
    """Stores batches.

    Thread rule: any thread may call; the environment lets one transaction through at a time.
    """

    def __init__(self, environment: Environment, budget: Budget, seal: Seal, chores: Chores, tally: Tally) -> None:
        self._environment = environment
        self._budget = budget
        self._seal = seal
        self._chores = chores
        self._tally = tally

    def store(self, items: Mapping[bytes, SetItem], places: Sequence[bytes]) -> dict[bytes, Outcome]:
        """Store what is missing of a batch that has `places`; says by place how it went."""
        batch = Batch(places)
        # The first item gets the newest tick, so that the end of a sequence is evicted before its beginning.
        ticks = {place: tick for tick, place in enumerate(reversed(places))}
        for chunk in self._chunks(self._wish(place, item, ticks[place]) for place, item in items.items()):
            self._store(chunk, batch)
        return batch.outcomes

    def _wish(self, place: bytes, item: SetItem, tick: int) -> Wish:
        length = item.meta.length
        # Checksum and MAC are passes over the payload, so they are made before anybody waits for our transaction.
        sealed = Sealed(checksum_of(item), self._seal.stamp(item.key, item.buffers, length))
        return Wish(place, item, sealed, pages_for(length, self._budget.page_bytes), tick)

    def _chunks(self, wishes: Iterator[Wish]) -> Iterator[list[Wish]]:
        chunk: list[Wish] = []
        room = self._budget.burst
        for wish in wishes:
            if chunk and (wish.pages > room or len(chunk) == self._budget.changes):
                yield chunk
                chunk, room = [], self._budget.burst
            chunk.append(wish)
            room -= wish.pages
        if chunk:
            yield chunk

    def _store(self, chunk: Sequence[Wish], batch: Batch) -> None:
        try:
            try:
                large = sum(wish.pages for wish in chunk) > self._budget.burst
                self._transact(chunk, batch, Room(self._budget.limit, PART_PAGES, patient=large))
            except MapFullError:
                self._environment.clear_readers()
                # Evicting more helps where the free pages are scattered. Where a reader keeps them from being used it only costs.
                limit = self._budget.limit if self._environment.lagging() else self._budget.squeezed
                self._turn()
                self._transact(chunk, batch, Room(limit, _SCATTERED_PART_PAGES, patient=True))
        except OSError as error:
            batch.outcomes.update(dict.fromkeys((wish.place for wish in chunk), self._tally.failed("a set", error)))

    def _transact(self, chunk: Sequence[Wish], batch: Batch, room: Room) -> None:
        while True:
            attempt = self._environment.write(lambda txn: self._attempt(Ledger(self._environment, txn), chunk, batch, room))
            self._chores.settled(attempt.done)
            batch.first_tick = attempt.first_tick
            if attempt.outcomes is not None:
                batch.outcomes.update(attempt.outcomes)
                return
            if room.patient:
                self._turn()

    def _turn(self) -> None:
        """Let a transaction pass: what one gave up can be used by the next but one."""
        self._environment.write(lambda txn: Ledger(self._environment, txn).save())

    def _attempt(self, ledger: Ledger, chunk: Sequence[Wish], batch: Batch, room: Room) -> Attempt:
        """One transaction: evict for a chunk, and store it if there is room then."""
        first_tick = ledger.ticks(batch.size) if batch.first_tick is None else batch.first_tick
        done = self._chores.do(ledger)
        fresh = [wish for wish in chunk if not self._is_there(ledger, wish, first_tick)]
        fitting = [wish for wish in fresh if wish.pages <= room.limit]
        outcomes: dict[bytes, Outcome] | None = None
        if self._make_room(ledger, fitting, batch, room):
            outcomes = dict.fromkeys((wish.place for wish in chunk), Outcome.HIT)
            outcomes |= dict.fromkeys((wish.place for wish in fresh), Outcome.THROTTLED)
            used = ledger.used_pages()
            for wish in fitting:
                if used + wish.pages <= room.limit:
                    used += wish.pages
                    ledger.add(wish.item, wish.place, wish.sealed, first_tick + wish.tick, room.part_pages)
                    outcomes[wish.place] = Outcome.STORED
        ledger.save()
        return Attempt(first_tick, done, outcomes)

    def _is_there(self, ledger: Ledger, wish: Wish, first_tick: int) -> bool:
        """Did another process, or another thread, store the object meanwhile? A damaged one makes way."""
        record = ledger.find(wish.place)
        if record is None:
            return False
        if self._chores.is_spoiled(wish.place, record.number):
            ledger.remove(wish.place, record)
            return False
        ledger.touch(wish.place, first_tick + wish.tick)
        return True

    def _make_room(self, ledger: Ledger, fresh: Sequence[Wish], batch: Batch, room: Room) -> bool:
        """Evict for what is to be stored. False where another transaction must evict more, or store it."""
        target = room.limit - sum(wish.pages for wish in fresh)
        if ledger.used_pages() <= target:
            return True
        spared = Spared(batch.places, {wish.parent for wish in fresh if wish.parent is not None})
        aim = target - self._budget.slack
        evicted = evict(ledger, lambda: ledger.used_pages() <= aim, spared, self._budget.changes)
        if room.patient and evicted.objects:
            return False
        return evicted.exhausted or ledger.used_pages() <= target
