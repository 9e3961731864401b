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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from threading import RLock
from typing import Any, Final, NamedTuple

import numpy as np

from tiercache.events.base import ChangeNote
from tiercache.policy import Lru
from tiercache.storage.coldest import Found, Survey
from tiercache.storage.eviction import EvictionOrder
from tiercache.storage.pages import column_of
from tiercache.storage.residents import ObjectColumns, Residents
from tiercache.storage.restorable import RestorablePages
from tiercache.storage.shares import Owners, Shares, Writer
from tiercache.storage.values import HALF_LIFE, usable_hints
from tiercache_backends.lmdb.environment import Environment
from tiercache_backends.lmdb.payload import footprint
from tiercache_backends.lmdb.records import (
    FACTS,
    HALF,
    Record,
    StoreTotals,
    log_start,
    named_tick,
    place_of,
    removals,
    tick_key,
    tick_of,
)
from tiercache_backends.lmdb.transaction import Transaction, names_in
from tiercache_backends.local.failures import DAMAGE

_OBJECTS_PER_TRANSACTION: Final = 4096
"""Maximum number of records that one transaction reads when all records are read."""
ALL_PAGES: Final = 1 << 62
"""More LMDB pages than any file has."""
_MAX_NOTED: Final = 1 << 16
"""Maximum number of uses that wait for `keep_up`; if there are more, the oldest uses are dropped."""


class _Hint(NamedTuple):
    """Value of an object that was given to this process and waits for `keep_up`."""

    digest: bytes
    value: float
    worker: int
    seconds: float
    """Time at which it was given, on the mirror's clock."""


class WalkResult(NamedTuple):
    """Result of one part of a walk over all objects, ordered by tick."""

    objects: list[tuple[bytes, Record]]
    """Places and records."""
    following: int
    """Tick at which the next part begins; 0 at the end."""
    damaged: bool = False
    """Whether a damaged LMDB page ended this part early."""


class Mirror:
    """Objects of a store as of one transaction, and the order in which they are evicted.

    During a write transaction that may evict, the caller holds `lock` and calls these methods:

        1. `keep_up`                         applies what other transactions changed
        2. `evict` or `sweep`                takes objects out
        3. `committed` or `rolled_back`      makes step 2 final, or undoes it

    Values that callers give (`hint`) are known to this process alone, and are forgotten when all records are
    read again. `clock` gives the seconds by which they age.

    The parameter `row` of many methods is the row of an object in the table `Residents`.

    Thread safety: the thread that holds `lock` may call; `note`, `read`, `is_read` and `unfinished` may be
    called without it.
    """

    def __init__(self, environment: Environment, clock: Callable[[], float]) -> None:
        self._environment = environment
        self._clock = clock
        self.footprint: Final = footprint(environment.page_bytes)
        """Bytes that an object takes of its owner's share."""
        self._hints: deque[_Hint] = deque(maxlen=_MAX_NOTED)
        self.lock: Final = RLock()
        self._leaving: list[tuple[int, bytes, bytes | None]] = []
        """Objects that the open transaction removes: row, digest, and parent if known."""
        self._noted: deque[tuple[bytes, bool]] = deque(maxlen=_MAX_NOTED)
        """Places of objects that were used, each with `brought` (see `note`)."""
        self._watcher: ChangeNote | None = None
        self._told: set[bytes] | None = None
        """Digests that the watcher knows, while all records are read again; else it knows the mirror's."""
        self.owners: Final = Owners()
        """Bytes of each owner, as of the last `keep_up`."""
        self._names: dict[int, bytes] = {}
        """Namespaces by number."""
        self._reset()

    def note(self, places: Iterable[bytes], *, brought: bool = False) -> None:
        """Record, without a lock, that objects were used; the next `keep_up` applies these uses.

        `brought`: the objects were used by a set that found them stored already, and not by a get.
        """
        if self.is_read:
            self._noted.extend((place, brought) for place in places)

    def hint(self, digests: Sequence[bytes], values: Sequence[float], worker: int) -> None:
        """Record, without a lock, the values of objects; the next `keep_up` applies them.

        At most `_MAX_NOTED` of them wait; if there are more, the oldest are dropped.
        """
        possible, which = usable_hints(values, worker, len(digests))
        now = self._clock()
        self._hints.extend(
            _Hint(digests[i], value, worker, now)
            for i, value in zip(which.tolist(), possible.tolist(), strict=True)
        )

    def is_worth(self, value: float, writer: Writer | None = None) -> bool:
        """Return whether an object of this value would be stored if room had to be made for it."""
        return self._order.is_worth(self._residents.rank(value), writer)

    def share(self, shares: Shares) -> None:
        """Keep these shares; see `StorageBackend.share`. The mirror has been read."""
        self._residents.share(shares, self._name_of)
        self._order.restart()

    def owner_of(self, namespace: bytes) -> str:
        """Return the name of the owner of a namespace, without a lock; empty before `share`."""
        shares = self.owners.shares
        return "" if shares is None else shares.owner_of(namespace)

    def watch(self, watcher: ChangeNote | None) -> None:
        """Tell `watcher` of objects that come and go from now on; see `StorageBackend.watch`.

        The mirror has been read. An eviction is told before its commit, and taken back if that fails.
        """
        self._watcher = self._residents.note = watcher

    def tell_gone(self, damaged: Mapping[bytes, int | None]) -> None:
        """Tell that these objects, numbers by place, count as absent in this process, removed or not.

        Later objects at these places stay (None: whatever the mirror has there is meant).
        """
        with self.lock:
            for place, number in damaged.items():
                row = self._residents.find(place_of(place))
                if row >= 0 and number in (None, self._residents.number[row]) and self._watcher is not None:
                    self._watcher((place_of(place),), False)

    @property
    def pages(self) -> RestorablePages:
        """Pages of the objects, and which of them can be restored."""
        return self._residents.pages

    @property
    def is_watched(self) -> bool:
        """Whether anybody is told of changes."""
        return self._watcher is not None

    @property
    def is_read(self) -> bool:
        """Whether all records have been read."""
        return self._seen > 0

    def restart(self) -> None:
        """Let the next call read all records, because the environment was written anew.

        The watcher is told of what has gone then.
        """
        with self.lock:
            self._told = self._told or self._digests()
            self._reset()

    def read(self) -> None:
        """Empty the mirror and read all records; the caller has no transaction open.

        Raises OSError; after an error `is_read` is False.
        """
        with self.lock:
            if self._told is None:
                self._told = self._digests()
            self._reset()
            self._read()
            told, self._told, self._residents.note = self._told, None, self._watcher
            if self._watcher is not None:
                now = self._digests()
                self._watcher(list(told - now), False)
                self._watcher(list(now - told), True)

    def _read(self) -> None:
        facts, namespace_ids = self._environment.read(self._facts)
        found: dict[bytes, Record] = {}
        tick, damaged = 1, self._environment.is_damaged()
        # LMDB reuses no given-up pages while a read transaction lasts, so read in short parts. Other
        # processes write between the parts. Their changes have ticks from `facts.next_tick` on, so the next
        # `keep_up` applies them.
        while tick:
            some = self._environment.read(partial(self._walk_by_age, tick))
            found.update(some.objects)
            tick, damaged = some.following, damaged or some.damaged
        if len(found) < facts.objects and not damaged:
            # An earlier release wrote the store: some objects have no entry in `ages` (see records.py).
            self._environment.read(partial(self._find_without_age, found))
        ordered = sorted(found.items(), key=lambda entry: entry[1].tick)
        records = [record for _, record in ordered]
        known = [i for i, record in enumerate(records) if record.depends_on]
        self._residents.load(
            ObjectColumns(
                column_of([place_of(place) for place, _ in ordered], 2 * HALF).copy(),
                column_of([record.parent for record in records], HALF).copy(),
                np.array(known, np.int64),
                np.array([record.number for record in records], np.uint64),
                np.array([record.length for record in records], np.uint64),
                np.array([record.depth for record in records], np.uint32),
                np.array([record.namespace for record in records], np.uint32),
            )
        )
        for number in namespace_ids:
            self._residents.pages.require_states(number)
        if (shares := self.owners.shares) is not None:
            self._residents.share(shares, self._name_of)
        self._seen = facts.next_tick

    def keep_up(self, txn: Any) -> bool:
        """Apply the changes since the last call; return False if all records must be read again.

        In a write transaction, call this method before any change.
        """
        facts = StoreTotals.unpack(txn.get(FACTS, db=self._environment.facts))
        # The mirror was never read, or the store's ticks began anew, or the log has lost removals.
        if (
            not self._seen
            or facts.next_tick < self._seen
            or log_start(txn, self._environment.facts) > self._seen
        ):
            return False
        self._apply_noted()
        if facts.next_tick == self._seen:
            self._apply_hints()
            return True
        if named_tick(txn, self._environment.facts) >= self._seen:
            for namespace_id in self._facts(txn)[1]:
                self._residents.pages.require_states(namespace_id)
        for tick, place, number in sorted(
            [*removals(txn, self._environment.facts, self._seen), *self._changes(txn)]
        ):
            row = self._residents.find(place_of(place))
            # A place can be used again: object 3 is removed at tick 7, object 8 is stored there at tick 9. If
            # the mirror has object 8 already, the removal must not forget it. Numbers rise, so compare them.
            if number:
                if row >= 0 and self._residents.number[row] <= number:
                    self._forget(row)
                continue
            value = txn.get(place, db=self._environment.objects)
            record = None if value is None else Record.unpack(value)
            if record is None or record.tick != tick:
                continue  # the entry in `ages` is outdated: the object is gone, or has a newer tick
            if row >= 0 and self._residents.number[row] == record.number:
                self._residents.renew(row)
                continue
            if row >= 0:
                self._forget(row)
            if record.namespace not in self._names:
                self._facts(txn)  # reads the names
            self._add(place, record)
        self._seen = facts.next_tick
        self._apply_hints()
        return True

    def evict(
        self,
        eviction: Eviction,
        held: Sequence[bytes],
        *,
        promising: bool,
        value: float | None = None,
        writer: Writer | None = None,
    ) -> None:
        """Evict objects within the bounds of `eviction`; `writer`: whose need the room.

        `value`: lowest value of the objects that need the room; None if none of them has a value.

        `held`: keys of pages that stay, with all pages before them. `promising`: whether a restore could use
        one of the objects that need the room as soon as it is stored (see `EvictionOrder.evict`).
        """
        nodes = [self._residents.pages.hold(page) for page in held]
        try:
            rank = None if value is None else self._residents.rank(value)
            self._order.evict(eviction, nodes, promising=promising, rank=rank, writer=writer)
        finally:
            for node in nodes:
                self._residents.pages.release(node)

    @property
    def unfinished(self) -> bool:
        """Whether the last eviction removed only a part of a unit; no restore can use the rest of it."""
        return self._order.unfinished

    def sweep(self, eviction: Eviction) -> None:
        """Evict objects that no restore can use, such as the rest of a unit (see `unfinished`)."""
        self._order.sweep(eviction)

    def evict_beyond(self, owner: int, eviction: Eviction) -> None:
        """Evict what an owner has beyond its quota, within the bounds of `eviction`."""
        if (short := self.owners.used[owner] - self.owners.quotas[owner]) > 0:
            own = eviction.of_owner(short)
            self._order.evict(own, writer=Writer(owner, for_quota=True))
            eviction.objects += own.objects
            self.owners.evicted[owner] += own.objects

    def used_namespaces(self, objects: int) -> set[int] | None:
        """Return the numbers of all objects' namespaces; None unless the mirror has `objects` objects."""
        rows = self._residents.residents()
        used = np.unique(self._residents.columns["namespace"][rows]).tolist()
        return {*used} if len(rows) == objects else None

    def committed(self) -> None:
        """Drop the objects that the transaction removed; call this after its commit."""
        for row, _, _ in self._leaving:
            self._residents.drop(row)
        self._leaving = []

    def rolled_back(self) -> None:
        """Put back the objects that the transaction removed; call this if the commit did not happen."""
        for row, digest, parent in reversed(self._leaving):
            self._residents.enter(row, digest, parent)
        self._leaving = []

    def is_promising(self, page: bytes, namespace_id: int, *, attached: bool) -> bool:
        """Return whether a restore could use a new object on this page as soon as the object is stored.

        `attached`: the object is attached to the page, as a state is; otherwise the object is the page.
        """
        node = self._residents.pages.hold(page)
        promising = self._residents.pages.is_promising(node, namespace_id, attached=attached)
        self._residents.pages.release(node)
        return promising

    def has_refused(self, page: bytes) -> bool:
        """Return whether this page was not stored when it came last."""
        return self.is_read and self._residents.pages.has_refused(page)

    def survey(self) -> Survey:
        """Return copies of the columns that determine the eviction order; see `EvictionOrder.survey`."""
        return self._order.survey()

    def places(self, found: Found) -> list[bytes]:
        """Return the places of the found objects that are still stored."""
        return [place_of(self._residents.digest(row)) for row in self._residents.still_there(*found).tolist()]

    def _reset(self) -> None:
        self._residents = Residents(clock=self._clock, footprint=self.footprint)
        self._residents.owners = self.owners
        self._order = EvictionOrder(self._residents, Lru())
        self._leaving = []
        self._seen = 0

    def _add(self, place: bytes, record: Record) -> None:
        residents, page = self._residents, place[:HALF]
        node = residents.pages.hold(page)
        parent = residents.pages.hold(record.depends_on) if record.depends_on else None
        residents.add(
            place_of(place), node, parent, record.number, record.length, record.namespace, record.depth
        )
        residents.pages.release(node)
        if parent is not None:
            residents.pages.release(parent)

    def _apply_noted(self) -> None:
        """Apply the uses that `note` recorded."""
        for _ in range(len(self._noted)):
            place, brought = self._noted.popleft()
            row = self._residents.find(place_of(place))
            if row >= 0:
                (self._residents.renew if brought else self._residents.touch)(row)

    def _apply_hints(self) -> None:
        """Apply the values that `hint` recorded, as old as they are."""
        now = self._clock()
        waiting = [self._hints.popleft() for _ in range(len(self._hints))]
        for worker, group in groupby(waiting, key=lambda hint: hint.worker):
            hints = list(group)
            aged = [hint.value * 2.0 ** ((hint.seconds - now) / HALF_LIFE) for hint in hints]
            self._residents.advise([hint.digest for hint in hints], aged, worker)

    def _forget(self, row: int) -> None:
        self._residents.leave(row)
        self._residents.drop(row)

    def _digests(self) -> set[bytes]:
        """Return the digests of all objects if somebody watches, else nothing."""
        residents = self._residents
        rows = [] if self._watcher is None else residents.residents().tolist()
        return {residents.digest(row) for row in rows}

    def _facts(self, txn: Any) -> tuple[StoreTotals, list[int]]:
        facts = StoreTotals.unpack(txn.get(FACTS, db=self._environment.facts))
        names = names_in(self._environment, txn)
        self._names = {name.number: namespace for namespace, name in names.items()}
        return facts, [name.number for name in names.values() if name.states]

    def _name_of(self, number: int) -> bytes:
        return self._names.get(number, b"")

    def _walk_by_age(self, tick: int, txn: Any) -> WalkResult:
        """Return the next objects from a tick on, found by their entries in `ages`.

        A walk over `objects` would be simpler, but if it meets a damaged leaf, LMDB kills the process.
        """
        objects: list[tuple[bytes, Record]] = []
        with txn.cursor(self._environment.ages) as walk:
            found = walk.set_range(tick_key(tick))
            while found and len(objects) < _OBJECTS_PER_TRANSACTION:
                tick, place = tick_of(walk.key()), bytes(walk.value())
                try:
                    value = txn.get(place, db=self._environment.objects)
                except DAMAGE:
                    # After damage LMDB's transaction is useless, so the next part begins behind this object.
                    return WalkResult(objects, tick + 1, damaged=True)
                record = None if value is None else Record.unpack(value)
                if record is not None and record.tick == tick:
                    objects.append((place, record))
                found = walk.next()
            return WalkResult(objects, tick_of(walk.key()) if found else 0)

    def _find_without_age(self, found: dict[bytes, Record], txn: Any) -> None:
        for key, value in txn.cursor(self._environment.objects):
            record = Record.unpack(value) if len(key) == 2 * HALF and bytes(key) not in found else None
            if record is not None:
                found[bytes(key)] = record

    def _changes(self, txn: Any) -> Iterable[tuple[int, bytes, int]]:
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

    Thread safety: only the thread of the transaction uses it, which holds the mirror's lock.
    """

    def __init__(
        self,
        mirror: Mirror,
        transaction: Transaction,
        pages: int,
        max_objects: int,
        damaged: set[bytes],
        nbytes: float = 0,
    ) -> None:
        self._mirror = mirror
        self._transaction = transaction
        self._pages = pages
        self.max_objects: Final = max_objects
        """Maximum number of objects to remove."""
        self._damaged = damaged
        self._nbytes = nbytes
        self.objects = 0
        """Number of objects removed so far."""

    def of_owner(self, nbytes: float) -> Eviction:
        """Return an eviction with the same limits, of so many bytes of an owner's share."""
        return Eviction(self._mirror, self._transaction, ALL_PAGES, self.max_objects, self._damaged, nbytes)

    def take(self, rows: list[int]) -> None:
        """Remove these objects; skip those that are no longer stored or cannot be removed.

        A removal that meets damage adds the object's place to those that cannot be removed.
        """
        mirror, residents = self._mirror, self._mirror._residents
        for row in rows:
            place = place_of(residents.digest(row))
            if place in self._damaged:
                residents.pins[row] += 1  # for all further evictions
                continue
            try:
                record = self._transaction.find(place)
                if record is None or record.number != residents.number[row]:
                    mirror._forget(row)
                    continue
                self._transaction.remove(place, record)
            except DAMAGE:
                self._damaged.add(place)
                raise
            mirror._leaving.append((row, *residents.leave(row)))
            self.objects += 1
            self._nbytes -= mirror.footprint.of(record.length)

    def enough(self) -> bool:
        """Return whether enough LMDB pages are free, and enough bytes of an owner's share removed."""
        return self._nbytes <= 0 and self._transaction.used_pages() <= self._pages

    def full(self) -> bool:
        """Return whether this transaction may remove no more objects."""
        return self.objects >= self.max_objects
