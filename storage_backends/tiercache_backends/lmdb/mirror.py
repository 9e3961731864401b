"""In-memory copy of the records of an `lmdb` store, and the write transactions, which keep it in step.

Only the records in LMDB are authoritative, and other processes change them. The mirror reads all records
once, before this process first stores an object or reports the store's worth. After that it makes its own
changes in both places, and reads only those of other processes. Every change takes the next tick, so the
changes that the mirror does not know yet have ticks from `_seen` on:

    database `ages`      objects that were stored or used
    database `gone`      objects that were removed; it keeps only the latest removals

    ticks   | removals ................................. |
                         |<- read by the next `keep_up` ->|
                       _seen                          next_tick

If `gone` has already lost removals since `_seen`, the mirror reads all records again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from threading import RLock
from typing import Any, Final, TypeVar

import numpy as np

from tiercache.core import DIGEST_BYTES
from tiercache.events.base import ChangeNote
from tiercache.storage.eviction import EvictionOrder
from tiercache.storage.layouts import LAYOUT_BYTES
from tiercache.storage.pages import PAGE_KEY_BYTES, column_of
from tiercache.storage.residents import ObjectColumns, Residents
from tiercache_backends.lmdb.environment import Environment
from tiercache_backends.lmdb.records import PARENT_KNOWN, RECORD, Facts, Record, ticks_from
from tiercache_backends.lmdb.transaction import Transaction, names_in
from tiercache_backends.local.names import Names

T = TypeVar("T")

_OBJECTS_PER_TRANSACTION: Final = 4096
"""Maximum number of records that one transaction reads when all records are read."""


class Mirror:
    """Objects of a store as of one transaction, and the order in which they are evicted.

    Thread safety: any thread may call `write`; the thread that holds `lock` may call the rest.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.lock: Final = RLock()
        self._use(Residents(), Names(), 0)

    def _use(self, residents: Residents, names: Names, seen: int) -> None:
        self.residents = residents
        """Table of the objects."""
        self.order = EvictionOrder(residents)
        self._names = names
        self._seen = seen
        """First tick that is not known; 0 before all records were read."""

    def write(self, work: Callable[[Transaction], T], *, whole: bool = False) -> T:
        """Run `work` in a write transaction, and keep the mirror in step with what it commits.

        `whole`: the table must have all objects. Raises OSError, with nothing changed.
        """
        made: list[Transaction] = []

        def run(txn: Any) -> list[T]:
            if (whole or self._seen) and not self.keep_up(txn):
                return []
            names = self._names if self._seen else names_in(self._environment, txn)
            made.append(Transaction(self._environment, txn, self.residents, names, whole=self._seen > 0))
            result = work(made[0])
            made[0].save()
            return [result]

        with self.lock:
            try:
                while not (done := self._environment.write(run)):
                    self.read()
            except BaseException:  # whatever it is, the table is as before, and it is raised again
                for transaction in made:
                    transaction.finish(committed=False)
                    if transaction.has_named:
                        self._seen = 0
                raise
            made[0].finish(committed=True)
            if self._seen:
                self._seen = made[0].facts.next_tick
            return done[0]

    def watch(self, watcher: ChangeNote | None) -> None:
        """Tell `watcher` of objects that come and go from now on; see `StorageBackend.watch`.

        An eviction is told before its commit, and taken back if that fails.
        """
        self.refresh()
        self.residents.note = watcher

    def hidden(self, damaged: Mapping[bytes, int]) -> tuple[int, int]:
        """Return how many of these objects, numbers by digest, are stored, and their bytes."""
        residents = self.residents
        found = [(residents.find(digest), number) for digest, number in damaged.items()]
        rows = [row for row, number in found if row >= 0 and residents.number[row] == number]
        return len(rows), sum(residents.length[row] for row in rows)

    @property
    def is_watched(self) -> bool:
        """Whether anybody is told of changes."""
        return self.residents.note is not None

    def refresh(self) -> None:
        """Apply all changes, in transactions of its own; the caller has none open. Raises OSError."""
        # Other processes may remove so much between `read` and `keep_up` that all records have to be read
        # once more.
        while not self._environment.read(self.keep_up):
            self.read()

    def read(self) -> None:
        """Read all records; the caller has no transaction open. Raises OSError, with nothing changed."""
        note, known = self.residents.note, self._digests()
        self._use(*self._all())
        self.residents.note = note
        if note is not None:
            now = self._digests()
            note(list(known - now), False)
            note(list(now - known), True)

    def _all(self) -> tuple[Residents, Names, int]:
        """Return a table of all records, the names, and the first tick of a change that they may not have."""
        facts, names = self._environment.read(self._facts)
        found: list[tuple[bytes, bytes]] = []
        # LMDB reuses no given-up pages while a read transaction lasts, so read in short parts. Other
        # processes write between the parts. Their changes have ticks from `next_tick` on, so the next
        # `keep_up` applies them.
        read = partial(self._environment.objects_after, most=_OBJECTS_PER_TRANSACTION)
        while some := self._environment.read(partial(read, digest=found[-1][0] if found else b"")):
            found += some
        records = np.frombuffer(b"".join([value for _, value in found]), RECORD)
        order = records["tick"].argsort()
        records = records[order]
        known = (records["flags"] & PARENT_KNOWN).nonzero()[0]
        residents = Residents()
        residents.load(
            ObjectColumns(
                column_of([digest for digest, _ in found], DIGEST_BYTES)[order],
                np.ascontiguousarray(records["parent"]).view(np.uint64).reshape(-1, PAGE_KEY_BYTES // 8),
                known,
                records["number"],
                records["length"],
                records["depth"],
                records["namespace"],
            )
        )
        _require_states(residents, names)
        return residents, names, facts.next_tick

    def _facts(self, txn: Any) -> tuple[Facts, Names]:
        return self._environment.facts_in(txn), names_in(self._environment, txn)

    def keep_up(self, txn: Any) -> bool:
        """Apply what others changed since the last call; return False if all records must be read again.

        In a write transaction, call this method before any change.
        """
        environment, seen = self._environment, self._seen
        facts = environment.facts_in(txn)
        # The mirror was never read, or the store's ticks began anew.
        if not seen or facts.next_tick < seen:
            return False
        if facts.next_tick == seen:
            return True
        kept = int(txn.stat(environment.gone)["entries"])
        if kept >= environment.logged and next(ticks_from(txn, environment.gone, 0))[0] > seen:
            return False
        if facts.named_at >= seen:
            self._names = names_in(environment, txn)
            _require_states(self.residents, self._names)
        removals = [(tick, digest, True) for tick, digest in ticks_from(txn, environment.gone, seen)]
        uses = [(tick, digest, False) for tick, digest in ticks_from(txn, environment.ages, seen)]
        for tick, digest, is_removal in sorted(removals + uses):
            row = self.residents.find(digest)
            # If the object was stored again after its removal, and the mirror has it already, its number is
            # that later tick, and the removal must not forget it.
            if is_removal:
                if row >= 0 and self.residents.number[row] < tick:
                    self._forget(row)
                continue
            value = txn.get(digest, db=environment.objects)
            if value is None or (record := Record.unpack(value)).tick != tick:
                continue  # the entry in `ages` is outdated: the object is gone, or has a newer tick
            if row >= 0 and self.residents.number[row] == record.number:
                self.residents.renew(row)
                continue
            if row >= 0:
                self._forget(row)
            self._add(digest, record)
        self._seen = facts.next_tick
        return True

    def _forget(self, row: int) -> None:
        self.residents.leave(row)
        self.residents.drop(row)

    def _add(self, digest: bytes, record: Record) -> None:
        pages = self.residents.pages
        node = pages.hold(digest[LAYOUT_BYTES:])
        parent = pages.hold(record.depends_on) if record.depends_on else None
        self.residents.add(digest, node, parent, record.number, record.length, record.namespace, record.depth)
        pages.release(node)
        if parent is not None:
            pages.release(parent)

    def _digests(self) -> set[bytes]:
        """Return the digests of all objects if somebody watches, else nothing."""
        rows = self.residents.residents().tolist() if self.is_watched else []
        return {self.residents.digest(row) for row in rows}


def _require_states(residents: Residents, names: Names) -> None:
    for namespace, record in names.records.items():
        if record.states:
            residents.pages.require_states(names.ids[namespace])
