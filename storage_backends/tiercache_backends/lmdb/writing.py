"""Sets of the `lmdb` store: a batch is cut into chunks, each of which should fit into one transaction.

If a transaction finds no free LMDB pages, it is tried again with shorter pieces of payload, then with one
object at a time, then under lower limits on the pages in use. In this tree each method calls the methods
below it that are indented further; `|` marks an alternative:

    _store -> _store_splitting        after damage to an LMDB page: each half of the chunk by itself
      -> _store_in_map                usually
       | _store_on_full_disk          while the disk is full
         -> _store_in_file            only in pages that the file already has
        -> _store_retrying            with each of `_limits_to_try`, then one object at a time
          -> _store_under_lower_limits
            -> _run                   transactions (`attempt.py`), until one stores the chunk
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from tiercache.core import Outcome
from tiercache.storage.base import SetItem, checksum_of
from tiercache.storage.checksum import Checksums, MacKey
from tiercache.storage.residents import parents_first
from tiercache_backends.lmdb.attempt import (
    Attempt,
    Batch,
    MirrorBehindError,
    NewObject,
    WriteContext,
    WriteLimits,
)
from tiercache_backends.lmdb.budget import PageBudget
from tiercache_backends.lmdb.environment import MapFullError
from tiercache_backends.lmdb.mirror import Eviction
from tiercache_backends.lmdb.payload import PART_PAGES, pages_for
from tiercache_backends.lmdb.records import HALF
from tiercache_backends.lmdb.transaction import Transaction
from tiercache_backends.local.failures import DamagedError, is_full

_SHORTER_PART_PAGES: Final = 4
"""Number of LMDB pages of a piece of payload, if the file has few long runs of adjacent free pages."""
_SINGLE_PAGES: Final = 1
"""Number of LMDB pages of a piece of payload, if LMDB finds no runs of free pages at all."""
_MAX_OBJECTS: Final = 256
"""Maximum number of objects stored in one transaction."""
_MAX_DAMAGED: Final = 4096
"""Number of known unremovable objects above which a chunk that meets damage is split, and not tried again."""
_CAUTIOUS_CHUNKS: Final = 32
"""Number of chunks that begin with the short pieces that worked last, before long pieces are tried again."""

T = TypeVar("T")


class BatchWriter:
    """Writer of batches of objects.

    Thread safety: any thread may call; the environment runs one write transaction at a time.
    """

    def __init__(self, context: WriteContext, mac_key: MacKey) -> None:
        self._context = context
        self._environment = context.environment
        self._mirror = context.mirror
        self._disk = context.disk
        self._maintenance = context.maintenance
        self._errors = context.errors
        self._unremovable = context.unremovable
        self._mac_key = mac_key
        self._used = 0
        """Number of LMDB pages in use after the last transaction of this process."""
        self._part_pages = PART_PAGES
        """Number of LMDB pages of the pieces that worked last."""
        self._cautious = 0
        """Number of chunks that still begin with pieces of `_part_pages`."""

    def store(self, items: Mapping[bytes, SetItem], places: Sequence[bytes]) -> dict[bytes, Outcome]:
        """Store `items`, the missing objects of a batch, and return their outcomes by place.

        `places`: the places of all objects of the batch, also of those that are stored already.
        """
        batch = Batch(places, items.values())
        self._mirror.note((place for place in places if place not in items), brought=True)
        missing = list(items)
        ordered = (
            missing[i] for i in parents_first([(place[:HALF], items[place].meta.parent) for place in missing])
        )
        for places_of_owner in self._by_owner(ordered, items):
            for chunk in self._chunks(self._prepare(place, items[place]) for place in places_of_owner):
                self._store(chunk, batch)
        while self._mirror.unfinished and self._sweep():
            pass
        self.trim()
        return batch.outcomes

    def _by_owner(
        self, ordered: Iterable[bytes], items: Mapping[bytes, SetItem]
    ) -> Iterable[Iterable[bytes]]:
        """Return the places of a batch in one list for each owner, so that a chunk has one owner."""
        if not self._mirror.owners.active:
            return (ordered,)
        groups: dict[str, list[bytes]] = {}
        owners: dict[bytes, str] = {}
        for place in ordered:
            namespace = items[place].meta.namespace
            if namespace not in owners:
                owners[namespace] = self._mirror.owner_of(namespace)
            groups.setdefault(owners[namespace], []).append(place)
        return groups.values()

    def trim(self) -> None:
        """Evict what owners have beyond their quotas, as far as the mirror knows."""
        while self._mirror.is_read and (beyond := self._mirror.owners.beyond()):
            if not self._evict_some(partial(self._mirror.evict_beyond, beyond[0])):
                return

    def forget_namespaces(self) -> None:
        """Forget the namespaces that have neither a record nor an object, as far as the mirror is whole."""

        def work(txn: Any) -> None:
            transaction = Transaction(self._environment, txn)
            known = self._mirror.is_read and self._mirror.keep_up(txn)
            used = self._mirror.used_namespaces(transaction.totals.objects) if known else None
            if used is not None:
                transaction.forget_namespaces(used)

        try:
            self._write(work)
        except OSError as error:
            self._errors.failed("forgetting namespaces", error)

    def _sweep(self) -> bool:
        """Evict the rest of a unit (pages of one conversation) that earlier transactions evicted in part.

        Returns False if nothing was evicted.
        """
        return self._evict_some(self._mirror.sweep)

    def _evict_some(self, evict: Callable[[Eviction], None]) -> bool:
        """Evict in a transaction of its own; return False if nothing was evicted."""

        def work(txn: Any) -> int:
            if not self._mirror.keep_up(txn):
                return 0
            transaction = Transaction(self._environment, txn)
            eviction = Eviction(self._mirror, transaction, 0, self._disk.budget().changes, self._unremovable)
            evict(eviction)
            transaction.count_evicted(eviction.objects)
            transaction.save()
            return eviction.objects

        try:
            return self._write(work) > 0
        except OSError as error:
            self._errors.failed("an eviction", error)
            return False

    def _prepare(self, place: bytes, item: SetItem) -> NewObject:
        length = item.meta.length
        # Compute checksum and MAC before this thread takes the writer lock: they read the whole payload.
        checksums = Checksums(checksum_of(item), self._mac_key.mac(item.key, item.buffers, length))
        page = place[:HALF]
        pages = pages_for(length, self._environment.page_bytes)
        taken = self._mirror.footprint.of(length)
        return NewObject(place, item, checksums, pages, page, item.meta.parent == page, taken)

    def _chunks(
        self, objects: Iterable[NewObject], budget: PageBudget | None = None
    ) -> Iterator[list[NewObject]]:
        """Yield the objects in chunks for one transaction each; the fuller the file, the shorter the chunks.

        `budget`: the limits of a transaction; None means the disk's present budget.
        """
        chunk: list[NewObject] = []
        room = 0  # LMDB pages that the chunk may still change
        for new in objects:
            now = budget or self._disk.budget()
            if chunk and (now.cost(new.pages) > room or len(chunk) == _MAX_OBJECTS):
                yield chunk
                chunk = []
            if not chunk:
                room = now.burst(self._used)
            chunk.append(new)
            room -= now.cost(new.pages)
        if chunk:
            yield chunk

    def _store(self, chunk: Sequence[NewObject], batch: Batch) -> None:
        try:
            self._store_splitting(chunk, batch)
        except OSError as error:
            left = (new.place for new in chunk if new.place not in batch.outcomes)
            batch.outcomes.update(dict.fromkeys(left, self._errors.failed("a set", error)))

    def _store_splitting(self, chunk: Sequence[NewObject], batch: Batch) -> None:
        """Store a chunk; if it meets a damaged LMDB page, try again, then store each half by itself.

        In the end only the objects that need the damaged page fail.
        """
        # The first try also writes waiting work (see `Maintenance`), and this work may have caused the error.
        # So the second try is without waiting work. If a try finds one more object that cannot be evicted, a
        # further try leaves this object out.
        known = -1  # number of unremovable objects after the last try
        while True:
            try:
                if self._disk.is_short():
                    self._store_on_full_disk(chunk, batch)
                else:
                    self._store_in_map(chunk, batch)
                return
            except DamagedError as error:
                damage = error
            if known == len(self._unremovable) or known >= _MAX_DAMAGED:
                break
            known = len(self._unremovable)
            self._maintenance.flush_one_by_one()
        if len(chunk) == 1:
            raise damage
        middle = len(chunk) // 2
        for half in (chunk[:middle], chunk[middle:]):
            self._store(half, batch)

    def _store_in_map(self, chunk: Sequence[NewObject], batch: Batch) -> None:
        """Store a chunk in the whole map or, if the disk is full, in the pages that the file has."""
        try:
            self._store_retrying(chunk, batch, self._disk.whole)
        except OSError as error:
            if not is_full(error):
                raise
            self._disk.note_full()
            self._store_in_file(chunk, batch)

    def _store_on_full_disk(self, chunk: Sequence[NewObject], batch: Batch) -> None:
        """Store a chunk in the pages that the file has; if every object is THROTTLED, try the whole map."""
        self._store_in_file(chunk, batch)
        throttled = [new for new in chunk if batch.outcomes[new.place] is Outcome.THROTTLED]
        if len(throttled) == len(chunk):
            self._disk.use_whole_map()
            self._store_in_map(chunk, batch)

    def _store_in_file(self, chunk: Sequence[NewObject], batch: Batch) -> None:
        """Store a chunk in the LMDB pages that the file already has on the disk."""
        for small in self._chunks(chunk, self._disk.budget()):
            try:
                self._store_retrying(small, batch, self._disk.budget())
            except OSError as error:
                if not is_full(error):
                    raise
                # An eviction changes LMDB pages too. Evict only one object per transaction, because such a
                # transaction needs the fewest free pages.
                limits = WriteLimits(
                    self._disk.note_full().limit, _SINGLE_PAGES, evictions=1, evicts_apart=True
                )
                self._run(small, batch, limits)

    def _store_retrying(self, chunk: Sequence[NewObject], batch: Batch, budget: PageBudget) -> None:
        """Store a chunk; whenever LMDB finds no free pages, try the next `WriteLimits`.

        If all limits fail, store the objects one by one. If even a single object fails, try it under lower
        limits.
        """
        large = sum(budget.cost(new.pages) for new in chunk) > budget.burst(self._used)
        for limits in self._limits_to_try(budget, large):
            try:
                self._run(chunk, batch, limits)
                self._note_success(limits)
                return
            except MapFullError:
                self._environment.clear_readers()
                if self._environment.lagging():
                    # A slow reader keeps LMDB from reusing pages. The pages of further evictions could not be
                    # reused either. So try only once more, with shorter pieces.
                    self._commit_nothing()
                    self._run(
                        chunk, batch, limits._replace(part_pages=_SHORTER_PART_PAGES, evicts_apart=True)
                    )
                    return
                self._commit_nothing()
        if len(chunk) > 1:
            for new in chunk:
                self._store_retrying([new], batch, budget)
            return
        self._store_under_lower_limits(chunk, batch, budget)

    def _store_under_lower_limits(self, chunk: Sequence[NewObject], batch: Batch, budget: PageBudget) -> None:
        """Store a chunk; try lower and lower limits on the LMDB pages in use, so that more pages are free."""
        *lower, last = (
            WriteLimits(limit, _SINGLE_PAGES, budget.changes, evicts_apart=True)
            for limit in budget.lower_limits
        )
        for limits in lower:
            try:
                self._run(chunk, batch, limits)
                return
            except MapFullError:
                self._commit_nothing()
        self._run(chunk, batch, last)

    def _limits_to_try(self, budget: PageBudget, large: bool) -> list[WriteLimits]:
        """Return the limits to try in turn.

        `large`: the chunk changes more LMDB pages than one transaction should.
        """
        if self._disk.is_short():
            # A piece of several pages needs a run of free pages. Without one, LMDB would let the file grow.
            return [WriteLimits(budget.limit, _SINGLE_PAGES, budget.changes, evicts_apart=True)]
        self._cautious -= 1
        usual = self._part_pages if self._cautious > 0 else PART_PAGES
        shorter = [pages for pages in (PART_PAGES, _SHORTER_PART_PAGES, _SINGLE_PAGES) if pages <= usual]
        # Try the usual piece size twice, because the second try can use pages given up before the first try.
        first = WriteLimits(budget.limit, usual, budget.changes, evicts_apart=large)
        return [first, *(first._replace(part_pages=pages, evicts_apart=True) for pages in shorter)]

    def _note_success(self, limits: WriteLimits) -> None:
        """Record limits that were enough; if the pieces were short, the next chunks begin with short ones."""
        if self._cautious <= 0 and limits.part_pages < PART_PAGES:
            self._part_pages, self._cautious = limits.part_pages, _CAUTIOUS_CHUNKS

    def _run(self, chunk: Sequence[NewObject], batch: Batch, limits: WriteLimits) -> None:
        """Run transactions until one stores the chunk, and record the outcomes in `batch`."""
        while True:
            try:
                result = self._write(lambda txn: Attempt(self._context, txn, chunk, batch, limits).run())
            except MirrorBehindError:
                self._mirror.read()
                continue
            self._maintenance.committed(result.applied)
            self._used = result.used
            self._disk.keep_reserve()
            if result.outcomes is not None:
                batch.settle(chunk, result.outcomes)
                return
            if limits.evicts_apart:
                # Transaction N + 2 is the first that can use the pages that transaction N gave up.
                self._commit_nothing()

    def _write(self, work: Callable[[Any], T]) -> T:
        """Run `work`, which may evict, in a write transaction, and keep the mirror in step.

        After a commit the mirror drops the evicted objects; after a failure the mirror puts them back.
        """
        with self._mirror.lock:
            try:
                result = self._environment.write(work)
            except BaseException:
                self._mirror.rolled_back()
                raise
            self._mirror.committed()
            return result

    def _commit_nothing(self) -> None:
        """Commit an empty transaction, so that pages given up by the transaction before it can be used."""
        self._environment.write(lambda txn: Transaction(self._environment, txn).save())
