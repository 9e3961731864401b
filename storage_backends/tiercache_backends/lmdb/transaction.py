"""Changes to the five databases within one write transaction, and small changes that wait for one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from errno import EIO
from itertools import chain, count, islice
from threading import Lock
from typing import Any, Final

from tiercache.storage.base import NamespaceRecord, SetItem
from tiercache.storage.checksum import Checksums
from tiercache_backends.lmdb.environment import DamagedError, Environment, ErrorCounters
from tiercache_backends.lmdb.records import (
    FACTS,
    HALF,
    NAMED,
    Record,
    StoreTotals,
    forget_removals,
    gone_key,
    gone_value,
    part_key,
    piece_sizes,
    tick_key,
    tick_of,
)
from tiercache_backends.local.directory import is_full
from tiercache_backends.local.names import Name, pack_name, unpack_name

_YOUNG: Final = 4
"""Divisor: an object counts as young (just used) if its tick is in the newest quarter of all ticks in use.

A young object is not touched again, because a slightly later place in the eviction order is not worth the
LMDB pages that the change would write.
"""
_MIN_YOUNG: Final = 16
"""Minimum number of the newest ticks that count as young."""
_MAX_LOGGED: Final = 8192
"""Maximum number of the newest ticks for which removals are logged."""
_MIN_LOGGED: Final = 256
"""Minimum number of the newest ticks for which removals are logged.

Between the minimum and the maximum, this number equals the number of LMDB pages of the map.
"""
_MAX_WAITING: Final = 4096
"""Maximum number of objects whose recency, or whose removal as damaged, waits for another write.

If more objects wait, all recency is written at once. If that write fails, up to twice this number of objects
are kept waiting.
"""


class Transaction:
    """Changes of one LMDB write transaction, which keep the five databases consistent.

    The caller must call `save` at the end, unless nothing was changed.

    Thread safety: only the thread of the transaction uses it.
    """

    def __init__(self, environment: Environment, txn: Any) -> None:
        self._environment = environment
        self._txn = txn
        self.totals = StoreTotals.unpack(txn.get(FACTS, db=environment.facts))
        self._young_from: int | None = None
        """First tick that counts as young; None until `_is_young` needs it."""
        self._has_removed = False
        self._namespaces: dict[bytes, int] = {}

    def find(self, place: bytes) -> Record | None:
        """Return the record of the object at `place`; None where there is none."""
        value = self._txn.get(place, db=self._environment.objects)
        return None if value is None else Record.unpack(value)

    def tick(self) -> int:
        """Take the next tick, which is newer than all earlier ticks.

        Every change takes a tick, in the order of transactions. Mirrors rely on that order.
        """
        tick = self.totals.next_tick
        self.totals = self.totals._replace(next_tick=tick + 1)
        return tick

    def follows(self, place: bytes, above: bytes) -> bool:
        """Return whether the page object at `place` is, or descends from, the page object at `above`."""
        seen: set[bytes] = set()
        while place != above and place not in seen:
            seen.add(place)
            record = self.find(place)
            if record is None or not record.depends_on:
                return False
            place = record.depends_on + place[HALF:]
        return place == above

    def add(self, objects: Sequence[tuple[bytes, SetItem, Checksums]], part_pages: int) -> None:
        """Store objects that are not there yet, in pieces of at most `part_pages` LMDB pages.

        `objects`: place, item and checksums of each. Raises DamagedError where the store has a piece
        with the number of one of these objects or a larger number.
        """
        # Write one entry per piece in `parts`, and one in each of `objects` and `ages`. All entries of a
        # database are written in one call.
        facts, page_bytes = self.totals, self._environment.page_bytes
        pieces: list[Iterator[tuple[bytes, memoryview | bytes]]] = []
        records: list[tuple[bytes, bytes]] = []
        ages: list[tuple[bytes, bytes]] = []
        numbers, ticks = count(facts.next_number), count(facts.next_tick)
        for (place, item, checksums), number, tick in zip(objects, numbers, ticks, strict=False):
            meta = item.meta
            record = Record.of(number, tick, item.key, meta, self.namespace_id(meta.namespace), checksums)
            sizes = piece_sizes(meta.length, page_bytes, part_pages)
            pieces.append(_pieces(number, item.buffers, sizes))
            records.append((place, record.pack()))
            # The tick in the record is also the object's key in `ages`.
            ages.append((tick_key(tick), place))
        for db, entries in ((self._environment.objects, sorted(records)), (self._environment.ages, ages)):
            with self._txn.cursor(db) as cursor:
                cursor.putmulti(entries)
        # `append` puts a key behind all others without a search of the tree, and skips a key that is not
        # larger. Numbers rise, so no key is skipped.
        with self._txn.cursor(self._environment.parts) as cursor:
            taken, added = cursor.putmulti(chain.from_iterable(pieces), append=True)
        if added < taken:
            raise DamagedError(EIO, "the store holds a part of an object that was never stored")
        self.totals = facts._replace(
            next_number=facts.next_number + len(objects),
            next_tick=facts.next_tick + len(objects),
            objects=facts.objects + len(objects),
            payload_bytes=facts.payload_bytes + sum(item.meta.length for _, item, _ in objects),
        )

    def remove(self, place: bytes, record: Record) -> None:
        """Delete an object with all of its entries, and log the removal."""
        first = part_key(record.number, 0)
        with self._txn.cursor(self._environment.parts) as cursor:
            found = cursor.set_range(first)
            while (
                found and cursor.key()[:8] == first[:8]
            ):  # the object's number begins the keys of its pieces
                cursor.delete()
                found = bool(cursor.key())
        self._txn.delete(place, db=self._environment.objects)
        self._forget_age(place, record.tick)
        self._txn.put(gone_key(self.tick()), gone_value(place, record.number), db=self._environment.facts)
        self._has_removed = True
        facts = self.totals
        self.totals = facts._replace(
            objects=max(0, facts.objects - 1), payload_bytes=max(0, facts.payload_bytes - record.length)
        )

    def touch(self, place: bytes) -> bool:
        """Mark an object as used just now; return False, and do nothing, if it is absent or young."""
        record = self.find(place)
        if record is None or self._is_young(record.tick):
            return False
        self._forget_age(place, record.tick)
        fresh = record._replace(tick=self.tick())
        self._txn.put(tick_key(fresh.tick), place, db=self._environment.ages)
        self._txn.put(place, fresh.pack(), db=self._environment.objects)
        return True

    def register(self, record: NamespaceRecord) -> None:
        """Store a namespace's record, merged with the record that is stored already, if there is one."""
        known = name_in(self._environment, self._txn, record.namespace)
        kept = Name(self.namespace_id(record.namespace), record.over(known.record if known else None))
        if kept != known:
            self._txn.put(record.namespace, pack_name(kept), db=self._environment.names)
            if kept.states:
                self._txn.put(NAMED, tick_key(self.tick()), db=self._environment.facts)

    def has_states(self, namespace: bytes) -> bool:
        """Return whether a prefix of this namespace needs states."""
        known = name_in(self._environment, self._txn, namespace)
        return known is not None and known.states

    def used_pages(self) -> int:
        """Return the number of LMDB pages that are in use now, in this transaction."""
        return self._environment.used_pages(self._txn)

    def drop_damaged(self, place: bytes, number: int) -> None:
        """Delete a damaged object and count it as corrupt, unless another was stored at its place later."""
        record = self.find(place)
        if record is not None and record.number == number:
            self.remove(place, record)
            self.totals = self.totals._replace(corrupt=self.totals.corrupt + 1)

    def count_evicted(self, objects: int) -> None:
        """Add to the number of objects evicted in the life of the store."""
        self.totals = self.totals._replace(evicted=self.totals.evicted + objects)

    def save(self) -> None:
        """Write the totals, and if this transaction removed objects, shorten the log of removals."""
        if self._has_removed:
            pages = self._environment.budget.map_pages
            kept = max(_MIN_LOGGED, min(_MAX_LOGGED, pages))
            forget_removals(self._txn, self._environment.facts, self.totals.next_tick - kept)
        self._txn.put(FACTS, self.totals.pack(), db=self._environment.facts)

    def _forget_age(self, place: bytes, tick: int) -> None:
        # The entry of another object means that a record or the counter of ticks is damaged.
        key = tick_key(tick)
        if self._txn.get(key, db=self._environment.ages) != place:
            raise DamagedError(EIO, "an object has no entry among the ages")
        self._txn.delete(key, db=self._environment.ages)

    def _is_young(self, tick: int) -> bool:
        # ticks   oldest in `ages` ...................|... young ...| next_tick
        if self._young_from is None:
            newest = oldest = self.totals.next_tick
            with self._txn.cursor(self._environment.ages) as cursor:
                if cursor.first():
                    oldest = tick_of(cursor.key())
            self._young_from = newest - max(_MIN_YOUNG, (newest - oldest) // _YOUNG)
        return tick >= self._young_from

    def namespace_id(self, namespace: bytes) -> int:
        """Return the number by which records name this namespace; if there is none, choose one."""
        if namespace not in self._namespaces:
            known = name_in(self._environment, self._txn, namespace)
            if known is None:
                known = Name(free_number(self._environment, self._txn), None)
                self._txn.put(namespace, pack_name(known), db=self._environment.names)
            self._namespaces[namespace] = known.number
        return self._namespaces[namespace]


def name_in(environment: Environment, txn: Any, namespace: bytes) -> Name | None:
    """Return the stored name of one namespace; None if the name is absent or unreadable."""
    value = txn.get(namespace, db=environment.names)
    if value is not None:
        with suppress(ValueError):
            return unpack_name(namespace, value)
    return None


def names_in(environment: Environment, txn: Any) -> dict[bytes, Name]:
    """Return the stored names of all namespaces, by namespace; leave out unreadable names."""
    names: dict[bytes, Name] = {}
    with txn.cursor(environment.names) as cursor:
        for namespace, value in cursor:
            with suppress(ValueError):
                names[bytes(namespace)] = unpack_name(bytes(namespace), value)
    return names


def free_number(environment: Environment, txn: Any) -> int:
    """Return a number that no namespace has."""
    # Namespaces are numbered in order, from 1. The count of entries includes names that cannot be read.
    known = max((name.number for name in names_in(environment, txn).values()), default=0)
    return max(known, int(txn.stat(environment.names)["entries"])) + 1


def _pieces(
    number: int, buffers: Sequence[memoryview], sizes: Iterable[int]
) -> Iterator[tuple[bytes, memoryview | bytes]]:
    """Yield key and bytes of each piece of the payload of object `number`."""
    start, index, buffer = 0, 0, buffers[0]
    for part, size in enumerate(sizes):
        if start + size <= buffer.nbytes:
            yield part_key(number, part), buffer[start : start + size]
            start += size
            continue
        views = [buffer[start : start + size]]
        start += size
        while start > buffer.nbytes:  # the piece goes on in the next buffer
            start -= buffer.nbytes
            index += 1
            buffer = buffers[index]
            views.append(buffer[:start])
        views = [view for view in views if view.nbytes]
        # Join a piece only if it lies in several buffers, because joining costs a copy.
        yield part_key(number, part), views[0] if len(views) == 1 else b"".join(views)


class Pending:
    """Small changes that wait for a transaction: uses, namespace records, removals of damaged objects.

    A get writes nothing itself, so that it never waits for a writer. Its changes wait here until some write
    transaction makes them (`apply`). After its commit only those are forgotten that it made, because another
    thread may have added some meanwhile.

    The lists of objects are bounded. If an entry has to be dropped, a little recency is lost, or a damaged
    object is found again later.

    Thread safety: any thread may call.
    """

    def __init__(self, environment: Environment, errors: ErrorCounters) -> None:
        self._environment = environment
        self._errors = errors
        self._mutex = Lock()
        self._touched: dict[bytes, None] = {}
        """Places of objects whose recency waits to be written, the earliest use first."""
        self._damaged: dict[bytes, int] = {}
        """Numbers of damaged objects that wait to be removed, by place; they count as absent."""
        self._unsaved: dict[bytes, NamespaceRecord] = {}
        """Namespace records that wait to be written, by namespace."""

    def touch(self, places: Sequence[bytes]) -> None:
        """Record that the objects of a batch were used, in this order."""
        with self._mutex:
            # In a batch the deeper pages of a sequence come later. Deeper pages should be evicted first, so
            # they get older ticks.
            for place in reversed(places):
                self._touched.pop(place, None)
                self._touched[place] = None
            crowded = len(self._touched) > _MAX_WAITING
            while len(self._touched) > 2 * _MAX_WAITING:
                del self._touched[next(iter(self._touched))]
        if crowded:
            self.flush()

    def register(self, record: NamespaceRecord) -> None:
        """Write a namespace record now; if the write fails, a later transaction repeats it."""
        with self._mutex:
            self._unsaved[record.namespace] = record.over(self._unsaved.get(record.namespace))
        self.flush()

    def drop(self, damaged: Mapping[bytes, int]) -> None:
        """Remove damaged objects, given as numbers by place, or hide them until that is possible.

        An object with another number that was stored at the same place later stays.
        """
        with self._mutex:
            self._damaged.update(damaged)
            while len(self._damaged) > _MAX_WAITING:
                del self._damaged[next(iter(self._damaged))]
        self.flush()

    def is_damaged(self, place: bytes, number: int) -> bool:
        """Return whether the object with this number is known to be damaged, and so counts as absent."""
        return self._damaged.get(place) == number

    def any_damaged(self) -> bool:
        """Return whether any object is known to be damaged."""
        return bool(self._damaged)

    def damaged(self) -> dict[bytes, int]:
        """Return the numbers of the damaged objects that are still stored, by place."""
        with self._mutex:
            return dict(self._damaged)

    def waiting(self) -> int:
        """Return the number of objects whose recency is not written yet."""
        return len(self._touched)

    def remove(self, places: Sequence[bytes]) -> set[bytes]:
        """Remove objects, in several transactions; return the places of the removed objects."""
        gone: set[bytes] = set()
        changes = self._environment.budget.changes
        try:
            for start in range(0, len(places), changes):
                gone.update(self._remove(places[start : start + changes]))
        except OSError as error:
            self._errors.failed("a deletion", error)
        return gone

    def flush(self) -> None:
        """Make all waiting changes; count and log a failure instead of raising it."""
        try:
            while self._unsaved or self._touched or self._damaged:
                self._change(())  # as much as one transaction may change
        except OSError as error:
            self._errors.failed("writing recency", error)

    def apply(self, transaction: Transaction) -> Callable[[], None]:
        """Make as many waiting changes as one transaction may; return what to call after its commit."""
        # Lock order: the writer lock, which this transaction holds, then the mutex. Copy the lists, so that
        # no call of LMDB is made under the mutex.
        with self._mutex:
            waiting, named, damaged = list(self._touched), dict(self._unsaved), dict(self._damaged)
        left = self._environment.budget.changes
        dropped = dict(islice(damaged.items(), left))
        for place, number in dropped.items():
            transaction.drop_damaged(place, number)
        for record in named.values():
            transaction.register(record)
        touched: list[bytes] = []
        for place in waiting:
            if left <= 0:
                break
            touched.append(place)
            left -= transaction.touch(place)

        def committed() -> None:
            with self._mutex:
                for place in touched:
                    self._touched.pop(place, None)
                # Another thread may have replaced an entry since: forget an entry only if it is the same.
                for namespace, record in named.items():
                    if self._unsaved.get(namespace) is record:
                        del self._unsaved[namespace]
                for place, number in dropped.items():
                    if self._damaged.get(place) == number:
                        del self._damaged[place]

        return committed

    def _remove(self, places: Sequence[bytes]) -> list[bytes]:
        """Remove objects in one transaction, or each half by itself where the disk is too full for that."""
        try:
            return self._change(places)
        except OSError as error:
            if not is_full(error) or len(places) == 1:
                raise
        middle = len(places) // 2
        return self._remove(places[:middle]) + self._remove(places[middle:])

    def _change(self, places: Sequence[bytes]) -> list[bytes]:
        """Make waiting changes and remove these objects, in one transaction; return the places removed."""

        def work(txn: Any) -> tuple[list[bytes], Callable[[], None]]:
            transaction = Transaction(self._environment, txn)
            before = transaction.totals
            # Damaged objects go first. They count as absent, so their deletion is answered False.
            committed = self.apply(transaction)
            gone: list[bytes] = []
            for place in places:
                record = transaction.find(place)
                if record is not None and not self.is_damaged(place, record.number):
                    transaction.remove(place, record)
                    gone.append(place)
            if transaction.totals != before:
                transaction.save()
            return gone, committed

        removed, committed = self._environment.write(work)
        committed()
        return removed
