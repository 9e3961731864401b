"""Small writes that ride along in write transactions: recency, namespace records, and removals of damaged objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from threading import Lock
from typing import Any, Final, NamedTuple

from tiercache.storage.base import NamespaceRecord
from tiercache_backends.lmdb.budget import Budget
from tiercache_backends.lmdb.environment import Environment
from tiercache_backends.lmdb.ledger import Ledger
from tiercache_backends.lmdb.records import Record
from tiercache_backends.lmdb.tally import Tally
from tiercache_backends.local.failures import DamagedError, is_full

MOST_WAITING: Final = 4096
"""Objects whose recency may wait for another write; beyond that it is written at once, and twice as many are kept at most.

Also the bound of damaged objects that wait to be removed, and of those that cannot be removed.
"""


class Done(NamedTuple):
    """Waiting work that one transaction wrote down.

    `touched`: places whose recency it wrote. `named`: namespace records by namespace. `dropped`: damaged objects by place, with their
    numbers (None: no readable record).
    """

    touched: Sequence[bytes]
    named: Mapping[bytes, NamespaceRecord]
    dropped: Mapping[bytes, int | None]


class Hidden(NamedTuple):
    """Count and payload bytes of damaged objects that are still in the store, because they were not, or could not be, removed."""

    objects: int = 0
    payload_bytes: int = 0


class Chores:
    """Small writes that this process has yet to make. Reads write nothing themselves, so that they never wait for a writer.

    The lists of objects are bounded; what is dropped costs a little recency, or is found damaged once more.

    Thread safety: any thread may call.
    """

    def __init__(self, environment: Environment, budget: Budget, tally: Tally) -> None:
        self._environment = environment
        self._budget = budget
        self._tally = tally
        self._mutex = Lock()
        self._touched: dict[bytes, None] = {}
        self._spoiled: dict[bytes, int | None] = {}
        self._stuck: dict[bytes, int | None] = {}
        """Damaged objects that cannot be removed, by place, with their numbers; they count as absent as long as this process lives."""
        self._unsaved: dict[bytes, NamespaceRecord] = {}

    def touch(self, places: Sequence[bytes]) -> None:
        """Note that the objects of a batch were used, in this order; does nothing once LMDB has met a damaged page."""
        if self._environment.is_damaged():
            return
        with self._mutex:
            # The deeper pages of a sequence come later in a batch and are to be evicted earlier, so they get older ticks.
            for place in reversed(places):
                self._touched.pop(place, None)
                self._touched[place] = None
            crowded = len(self._touched) > MOST_WAITING
            while len(self._touched) > 2 * MOST_WAITING:
                del self._touched[next(iter(self._touched))]
        if crowded:
            self.settle()

    def register(self, record: NamespaceRecord) -> None:
        """Store a namespace's identity, now or, where that fails, with a later transaction."""
        with self._mutex:
            self._unsaved[record.namespace] = record.over(self._unsaved.get(record.namespace))
        self.settle()

    def drop(self, damaged: Mapping[bytes, int | None]) -> None:
        """Remove damaged objects, if they still have these numbers (None: no readable record). What cannot be removed counts as absent."""
        with self._mutex:
            self._spoiled.update(damaged)
            while len(self._spoiled) > MOST_WAITING:
                del self._spoiled[next(iter(self._spoiled))]
        self.settle()

    def is_spoiled(self, place: bytes, number: int) -> bool:
        """Return whether the object with this number counts as absent, because it is damaged."""
        return number in (self._spoiled.get(place), self._stuck.get(place))

    def any_spoiled(self) -> bool:
        """Return whether any object counts as absent because it is damaged."""
        return bool(self._spoiled or self._stuck)

    def hidden(self) -> Hidden:
        """Return the count and the bytes of objects that the store's own counts include and no caller can read."""
        with self._mutex:
            hidden = self._stuck | self._spoiled
        lengths = [length for place, number in hidden.items() if (length := self._length(place, number)) is not None]
        return Hidden(len(lengths), sum(lengths))

    def remove(self, places: Sequence[bytes]) -> set[bytes]:
        """Remove objects in one transaction after the other; return the places of those that were there and are gone."""
        gone: set[bytes] = set()
        try:
            for start in range(0, len(places), self._budget.changes):
                gone.update(self._remove_apart(places[start : start + self._budget.changes]))
        except OSError as error:
            self._tally.failed("a deletion", error)
        return gone

    def settle(self) -> None:
        """Write down everything that waits; where the disk is full or fails, count and log that instead."""
        try:
            while self._waits():
                try:
                    self.settled(self._environment.write(lambda txn: self._alone(Ledger(self._environment, txn))))
                except DamagedError:
                    self.sift()
        except OSError as error:
            self._tally.failed("noting what was used", error)

    def sift(self) -> None:
        """Write what waits, each thing in a transaction of its own; drop what cannot be written, and all recency.

        Raises OSError where the disk is full or fails.
        """
        with self._mutex:
            waiting, named, spoiled = list(self._touched), dict(self._unsaved), dict(self._spoiled)
        for namespace, record in named.items():
            self._alone_or_dropped(Done((), {namespace: record}, {}), partial(_register, record))
        for place, number in spoiled.items():
            ways = [partial(_drop, place, number, strike) for strike in (False, True)]
            if not self._alone_or_dropped(Done((), {}, {place: number}), *ways):
                self._keep_out(place, number)
        if waiting:
            # Moving an age removes one, and LMDB ends the process where it then joins a leaf with a damaged neighbour.
            self._tally.count("chores_dropped", len(waiting))
            self.settled(Done(waiting, {}, {}))

    def do(self, ledger: Ledger) -> Done:
        """Write down what waits, as far as one transaction may take it; return what that was, for `settled` after the commit."""
        with self._mutex:
            waiting, named, spoiled = list(self._touched), dict(self._unsaved), dict(self._spoiled)
        left = self._budget.changes
        dropped = dict(islice(spoiled.items(), left))
        for place, number in dropped.items():
            ledger.drop(place, number)
        for record in named.values():
            ledger.register(record)
        touched: list[bytes] = []
        for place in waiting:
            if left <= 0:
                break
            touched.append(place)
            left -= ledger.touch(place)
        return Done(touched, named, dropped)

    def settled(self, done: Done) -> None:
        """Forget what a transaction wrote down: it was committed."""
        with self._mutex:
            for place in done.touched:
                self._touched.pop(place, None)
            # Another thread may have registered or spoiled something new since `do`: only what was written is forgotten.
            for namespace, record in done.named.items():
                if self._unsaved.get(namespace) is record:
                    del self._unsaved[namespace]
            for place, number in done.dropped.items():
                if self._spoiled.get(place) == number:
                    self._spoiled.pop(place, None)

    def waiting(self) -> int:
        """Return the number of objects whose recency is not written yet."""
        return len(self._touched)

    def _alone_or_dropped(self, done: Done, *ways: Callable[[Ledger], object]) -> bool:
        """Do one waiting thing in a transaction of its own, in the first of `ways` that works; drop it and return False where none does."""
        for way in ways:
            try:
                self._environment.write(partial(self._in_full, way))
            except DamagedError as error:
                self._tally.failed("noting what was used", error)
            else:
                self.settled(done)
                return True
        self._tally.count("chores_dropped", len(done.touched) + len(done.named) + len(done.dropped))
        self.settled(done)
        return False

    def _in_full(self, way: Callable[[Ledger], object], txn: Any) -> None:
        ledger = Ledger(self._environment, txn)
        way(ledger)
        ledger.save()

    def _keep_out(self, place: bytes, number: int | None) -> None:
        with self._mutex:
            self._stuck[place] = number
            while len(self._stuck) > MOST_WAITING:
                del self._stuck[next(iter(self._stuck))]

    def _length(self, place: bytes, number: int | None) -> int | None:
        """Return the payload bytes of a damaged object; None where it is gone or its record cannot be read."""

        def look(txn: Any) -> int | None:
            value = txn.get(place, db=self._environment.objects)
            record = None if value is None else Record.unpack(value)
            return record.length if record is not None and record.number == number else None

        with suppress(DamagedError):
            return self._environment.read(look)
        return None

    def _remove_apart(self, places: Sequence[bytes], *, silent: bool = False) -> list[bytes]:
        """Remove objects in one transaction, or in smaller ones where it meets damage or the disk has no room for so much.

        Return the places removed. `silent`: leave out the log of removals, which takes LMDB pages; tried where the disk is full.
        """
        try:
            removed, done = self._environment.write(partial(self._remove, places, silent))
        except DamagedError as error:
            if self._waits():
                self.sift()
                return self._remove_apart(places)
            if len(places) == 1:
                return self._strike(places[0], error)
        except OSError as error:
            if is_full(error) and not silent:
                return self._remove_apart(places, silent=True)
            if not is_full(error) or len(places) == 1:
                raise
        else:
            self.settled(done)
            return removed
        middle = len(places) // 2
        return self._remove_apart(places[:middle], silent=silent) + self._remove_apart(places[middle:], silent=silent)

    def _strike(self, place: bytes, error: OSError) -> list[bytes]:
        """Remove at least the record of an object whose payload or age lies on a damaged page.

        Return its place in a list; an empty list where it was not there, or where even that fails; `error` is logged then.
        """

        def strike(ledger: Ledger) -> None:
            record = ledger.find(place)
            if record is not None:
                found.append(place)
                ledger.strike(place, record)

        found: list[bytes] = []
        try:
            self._environment.write(partial(self._in_full, strike))
        except DamagedError:
            self._tally.failed("a deletion", error)
            return []
        return found

    def _waits(self) -> bool:
        return bool(self._unsaved or self._touched or self._spoiled)

    def _remove(self, places: Sequence[bytes], silent: bool, txn: Any) -> tuple[list[bytes], Done]:
        ledger = Ledger(self._environment, txn, silent=silent)
        before = ledger.facts
        # Damaged objects go first: they count as absent, so no deletion is answered True for them.
        done = self.do(ledger)
        found = [(place, ledger.find(place)) for place in places]
        gone = [(place, record) for place, record in found if record is not None and not self.is_spoiled(place, record.number)]
        for place, record in gone:
            ledger.remove(place, record)
        if ledger.facts != before:
            ledger.save()
        return [place for place, _ in gone], done

    def _alone(self, ledger: Ledger) -> Done:
        before = ledger.facts
        done = self.do(ledger)
        if ledger.facts != before:
            ledger.save()
        return done


def _register(record: NamespaceRecord, ledger: Ledger) -> None:
    ledger.register(record)


def _drop(place: bytes, number: int | None, strike: bool, ledger: Ledger) -> None:
    ledger.drop(place, number, strike=strike)
