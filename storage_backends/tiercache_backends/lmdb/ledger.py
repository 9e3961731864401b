"""Changes to the five databases within one write transaction, which keep them in step."""

from __future__ import annotations

from typing import Any, Final

from tiercache.storage.base import NamespaceRecord, SetItem
from tiercache.storage.checksum import Sealed
from tiercache_backends.lmdb import payload
from tiercache_backends.lmdb.environment import Environment
from tiercache_backends.lmdb.names import free_number, name_in
from tiercache_backends.lmdb.records import (
    FACTS,
    HALF,
    Facts,
    Record,
    count_of,
    count_value,
    forget_removals,
    gone_key,
    gone_value,
    tell_names,
    tell_none,
    tick_key,
    tick_of,
)
from tiercache_backends.local.names import Name, pack_name

_YOUNG: Final = 4
"""Divisor of all ticks: an object whose tick lies in the newest quarter counts as just used, because the next eviction is far from it."""
_YOUNG_AT_LEAST: Final = 16
"""Newest ticks that count as just used in any case."""
_TOLD: Final = 8192
_TOLD_AT_LEAST: Final = 256
"""Bounds of the ticks for which removals are told to other processes; between them as many as the map has LMDB pages."""


class Ledger:
    """The changes of one write transaction. The caller ends with `save`, which a transaction without changes may leave out.

    A `silent` ledger logs no removal for other processes, which takes fewer LMDB pages, and has them read everything again.

    Thread safety: only the thread of the transaction uses it.
    """

    def __init__(self, environment: Environment, txn: Any, *, silent: bool = False) -> None:
        self._silent = silent
        self._in = environment
        self._txn = txn
        self.facts = Facts.unpack(txn.get(FACTS, db=environment.facts))
        self._young_from: int | None = None
        self._told = False
        self._namespaces: dict[bytes, int] = {}

    def find(self, place: bytes) -> Record | None:
        """Return the record of the object at `place`; None where there is none."""
        value = self._txn.get(place, db=self._in.objects)
        return None if value is None else Record.unpack(value)

    def tick(self) -> int:
        """Return a tick newer than all before. Every change takes one, in the order of transactions; mirrors rely on that."""
        tick = self.facts.next_tick
        self.facts = self.facts._replace(next_tick=tick + 1)
        return tick

    def follows(self, place: bytes, above: bytes) -> bool:
        """Return whether the page object at `place` is the one at `above`, or follows it directly or through others."""
        seen: set[bytes] = set()
        while place != above and place not in seen:
            seen.add(place)
            record = self.find(place)
            if record is None or not record.depends_on:
                return False
            place = record.depends_on + place[HALF:]
        return place == above

    def add(self, item: SetItem, place: bytes, sealed: Sealed, part_pages: int) -> None:
        """Store an object that is not there yet, in pieces of at most `part_pages` LMDB pages."""
        facts, meta = self.facts, item.meta
        tick = facts.next_tick
        record = Record.of(facts.next_number, tick, item.key, meta, self.namespace_id(meta.namespace), sealed)
        sizes = payload.piece_sizes(meta.length, self._in.page_bytes, part_pages)
        payload.write(self._txn, self._in.parts, record.number, item.buffers, sizes)
        self._put(place, record)
        self._txn.put(tick_key(tick), place, db=self._in.ages)
        if record.depends_on:
            self._txn.put(record.depends_on, count_value(self.dependents(record.depends_on) + 1), db=self._in.objects)
        self.facts = facts._replace(
            next_number=record.number + 1,
            next_tick=tick + 1,
            objects=facts.objects + 1,
            payload_bytes=facts.payload_bytes + meta.length,
        )

    def remove(self, place: bytes, record: Record) -> None:
        """Delete an object with all that belongs to it, and log its removal."""
        payload.remove(self._txn, self._in.parts, record.number)
        self._txn.delete(place, db=self._in.objects)
        self._forget_age(place, record.tick)
        self._count_out(place, record)
        if record.depends_on:
            self._release(record.depends_on)

    def strike(self, place: bytes, record: Record) -> None:
        """Delete an object's record and nothing else, and log its removal: the rest lies where it cannot be read, and stays there."""
        self._txn.delete(place, db=self._in.objects)
        self._count_out(place, record)

    def touch(self, place: bytes) -> bool:
        """Mark an object as used just now; return False where nothing changes: it is not there, or counts as just used anyway."""
        record = self.find(place)
        if record is None or self._is_young(record.tick):
            return False
        self._forget_age(place, record.tick)
        fresh = record._replace(tick=self.tick())
        self._txn.put(tick_key(fresh.tick), place, db=self._in.ages)
        self._put(place, fresh)
        return True

    def dependents(self, page: bytes) -> int:
        """Return the number of stored objects that name this page as their parent."""
        value = self._txn.get(page, db=self._in.objects)
        return 0 if value is None else count_of(value)

    def register(self, record: NamespaceRecord) -> None:
        """Store a namespace's identity, and whether it has states, unless they are stored already."""
        known = name_in(self._in, self._txn, record.namespace)
        kept = Name(self.namespace_id(record.namespace), record.over(known.record if known else None))
        if kept != known:
            self._txn.put(record.namespace, pack_name(kept), db=self._in.names)
            if kept.states:
                tell_names(self._txn, self._in.facts, self.tick())

    def has_states(self, namespace: bytes) -> bool:
        """Return whether a prefix of this namespace needs states."""
        known = name_in(self._in, self._txn, namespace)
        return known is not None and known.states

    def used_pages(self) -> int:
        """Return the LMDB pages that are in use now, in this transaction."""
        return self._in.used_pages(self._txn)

    def oldest(self, tick: int = 0) -> tuple[int, bytes] | None:
        """Return (tick, place) of the least recently used object among those with at least this tick; None where there is none."""
        with self._txn.cursor(self._in.ages) as cursor:
            return (tick_of(cursor.key()), cursor.value()) if cursor.set_range(tick_key(tick)) else None

    def drop(self, place: bytes, number: int | None, *, strike: bool = False) -> None:
        """Delete a damaged object if it still has this number, and count it as corrupt.

        `number` None: delete it if its record cannot be read. `strike`: delete its record alone.
        """
        value = self._txn.get(place, db=self._in.objects)
        record = None if value is None else Record.unpack(value)
        if value is None or (record.number if record else None) != number:
            return
        if record is not None and strike:
            self.strike(place, record)
        elif record is not None:
            self.remove(place, record)
        else:
            self._txn.delete(place, db=self._in.objects)
        self.facts = self.facts._replace(corrupt=self.facts.corrupt + 1)

    def save(self) -> None:
        """Write the facts, and cut the log of removals if there were any."""
        if self._told and self._silent:
            tell_none(self._txn, self._in.facts, self.facts.next_tick)
        elif self._told:
            most = max(_TOLD_AT_LEAST, min(_TOLD, self._in.map_bytes() // self._in.page_bytes))
            forget_removals(self._txn, self._in.facts, self.facts.next_tick - most)
        self._txn.put(FACTS, self.facts.pack(), db=self._in.facts)

    def _put(self, place: bytes, record: Record) -> None:
        self._txn.put(place, record.pack(), db=self._in.objects)

    def _count_out(self, place: bytes, record: Record) -> None:
        tick = self.tick()
        if not self._silent:
            self._txn.put(gone_key(tick), gone_value(place, record.number), db=self._in.facts)
        self._told = True
        facts = self.facts
        self.facts = facts._replace(objects=max(0, facts.objects - 1), payload_bytes=max(0, facts.payload_bytes - record.length))

    def _forget_age(self, place: bytes, tick: int) -> None:
        # Compare the value first, since the age may be another object's: LMDB's `delete` compares values only where keys repeat.
        key = tick_key(tick)
        if self._txn.get(key, db=self._in.ages) == place:
            self._txn.delete(key, db=self._in.ages)

    def _release(self, page: bytes) -> None:
        left = self.dependents(page) - 1
        if left > 0:
            self._txn.put(page, count_value(left), db=self._in.objects)
        else:
            self._txn.delete(page, db=self._in.objects)

    def _is_young(self, tick: int) -> bool:
        if self._young_from is None:
            newest = self.facts.next_tick
            first = self.oldest()
            self._young_from = newest - max(_YOUNG_AT_LEAST, (newest - (first[0] if first else newest)) // _YOUNG)
        return tick >= self._young_from

    def namespace_id(self, namespace: bytes) -> int:
        """Return the number by which records name this namespace; give it one if it has none."""
        if namespace not in self._namespaces:
            known = name_in(self._in, self._txn, namespace)
            if known is None:
                known = Name(free_number(self._in, self._txn), None)
                self._txn.put(namespace, pack_name(known), db=self._in.names)
            self._namespaces[namespace] = known.number
        return self._namespaces[namespace]
