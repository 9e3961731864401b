"""A copy in memory of what an `lmdb` store holds, so that this process evicts in the order that all stores have in common.

The truth is in LMDB, and other processes change it. A mirror is read once, when the store must first evict or report its worth, and is then
kept up to date with what has a newer tick: the database `ages` names what was stored or used, and the log of removals in `facts` names what
was removed. Every change has a tick of its own, and ticks rise from transaction to transaction, so nothing is missed. The log is bounded; a
mirror that is behind its beginning reads everything again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from threading import RLock
from typing import Any, Final, NamedTuple

import numpy as np

from tiercache.policy import Lru
from tiercache.storage.eviction import EvictionOrder
from tiercache.storage.pages import column_of
from tiercache.storage.residents import Loaded, Residents, Worth
from tiercache_backends.lmdb.environment import Environment
from tiercache_backends.lmdb.ledger import Ledger
from tiercache_backends.lmdb.names import names_in
from tiercache_backends.lmdb.records import FACTS, HALF, Facts, Record, gone_since, named_at, place_of, removals, tick_key, tick_of
from tiercache_backends.local.failures import DAMAGE

_AT_ONCE: Final = 4096
"""Objects read in one transaction while the mirror is read."""
_MOST_NOTED: Final = 1 << 16
"""Uses of objects remembered until the next transaction applies them; beyond that the oldest are forgotten."""


class Known(NamedTuple):
    """Result of one part of a walk over all objects, ordered by tick.

    `objects`: places and records. `following`: the tick at which the next part begins; 0 at the end. `damaged`: whether a damaged page
    ended this part early.
    """

    objects: list[tuple[bytes, Record]]
    following: int
    damaged: bool = False


class Mirror:
    """The objects of a store as of one transaction, and the order in which they are evicted.

    Around a write transaction the caller holds `lock` and calls `keep_up`, then `evict` or `sweep`, and after its end `settled` or
    `undone`. A `row` is that of an object in `Residents`.

    Thread safety: any thread that holds `lock`; `note`, `read`, `is_read` and `unfinished` may be called without it.
    """

    def __init__(self, environment: Environment) -> None:
        self._in = environment
        self.lock: Final = RLock()
        self._leaving: list[tuple[int, bytes, bytes | None]] = []
        self._noted: deque[tuple[bytes, bool]] = deque(maxlen=_MOST_NOTED)
        self._start_again()

    def note(self, places: Iterable[bytes], *, brought: bool = False) -> None:
        """Note, without waiting, that objects were read, or `brought` by a writer and already stored; the next `keep_up` applies it."""
        if self.is_read:
            self._noted.extend((place, brought) for place in places)

    @property
    def is_read(self) -> bool:
        """Whether all objects have been read."""
        return self._seen > 0

    def read(self) -> None:
        """Read all objects anew; the caller has no transaction open. Raises OSError, and the mirror counts as not read then."""
        with self.lock:
            self._start_again()
            self._read()

    def _read(self) -> None:
        facts, spaces = self._in.read(self._facts)
        found: dict[bytes, Record] = {}
        tick, damaged = 1, self._in.is_damaged()
        while tick:
            some = self._in.read(partial(self._by_age, tick))
            found.update(some.objects)
            tick, damaged = some.following, damaged or some.damaged
        if len(found) < facts.objects and not damaged:
            # Earlier releases removed the age of an object on which others depend.
            self._in.read(partial(self._without_age, found))
        ordered = sorted(found.items(), key=lambda entry: entry[1].tick)
        records = [record for _, record in ordered]
        known = [i for i, record in enumerate(records) if record.depends_on]
        self._residents.load(
            Loaded(
                column_of([place_of(place) for place, _ in ordered], 2 * HALF).copy(),
                column_of([record.parent for record in records], HALF).copy(),
                np.array(known, np.int64),
                np.array([record.number for record in records], np.uint64),
                np.array([record.length for record in records], np.uint64),
                np.array([record.depth for record in records], np.uint32),
                np.array([record.namespace for record in records], np.uint32),
            )
        )
        for number in spaces:
            self._residents.require_states(number)
        self._seen = facts.next_tick

    def keep_up(self, txn: Any) -> bool:
        """Apply what has changed since the last call; return False where everything must be read again.

        In a write transaction the caller does this before it changes anything.
        """
        facts = Facts.unpack(txn.get(FACTS, db=self._in.facts))
        if not self._seen or facts.next_tick < self._seen or gone_since(txn, self._in.facts) > self._seen:
            return False
        self._reckon()
        if facts.next_tick == self._seen:
            return True
        if named_at(txn, self._in.facts) >= self._seen:
            for space in self._facts(txn)[1]:
                self._residents.require_states(space)
        for tick, place, number in sorted([*removals(txn, self._in.facts, self._seen), *self._changes(txn)]):
            row = self._residents.find(place_of(place))
            if number:  # a removal; a row with a larger number was stored after it
                if row >= 0 and self._residents.number[row] <= number:
                    self._forget(row)
                continue
            value = txn.get(place, db=self._in.objects)
            record = None if value is None else Record.unpack(value)
            if record is None or record.tick != tick:
                continue  # the age is stale: the object is gone, or has a newer one
            if row >= 0 and self._residents.number[row] == record.number:
                self._residents.renew(row)
                continue
            if row >= 0:
                self._forget(row)
            self._add(place, record)
        self._seen = facts.next_tick
        return True

    def evict(self, ledger: Ledger, eviction: Eviction, held: Sequence[bytes], *, promising: bool) -> None:
        """Evict objects in the transaction of `ledger`, within the bounds of `eviction`; the pages in `held`, and all before them, stay.

        `promising`: see `EvictionOrder.evict`.
        """
        nodes = [self._residents.hold(page) for page in held]
        try:
            self._order.evict(_Evicting(self, ledger, eviction), promising=promising)
        finally:
            for node in nodes:
                self._residents.release(node)

    @property
    def unfinished(self) -> bool:
        """Whether the last eviction stopped before it had removed all that belongs together."""
        return self._order.unfinished

    def sweep(self, ledger: Ledger, eviction: Eviction) -> None:
        """Evict what cannot be restored, such as the rest that an eviction left, as far as one transaction may."""
        self._order.sweep(_Evicting(self, ledger, eviction))

    def settled(self) -> None:
        """Drop for good the objects that the transaction evicted: it was committed."""
        for row, _, _ in self._leaving:
            self._residents.drop(row)
        self._leaving = []

    def undone(self) -> None:
        """Take back the objects that the transaction evicted: it was not committed, and they are still stored."""
        for row, digest, parent in reversed(self._leaving):
            self._residents.enter(row, digest, parent)
        self._leaving = []

    def require_states(self, space: int) -> None:
        """Note that prefixes of the namespace with the id `space` need states."""
        self._residents.require_states(space)

    def depth(self, page: bytes) -> int:
        """Return the number of pages up to the end of this one; 0 where that is not known."""
        node = self._residents.pages.find(page)
        return int(self._residents.pages.depth[node]) if node >= 0 else 0

    def is_promising(self, page: bytes, space: int, *, hangs: bool) -> bool:
        """Return whether an object on this page would be of use as soon as it is stored; see `Residents.is_promising`."""
        node = self._residents.hold(page)
        promising = self._residents.is_promising(node, space, hangs=hangs)
        self._residents.release(node)
        return promising

    def worth(self) -> Worth:
        """Return what the store holds, by what it is good for."""
        return self._residents.worth()

    def leave(self, row: int) -> None:
        """Take an object out because this transaction removes it; `settled` or `undone` follows."""
        self._leaving.append((row, *self._residents.leave(row)))

    def forget(self, row: int) -> None:
        """Drop an object that another process has removed."""
        self._forget(row)

    def spare(self, row: int) -> None:
        """Exclude an object from eviction for good, because it cannot be removed."""
        self._residents.pins[row] += 1

    def place(self, row: int) -> bytes:
        """Return the object's place, its key in the database `objects`."""
        return place_of(self._residents.digest(row))

    def number(self, row: int) -> int:
        """Return the object's number."""
        return int(self._residents.number[row])

    def _start_again(self) -> None:
        self._residents = Residents()
        self._order = EvictionOrder(self._residents, Lru())
        self._leaving = []
        self._seen = 0

    def _add(self, place: bytes, record: Record) -> None:
        residents, page = self._residents, place[:HALF]
        node = residents.hold(page)
        parent = residents.hold(record.depends_on) if record.depends_on else None
        residents.add(place_of(place), node, parent, record.number, record.length, record.namespace, record.depth)
        residents.release(node)
        if parent is not None:
            residents.release(parent)

    def _reckon(self) -> None:
        """Apply the uses that `note` recorded."""
        for _ in range(len(self._noted)):
            place, brought = self._noted.popleft()
            row = self._residents.find(place_of(place))
            if row >= 0:
                (self._residents.renew if brought else self._residents.touch)(row)

    def _forget(self, row: int) -> None:
        self._residents.leave(row)
        self._residents.drop(row)

    def _facts(self, txn: Any) -> tuple[Facts, list[int]]:
        facts = Facts.unpack(txn.get(FACTS, db=self._in.facts))
        return facts, [name.number for name in names_in(self._in, txn).values() if name.states]

    def _by_age(self, tick: int, txn: Any) -> Known:
        """Return the next objects from a tick on, found by their ages.

        A walk over the database `objects` itself would end the process where one of its leaves is damaged.
        """
        objects: list[tuple[bytes, Record]] = []
        with txn.cursor(self._in.ages) as walk:
            found = walk.set_range(tick_key(tick))
            while found and len(objects) < _AT_ONCE:
                tick, place = tick_of(walk.key()), bytes(walk.value())
                try:
                    value = txn.get(place, db=self._in.objects)
                except DAMAGE:
                    return Known(objects, tick + 1, damaged=True)  # no more can be read in this transaction
                record = None if value is None else Record.unpack(value)
                if record is not None and record.tick == tick:
                    objects.append((place, record))
                found = walk.next()
            return Known(objects, tick_of(walk.key()) if found else 0)

    def _without_age(self, found: dict[bytes, Record], txn: Any) -> None:
        for key, value in txn.cursor(self._in.objects):
            record = Record.unpack(value) if len(key) == 2 * HALF and bytes(key) not in found else None
            if record is not None:
                found[bytes(key)] = record

    def _changes(self, txn: Any) -> Iterable[tuple[int, bytes, int]]:
        with txn.cursor(self._in.ages) as walk:
            found = walk.set_range(tick_key(self._seen))
            while found:
                yield tick_of(walk.key()), bytes(walk.value()), 0
                found = walk.next()


class Eviction:
    """Bounds and count of the evictions in one transaction.

    It goes on until at most `pages` LMDB pages are in use, and removes at most `most` objects; `objects` counts those removed.

    Thread safety: only the thread of the transaction uses it.
    """

    def __init__(self, pages: int, most: int, damaged: set[bytes]) -> None:
        self.pages = pages
        self.most = most
        self.damaged = damaged
        """Places of objects that cannot be removed; where a removal fails its place is added, and the transaction is lost."""
        self.objects = 0


class _Evicting:
    """The `eviction.Taker` of one transaction: it removes objects from the database and from the mirror.

    Thread safety: that of its mirror.
    """

    def __init__(self, mirror: Mirror, ledger: Ledger, eviction: Eviction) -> None:
        self._mirror = mirror
        self._ledger = ledger
        self._eviction = eviction

    def take(self, rows: list[int]) -> None:
        """Remove these objects, as far as they are still stored and can be removed."""
        for row in rows:
            place = self._mirror.place(row)
            if place in self._eviction.damaged:
                self._mirror.spare(row)
                continue
            try:
                record = self._ledger.find(place)
                if record is None or record.number != self._mirror.number(row):
                    self._mirror.forget(row)
                    continue
                self._ledger.remove(place, record)
            except DAMAGE:
                self._eviction.damaged.add(place)
                raise
            self._mirror.leave(row)
            self._eviction.objects += 1

    def enough(self) -> bool:
        """Return whether as many LMDB pages are free as were wanted."""
        return self._ledger.used_pages() <= self._eviction.pages

    def full(self) -> bool:
        """Return whether this transaction may remove no more objects."""
        return self._eviction.objects >= self._eviction.most
