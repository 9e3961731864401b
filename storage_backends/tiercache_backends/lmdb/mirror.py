"""In-memory copy of the records of an `lmdb` store, which keeps the objects in their eviction order.

Only the records in LMDB are authoritative, and other processes change them. The mirror reads all records
once, when the store must first evict or report its worth (how many bytes are restorable). After that the
mirror reads only the changes. Every change takes the next tick, so the changes that the mirror does not know
yet have ticks from `_seen` on:

    database `ages`      objects that were stored or used
    log in `facts`       objects that were removed; the log keeps only the latest removals

    ticks   | log of removals ........................... |
                         |<- read by the next `keep_up` ->|
                       _seen                          next_tick

If the log has already lost removals since `_seen`, the mirror reads all records again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from threading import RLock
from typing import Any, Final

import numpy as np

from tiercache.events.base import ChangeNote
from tiercache.storage.eviction import EvictionOrder
from tiercache.storage.pages import column_of
from tiercache.storage.residents import ObjectColumns, Residents
from tiercache_backends.lmdb.environment import Environment
from tiercache_backends.lmdb.records import (
    FACTS,
    HALF,
    NAMED,
    Record,
    StoreTotals,
    log_start,
    place_of,
    removals,
    tick_key,
    tick_of,
)
from tiercache_backends.lmdb.transaction import Transaction, names_in

_OBJECTS_PER_TRANSACTION: Final = 4096
"""Maximum number of records that one transaction reads when all records are read."""
_MAX_NOTED: Final = 1 << 16
"""Maximum number of uses that wait for `keep_up`; if there are more, the oldest uses are dropped."""


class Mirror:
    """Objects of a store as of one transaction, and the order in which they are evicted.

    During a write transaction that may evict, the caller holds `lock` and goes on in this order:

        1. `keep_up`                         applies what other transactions changed
        2. an `Eviction` through `order`     takes objects out
        3. `committed` or `rolled_back`      makes step 2 final, or undoes it

    Thread safety: the thread that holds `lock` may call; `note`, `is_read` and `is_watched` need no lock.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.lock: Final = RLock()
        self._noted: deque[tuple[bytes, bool]] = deque(maxlen=_MAX_NOTED)
        """Places of objects that were used, each with `brought` (see `note`)."""
        self._use(Residents(), 0)

    def _use(self, residents: Residents, seen: int) -> None:
        self.residents = residents
        """Table of the objects."""
        self.order = EvictionOrder(residents)
        self._leaving: list[tuple[int, bytes, bytes | None]] = []
        """Objects that the open transaction removes: row, digest, and parent if known."""
        self._seen = seen

    def note(self, places: Iterable[bytes], *, brought: bool = False) -> None:
        """Record, without a lock, that objects were used; the next `keep_up` applies these uses.

        `brought`: the objects were used by a set that found them stored already, and not by a get.
        """
        if self.is_read:
            self._noted.extend((place, brought) for place in places)

    def watch(self, watcher: ChangeNote | None) -> None:
        """Tell `watcher` of objects that come and go from now on; see `StorageBackend.watch`.

        An eviction is told before its commit, and taken back if that fails.
        """
        self.refresh()
        self.residents.note = watcher

    def hidden(self, damaged: Mapping[bytes, int]) -> tuple[int, int]:
        """Return how many of these objects, numbers by place, are stored, and their bytes."""
        residents = self.residents
        found = [(residents.find(place_of(place)), number) for place, number in damaged.items()]
        rows = [row for row, number in found if row >= 0 and residents.number[row] == number]
        return len(rows), sum(residents.length[row] for row in rows)

    @property
    def is_watched(self) -> bool:
        """Whether anybody is told of changes."""
        return self.residents.note is not None

    @property
    def is_read(self) -> bool:
        """Whether all records have been read."""
        return self._seen > 0

    def refresh(self) -> None:
        """Apply all changes, in transactions of its own; the caller has none open. Raises OSError."""
        # Other processes may remove so much between `read` and `keep_up` that all records have to be read
        # once more.
        while not self.is_read or not self._environment.read(self.keep_up):
            self.read()

    def read(self) -> None:
        """Read all records; the caller has no transaction open. Raises OSError, with nothing changed."""
        with self.lock:
            note, known = self.residents.note, self._digests()
            self._use(*self._all())
            self.residents.note = note
            if note is not None:
                now = self._digests()
                note(list(known - now), False)
                note(list(now - known), True)

    def _all(self) -> tuple[Residents, int]:
        """Return a table of all records, and the first tick of a change that it may not have."""
        next_tick, with_states = self._environment.read(self._facts)
        found: list[tuple[bytes, Record]] = []
        # LMDB reuses no given-up pages while a read transaction lasts, so read in short parts. Other
        # processes write between the parts. Their changes have ticks from `next_tick` on, so the next
        # `keep_up` applies them.
        place: bytes | None = b""
        while place is not None:
            place = self._environment.read(partial(self._read_some, place, found))
        found.sort(key=lambda entry: entry[1].tick)
        records = [record for _, record in found]
        known = [i for i, record in enumerate(records) if record.depends_on]
        residents = Residents()
        residents.load(
            ObjectColumns(
                column_of([place_of(place) for place, _ in found], 2 * HALF).copy(),
                column_of([record.parent for record in records], HALF).copy(),
                np.array(known, np.int64),
                np.array([record.number for record in records], np.uint64),
                np.array([record.length for record in records], np.uint64),
                np.array([record.depth for record in records], np.uint32),
                np.array([record.namespace for record in records], np.uint32),
            )
        )
        for number in with_states:
            residents.pages.require_states(number)
        return residents, next_tick

    def _read_some(self, place: bytes, found: list[tuple[bytes, Record]], txn: Any) -> bytes | None:
        """Append the next objects from a place on; return where to go on, None at the end."""
        end = len(found) + _OBJECTS_PER_TRANSACTION
        with txn.cursor(self._environment.objects) as walk:
            there = walk.set_range(place or b"\0")
            while there and len(found) < end:
                found.append((bytes(walk.key()), Record.unpack(walk.value())))
                there = walk.next()
            return bytes(walk.key()) if there else None

    def keep_up(self, txn: Any) -> bool:
        """Apply the changes since the last call; return False if all records must be read again.

        In a write transaction, call this method before any change.
        """
        objects, facts = self._environment.objects, self._environment.facts
        next_tick = StoreTotals.unpack(txn.get(FACTS, db=facts)).next_tick
        # The mirror was never read, or the store's ticks began anew, or the log has lost removals.
        if not self._seen or next_tick < self._seen or log_start(txn, facts) > self._seen:
            return False
        for _ in range(len(self._noted)):
            place, brought = self._noted.popleft()
            if (row := self.residents.find(place_of(place))) >= 0:
                (self.residents.renew if brought else self.residents.touch)(row)
        if next_tick > self._seen:
            if tick_of(txn.get(NAMED, tick_key(0), db=facts)) >= self._seen:
                for namespace_id in self._facts(txn)[1]:
                    self.residents.pages.require_states(namespace_id)
            for tick, place, number in sorted([*removals(txn, facts, self._seen), *self._changes(txn)]):
                row = self.residents.find(place_of(place))
                # A place can be used again: object 3 is removed at tick 7, object 8 is stored there at tick
                # 9. If the mirror has object 8 already, the removal must not forget it. Numbers rise, so
                # compare them.
                if number:
                    if row >= 0 and self.residents.number[row] <= number:
                        self.forget(row)
                    continue
                value = txn.get(place, db=objects)
                if value is None or (record := Record.unpack(value)).tick != tick:
                    continue  # the entry in `ages` is outdated: the object is gone, or has a newer tick
                if row >= 0 and self.residents.number[row] == record.number:
                    self.residents.renew(row)
                    continue
                if row >= 0:
                    self.forget(row)
                self._add(place, record)
            self._seen = next_tick
        return True

    def is_promising(self, page: bytes, namespace_id: int, *, attached: bool) -> bool:
        """Return whether a restore could use a new object on this page as soon as the object is stored.

        `attached`: the object is attached to the page, as a state is; otherwise the object is the page.
        """
        pages = self.residents.pages
        node = pages.hold(page)
        promising = pages.is_promising(node, namespace_id, attached=attached)
        pages.release(node)
        return promising

    def leave(self, row: int) -> None:
        """Take an object out, until `committed` or `rolled_back`."""
        self._leaving.append((row, *self.residents.leave(row)))

    def forget(self, row: int) -> None:
        """Take an object out for good, because it is no longer stored."""
        self.residents.leave(row)
        self.residents.drop(row)

    def committed(self) -> None:
        """Drop the objects that the transaction removed; call this after its commit."""
        for row, _, _ in self._leaving:
            self.residents.drop(row)
        self._leaving = []

    def rolled_back(self) -> None:
        """Put back the objects that the transaction removed; call this if the commit did not happen."""
        for row, digest, parent in reversed(self._leaving):
            self.residents.enter(row, digest, parent)
        self._leaving = []

    def _add(self, place: bytes, record: Record) -> None:
        pages = self.residents.pages
        node = pages.hold(place[:HALF])
        parent = pages.hold(record.depends_on) if record.depends_on else None
        self.residents.add(
            place_of(place), node, parent, record.number, record.length, record.namespace, record.depth
        )
        pages.release(node)
        if parent is not None:
            pages.release(parent)

    def _digests(self) -> set[bytes]:
        """Return the digests of all objects if somebody watches, else nothing."""
        rows = self.residents.residents().tolist() if self.is_watched else []
        return {self.residents.digest(row) for row in rows}

    def _facts(self, txn: Any) -> tuple[int, list[int]]:
        """Return the next tick, and the numbers of the namespaces with states."""
        facts = StoreTotals.unpack(txn.get(FACTS, db=self._environment.facts))
        names = names_in(self._environment, txn).values()
        return facts.next_tick, [name.number for name in names if name.states]

    def _changes(self, txn: Any) -> Iterator[tuple[int, bytes, int]]:
        """Yield (tick, place, 0) of every object stored or used since the last `keep_up`.

        The triples of `removals` have the object's number instead of 0.
        """
        with txn.cursor(self._environment.ages) as walk:
            found = walk.set_range(tick_key(self._seen))
            while found:
                yield tick_of(walk.key()), bytes(walk.value()), 0
                found = walk.next()


class Eviction:
    """Remover of objects from the databases and from the mirror, in one transaction (an `eviction.Taker`).

    It removes until `pages` LMDB pages are in use.

    Thread safety: only the thread of the transaction uses it, which holds the mirror's lock.
    """

    def __init__(self, mirror: Mirror, transaction: Transaction, max_objects: int, pages: int) -> None:
        self._mirror = mirror
        self._transaction = transaction
        self._max_objects = max_objects
        self._pages = pages
        self.objects = 0
        """Number of objects removed so far."""

    def take(self, rows: list[int]) -> None:
        """Remove these objects; skip those that are no longer stored."""
        for row in rows:
            place = place_of(self._mirror.residents.digest(row))
            record = self._transaction.find(place)
            if record is None or record.number != self._mirror.residents.number[row]:
                self._mirror.forget(row)
                continue
            self._transaction.remove(place, record)
            self._mirror.leave(row)
            self.objects += 1

    def enough(self) -> bool:
        """Return whether enough LMDB pages are free."""
        return self._transaction.used_pages() <= self._pages

    def full(self) -> bool:
        """Return whether this transaction may remove no more objects."""
        return self.objects >= self._max_objects
