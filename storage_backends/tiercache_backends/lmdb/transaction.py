"""Changes within one write transaction, and small changes that wait for one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from errno import EIO
from itertools import chain, islice
from threading import Lock
from typing import Any, Final, NamedTuple

import numpy as np

from tiercache.storage.base import NamespaceRecord, SetItem
from tiercache.storage.checksum import Checksums
from tiercache.storage.residents import Residents, add_all
from tiercache.storage.restorable import Admissibility, hold_new
from tiercache_backends.lmdb.environment import DamagedError, Environment
from tiercache_backends.lmdb.records import (
    FACTS,
    Record,
    cut,
    pages_for,
    part_key,
    piece_sizes,
    record_of,
    tick_key,
    ticks_from,
)
from tiercache_backends.local.names import Names

_YOUNG: Final = 4
"""Divisor: an object counts as young (just used) if its tick is among as many as a quarter of the objects.

A young object is not touched again, because a slightly later place in the eviction order is not worth the
LMDB pages that the change would write.
"""
_MIN_YOUNG: Final = 16
"""Minimum number of the newest ticks that count as young."""
_FEW: Final = 8
"""If a chunk has fewer pages than this, admitting them one by one is faster than using NumPy."""
_MAX_WAITING: Final = 4096
"""Maximum number of objects whose recency, or whose removal as damaged, waits for another write.

If more objects wait, all recency is written at once. If that write fails, up to twice this number of objects
are kept waiting.
"""


class NewObject(NamedTuple):
    """One object to store."""

    digest: bytes
    page: bytes
    """Key of the object's page."""
    item: SetItem
    checksums: Checksums
    pages: int
    """Number of LMDB pages that the object takes."""

    def in_short_pieces(self, page_bytes: int) -> NewObject:
        """Return the object with the number of LMDB pages that it takes in pieces of one page."""
        return self._replace(pages=pages_for(self.item.meta.length, page_bytes, 1))

    @property
    def attached(self) -> bool:
        """Whether the object is attached to its page, as a state is; otherwise the object is the page."""
        return self.item.meta.parent == self.page


class Transaction:
    """Changes of one LMDB write transaction, which keep the databases consistent, and the table in step.

    It is the `eviction.Taker` of its evictions.

    What is removed leaves the table at once, so that an eviction goes on without it; what is stored comes
    into it with `finish`. The mirror calls `save` before the commit and `finish` after it.

    `residents`: the table, and `whole` says whether it has all objects; if not, it has none.

    Thread safety: only the thread of the transaction uses it, which holds the mirror's lock.
    """

    def __init__(
        self, environment: Environment, txn: Any, residents: Residents, names: Names, *, whole: bool
    ) -> None:
        self._environment = environment
        self._txn = txn
        self.residents: Final = residents
        self.names: Final = names
        self.whole: Final = whole
        self.facts = self._found = environment.facts_in(txn)
        self._held: dict[bytes, int] = {}
        """Nodes of pages that stay during this transaction, by page key."""
        self._expected: list[int] = []
        """Nodes of page objects that this transaction may store."""
        self._added: tuple[Sequence[NewObject], int] = (), 0
        """Objects that this transaction stores, and the number of the first."""
        self._parts: Any = None
        """Cursor for the removal of pieces, from the first removal on."""
        self._leaving: list[tuple[int, bytes, bytes | None]] = []
        """Objects that this transaction removes from the table: row, digest, and parent if known."""
        self._at_commit: list[Callable[[], None]] = []
        self._has_removed = False
        self.evicted = 0
        """Number of objects that were evicted; see `may_evict`."""

    @property
    def has_named(self) -> bool:
        """Whether this transaction changed `names`."""
        return self.facts.named_at != self._found.named_at

    def find(self, digest: bytes) -> Record | None:
        """Return the record of an object; None where there is none."""
        value = self._txn.get(digest, db=self._environment.objects)
        return None if value is None else Record.unpack(value)

    def take_tick(self) -> int:
        """Take the next tick, which is newer than all earlier ticks.

        Every change takes a tick, in the order of transactions. Mirrors rely on that order.
        """
        tick = self.facts.next_tick
        self.facts = self.facts._replace(next_tick=tick + 1)
        return tick

    def hold(self, page: bytes) -> int:
        """Keep a page and all pages before it until `finish`; return its node."""
        node = self._held.get(page)
        if node is None:
            node = self._held[page] = self.residents.pages.hold(page)
        return node

    def held(self) -> Iterable[int]:
        """Return the nodes of all pages that are held."""
        return self._held.values()

    def hold_new(self, news: Sequence[NewObject]) -> bool:
        """Admit pages of one sequence at once; return False, with nothing changed, if they are not that.

        This does the same as `admit` for each of them, several times as fast.
        """
        namespaces = {new.item.meta.namespace for new in news}
        if self._held or len(news) < _FEW or len(namespaces) > 1 or any(new.attached for new in news):
            return False
        held = hold_new(
            self.residents.pages,
            [new.page for new in news],
            [new.item.meta.parent for new in news],
            [new.item.meta.depth or 0 for new in news],
            self.namespace_id(*namespaces),
        )
        if held is None:
            return False
        self._held, self._expected = held, [held[new.page] for new in news]
        return True

    def admit(self, new: NewObject) -> Admissibility:
        """Return whether an object may be stored; if so, objects after it may follow it."""
        meta, pages = new.item.meta, self.residents.pages
        node = self.hold(new.page)
        parent = None if meta.parent is None else self.hold(meta.parent)
        namespace_id = self.namespace_id(meta.namespace)
        verdict = pages.admissibility(node, parent, meta.depth or 0, namespace_id)
        if verdict is Admissibility.FINE and not new.attached:
            pages.expect(node, meta.depth or 0, namespace_id)
            self._expected.append(node)
        return verdict

    def is_promising(self, new: NewObject) -> bool:
        """Return whether a restore could use an admitted object as soon as all of them are stored."""
        number = self.names.ids[new.item.meta.namespace]
        return self.residents.pages.is_promising(self._held[new.page], number, attached=new.attached)

    def add(self, news: Sequence[NewObject], part_pages: int) -> None:
        """Store admitted objects, once in a transaction, in pieces of at most `part_pages` LMDB pages.

        Raises DamagedError where the store has a piece of a newer object.
        """
        # Write one entry per piece in `parts`, and one in each of `objects` and `ages`. All entries of a
        # database are written in one call.
        pieces: list[Iterator[tuple[bytes, memoryview | bytes]]] = []
        records: list[tuple[bytes, bytes]] = []
        ages: list[tuple[bytes, bytes]] = []
        page_bytes, ids = self._environment.page_bytes, self.names.ids
        for tick, (digest, _, item, checksums, _) in enumerate(news, self.facts.next_tick):
            meta = item.meta
            pieces.append(_pieces(tick, item.buffers, piece_sizes(meta.length, page_bytes, part_pages)))
            records.append((digest, record_of(tick, item.key, meta, ids[meta.namespace], checksums)))
            ages.append((tick_key(tick), digest))
        for db, entries in ((self._environment.objects, sorted(records)), (self._environment.ages, ages)):
            with self._txn.cursor(db) as cursor:
                cursor.putmulti(entries)
        # `append` puts a key behind all others without a search of the tree, and skips a key that is not
        # larger. Numbers rise, so no key is skipped.
        with self._txn.cursor(self._environment.parts) as cursor:
            taken, added = cursor.putmulti(chain.from_iterable(pieces), append=True)
        if added < taken:
            raise DamagedError(EIO, "the store holds a part of an object that was never stored")
        self._added = news, self.facts.next_tick
        self.facts = self.facts._replace(next_tick=self.facts.next_tick + len(news))

    def remove(self, digest: bytes, record: Record) -> None:
        """Delete an object with all of its entries, and log the removal."""
        first = part_key(record.number, 0)
        if self._parts is None:
            self._parts = self._txn.cursor(self._environment.parts)
        found = self._parts.set_range(first)
        while found and self._parts.key()[:8] == first[:8]:  # the number begins the keys of all pieces
            self._parts.delete()
            found = bool(self._parts.key())
        self._txn.delete(digest, db=self._environment.objects)
        self._forget_age(digest, record.tick)
        self._txn.put(tick_key(self.take_tick()), digest, db=self._environment.gone)
        self._has_removed = True
        row = self.residents.find(digest)
        if row >= 0:
            self._leaving.append((row, *self.residents.leave(row)))

    def touch(self, digest: bytes) -> bool:
        """Mark an object as used just now; return False, and do nothing, if it is absent or young.

        The table is not changed.
        """
        record = self.find(digest)
        if record is None or self._is_young(record.tick):
            return False
        self._forget_age(digest, record.tick)
        fresh = record._replace(tick=self.take_tick())
        self._txn.put(tick_key(fresh.tick), digest, db=self._environment.ages)
        self._txn.put(digest, fresh.pack(), db=self._environment.objects)
        return True

    def register(self, record: NamespaceRecord) -> None:
        """Store a namespace's record, merged with the record that is stored already, if there is one."""
        namespace, known = record.namespace, self.names.records.get(record.namespace)
        merged = record.over(known)
        if merged != known:
            self.names.add(namespace, self.names.number(namespace), merged)
            self._store_name(namespace)
            if merged.states:
                self.residents.pages.require_states(self.names.ids[namespace])

    def namespace_id(self, namespace: bytes) -> int:
        """Return the number by which records name this namespace; if there is none, choose one."""
        if namespace not in self.names.ids:
            self.names.number(namespace)
            self._store_name(namespace)
        return self.names.ids[namespace]

    def may_evict(self, objects: int, pages: int = 0) -> None:
        """Let an `EvictionOrder` remove at most so many objects, until `pages` LMDB pages are in use."""
        self._most, self._enough = objects, pages

    def take(self, rows: list[int]) -> None:
        """Evict these objects; skip those that are no longer stored."""
        for row in rows:
            digest, number = self.residents.digest(row), self.residents.number[row]
            record = self.find(digest)
            if record is None or record.number != number:
                self.residents.leave(row)
                self.residents.drop(row)
                continue
            self.remove(digest, record)
            self.evicted += 1
            self.facts = self.facts._replace(evicted=self.facts.evicted + 1)

    def enough(self) -> bool:
        """Return whether enough LMDB pages are free."""
        return self.used_pages() <= self._enough

    def full(self) -> bool:
        """Return whether this transaction may evict no more objects."""
        return self.evicted >= self._most

    def used_pages(self) -> int:
        """Return the number of LMDB pages that are in use now, in this transaction."""
        return self._environment.used_pages(self._txn)

    def drop_damaged(self, digest: bytes, number: int) -> None:
        """Delete a damaged object and count it as corrupt, unless another was stored in its place later."""
        record = self.find(digest)
        if record is not None and record.number == number:
            self.remove(digest, record)
            self.facts = self.facts._replace(corrupt=self.facts.corrupt + 1)

    def call_at_commit(self, work: Callable[[], None]) -> None:
        """Let `finish` call `work` if the transaction was committed."""
        self._at_commit.append(work)

    def save(self) -> None:
        """Write the facts, and if this transaction removed objects, shorten the log of removals."""
        if self._has_removed:
            gone = self._environment.gone
            surplus = self._txn.stat(gone)["entries"] - self._environment.logged
            # Collected first: a deletion during the walk would move the cursor.
            for tick, _ in list(islice(ticks_from(self._txn, gone, 0), max(0, surplus))):
                self._txn.delete(tick_key(tick), db=gone)
        if self.facts != self._found:
            self._txn.put(FACTS, self.facts.pack(), db=self._environment.facts)

    def finish(self, *, committed: bool) -> None:
        """Bring the table in step with what was committed, or undo what was done to it."""
        residents = self.residents
        residents.pages.expected_all(self._expected)
        if committed:
            for row, _, _ in self._leaving:
                residents.drop(row)
            self._add_to_table(*self._added)
            for work in self._at_commit:
                work()
        else:
            for row, digest, parent_key in reversed(self._leaving):
                residents.enter(row, digest, parent_key)
        for node in self._held.values():
            residents.pages.release(node)
        self._at_commit = []  # else a cycle would keep the callers' buffers until the next collection

    def _add_to_table(self, news: Sequence[NewObject], number: int) -> None:
        if news:
            metas, ids, held = [new.item.meta for new in news], self.names.ids, self._held
            add_all(
                self.residents,
                [new.digest for new in news],
                [held[new.page] for new in news],
                [None if meta.parent is None else held[meta.parent] for meta in metas],
                np.arange(number, number + len(news), dtype=np.uint64),
                np.array([meta.length for meta in metas], np.uint64),
                np.array([ids[meta.namespace] for meta in metas], np.uint32),
                np.array([meta.depth or 0 for meta in metas], np.uint32),
            )

    def _store_name(self, namespace: bytes) -> None:
        tick = self.take_tick()
        self.facts = self.facts._replace(named_at=tick)  # first, so that it shows if the next line fails
        self._txn.put(namespace, self.names.packed(namespace), db=self._environment.names)

    def _forget_age(self, digest: bytes, tick: int) -> None:
        # The entry of another object means that a record or the counter of ticks is damaged.
        if self._txn.pop(tick_key(tick), db=self._environment.ages) != digest:
            raise DamagedError(EIO, "an object has no entry among the ages")

    def _is_young(self, tick: int) -> bool:
        # Every object has a tick of its own, so at most a quarter of the objects have newer ticks than these.
        objects = int(self._txn.stat(self._environment.objects)["entries"])
        return tick >= self.facts.next_tick - max(_MIN_YOUNG, objects // _YOUNG)


def names_in(environment: Environment, txn: Any) -> Names:
    """Return the stored names of all namespaces; unreadable ones only count among the numbers."""
    names = Names()
    with txn.cursor(environment.names) as cursor:
        for namespace, value in cursor:
            with suppress(ValueError):
                names.add_packed(bytes(namespace), value)
    # Namespaces are numbered in order, from 1. The count of entries includes names that cannot be read.
    names.last = max(names.last, int(txn.stat(environment.names)["entries"]))
    return names


def _pieces(
    number: int, buffers: Sequence[memoryview], sizes: Iterable[int]
) -> Iterator[tuple[bytes, memoryview | bytes]]:
    """Yield key and bytes of each piece of the payload of object `number`."""
    for part, views in enumerate(cut(buffers, sizes)):
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

    def __init__(self) -> None:
        self._mutex = Lock()
        self._used: dict[bytes, bool | None] = {}
        """Objects whose recency waits to be written, the earliest use first, and what the table must learn.

        True: a set brought the object again; False: a get used it; None: the table knows.
        """
        self.damaged: Mapping[bytes, int] = {}
        """Numbers of damaged objects that wait to be removed, by digest; replaced, and never changed."""
        self._unsaved: dict[bytes, NamespaceRecord] = {}
        """Namespace records that wait to be written, by namespace."""

    def note_uses(self, digests: Sequence[bytes], *, brought: bool = False) -> bool:
        """Record that the objects of a batch were used, in this order; return whether too many wait.

        `brought`: by a set that found them stored already.
        """
        with self._mutex:
            # In a batch the deeper pages of a sequence come later. Deeper pages should be evicted first, so
            # they get older ticks.
            for digest in reversed(digests):
                self._used.pop(digest, None)
                self._used[digest] = brought
            crowded = len(self._used) > _MAX_WAITING
            while len(self._used) > 2 * _MAX_WAITING:
                del self._used[next(iter(self._used))]
        return crowded

    def add_namespace(self, record: NamespaceRecord) -> None:
        """Let a namespace's record be written."""
        with self._mutex:
            self._unsaved[record.namespace] = record.over(self._unsaved.get(record.namespace))

    def hide(self, damaged: Mapping[bytes, int]) -> None:
        """Hide damaged objects, given as numbers by digest, until they are removed.

        An object with another number that was stored in the same place later stays.
        """
        with self._mutex:
            known = [*self.damaged.items(), *damaged.items()]
            self.damaged = dict(known[-_MAX_WAITING:])

    def is_damaged(self, digest: bytes, number: int) -> bool:
        """Return whether the object with this number is known to be damaged, and so counts as absent."""
        return self.damaged.get(digest) == number

    def any_waiting(self) -> bool:
        """Return whether any change waits."""
        return bool(self._unsaved or self._used or self.damaged)

    def uses_waiting(self) -> int:
        """Return the number of objects whose recency is not written yet."""
        return len(self._used)

    def tell_uses(self, residents: Residents) -> None:
        """Tell the table, which has all objects, of the uses that it does not know."""
        with self._mutex:
            used = self._used
            self._used = dict.fromkeys(used)
        for digest, brought in used.items():
            if brought is not None and (row := residents.find(digest)) >= 0:
                (residents.renew if brought else residents.touch)(row)

    def apply(self, transaction: Transaction, most: int) -> None:
        """Make waiting changes in a transaction: all of namespaces, and of at most `most` objects."""
        if transaction.whole:
            self.tell_uses(transaction.residents)
        # Lock order: the writer lock, which this transaction holds, then the mutex. Copy the lists, so that
        # no call of LMDB is made under the mutex.
        with self._mutex:
            used, named = list(self._used), dict(self._unsaved)
        dropped = dict(islice(self.damaged.items(), most))
        for digest, number in dropped.items():
            transaction.drop_damaged(digest, number)
        for record in named.values():
            transaction.register(record)
        touched: list[bytes] = []
        for digest in used:
            if most <= 0:
                break
            touched.append(digest)
            most -= transaction.touch(digest)

        def committed() -> None:
            with self._mutex:
                # Another thread may have replaced an entry since: forget an entry only if it is the same.
                for digest in touched:
                    if self._used.get(digest) is None or not transaction.whole:
                        self._used.pop(digest, None)
                for namespace, record in named.items():
                    if self._unsaved.get(namespace) is record:
                        del self._unsaved[namespace]
                self.damaged = dict(self.damaged.items() - dropped.items())

        transaction.call_at_commit(committed)
