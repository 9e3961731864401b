"""The five databases within one write transaction: what keeps them in step."""

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
"""An object whose tick is within the newest quarter is as good as new: the next eviction is far from it."""
_YOUNG_AT_LEAST: Final = 16
_TOLD: Final = 8192
_TOLD_AT_LEAST: Final = 256
"""Ticks for which removals are told to other processes: not more than the map has LMDB pages, within these bounds."""


class Ledger:
    """One write transaction. `save` belongs at its end. A `silent` one tells other processes of no removal, which takes fewer LMDB pages.

    Thread safety: the thread of the transaction.
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
        """The record of the object that lies at `place`."""
        value = self._txn.get(place, db=self._in.objects)
        return None if value is None else Record.unpack(value)

    def tick(self) -> int:
        """A tick that is newer than all before. Every change takes one, in the order of transactions: a mirror goes by that."""
        tick = self.facts.next_tick
        self.facts = self.facts._replace(next_tick=tick + 1)
        return tick

    def follows(self, place: bytes, above: bytes) -> bool:
        """Does the page object at a place follow the one at another, somewhere?"""
        seen: set[bytes] = set()
        while place != above and place not in seen:
            seen.add(place)
            record = self.find(place)
            if record is None or not record.depends_on:
                return False
            place = record.depends_on + place[HALF:]
        return place == above

    def add(self, item: SetItem, place: bytes, sealed: Sealed, part_pages: int) -> None:
        """Store an object that is not there."""
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
        """Delete an object."""
        payload.remove(self._txn, self._in.parts, record.number)
        self._txn.delete(place, db=self._in.objects)
        self._forget_age(place, record.tick)
        self._count_out(place, record)
        if record.depends_on:
            self._release(record.depends_on)

    def strike(self, place: bytes, record: Record) -> None:
        """Delete an object's record and nothing else: what belongs to it lies where nothing can be read, and stays there."""
        self._txn.delete(place, db=self._in.objects)
        self._count_out(place, record)

    def touch(self, place: bytes) -> bool:
        """The object was used just now, if it is there; False where it counts as just used anyway."""
        record = self.find(place)
        if record is None or self._is_young(record.tick):
            return False
        self._forget_age(place, record.tick)
        fresh = record._replace(tick=self.tick())
        self._txn.put(tick_key(fresh.tick), place, db=self._in.ages)
        self._put(place, fresh)
        return True

    def dependents(self, page: bytes) -> int:
        """How many stored objects name this page as their parent."""
        value = self._txn.get(page, db=self._in.objects)
        return 0 if value is None else count_of(value)

    def register(self, record: NamespaceRecord) -> None:
        """Remember a namespace's identity, and whether it has states."""
        known = name_in(self._in, self._txn, record.namespace)
        kept = Name(self.namespace_id(record.namespace), record.over(known.record if known else None))
        if kept != known:
            self._txn.put(record.namespace, pack_name(kept), db=self._in.names)
            if kept.states:
                tell_names(self._txn, self._in.facts, self.tick())

    def has_states(self, namespace: bytes) -> bool:
        """Does a prefix of this namespace need states?"""
        known = name_in(self._in, self._txn, namespace)
        return known is not None and known.states

    def used_pages(self) -> int:
        """Pages in use now."""
        return self._in.used_pages(self._txn)

    def oldest(self, tick: int = 0) -> tuple[int, bytes] | None:
        """The least recently used object with at least this tick, as (tick, place)."""
        with self._txn.cursor(self._in.ages) as cursor:
            return (tick_of(cursor.key()), cursor.value()) if cursor.set_range(tick_key(tick)) else None

    def drop(self, place: bytes, number: int | None, *, strike: bool = False) -> None:
        """Delete a damaged object, if it still has this number; None: if its record cannot be read. `strike`: its record alone."""
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
        """Write the facts."""
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
        # The value tells that the age is this object's: `delete` compares it only where keys repeat.
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
        """The number by which records name this namespace; it gets one if it has none."""
        if namespace not in self._namespaces:
            known = name_in(self._in, self._txn, namespace)
            if known is None:
                known = Name(free_number(self._in, self._txn), None)
                self._txn.put(namespace, pack_name(known), db=self._in.names)
            self._namespaces[namespace] = known.number
        return self._namespaces[namespace]
