"""Sets of the `lmdb` store: a batch is cut into chunks, each of which should fit into one transaction.

A transaction evicts for its chunk and stores it (`_Attempt`). Other processes write between transactions, so
each looks up again which objects are stored. If LMDB finds no free pages, or the disk is full, the chunk goes
through the `_PLANS`:

    long pieces            usually; once more in a transaction that only stores
    pieces of one page     a map that was once full has few long runs of adjacent free pages
    lower limits           more is evicted, so that more pages are free, for one object at a time

While the disk is full, the limit is what the file already has on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self, TypeVar

from tiercache.core import Outcome
from tiercache.storage.base import SetItem, checksum_of
from tiercache.storage.checksum import Checksums, MacKey
from tiercache.storage.pages import NONE
from tiercache.storage.residents import parents_first
from tiercache.storage.restorable import Admissibility
from tiercache_backends.lmdb.environment import Environment, ErrorCounters, MapFullError
from tiercache_backends.lmdb.mirror import Eviction, Mirror
from tiercache_backends.lmdb.records import HALF, PART_PAGES, pages_for
from tiercache_backends.lmdb.transaction import Pending, Transaction
from tiercache_backends.local.directory import is_full

_MAX_OBJECTS: Final = 256
"""Maximum number of objects stored in one transaction."""

T = TypeVar("T")


class NewObject(NamedTuple):
    """One object to store."""

    place: bytes
    """Key of the object in the database `objects`."""
    item: SetItem
    checksums: Checksums
    pages: int
    """Number of LMDB pages for the payload if it is cut into pieces of `PART_PAGES` pages."""

    @property
    def page(self) -> bytes:
        """Key of the object's page."""
        return self.place[:HALF]

    @property
    def attached(self) -> bool:
        """Whether the object is attached to its page, as a state is; otherwise the object is the page."""
        return self.item.meta.parent == self.page


class Plan(NamedTuple):
    """How a transaction uses the file."""

    part_pages: int
    """Number of LMDB pages of a full payload piece."""
    apart: bool = True
    """Whether a transaction either evicts or stores, but never does both.

    The pages that an eviction frees can be used two transactions later. A transaction that stores objects
    before then needs other free pages.
    """
    step: int = 0
    """By how many times the reserve the limit on the pages in use is lowered."""


_PLANS: Final = (
    Plan(PART_PAGES, apart=False),
    Plan(PART_PAGES),
    Plan(1),
    *(Plan(1, step=step) for step in range(1, 6)),
)
"""Plans that a set tries in turn."""


class MirrorBehindError(Exception):
    """The mirror must be read (again) before the chunk can be stored; the transaction is undone."""


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
        pending: Pending,
        errors: ErrorCounters,
        mac_key: MacKey,
    ) -> None:
        self.environment: Final = environment
        self.mirror: Final = mirror
        self.pending: Final = pending
        self.errors: Final = errors
        self._mac_key = mac_key
        self._used = 0
        """Number of LMDB pages in use after the last transaction of this process."""

    def store(self, items: Mapping[bytes, SetItem], places: Sequence[bytes]) -> dict[bytes, Outcome]:
        """Store `items`, the missing objects of a batch, and return their outcomes by place.

        `places`: the places of all objects of the batch, also of those that are stored already.
        """
        self.environment.try_growing()
        batch = Batch(places, items.values())
        self.mirror.note((place for place in places if place not in items), brought=True)
        missing = list(items)
        ordered = (
            missing[i] for i in parents_first([(place[:HALF], items[place].meta.parent) for place in missing])
        )
        for chunk in self._chunks(self._prepare(place, items[place]) for place in ordered):
            self._store(chunk, batch)
        while self.mirror.order.unfinished and self._sweep():
            pass
        return batch.outcomes

    def _sweep(self) -> bool:
        """Evict the rest of a unit (pages of one conversation) that earlier transactions evicted in part.

        Returns False if nothing was evicted.
        """

        def work(txn: Any) -> int:
            if not self.mirror.keep_up(txn):
                return 0
            transaction = Transaction(self.environment, txn)
            eviction = Eviction(self.mirror, transaction, self.environment.budget.changes, 0)
            self.mirror.order.sweep(eviction)
            transaction.count_evicted(eviction.objects)
            transaction.save()
            return eviction.objects

        try:
            return self._write(work) > 0
        except OSError as error:
            self.errors.failed("an eviction", error)
            return False

    def _prepare(self, place: bytes, item: SetItem) -> NewObject:
        length = item.meta.length
        # Compute checksum and MAC before this thread takes the writer lock: they read the whole payload.
        checksums = Checksums(checksum_of(item), self._mac_key.mac(item.key, item.buffers, length))
        return NewObject(place, item, checksums, pages_for(length, self.environment.page_bytes))

    def _chunks(self, objects: Iterable[NewObject]) -> Iterator[list[NewObject]]:
        """Yield the objects in chunks, each for one transaction; a fuller file gets shorter ones."""
        chunk: list[NewObject] = []
        room = 0  # LMDB pages that the chunk may still change
        for new in objects:
            if chunk and (new.pages + 1 > room or len(chunk) == _MAX_OBJECTS):
                yield chunk
                chunk = []
            if not chunk:
                room = self.environment.budget.burst(self._used)
            chunk.append(new)
            room -= new.pages + 1
        if chunk:
            yield chunk

    def _store(self, chunk: Sequence[NewObject], batch: Batch) -> None:
        """Store a chunk by the first plan that finds enough free pages, or find out that none does."""
        left = list(chunk)
        failure = OSError()
        try:
            for plan in _PLANS:
                for some in ([new] for new in left) if plan.step else self._chunks(left):
                    try:
                        self._run(some, batch, plan)
                    except OSError as error:
                        failure = error
                        self._make_way(error, plan)
                left = [new for new in left if new.place not in batch.outcomes]
                if not left:
                    return
        except OSError as error:
            failure = error
        outcome = self.errors.failed("a set", failure)
        batch.settle(left, {new.place: batch.outcomes.get(new.place, outcome) for new in left})

    def _make_way(self, error: OSError, plan: Plan) -> None:
        """Prepare for the next plan, because this one found no free pages; raise `error` if that is vain."""
        if not is_full(error):
            raise error
        # The first time nothing is evicted for it: others may have filled the disk for a moment only.
        if plan.apart and not isinstance(error, MapFullError):
            self.environment.note_full()
        self.environment.clear_readers()
        # A slow reader keeps LMDB from reusing pages. The pages of further evictions could not be reused
        # either.
        if plan.part_pages == 1 and self.environment.is_held_back():
            raise error
        self._commit_nothing()

    def _run(self, chunk: Sequence[NewObject], batch: Batch, plan: Plan) -> None:
        """Run transactions until one stores the chunk, and record the outcomes in `batch`."""
        if sum(new.pages + 1 for new in chunk) > self.environment.budget.burst(self._used):
            plan = plan._replace(apart=True)
        while True:
            try:
                attempt = self._write(lambda txn: _Attempt(self, txn, chunk, batch, plan).run())
            except MirrorBehindError:
                self.mirror.read()
                continue
            attempt.committed()
            self._used = attempt.used
            self.environment.keep_ahead()
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
        budget = store.environment.budget
        self._limit = budget.limit - plan.step * budget.reserve
        """Maximum number of LMDB pages in use."""
        self._slack = budget.slack
        self._chunk = chunk
        self._batch = batch
        self._plan = plan
        if self._mirror.is_read and not self._mirror.keep_up(txn):
            raise MirrorBehindError
        self._transaction = Transaction(store.environment, txn)
        # An eviction changes LMDB pages too, the fewest if it is of one object.
        self._evictions = 1 if budget.is_short and plan.step else budget.changes
        """Number of objects that this transaction may still evict."""
        self.committed = self._pending.apply(self._transaction)
        """Function to call after the commit."""
        self.outcomes: Mapping[bytes, Outcome] | None = None
        """Outcomes by place; None if the transaction only evicted, so that another one must follow."""
        self.used = 0
        """Number of LMDB pages in use at the end of the transaction."""

    def run(self) -> Self:
        """Evict, and store the objects that may be stored and that fit; the caller commits."""
        missing = [new for new in self._chunk if not self._is_there(new)]
        refused = self._refused(missing)
        allowed = [new for new in missing if new.place not in refused]
        fitting = self._within_limit(allowed)
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

    def _within_limit(self, news: Sequence[NewObject]) -> Sequence[NewObject] | None:
        """Evict until these objects fit into the file; return those that do.

        Returns None if the chunk needs another transaction, which evicts more or, if this one has evicted
        enough and plans are `apart`, stores.
        """
        #   0                            target                 limit
        #   |---- in use after evicting ---|------ pages ---------|
        used_pages = self._transaction.used_pages
        news = [new for new in news if self._needs(new) <= self._limit]  # no other fits into an empty file
        pages = sum(self._needs(new) for new in news)
        target = self._limit - pages
        if used_pages() > target:
            if not self._mirror.is_read:
                raise MirrorBehindError
            # What is freed beyond the need is no more than another chunk like this one takes.
            evicted = self._evict(news, target - min(self._slack, pages))
            if (self._plan.apart and evicted) or (self._evictions <= 0 and used_pages() > target):
                return None
        return _filled(news, self._limit - used_pages(), self._needs)

    def _evict(self, news: Sequence[NewObject], pages: int) -> int:
        """Evict for these objects until `pages` pages are in use; return the number of objects evicted."""
        eviction = Eviction(self._mirror, self._transaction, self._evictions, pages)
        nodes = [self._pages.hold(page) for page in self._batch.held]
        try:
            promising = {self._is_promising(new, news) for new in news}  # of all: it notes their namespaces
            self._mirror.order.evict(eviction, nodes, promising=True in promising)
        finally:
            for node in nodes:
                self._pages.release(node)
        self._transaction.count_evicted(eviction.objects)
        self._evictions -= eviction.objects
        return eviction.objects

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
        # Refuse a circle of parents. Depths that rise from page to page make none.
        if not (meta.depth and depth) and self._transaction.follows(before, new.place):
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


def _filled(news: Iterable[NewObject], room: int, size: Callable[[NewObject], int]) -> Sequence[NewObject]:
    """Return the objects that fit into `room` one after the other, without what depends on the others."""
    fitting: list[NewObject] = []
    lost: set[bytes] = set()
    for new in news:
        if new.item.meta.parent not in lost and size(new) <= room:
            fitting.append(new)
            room -= size(new)
        elif not new.attached:
            lost.add(new.page)
    return fitting
