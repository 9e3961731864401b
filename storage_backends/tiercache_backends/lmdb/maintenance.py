"""Upkeep of an `lmdb` store: small writes that wait for a transaction, removals, and checks of all databases.

There are three kinds of small writes: recency (which objects were used), namespace records, and removals of
damaged objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from threading import Lock
from typing import Any, Final, NamedTuple

from tiercache.storage.base import NamespaceRecord
from tiercache_backends.lmdb.budget import PageBudget
from tiercache_backends.lmdb.environment import Environment, ErrorCounters
from tiercache_backends.lmdb.payload import number_of
from tiercache_backends.lmdb.records import FACTS, HALF, Record, StoreTotals, count_of, tick_of
from tiercache_backends.lmdb.transaction import Transaction
from tiercache_backends.local.failures import DamagedError, is_full

_MAX_WAITING: Final = 4096
"""Maximum number of objects whose recency waits for another write.

If more objects wait, all recency is written at once. If that write fails, up to twice this number of objects
are kept waiting. The same number limits the damaged objects that wait to be removed, and the damaged objects
that cannot be removed.
"""


class Applied(NamedTuple):
    """Waiting work that one transaction wrote."""

    touched: Sequence[bytes]
    """Places of objects whose recency was written."""
    named: Mapping[bytes, NamespaceRecord]
    """Namespace records that were written, by namespace."""
    dropped: Mapping[bytes, int | None]
    """Numbers of the damaged objects that were removed, by place.

    The number is None if the object had no readable record.
    """


class HiddenObjects(NamedTuple):
    """Count and payload bytes of damaged objects that are still in the store."""

    objects: int = 0
    payload_bytes: int = 0


class Maintenance:
    """Small writes that this process still has to make, and removals.

    A get writes nothing itself, so that it never waits for a writer. The small writes of a get wait here
    until some write transaction calls `apply`, which writes them and returns them. After the commit,
    `committed` forgets only the work that `apply` returned, because another thread may have added work in
    between:

        1. Thread A calls `apply` in its transaction.
        2. Thread B finds object X damaged, and adds the removal of X to the waiting work.
        3. A commits and calls `committed`; the removal of X is still waiting.

    The lists of objects are bounded. If an entry has to be dropped, a little recency is lost, or a damaged
    object is found again later.

    Thread safety: any thread may call.
    """

    def __init__(self, environment: Environment, budget: PageBudget, errors: ErrorCounters) -> None:
        self._environment = environment
        self._budget = budget
        self._errors = errors
        self._mutex = Lock()
        self._touched: dict[bytes, None] = {}
        """Places of objects whose recency waits to be written, the earliest use first."""
        self._damaged: dict[bytes, int | None] = {}
        """Numbers of damaged objects that wait to be removed, by place."""
        self._unremovable: dict[bytes, int | None] = {}
        """Numbers of damaged objects that cannot be removed, by place; this process treats them as absent."""
        self._unsaved: dict[bytes, NamespaceRecord] = {}
        """Namespace records that wait to be written, by namespace."""

    def touch(self, places: Sequence[bytes]) -> None:
        """Record that the objects of a batch were used, in this order.

        After damage this method does nothing: writing recency moves entries of the database `ages`, and so
        could meet another damaged LMDB page.
        """
        if self._environment.is_damaged():
            return
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

    def drop(self, damaged: Mapping[bytes, int | None]) -> None:
        """Remove damaged objects, given as numbers by place (None: the object has no readable record).

        An object with another number that was stored at the same place later stays. From now on this process
        treats the damaged objects as absent, even if they cannot be removed.
        """
        with self._mutex:
            self._damaged.update(damaged)
            while len(self._damaged) > _MAX_WAITING:
                del self._damaged[next(iter(self._damaged))]
        # Where LMDB's trees are damaged, more may be hidden than lost, which only a rewrite finds again.
        if not self._environment.is_damaged():
            self.flush()

    def forget_damaged(self) -> None:
        """Forget all damaged objects, because the environment was written anew without them."""
        with self._mutex:
            self._damaged, self._unremovable = {}, {}

    def is_damaged(self, place: bytes, number: int) -> bool:
        """Return whether the object with this number is known to be damaged, and so counts as absent."""
        return number in (self._damaged.get(place), self._unremovable.get(place))

    def any_damaged(self) -> bool:
        """Return whether any object is known to be damaged."""
        return bool(self._damaged or self._unremovable)

    def hidden(self) -> HiddenObjects:
        """Return number and bytes of the damaged objects that `StoreTotals` still includes."""
        with self._mutex:
            hidden = self._unremovable | self._damaged
        lengths = [self._length(place, number) for place, number in hidden.items()]
        stored = [length for length in lengths if length is not None]
        return HiddenObjects(len(stored), sum(stored))

    def remove(self, places: Sequence[bytes]) -> set[bytes]:
        """Remove objects, in several transactions; return the places of the removed objects."""
        gone: set[bytes] = set()
        try:
            for start in range(0, len(places), self._budget.changes):
                gone.update(self._remove_splitting(places[start : start + self._budget.changes]))
        except OSError as error:
            self._errors.failed("a deletion", error)
        return gone

    def flush(self) -> None:
        """Write all waiting work; count and log a failure instead of raising it."""
        try:
            while self._has_work():
                # Each round writes as much as one transaction may write.
                try:
                    self.committed(self._environment.write(self._apply_and_save))
                except DamagedError:
                    self.flush_one_by_one()
        except OSError as error:
            self._errors.failed("writing recency", error)

    def flush_one_by_one(self) -> None:
        """Write each namespace record and each removal in its own transaction; drop what meets damage.

        All waiting recency is dropped. Raises OSError where the disk is full or fails.
        """
        with self._mutex:
            waiting, named, damaged = list(self._touched), dict(self._unsaved), dict(self._damaged)
        for namespace, record in named.items():
            self._write_or_give_up(
                Applied((), {namespace: record}, {}), partial(Transaction.register, record=record)
            )
        for place, number in damaged.items():
            # Remove the whole object. If this meets damage, remove only its record.
            ways = [
                partial(Transaction.drop_damaged, place=place, number=number, record_only=record_only)
                for record_only in (False, True)
            ]
            if not self._write_or_give_up(Applied((), {}, {place: number}), *ways):
                self._mark_unremovable(place, number)
        if waiting:
            # Drop recency unwritten. Writing recency deletes entries of `ages`. When a leaf of LMDB's tree
            # becomes too empty, LMDB merges it with its neighbour, and a damaged neighbour kills the process.
            self._errors.count("chores_dropped", len(waiting))
            self.committed(Applied(waiting, {}, {}))

    def apply(self, transaction: Transaction) -> Applied:
        """Write as much waiting work as one transaction may write; return that work, for `committed`."""
        # Lock order: the writer lock, which this transaction holds, then the mutex. Copy the lists, so that
        # no call of LMDB is made under the mutex.
        with self._mutex:
            waiting, named, damaged = list(self._touched), dict(self._unsaved), dict(self._damaged)
        left = self._budget.changes
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
        return Applied(touched, named, dropped)

    def committed(self, applied: Applied) -> None:
        """Forget the work that a committed transaction wrote."""
        with self._mutex:
            for place in applied.touched:
                self._touched.pop(place, None)
            # Another thread may have replaced an entry since `apply`: forget an entry only if it is the same.
            for namespace, record in applied.named.items():
                if self._unsaved.get(namespace) is record:
                    del self._unsaved[namespace]
            for place, number in applied.dropped.items():
                if self._damaged.get(place) == number:
                    self._damaged.pop(place, None)

    def waiting(self) -> int:
        """Return the number of objects whose recency is not written yet."""
        return len(self._touched)

    def _write_or_give_up(self, applied: Applied, *ways: Callable[[Transaction], object]) -> bool:
        """Do one piece of waiting work in a transaction of its own: try `ways` in turn until one succeeds.

        If all of them meet damage, drop the work and return False.
        """
        for way in ways:
            try:
                self._environment.write(partial(self._run_and_save, way))
            except DamagedError as error:
                self._errors.failed("writing recency", error)
            else:
                self.committed(applied)
                return True
        self._errors.count("chores_dropped", len(applied.touched) + len(applied.named) + len(applied.dropped))
        self.committed(applied)
        return False

    def _run_and_save(self, way: Callable[[Transaction], object], txn: Any) -> None:
        transaction = Transaction(self._environment, txn)
        way(transaction)
        transaction.save()

    def _mark_unremovable(self, place: bytes, number: int | None) -> None:
        with self._mutex:
            self._unremovable[place] = number
            while len(self._unremovable) > _MAX_WAITING:
                del self._unremovable[next(iter(self._unremovable))]

    def _length(self, place: bytes, number: int | None) -> int | None:
        """Return the payload bytes of the object with this number; None where it is gone or unreadable."""

        def look(txn: Any) -> int | None:
            value = txn.get(place, db=self._environment.objects)
            record = None if value is None else Record.unpack(value)
            return record.length if record is not None and record.number == number else None

        with suppress(DamagedError):
            return self._environment.read(look)
        return None

    def _remove_splitting(self, places: Sequence[bytes], *, silent: bool = False) -> list[bytes]:
        """Remove objects in one transaction; if this meets damage or a full disk, remove each half by itself.

        Returns the places of the removed objects. `silent`: do not log the removals. Because the log takes
        LMDB pages, a removal that finds the disk full is repeated without the log.
        """
        try:
            removed, applied = self._environment.write(partial(self._remove, places, silent))
        except DamagedError as error:
            if self._has_work():
                self.flush_one_by_one()
                return self._remove_splitting(places)
            if len(places) == 1:
                return self._remove_record(places[0], error)
        except OSError as error:
            if is_full(error) and not silent:
                return self._remove_splitting(places, silent=True)
            if not is_full(error) or len(places) == 1:
                raise
        else:
            self.committed(applied)
            return removed
        middle = len(places) // 2
        return self._remove_splitting(places[:middle], silent=silent) + self._remove_splitting(
            places[middle:], silent=silent
        )

    def _remove_record(self, place: bytes, error: OSError) -> list[bytes]:
        """Remove at least the record of an object whose other entries lie on a damaged LMDB page.

        Returns a list with the object's place. The list is empty if the object is not there, or if its record
        cannot be removed either. In the latter case `error`, the error of the whole removal, is logged.
        """

        def remove_record(transaction: Transaction) -> None:
            record = transaction.find(place)
            if record is not None:
                found.append(place)
                transaction.remove_record(place, record)

        found: list[bytes] = []
        try:
            self._environment.write(partial(self._run_and_save, remove_record))
        except DamagedError:
            self._errors.failed("a deletion", error)
            return []
        return found

    def _has_work(self) -> bool:
        return bool(self._unsaved or self._touched or self._damaged)

    def _remove(self, places: Sequence[bytes], silent: bool, txn: Any) -> tuple[list[bytes], Applied]:
        transaction = Transaction(self._environment, txn, silent=silent)
        before = transaction.totals
        # Apply waiting work first, to remove damaged objects. A damaged object counts as absent, so its
        # deletion is answered False.
        applied = self.apply(transaction)
        gone: list[bytes] = []
        for place in places:
            record = transaction.find(place)
            if record is not None and not self.is_damaged(place, record.number):
                transaction.remove(place, record)
                gone.append(place)
        if transaction.totals != before:
            transaction.save()
        return gone, applied

    def _apply_and_save(self, txn: Any) -> Applied:
        transaction = Transaction(self._environment, txn)
        before = transaction.totals
        applied = self.apply(transaction)
        if transaction.totals != before:
            transaction.save()
        return applied


def check(environment: Environment) -> None:
    """Raise AssertionError unless all databases agree. Raises OSError.

    The check is one read transaction, so other processes may write meanwhile.
    """
    environment.read(partial(_check, environment))


def _check(environment: Environment, txn: Any) -> None:
    facts = StoreTotals.unpack(txn.get(FACTS, db=environment.facts))
    records: dict[bytes, Record] = {}
    counts: dict[bytes, int] = {}
    for raw, value in txn.cursor(environment.objects):
        key = bytes(raw)
        if len(key) == HALF:
            counts[key] = count_of(value)
        else:
            record = Record.unpack(value)
            assert record is not None, f"{key.hex()} has no record"
            records[key] = record
    assert facts.objects == len(records), "every object is counted"
    assert facts.payload_bytes == sum(record.length for record in records.values()), "every byte is counted"
    assert counts == Counter(record.depends_on for record in records.values() if record.depends_on), (
        "dependents are counted"
    )
    sizes: Counter[int] = Counter()
    for raw, value in txn.cursor(environment.parts):
        sizes[number_of(raw)] += len(value)
    assert sizes == {record.number: record.length for record in records.values()}, (
        "every object has its parts, and every part its object"
    )
    assert max(sizes, default=0) < facts.next_number, "every number is below the next one"
    ages = {tick_of(raw): bytes(value) for raw, value in txn.cursor(environment.ages)}
    assert all(records[place].tick == tick for tick, place in ages.items()), "every age is an object's"
    assert max((record.tick for record in records.values()), default=0) < facts.next_tick, (
        "every tick is below the next one"
    )
    assert all(ages.get(record.tick) == place for place, record in records.items()), "every object has an age"
