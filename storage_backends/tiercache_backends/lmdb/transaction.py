"""Changes to the five databases within one write transaction, so that they stay consistent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import chain, count
from typing import Any, Final

from tiercache.storage.base import NamespaceRecord, SetItem
from tiercache.storage.checksum import Checksums
from tiercache_backends.lmdb import payload
from tiercache_backends.lmdb.environment import Environment
from tiercache_backends.lmdb.records import (
    FACTS,
    HALF,
    Record,
    StoreTotals,
    count_of,
    count_value,
    forget_removals,
    gone_key,
    gone_value,
    set_log_start,
    set_named_tick,
    tick_key,
    tick_of,
)
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


class Transaction:
    """Changes of one LMDB write transaction, which keep the five databases consistent.

    The caller must call `save` at the end, unless nothing was changed.

    `silent`: do not log removals. The transaction then takes fewer LMDB pages, but the mirrors of all
    processes have to read all objects again.

    Thread safety: only the thread of the transaction uses it.
    """

    def __init__(self, environment: Environment, txn: Any, *, silent: bool = False) -> None:
        self._silent = silent
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
        # Write one entry per piece in `parts`, one entry in each of `objects` and `ages`, and the count of
        # dependents at the parent. All entries of a database are written in one call.
        facts, page_bytes = self.totals, self._environment.page_bytes
        pieces: list[Iterator[tuple[bytes, memoryview | bytes]]] = []
        records: list[tuple[bytes, bytes]] = []
        ages: list[tuple[bytes, bytes]] = []
        parents: Counter[bytes] = Counter()
        numbers, ticks = count(facts.next_number), count(facts.next_tick)
        for (place, item, checksums), number, tick in zip(objects, numbers, ticks, strict=False):
            meta = item.meta
            record = Record.of(number, tick, item.key, meta, self.namespace_id(meta.namespace), checksums)
            sizes = payload.piece_sizes(meta.length, page_bytes, part_pages)
            pieces.append(payload.pieces(number, item.buffers, sizes))
            records.append((place, record.pack()))
            # The tick in the record is also the object's key in `ages`.
            ages.append((tick_key(tick), place))
            if record.depends_on:
                parents[record.depends_on] += 1
        records += [(page, count_value(self.dependents(page) + more)) for page, more in parents.items()]
        for db, entries in ((self._environment.objects, sorted(records)), (self._environment.ages, ages)):
            with self._txn.cursor(db) as cursor:
                cursor.putmulti(entries)
        # Payload comes last: if the file is cut, more of the records before it are still there.
        payload.write(self._txn, self._environment.parts, chain.from_iterable(pieces))
        self.totals = facts._replace(
            next_number=facts.next_number + len(objects),
            next_tick=facts.next_tick + len(objects),
            objects=facts.objects + len(objects),
            payload_bytes=facts.payload_bytes + sum(item.meta.length for _, item, _ in objects),
        )

    def remove(self, place: bytes, record: Record) -> None:
        """Delete an object with all of its entries, and log the removal."""
        payload.remove(self._txn, self._environment.parts, record.number)
        self._txn.delete(place, db=self._environment.objects)
        self._forget_age(place, record.tick)
        self._log_removal(place, record)
        if record.depends_on:
            self._count_down(record.depends_on)

    def remove_record(self, place: bytes, record: Record) -> None:
        """Delete only the record of an object, and log the removal.

        This method is for an object whose payload, or whose entry in `ages`, lies on a damaged LMDB page.
        Payload and entry stay where they are.
        """
        self._txn.delete(place, db=self._environment.objects)
        self._log_removal(place, record)

    def touch(self, place: bytes) -> bool:
        """Mark an object as used just now; return False, and do nothing, if it is absent or young."""
        record = self.find(place)
        if record is None or self._is_young(record.tick):
            return False
        self._forget_age(place, record.tick)
        fresh = record._replace(tick=self.tick())
        self._txn.put(tick_key(fresh.tick), place, db=self._environment.ages)
        self._put(place, fresh)
        return True

    def dependents(self, page: bytes) -> int:
        """Return the number of stored objects that name this page as their parent."""
        value = self._txn.get(page, db=self._environment.objects)
        return 0 if value is None else count_of(value)

    def register(self, record: NamespaceRecord) -> None:
        """Store a namespace's record, merged with the record that is stored already, if there is one."""
        known = name_in(self._environment, self._txn, record.namespace)
        kept = Name(self.namespace_id(record.namespace), record.over(known.record if known else None))
        if kept != known:
            self._txn.put(record.namespace, pack_name(kept), db=self._environment.names)
            if kept.states:
                set_named_tick(self._txn, self._environment.facts, self.tick())

    def forget_namespaces(self, used: Collection[int]) -> None:
        """Forget the namespaces that have no record and whose numbers are not among `used`."""
        names = names_in(self._environment, self._txn)
        # The largest number stays, so that no later namespace gets a number that mirrors know. A name that
        # cannot be read may have it.
        if len(names) == self._txn.stat(self._environment.names)["entries"]:
            last = max((name.number for name in names.values()), default=0)
            for namespace, name in names.items():
                if name.record is None and name.number not in used and name.number != last:
                    self._txn.delete(namespace, db=self._environment.names)

    def has_states(self, namespace: bytes) -> bool:
        """Return whether a prefix of this namespace needs states."""
        known = name_in(self._environment, self._txn, namespace)
        return known is not None and known.states

    def used_pages(self) -> int:
        """Return the number of LMDB pages that are in use now, in this transaction."""
        return self._environment.used_pages(self._txn)

    def oldest(self, tick: int = 0) -> tuple[int, bytes] | None:
        """Return (tick, place) of the first entry of `ages` from `tick` on; None where there is none."""
        with self._txn.cursor(self._environment.ages) as cursor:
            return (tick_of(cursor.key()), cursor.value()) if cursor.set_range(tick_key(tick)) else None

    def drop_damaged(self, place: bytes, number: int | None, *, record_only: bool = False) -> None:
        """Delete a damaged object if it still has this number, and count it as corrupt.

        `number` None: delete the object if its record cannot be read. `record_only`: delete only the record
        (see `remove_record`).
        """
        value = self._txn.get(place, db=self._environment.objects)
        record = None if value is None else Record.unpack(value)
        # Another number means another object, which was stored at this place later.
        if value is None or (record.number if record else None) != number:
            return
        if record is not None and record_only:
            self.remove_record(place, record)
        elif record is not None:
            self.remove(place, record)
        else:
            self._txn.delete(place, db=self._environment.objects)
        self.totals = self.totals._replace(corrupt=self.totals.corrupt + 1)

    def count_evicted(self, objects: int) -> None:
        """Add to the number of objects evicted in the life of the store."""
        self.totals = self.totals._replace(evicted=self.totals.evicted + objects)

    def save(self) -> None:
        """Write the totals, and if this transaction removed objects, shorten the log of removals."""
        if self._has_removed and self._silent:
            set_log_start(self._txn, self._environment.facts, self.totals.next_tick)
        elif self._has_removed:
            kept = max(
                _MIN_LOGGED, min(_MAX_LOGGED, self._environment.map_bytes() // self._environment.page_bytes)
            )
            forget_removals(self._txn, self._environment.facts, self.totals.next_tick - kept)
        self._txn.put(FACTS, self.totals.pack(), db=self._environment.facts)

    def _put(self, place: bytes, record: Record) -> None:
        self._txn.put(place, record.pack(), db=self._environment.objects)

    def _log_removal(self, place: bytes, record: Record) -> None:
        tick = self.tick()
        if not self._silent:
            self._txn.put(gone_key(tick), gone_value(place, record.number), db=self._environment.facts)
        self._has_removed = True
        facts = self.totals
        self.totals = facts._replace(
            objects=max(0, facts.objects - 1), payload_bytes=max(0, facts.payload_bytes - record.length)
        )

    def _forget_age(self, place: bytes, tick: int) -> None:
        # After damage the entry may belong to another object, so compare the value first. LMDB's `delete`
        # compares values only in databases with several values per key.
        key = tick_key(tick)
        if self._txn.get(key, db=self._environment.ages) == place:
            self._txn.delete(key, db=self._environment.ages)

    def _count_down(self, page: bytes) -> None:
        left = self.dependents(page) - 1
        if left > 0:
            self._txn.put(page, count_value(left), db=self._environment.objects)
        else:
            self._txn.delete(page, db=self._environment.objects)

    def _is_young(self, tick: int) -> bool:
        # ticks   oldest in `ages` ...................|... young ...| next_tick
        if self._young_from is None:
            newest = self.totals.next_tick
            first = self.oldest()
            self._young_from = newest - max(_MIN_YOUNG, (newest - (first[0] if first else newest)) // _YOUNG)
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
    # Namespaces are numbered in order, from 1, and the last one is never forgotten. The count of entries
    # includes names that cannot be read; none is forgotten while there are any.
    known = max((name.number for name in names_in(environment, txn).values()), default=0)
    return max(known, int(txn.stat(environment.names)["entries"])) + 1
