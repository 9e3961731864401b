"""The five databases within one write transaction: what keeps them in step."""

from __future__ import annotations

from typing import Any, Final

import msgpack

from tiercache.storage.base import NamespaceRecord, SetItem
from tiercache.storage.checksum import Sealed
from tiercache_backends.lmdb import payload
from tiercache_backends.lmdb.environment import Environment
from tiercache_backends.lmdb.records import FACTS, HALF, Facts, Record, count_of, count_value, tick_key, tick_of

_YOUNG: Final = 4
"""An object whose tick is within the newest quarter is as good as new: the next eviction is far from it."""
_YOUNG_AT_LEAST: Final = 16


class Ledger:
    """One write transaction. `save` belongs at its end.

    Thread rule: the thread of the transaction.
    """

    def __init__(self, environment: Environment, txn: Any) -> None:
        self._in = environment
        self._txn = txn
        self.facts = Facts.unpack(txn.get(FACTS, db=environment.facts))
        self._young_from: int | None = None
        self._namespaces: dict[bytes, int] = {}

    def find(self, place: bytes) -> Record | None:
        """The record of the object that lies at `place`."""
        value = self._txn.get(place, db=self._in.objects)
        return None if value is None else Record.unpack(value)

    def ticks(self, count: int) -> int:
        """The first of `count` ticks that are newer than all before."""
        first = self.facts.next_tick
        self.facts = self.facts._replace(next_tick=first + count)
        return first

    def add(self, item: SetItem, place: bytes, sealed: Sealed, tick: int, part_pages: int) -> None:
        """Store an object that is not there."""
        facts, meta = self.facts, item.meta
        record = Record.of(facts.next_number, tick, item.key, meta, self._namespace_id(meta.namespace), sealed)
        sizes = payload.piece_sizes(meta.length, self._in.page_bytes, part_pages)
        payload.write(self._txn, self._in.parts, record.number, item.buffers, sizes)
        self._put(place, record)
        self._txn.put(tick_key(tick), place, db=self._in.ages)
        if record.depends_on:
            self._txn.put(record.depends_on, count_value(self.dependents(record.depends_on) + 1), db=self._in.objects)
        self.facts = facts._replace(
            next_number=record.number + 1, objects=facts.objects + 1, payload_bytes=facts.payload_bytes + meta.length
        )

    def remove(self, place: bytes, record: Record) -> int | None:
        """Delete an object.

        Returns the tick of the page that it depended on, if an eviction parked that page and may take now; the smallest of several.
        """
        payload.remove(self._txn, self._in.parts, record.number)
        self._txn.delete(place, db=self._in.objects)
        self._forget_age(place, record.tick)
        facts = self.facts
        self.facts = facts._replace(objects=max(0, facts.objects - 1), payload_bytes=max(0, facts.payload_bytes - record.length))
        return self._release(record.depends_on) if record.depends_on else None

    def touch(self, place: bytes, tick: int | None = None) -> bool:
        """The object was used just now, if it is there; False where it counts as just used anyway."""
        record = self.find(place)
        if record is None or self._is_young(record.tick):
            return False
        self._forget_age(place, record.tick)
        fresh = record._replace(tick=self.ticks(1) if tick is None else tick)
        self._txn.put(tick_key(fresh.tick), place, db=self._in.ages)
        self._put(place, fresh)
        return True

    def dependents(self, page: bytes) -> int:
        """How many stored objects name this page as their parent."""
        value = self._txn.get(page, db=self._in.objects)
        return 0 if value is None else count_of(value)

    def is_inner(self, place: bytes, record: Record) -> bool:
        """Does anything depend on the object?"""
        return not record.hangs_on(place) and self.dependents(place[:HALF]) > 0

    def park(self, tick: int) -> None:
        """Take an object, on which others depend, out of the order of eviction; it comes back with the last of them."""
        self._txn.delete(tick_key(tick), db=self._in.ages)

    def register(self, record: NamespaceRecord) -> None:
        """Remember a namespace's identity."""
        number = self._namespace_id(record.namespace)
        self._txn.put(record.namespace, msgpack.packb([number, dict(record.identity)]), db=self._in.names)

    def used_pages(self) -> int:
        """Pages in use now."""
        return self._in.used_pages(self._txn)

    def oldest(self, tick: int = 0) -> tuple[int, bytes] | None:
        """The least recently used object with at least this tick, as (tick, place)."""
        with self._txn.cursor(self._in.ages) as cursor:
            return (tick_of(cursor.key()), cursor.value()) if cursor.set_range(tick_key(tick)) else None

    def drop(self, place: bytes, number: int | None) -> None:
        """Delete a damaged object, if it still has this number; None: if its record cannot be read."""
        value = self._txn.get(place, db=self._in.objects)
        record = None if value is None else Record.unpack(value)
        if value is None or (record.number if record else None) != number:
            return
        if record is not None:
            self.remove(place, record)
        else:
            self._txn.delete(place, db=self._in.objects)
        self.facts = self.facts._replace(corrupt=self.facts.corrupt + 1)

    def save(self) -> None:
        """Write the facts."""
        self._txn.put(FACTS, self.facts.pack(), db=self._in.facts)

    def _put(self, place: bytes, record: Record) -> None:
        self._txn.put(place, record.pack(), db=self._in.objects)

    def _forget_age(self, place: bytes, tick: int) -> None:
        # A parked object has none. The value tells that the age is this object's: `delete` compares it only where keys repeat.
        key = tick_key(tick)
        if self._txn.get(key, db=self._in.ages) == place:
            self._txn.delete(key, db=self._in.ages)

    def _release(self, page: bytes) -> int | None:
        left = self.dependents(page) - 1
        if left > 0:
            self._txn.put(page, count_value(left), db=self._in.objects)
            return None
        self._txn.delete(page, db=self._in.objects)
        back: list[int] = []
        with self._txn.cursor(self._in.objects) as cursor:
            found = cursor.set_range(page)
            while found and cursor.key()[:HALF] == page:
                record = Record.unpack(cursor.value())
                if record is not None and not self._txn.get(tick_key(record.tick), db=self._in.ages):
                    self._txn.put(tick_key(record.tick), cursor.key(), db=self._in.ages)
                    back.append(record.tick)
                found = cursor.next()
        return min(back, default=None)

    def _is_young(self, tick: int) -> bool:
        if self._young_from is None:
            newest = self.facts.next_tick
            first = self.oldest()
            self._young_from = newest - max(_YOUNG_AT_LEAST, (newest - (first[0] if first else newest)) // _YOUNG)
        return tick >= self._young_from

    def _namespace_id(self, namespace: bytes) -> int:
        if namespace not in self._namespaces:
            value = self._txn.get(namespace, db=self._in.names)
            if value is None:
                number = int(self._txn.stat(self._in.names)["entries"]) + 1
                self._txn.put(namespace, msgpack.packb([number, None]), db=self._in.names)
            self._namespaces[namespace] = number if value is None else int(msgpack.unpackb(value)[0])
        return self._namespaces[namespace]
