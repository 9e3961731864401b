"""Sets of the `lmdb` store: a batch is cut into chunks, each of which should fit into one transaction.

A transaction evicts for its chunk and stores it (`_Attempt`). Other processes write between transactions, so
each looks up again which objects are stored. If LMDB finds no free pages, the chunk climbs down a ladder of
plans:

    long pieces            usually; once more in a transaction that only stores
    shorter pieces         a map that was once full has few long runs of adjacent free pages
    one object at a time   the fewest pages for one transaction
    lower limits           more is evicted, so that more pages are free

While the disk is full, the limit is what the file already has on it, and every piece is one page: without a
run of free pages LMDB would let the file grow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Self, TypeVar

import numpy as np

from tiercache.core import Outcome
from tiercache.storage.base import SetItem, checksum_of
from tiercache.storage.checksum import Checksums, MacKey
from tiercache.storage.env import Env
from tiercache.storage.pages import NONE
from tiercache.storage.residents import parents_first
from tiercache.storage.restorable import Admissibility
from tiercache.storage.shares import Writer
from tiercache_backends.lmdb.environment import Environment, ErrorCounters, MapFullError, PageBudget
from tiercache_backends.lmdb.mirror import ALL_PAGES, Eviction, Mirror, evict_beyond_quotas
from tiercache_backends.lmdb.records import HALF, PART_PAGES, pages_for
from tiercache_backends.lmdb.transaction import Pending, Transaction
from tiercache_backends.local.failures import is_full

_log = logging.getLogger(__name__)

_SHORTER_PART_PAGES: Final = 4, 1
"""Numbers of LMDB pages of a piece of payload to try in turn, if LMDB finds no runs for full pieces."""
_MAX_OBJECTS: Final = 256
"""Maximum number of objects stored in one transaction."""
_CAUTIOUS_CHUNKS: Final = 32
"""Number of chunks that begin with the short pieces that worked last, before long pieces are tried again."""
_PAUSE_SECONDS: Final = 10.0
"""Seconds after a full disk until the file may try to grow again."""
_SPARE_PAGES: Final = 64
"""Minimum number of pages that are allocated on the disk in advance, behind the last used page."""
_SPARE_SHARE: Final = 64
"""Divisor of the map's pages: one page in 64 is allocated on the disk in advance."""

T = TypeVar("T")


class NewObject(NamedTuple):
    """One object to store."""

    place: bytes
    """Key of the object in the database `objects`."""
    item: SetItem
    checksums: Checksums
    pages: int
    """Number of LMDB pages for the payload if it is cut into pieces of `PART_PAGES` pages."""
    page: bytes
    """Key of the object's page."""
    attached: bool
    """Whether the object is attached to its page, as a state is; otherwise the object is the page."""
    taken: int
    """Bytes that the object takes of its owner's share (`Mirror.footprint`)."""

    @property
    def value(self) -> float | None:
        """Value that the caller gave to the object."""
        return self.item.meta.value


class Plan(NamedTuple):
    """Limits of one transaction's use of the file."""

    limit: int
    """Maximum number of LMDB pages in use."""
    part_pages: int
    """Number of LMDB pages of a full payload piece."""
    evictions: int
    """Maximum number of objects to evict."""
    apart: bool
    """Whether a transaction either evicts or stores, but never does both.

    The pages that an eviction frees can be used two transactions later. A transaction that stores objects
    before then needs other free pages.
    """


class MirrorBehindError(Exception):
    """The mirror must be read (again) before the chunk can be stored; the transaction is undone."""


class Disk:
    """Budget of pages for LMDB's file, limited to the room on the disk.

    The budget is the whole map until a write finds the disk full: the disk may be smaller than the capacity,
    or other programs may have filled it. From then on the budget is the pages that the file already has.
    After a pause the budget is the whole map again, so that the file may try to grow.

    Thread safety: any thread may call.
    """

    def __init__(self, env: Env, environment: Environment) -> None:
        self._env = env
        self._environment = environment
        self._short: PageBudget | None = None
        """Budget of the pages that the file already has, while the disk counts as full; else None."""
        self._again = 0.0
        """Time at which the pause ends, in seconds of the monotonic clock."""

    def budget(self) -> PageBudget:
        """Return the present budget, which is the whole map again once the pause is over."""
        if self._env.monotonic() >= self._again:
            self._short = None
        return self._short or self._environment.budget

    def note_full(self) -> PageBudget:
        """Record that the disk is full, and return the new budget. Raises OSError if that fails."""
        whole, pages = self._environment.budget, self._environment.pages_on_disk()
        if self._short is None:
            _log.warning(
                "the disk of %s is full; the store continues with the %d pages that its file has",
                self._environment.path,
                pages,
            )
        self._again = self._env.monotonic() + _PAUSE_SECONDS
        self._short = short = PageBudget(min(pages, whole.map_pages), whole.page_bytes, is_short=True)
        return short

    def keep_reserve(self) -> None:
        """Allocate pages on the disk in advance, so that deletions work even after others fill the disk.

        If the disk has no room left, limit the budget to the pages that the file already has.
        """
        if self._short is None:
            pages = max(_SPARE_PAGES, self._environment.budget.map_pages // _SPARE_SHARE)
            try:
                # Allocate when less than a quarter is left, and not for every few pages.
                self._environment.reserve(pages // 4, pages)
            except OSError as error:
                if is_full(error):
                    self.note_full()

    def is_short(self) -> bool:
        """Return whether the budget is less than the whole map."""
        return self._short is not None


class Batch:
    """State of one `set` call.

    Thread safety: only the thread of the call uses it.
    """

    def __init__(self, places: Sequence[bytes], items: Iterable[SetItem]) -> None:
        self.held: Final = list(
            {*(place[:HALF] for place in places), *(item.meta.parent for item in items if item.meta.parent)}
        )
        """Keys of pages that this call never evicts: the pages and the parents of its objects.

        The last objects of a batch could not be restored without the first objects.
        """
        self.outcomes: dict[bytes, Outcome] = {}
        """Outcomes so far, by place, of the objects that were missing when the call began."""
        self.missing: set[bytes] = set()
        """Keys of pages that this batch brought and that were not stored."""

    def settle(self, chunk: Sequence[NewObject], outcomes: Mapping[bytes, Outcome]) -> None:
        """Record the outcomes of one chunk of this batch."""
        self.outcomes.update(outcomes)
        for new in chunk:
            if not new.attached and outcomes[new.place] in (Outcome.THROTTLED, Outcome.ERROR):
                self.missing.add(new.page)


class BatchWriter:
    """Writer of batches of objects.

    Thread safety: any thread may call; the environment runs one write transaction at a time.
    """

    def __init__(
        self,
        environment: Environment,
        mirror: Mirror,
        disk: Disk,
        pending: Pending,
        errors: ErrorCounters,
        mac_key: MacKey,
    ) -> None:
        self.environment: Final = environment
        self.mirror: Final = mirror
        self.disk: Final = disk
        self.pending: Final = pending
        self.errors: Final = errors
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
        self.mirror.note((place for place in places if place not in items), brought=True)
        missing = list(items)
        ordered = (
            missing[i] for i in parents_first([(place[:HALF], items[place].meta.parent) for place in missing])
        )
        for places_of_owner in self._by_owner(ordered, items):
            for chunk in self._chunks(self._prepare(place, items[place]) for place in places_of_owner):
                self._store(chunk, batch)
        while self.mirror.order.unfinished and self._evict_some(self._sweep):
            pass
        self.trim()
        return batch.outcomes

    def trim(self) -> None:
        """Evict what owners have beyond their quotas, as far as the mirror knows."""
        while self.mirror.is_read and self.mirror.owners.beyond():
            if not self._evict_some(partial(evict_beyond_quotas, self.mirror)):
                return

    def forget_namespaces(self) -> None:
        """Forget the namespaces that have neither a record nor an object; the mirror has been read."""

        def work(txn: Any) -> None:
            if self.mirror.keep_up(txn):
                residents = self.mirror.residents
                used = np.unique(residents.columns["namespace"][residents.residents()])
                Transaction(self.environment, txn).forget_namespaces(used.tolist())

        try:
            self._write(work)
        except OSError as error:
            self.errors.failed("forgetting namespaces", error)

    def _by_owner(
        self, ordered: Iterable[bytes], items: Mapping[bytes, SetItem]
    ) -> Iterable[Iterable[bytes]]:
        """Return the places of a batch in one list for each owner, so that a chunk has one owner."""
        if not self.mirror.owners.active:
            return (ordered,)
        groups: dict[int, list[bytes]] = {}
        with self.mirror.lock:
            for place in ordered:
                owner = self.mirror.owners.of_namespace(items[place].meta.namespace)
                groups.setdefault(owner, []).append(place)
        return groups.values()

    def _sweep(self, transaction: Transaction, max_objects: int) -> int:
        """Evict the rest of a unit (pages of one conversation) that earlier transactions evicted in part."""
        eviction = Eviction(self.mirror, transaction, max_objects, 0)
        self.mirror.order.sweep(eviction)
        return eviction.objects

    def _evict_some(self, evict: Callable[[Transaction, int], int]) -> bool:
        """Evict in a transaction of its own; return False if nothing was evicted."""

        def work(txn: Any) -> int:
            if not self.mirror.keep_up(txn):
                return 0
            transaction = Transaction(self.environment, txn)
            objects = evict(transaction, self.disk.budget().changes)
            transaction.count_evicted(objects)
            transaction.save()
            return objects

        try:
            return self._write(work) > 0
        except OSError as error:
            self.errors.failed("an eviction", error)
            return False

    def _prepare(self, place: bytes, item: SetItem) -> NewObject:
        length = item.meta.length
        # Compute checksum and MAC before this thread takes the writer lock: they read the whole payload.
        checksums = Checksums(checksum_of(item), self._mac_key.mac(item.key, item.buffers, length))
        page = place[:HALF]
        pages = pages_for(length, self.environment.page_bytes)
        taken = self.mirror.footprint.of(length)
        return NewObject(place, item, checksums, pages, page, item.meta.parent == page, taken)

    def _chunks(
        self, objects: Iterable[NewObject], budget: PageBudget | None = None
    ) -> Iterator[list[NewObject]]:
        """Yield the objects in chunks, each for one transaction; a fuller file gets shorter ones."""
        chunk: list[NewObject] = []
        room = 0  # LMDB pages that the chunk may still change
        for new in objects:
            if chunk and (new.pages + 1 > room or len(chunk) == _MAX_OBJECTS):
                yield chunk
                chunk = []
            if not chunk:
                room = (budget or self.disk.budget()).burst(self._used)
            chunk.append(new)
            room -= new.pages + 1
        if chunk:
            yield chunk

    def _store(self, chunk: Sequence[NewObject], batch: Batch) -> None:
        """Store a chunk, or find out that it cannot be stored now."""
        try:
            self._store_on_disk(chunk, batch)
        except OSError as error:
            left = (new.place for new in chunk if new.place not in batch.outcomes)
            batch.outcomes.update(dict.fromkeys(left, self.errors.failed("a set", error)))

    def _store_on_disk(self, chunk: Sequence[NewObject], batch: Batch) -> None:
        """Store a chunk in the whole map or, while the disk is full, in the pages that the file has."""
        budget = self.disk.budget()
        # A second try before anything is evicted: others may have filled the disk for a moment only.
        for _ in range(0 if budget.is_short else 2):
            try:
                self._climb([new for new in chunk if new.place not in batch.outcomes], batch, budget)
                return
            except MapFullError:
                raise
            except OSError as error:
                if not is_full(error):
                    raise
        short = budget if budget.is_short else self.disk.note_full()
        for small in self._chunks([new for new in chunk if new.place not in batch.outcomes], short):
            self._climb(small, batch, short)
        if budget.is_short and all(batch.outcomes[new.place] is Outcome.THROTTLED for new in chunk):
            # Nothing fits into what the file has, so let it try to grow.
            self._climb(chunk, batch, self.environment.budget)

    def _climb(self, chunk: Sequence[NewObject], batch: Batch, budget: PageBudget) -> None:
        """Store a chunk by the first plan that finds enough free pages; raise MapFullError if none does."""
        plans = self._plans(budget, sum(new.pages + 1 for new in chunk) > budget.burst(self._used))
        for plan in plans:
            if plan.limit < budget.limit and len(chunk) > 1:
                for new in chunk:
                    self._climb([new], batch, budget)
                return
            try:
                self._run(chunk, batch, plan)
            except OSError as error:
                if not (isinstance(error, MapFullError) or (budget.is_short and is_full(error))):
                    raise
                self.environment.clear_readers()
                lags = self.environment.is_held_back()
                if plan == plans[-1] or (lags and plan.part_pages == _SHORTER_PART_PAGES[-1]):
                    # A slow reader keeps LMDB from reusing pages. The pages of further evictions could not be
                    # reused either.
                    raise
                self._commit_nothing()
            else:
                if self._cautious <= 0 and plan.part_pages < PART_PAGES:
                    self._part_pages, self._cautious = plan.part_pages, _CAUTIOUS_CHUNKS
                return

    def _plans(self, budget: PageBudget, large: bool) -> list[Plan]:
        """Return the plans to try in turn.

        `large`: the chunk changes more LMDB pages than one transaction should.
        """
        last = Plan(budget.limit, _SHORTER_PART_PAGES[-1], budget.changes, apart=True)
        if budget.is_short:
            # An eviction changes LMDB pages too, the fewest if it is of one object.
            return [last, *(last._replace(limit=n, evictions=1) for n in (last.limit, *budget.lower_limits))]
        lower = [last._replace(limit=limit) for limit in budget.lower_limits]
        self._cautious -= 1
        usual = self._part_pages if self._cautious > 0 else PART_PAGES
        # Try the usual piece size twice, because the second try can use pages given up before the first try.
        sizes = [pages for pages in (PART_PAGES, *_SHORTER_PART_PAGES) if pages <= usual]
        first = Plan(budget.limit, usual, budget.changes, apart=large)
        return [first, *(last._replace(part_pages=pages) for pages in sizes), *lower]

    def _run(self, chunk: Sequence[NewObject], batch: Batch, plan: Plan) -> None:
        """Run transactions until one stores the chunk, and record the outcomes in `batch`."""
        while True:
            try:
                attempt = self._write(lambda txn: _Attempt(self, txn, chunk, batch, plan).run())
            except MirrorBehindError:
                self.mirror.read()
                continue
            self.pending.committed(attempt.applied)
            self._used = attempt.used
            self.disk.keep_reserve()
            if attempt.outcomes is not None:
                batch.settle(chunk, attempt.outcomes)
                return
            if plan.apart:
                # Transaction N + 2 is the first that can use the pages that transaction N gave up.
                self._commit_nothing()

    def _write(self, work: Callable[[Any], T]) -> T:
        """Run `work`, which may evict, in a write transaction, and keep the mirror in step.

        After a commit the mirror drops the evicted objects; after a failure the mirror puts them back.
        """
        with self.mirror.lock:
            try:
                result = self.environment.write(work)
            except BaseException:
                self.mirror.rolled_back()
                raise
            self.mirror.committed()
            return result

    def _commit_nothing(self) -> None:
        """Commit an empty transaction, so that pages given up by the transaction before it can be used."""
        self.environment.write(lambda txn: Transaction(self.environment, txn).save())


class _Attempt:
    """One write transaction that evicts for a chunk, and stores the chunk if there is room after that.

    The constructor and `run` raise MirrorBehindError.

    Thread safety: only the thread of the transaction uses it.
    """

    def __init__(
        self, store: BatchWriter, txn: Any, chunk: Sequence[NewObject], batch: Batch, plan: Plan
    ) -> None:
        self._mirror = store.mirror
        self._pages = store.mirror.residents.pages
        self._pending = store.pending
        self._errors = store.errors
        self._page_bytes = store.environment.page_bytes
        self._slack = store.environment.budget.slack
        self._chunk = chunk
        self._batch = batch
        self._plan = plan
        if (self._mirror.is_read and not self._mirror.keep_up(txn)) or (
            self._mirror.owners.active and not self._mirror.is_read
        ):
            raise MirrorBehindError
        self._transaction = Transaction(store.environment, txn)
        self._evictions = plan.evictions
        """Number of objects that this transaction may still evict."""
        self.applied = self._pending.apply(self._transaction)
        """Waiting changes that the transaction made."""
        self.outcomes: Mapping[bytes, Outcome] | None = None
        """Outcomes by place; None if the transaction only evicted, so that another one must follow."""
        self.used = 0
        """Number of LMDB pages in use at the end of the transaction."""

    def run(self) -> Self:
        """Evict, and store the objects that may be stored and that fit; the caller commits."""
        missing = [new for new in self._chunk if not self._is_there(new)]
        refused = self._refused(missing)
        allowed = [new for new in missing if new.place not in refused]
        fitting = self._within_quota(allowed)
        if fitting is not None:
            fitting = self._within_limit(fitting)
        if fitting is not None:
            self._transaction.add(
                [(new.place, new.item, new.checksums) for new in fitting], self._plan.part_pages
            )
            self.outcomes = outcomes = dict.fromkeys((new.place for new in self._chunk), Outcome.HIT)
            outcomes |= dict.fromkeys((new.place for new in allowed), Outcome.THROTTLED)
            outcomes |= refused
            outcomes |= dict.fromkeys((new.place for new in fitting), Outcome.STORED)
            crowded = (new for new in allowed if not new.attached)
            self._pages.refuse(new.page for new in crowded if outcomes[new.place] is Outcome.THROTTLED)
        self._transaction.save()
        self.used = self._transaction.used_pages()
        return self

    # --- does it fit, and who goes
    # --------------------------------------------------------------------------------------------------------

    def _within_quota(self, news: Sequence[NewObject]) -> Sequence[NewObject] | None:
        """Evict objects of the owner until these are within its quota; return those that are.

        Returns None if the chunk needs another transaction.
        """
        owners = self._mirror.owners
        if not owners.active or not news:
            return news
        owner = owners.of_namespace(news[0].item.meta.namespace)  # all of a chunk have one owner
        quota = owners.quotas[owner]

        def room() -> float:
            # What leaves in this transaction is gone when this is stored, so `extra` does not count.
            return quota - owners.used[owner]

        short = sum(new.taken for new in news if new.taken <= quota) - room()
        if short > 0:
            evicted = self._evict(news, self._worthy(news, for_quota=True), ALL_PAGES, short)
            owners.evicted[owner] += evicted
            if (self._plan.apart and evicted) or self._evictions <= 0:
                return None
        within = _filled(news, room(), lambda new: new.taken)
        owners.throttled[owner] += len(news) - len(within)
        return within

    def _within_limit(self, news: Sequence[NewObject]) -> Sequence[NewObject] | None:
        """Evict until these objects fit into the file; return those that do.

        Objects that are not worth what must go for them are left out. Returns None if the chunk needs another
        transaction, which evicts more or, if this one has evicted enough and plans are `apart`, stores.
        """
        #   0                            target                 limit
        #   |---- in use after evicting ---|------ pages ---------|
        limit, used_pages = self._plan.limit, self._transaction.used_pages
        news = [new for new in news if self._needs(new) <= limit]  # others are too large for an empty file
        fitting: Sequence[NewObject] = news
        while True:
            fitting = self._worthy(before := fitting)
            pages = sum(self._needs(new) for new in fitting)
            target = limit - pages
            if used_pages() <= target:
                break
            if not self._mirror.is_read:
                raise MirrorBehindError
            # What is freed beyond the need is no more than another chunk like this one takes.
            evicted = self._evict(fitting, fitting, target - min(self._slack, pages))
            if (self._plan.apart and evicted) or (self._evictions <= 0 and used_pages() > target):
                return None
            # An eviction stops at a unit of more value than one of the objects. Go on with the others.
            if not evicted and len(fitting) == len(before):
                break
        if len(fitting) < len(news):
            self._errors.count("not_worth", len(news) - len(fitting))
        return _filled(fitting, limit - used_pages(), self._needs)

    def _evict(
        self, news: Sequence[NewObject], worthy: Sequence[NewObject], pages: int, own_bytes: float = 0
    ) -> int:
        """Evict for these objects until `pages` pages are in use; return the number of objects evicted.

        `own_bytes`: evict so many bytes of their owner instead, for its quota. `worthy`: objects of `news`
        that are worth what must go, the least of which limits what goes.
        """
        eviction = Eviction(self._mirror, self._transaction, self._evictions, pages, own_bytes)
        values = [new.value for new in worthy or news if new.value is not None]
        residents = self._mirror.residents
        nodes = [self._pages.hold(page) for page in self._batch.held]
        try:
            self._mirror.order.evict(
                eviction,
                nodes,
                promising=True in {self._is_promising(new, news) for new in news},
                rank=residents.rank(min(values)) if values else None,
                writer=self._writer(news, for_quota=own_bytes > 0),
            )
        finally:
            for node in nodes:
                self._pages.release(node)
        self._transaction.count_evicted(eviction.objects)
        self._evictions -= eviction.objects
        return eviction.objects

    def _worthy(self, news: Sequence[NewObject], *, for_quota: bool = False) -> Sequence[NewObject]:
        """Return the objects without those that are not worth what must be evicted for them.

        What depends on a page that is left out is left out too. Nothing is while there is room, also for the
        pages that an eviction frees for later sets.
        """
        if not self._mirror.is_read or all(new.value is None for new in news):
            return news
        room = self._plan.limit - self._slack - self._transaction.used_pages()
        if not for_quota and sum(self._needs(new) for new in news) <= room:
            return news
        order, rank = self._mirror.order, self._mirror.residents.rank
        writer = self._writer(news, for_quota=for_quota)
        return _without(news, lambda new: new.value is None or order.is_worth(rank(new.value), writer))

    def _writer(self, news: Sequence[NewObject], *, for_quota: bool = False) -> Writer | None:
        owners = self._mirror.owners
        if not owners.active or not news:
            return None
        owner = owners.of_namespace(news[0].item.meta.namespace)
        return Writer(owner, sum(new.taken for new in news), for_quota)

    def _needs(self, new: NewObject) -> int:
        """Return the number of LMDB pages that the object takes in pieces of the plan's size."""
        if self._plan.part_pages == PART_PAGES:
            return new.pages
        return pages_for(new.item.meta.length, self._page_bytes, self._plan.part_pages)

    def _is_promising(self, new: NewObject, news: Sequence[NewObject]) -> bool:
        """Return whether a restore could use the object as soon as `news` is stored."""
        namespace = new.item.meta.namespace
        number = self._transaction.namespace_id(namespace)
        if self._transaction.has_states(namespace):
            self._pages.require_states(number)
        if new.attached and any(other.page == new.page and not other.attached for other in news):
            return True
        return self._mirror.is_promising(new.page, number, attached=new.attached)

    # --- may it be stored
    # --------------------------------------------------------------------------------------------------------

    def _is_there(self, new: NewObject) -> bool:
        """Return whether the object is stored now.

        Another thread or process may have stored the object after the call looked for missing objects.
        A stored object is marked as used. A damaged object is removed, and counts as missing.
        """
        record = self._transaction.find(new.place)
        if record is None:
            return False
        if self._pending.is_damaged(new.place, record.number):
            self._transaction.remove(new.place, record)
            return False
        self._transaction.touch(new.place)
        return True

    def _refused(self, missing: Sequence[NewObject]) -> dict[bytes, Outcome]:
        """Return the outcomes of the objects that must not be stored, by place.

        THROTTLED: the object's parent is absent, so no restore could use the object. ERROR: the object
        contradicts what is stored. In `missing`, parents come before the objects that follow them.
        """
        refused: dict[bytes, Outcome] = {}
        coming: dict[bytes, SetItem] = {}  # page objects accepted so far, by page key
        lost: set[bytes] = set()  # keys of the pages refused so far
        for new in missing:
            admissibility = self._admissibility(new, coming)
            page_is_lost = new.page in lost or new.page in self._batch.missing
            page_is_lost |= (
                new.page not in coming and self._mirror.is_read and self._pages.has_refused(new.page)
            )
            if admissibility is Admissibility.FINE and new.attached and page_is_lost:
                admissibility = Admissibility.ABSENT_PARENT
            if admissibility is not Admissibility.FINE:
                if not new.attached:
                    lost.add(new.page)
                    self._pages.refuse([new.page])
                refused[new.place] = (
                    Outcome.ERROR if admissibility is Admissibility.IMPOSSIBLE else Outcome.THROTTLED
                )
                self._errors.count(f"refused_{admissibility.value}")
            elif not new.attached:
                coming[new.page] = new.item
        return refused

    def _admissibility(self, new: NewObject, coming: Mapping[bytes, SetItem]) -> Admissibility:
        """Return whether an object may be stored next to what the database holds.

        The rules are those of `RestorablePages.admissibility`, applied to objects of the same layout.

        `coming`: page objects that this transaction has accepted, by page key.
        """
        meta, parent = new.item.meta, None if new.attached else new.item.meta.parent
        node = self._pages.find(new.page) if self._mirror.is_read else NONE
        known = self._pages.depth[node] if node >= 0 else 0
        if meta.depth and known and meta.depth != known:
            return Admissibility.IMPOSSIBLE
        if parent is None:
            return Admissibility.FINE
        before = parent + new.place[HALF:]  # place of the parent, which has the same layout
        depth = self._depth_of_parent(before, meta.namespace, coming.get(parent))
        if depth is None:
            return Admissibility.ABSENT_PARENT
        if meta.depth and depth and meta.depth != depth + 1:
            return Admissibility.IMPOSSIBLE
        # Refuse a circle of parents. A new page can close a circle only if other objects depend on it
        # already.
        if self._transaction.dependents(new.page) and self._transaction.follows(before, new.place):
            return Admissibility.IMPOSSIBLE
        return Admissibility.FINE

    def _depth_of_parent(self, place: bytes, namespace: bytes, coming: SetItem | None) -> int | None:
        """Return the parent's depth in pages, 0 if not known; None where the parent is absent.

        `place`: where the parent is stored. `coming`: the parent, if this transaction is to store it.
        """
        if coming is not None and coming.meta.namespace == namespace:
            return coming.meta.depth or 0
        stored = self._transaction.find(place)
        if stored is None or stored.namespace != self._transaction.namespace_id(namespace):
            return None
        return stored.depth


def _without(news: Iterable[NewObject], keep: Callable[[NewObject], bool]) -> list[NewObject]:
    """Return the objects that `keep` keeps and that depend on none that was left out, in order."""
    left: list[NewObject] = []
    lost: set[bytes] = set()
    for new in news:
        if new.item.meta.parent not in lost and keep(new):
            left.append(new)
        elif not new.attached:
            lost.add(new.page)
    return left


def _filled(news: Iterable[NewObject], room: float, size: Callable[[NewObject], int]) -> list[NewObject]:
    """Return the objects that fit into `room` one after the other, without what depends on the others."""
    taken = 0

    def keep(new: NewObject) -> bool:
        nonlocal taken
        fits = taken + size(new) <= room
        taken += size(new) * fits
        return fits

    return _without(news, keep)
