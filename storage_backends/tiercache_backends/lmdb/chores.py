"""What else goes into a write transaction when there is one: recency, names, damaged objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

MOST_WAITING: Final = 4096
"""Objects that were read and wait for their recency to be written, and as many damaged ones that could not be removed."""


class Done(NamedTuple):
    """What a transaction wrote down."""

    touched: Sequence[bytes]
    named: Mapping[bytes, NamespaceRecord]
    dropped: Mapping[bytes, int | None]


class Hidden(NamedTuple):
    """Damaged objects that are still in the store, because they could not be removed."""

    objects: int = 0
    payload_bytes: int = 0


class Chores:
    """What this process has yet to write: reads do not write, so that they never wait for anybody.

    All of it is bounded; what falls out costs a little recency, or is found damaged once more.

    Thread rule: any thread may call.
    """

    def __init__(self, environment: Environment, budget: Budget, tally: Tally) -> None:
        self._environment = environment
        self._budget = budget
        self._tally = tally
        self._mutex = Lock()
        self._touched: dict[bytes, None] = {}
        self._spoiled: dict[bytes, int | None] = {}
        self._unsaved: dict[bytes, NamespaceRecord] = {}

    def touch(self, places: Sequence[bytes]) -> None:
        """A batch was used, in this order."""
        with self._mutex:
            # The deeper pages of a sequence come later in a batch, and are to be evicted earlier.
            for place in reversed(places):
                self._touched.pop(place, None)
                self._touched[place] = None
            crowded = len(self._touched) > MOST_WAITING
            while len(self._touched) > 2 * MOST_WAITING:
                del self._touched[next(iter(self._touched))]
        if crowded:
            self.settle()

    def register(self, record: NamespaceRecord) -> None:
        """Remember a namespace's identity, with the next batch if not now."""
        with self._mutex:
            self._unsaved[record.namespace] = record
        self.settle()

    def drop(self, damaged: Mapping[bytes, int | None]) -> None:
        """Remove damaged objects, if they still have these numbers (None: no readable record). What cannot be removed counts as absent."""
        with self._mutex:
            self._spoiled.update(damaged)
            while len(self._spoiled) > MOST_WAITING:
                del self._spoiled[next(iter(self._spoiled))]
        self.settle()

    def is_spoiled(self, place: bytes, number: int) -> bool:
        """Does the object with this number count as absent?"""
        return self._spoiled.get(place) == number

    def any_spoiled(self) -> bool:
        """Is there any that does?"""
        return bool(self._spoiled)

    def hidden(self, txn: Any) -> Hidden:
        """What the store's own counts include and nobody can have."""
        if not self._spoiled:
            return Hidden()
        with self._mutex:
            spoiled = dict(self._spoiled)
        values = ((number, txn.get(place, db=self._environment.objects)) for place, number in spoiled.items())
        records = [(number, Record.unpack(value)) for number, value in values if value is not None]
        lengths = [record.length for number, record in records if record is not None and record.number == number]
        return Hidden(len(lengths), sum(lengths))

    def remove(self, places: Sequence[bytes]) -> set[bytes]:
        """Remove objects, transaction by transaction; says which were there and are gone."""
        gone: set[bytes] = set()
        try:
            for start in range(0, len(places), self._budget.changes):
                removed, done = self._environment.write(partial(self._remove, places[start : start + self._budget.changes]))
                self.settled(done)
                gone.update(removed)
        except OSError as error:
            self._tally.failed("a deletion", error)
        return gone

    def settle(self) -> None:
        """Write down everything, if that is possible."""
        try:
            while self._unsaved or self._touched or self._spoiled:
                self.settled(self._environment.write(lambda txn: self._alone(Ledger(self._environment, txn))))
        except OSError as error:
            self._tally.failed("noting what was used", error)

    def do(self, ledger: Ledger) -> Done:
        """Write down what is waiting, as far as one transaction may take it."""
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
        """The transaction is through."""
        with self._mutex:
            for place in done.touched:
                self._touched.pop(place, None)
            for namespace, record in done.named.items():
                if self._unsaved.get(namespace) is record:
                    del self._unsaved[namespace]
            for place, number in done.dropped.items():
                if self._spoiled.get(place) == number:
                    self._spoiled.pop(place, None)

    def waiting(self) -> int:
        """Objects whose recency is not written yet."""
        return len(self._touched)

    def _remove(self, places: Sequence[bytes], txn: Any) -> tuple[list[bytes], Done]:
        ledger = Ledger(self._environment, txn)
        before = ledger.facts
        # Damaged objects go first: they are not there for anybody, so nobody deletes them.
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
