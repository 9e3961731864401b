"""One write transaction of a `set` call, which evicts for a chunk of the batch and stores the chunk.

A chunk is a part of the batch that should fit into one transaction. If a chunk does not fit, `writing.py`
runs further transactions for the chunk. Other processes write between these transactions, so each transaction
looks up again which objects are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tiercache.core import Outcome
from tiercache.storage.base import SetItem
from tiercache.storage.checksum import Checksums
from tiercache.storage.pages import NONE
from tiercache.storage.restorable import Admissibility
from tiercache.storage.shares import Writer
from tiercache_backends.lmdb.budget import Disk
from tiercache_backends.lmdb.environment import Environment, ErrorCounters
from tiercache_backends.lmdb.maintenance import Applied, Maintenance
from tiercache_backends.lmdb.mirror import ALL_PAGES, Eviction, Mirror
from tiercache_backends.lmdb.payload import PART_PAGES, pages_for
from tiercache_backends.lmdb.records import HALF
from tiercache_backends.lmdb.transaction import Transaction


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


class WriteLimits(NamedTuple):
    """Limits of one transaction's use of the file."""

    limit: int
    """Maximum number of LMDB pages in use."""
    part_pages: int
    """Number of LMDB pages of a full payload piece."""
    evictions: int
    """Maximum number of objects to evict."""
    evicts_apart: bool
    """Whether a transaction either evicts or stores, but never does both.

    The pages that an eviction frees can be used two transactions later. A transaction that stores objects
    before then needs other free pages.
    """


class AttemptResult(NamedTuple):
    """Result of one transaction."""

    applied: Applied
    """Work that was waiting in `Maintenance` and that the transaction wrote."""
    outcomes: Mapping[bytes, Outcome] | None
    """Outcomes by place; None if the transaction only evicted, so that another transaction must follow."""
    used: int
    """Number of LMDB pages in use at the end of the transaction."""


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


@dataclass(frozen=True, slots=True)
class WriteContext:
    """Parts of the store that every transaction of a `set` uses.

    Thread safety: each part has its own rules.
    """

    environment: Environment
    mirror: Mirror
    disk: Disk
    maintenance: Maintenance
    errors: ErrorCounters
    unremovable: set[bytes]
    """Places of objects that cannot be evicted, because they lie on a damaged LMDB page."""


class MirrorBehindError(Exception):
    """The mirror must be read (again) before the chunk can be stored; the transaction is undone."""


class Attempt:
    """One write transaction that evicts for a chunk, and stores the chunk if there is room after that.

    The constructor and `run` raise MirrorBehindError.

    Thread safety: only the thread of the transaction uses it.
    """

    def __init__(
        self, context: WriteContext, txn: Any, chunk: Sequence[NewObject], batch: Batch, limits: WriteLimits
    ) -> None:
        self._context = context
        self._mirror = context.mirror
        self._chunk = chunk
        self._batch = batch
        self._limits = limits
        if self._mirror.is_read and not self._mirror.keep_up(txn):
            raise MirrorBehindError
        if self._mirror.owners.active and not self._mirror.is_read:
            raise MirrorBehindError
        self._transaction = Transaction(context.environment, txn)
        self._evictions = limits.evictions
        """Number of objects that this transaction may still evict."""

    def run(self) -> AttemptResult:
        """Evict, store the objects that may be stored and that fit, and return the result.

        The caller commits the transaction.
        """
        limit = self._limits.limit
        applied = self._context.maintenance.apply(self._transaction)
        missing = [new for new in self._chunk if not self._is_there(new)]
        refused = self._refused(missing)
        # `fitting` lacks the refused objects, and objects that are too large even for an empty file.
        needs = {new.place: self._pages(new) for new in missing if new.place not in refused}
        sized = [new for new in missing if needs.get(new.place, limit + 1) <= limit]
        outcomes: dict[bytes, Outcome] | None = None
        within = self._within_quota(sized)
        fitting = self._worthy(within or (), needs)
        while made_room := within is not None and self._make_room(
            fitting, sum(needs[new.place] for new in fitting)
        ):
            # An eviction stops at a unit of more value than one of the objects. Go on with the others.
            left = self._worthy(fitting, needs)
            if len(left) == len(fitting):
                break
            fitting = left
        if made_room:
            if within is not None and len(fitting) < len(within):
                self._context.errors.count("not_worth", len(within) - len(fitting))
            outcomes = dict.fromkeys((new.place for new in self._chunk), Outcome.HIT)
            outcomes |= dict.fromkeys(needs, Outcome.THROTTLED)
            outcomes |= refused
            outcomes |= dict.fromkeys(self._add(fitting, needs), Outcome.STORED)
            crowded = (new for new in missing if new.place in needs and not new.attached)
            self._mirror.pages.refuse(n.page for n in crowded if outcomes[n.place] is Outcome.THROTTLED)
        self._transaction.save()
        return AttemptResult(applied, outcomes, self._transaction.used_pages())

    def _add(self, fitting: Sequence[NewObject], needs: Mapping[bytes, int]) -> list[bytes]:
        """Store the objects that fit and whose parent is stored; return the places stored."""
        used = self._transaction.used_pages()
        # Pages of this chunk that are not stored. Parents come before the objects that follow them: if an
        # object's parent is still in this set, the parent did not fit.
        left: set[bytes] = {new.page for new in fitting if not new.attached}
        added: list[tuple[bytes, SetItem, Checksums]] = []
        for new in fitting:
            if used + needs[new.place] <= self._limits.limit and new.item.meta.parent not in left:
                used += needs[new.place]
                added.append((new.place, new.item, new.checksums))
                left.discard(new.page)
        self._transaction.add(added, self._limits.part_pages)
        return [place for place, _, _ in added]

    def _writer(self, news: Sequence[NewObject], *, for_quota: bool = False) -> Writer | None:
        """Return whose objects these are; all of a chunk have one owner."""
        owners = self._mirror.owners
        if not owners.active or not news:
            return None
        owner = owners.of_namespace(news[0].item.meta.namespace)
        return Writer(owner, sum(new.taken for new in news), for_quota)

    def _within_quota(self, news: Sequence[NewObject]) -> Sequence[NewObject] | None:
        """Evict objects of the owner until these are within its quota; return those that are.

        Returns None if the chunk needs another transaction, as `_make_room` does.
        """
        writer = self._writer(news, for_quota=True)
        if writer is None:
            return news
        owners, owner = self._mirror.owners, writer.owner
        # What leaves in this transaction is gone when this is stored, so `extra` does not count.
        room = owners.quotas[owner] - owners.used[owner]
        short = sum(n.taken for n in news if n.taken <= owners.quotas[owner]) - room
        if short > 0:
            valued = [n.item.meta.value for n in news if n.item.meta.value is not None]
            value = min(
                (v for v in valued if self._mirror.is_worth(v, writer)), default=min(valued, default=None)
            )
            eviction = self._eviction(ALL_PAGES, short)
            promising = {self._is_promising(new, news) for new in news}
            self._mirror.evict(
                eviction, self._batch.held, promising=True in promising, value=value, writer=writer
            )
            self._transaction.count_evicted(eviction.objects)
            owners.evicted[owner] += eviction.objects
            self._evictions -= eviction.objects
            if (self._limits.evicts_apart and eviction.objects) or self._evictions <= 0:
                return None
            room = owners.quotas[owner] - owners.used[owner]
        within: list[NewObject] = []
        lost: set[bytes] = set()
        for new in news:
            if new.taken <= room and new.item.meta.parent not in lost:
                room -= new.taken
                within.append(new)
            elif not new.attached:
                lost.add(new.page)
        owners.throttled[owner] += len(news) - len(within)
        return within

    def _worthy(self, fitting: Sequence[NewObject], needs: Mapping[bytes, int]) -> Sequence[NewObject]:
        """Return the objects without those that are not worth what must be evicted for them.

        What depends on a page that is left out is left out too. Nothing is while there is room, also for the
        pages that an eviction frees for later sets.
        """
        writer = self._writer(fitting)
        valued = {new.place: value for new in fitting if (value := new.item.meta.value) is not None}
        room = self._limits.limit - self._context.disk.whole.slack - self._transaction.used_pages()
        if not valued or not self._mirror.is_read or sum(needs[new.place] for new in fitting) <= room:
            return fitting
        left: list[NewObject] = []
        lost: set[bytes] = set()
        for new in fitting:
            worth = new.place not in valued or self._mirror.is_worth(valued[new.place], writer)
            if worth and new.item.meta.parent not in lost:
                left.append(new)
            elif not new.attached:
                lost.add(new.page)
        return left

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
            page_is_lost = page_is_lost or (new.page not in coming and self._mirror.has_refused(new.page))
            if admissibility is Admissibility.FINE and new.attached and page_is_lost:
                admissibility = Admissibility.ABSENT_PARENT
            if admissibility is not Admissibility.FINE:
                if not new.attached:
                    lost.add(new.page)
                    self._mirror.pages.refuse([new.page])
                refused[new.place] = (
                    Outcome.ERROR if admissibility is Admissibility.IMPOSSIBLE else Outcome.THROTTLED
                )
                self._context.errors.count(f"refused_{admissibility.value}")
            elif not new.attached:
                coming[new.page] = new.item
        return refused

    def _admissibility(self, new: NewObject, coming: Mapping[bytes, SetItem]) -> Admissibility:
        """Return whether an object may be stored next to what the database holds.

        The rules are those of `RestorablePages.admissibility`, applied to objects of the same layout.

        `coming`: page objects that this transaction has accepted, by page key.
        """
        meta, parent = new.item.meta, None if new.attached else new.item.meta.parent
        node = self._mirror.pages.find(new.page) if self._mirror.is_read else NONE
        known = self._mirror.pages.depth[node] if node >= 0 else 0
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

    def _pages(self, new: NewObject) -> int:
        """Return the number of LMDB pages that the payload takes in pieces of `part_pages` pages."""
        if self._limits.part_pages == PART_PAGES:
            return new.pages
        page_bytes = self._context.environment.page_bytes
        return pages_for(new.item.meta.length, page_bytes, self._limits.part_pages)

    def _is_there(self, new: NewObject) -> bool:
        """Return whether the object is stored now.

        Another thread or process may have stored the object after the call looked for missing objects.
        A stored object is marked as used. A damaged object is removed, and counts as missing.
        """
        record = self._transaction.find(new.place)
        if record is None:
            return False
        if self._context.maintenance.is_damaged(new.place, record.number):
            self._transaction.remove(new.place, record)
            return False
        self._transaction.touch(new.place)
        return True

    def _make_room(self, fitting: Sequence[NewObject], pages: int) -> bool:
        """Evict until the objects in `fitting`, which take `pages` LMDB pages, fit.

        Returns False if the chunk needs another transaction. That transaction evicts more or, if this one has
        evicted enough and `evicts_apart` is set, stores the chunk.
        """
        #   0                            target                 limit
        #   |---- in use after evicting ---|------ pages ---------|
        target = self._limits.limit - pages
        if self._transaction.used_pages() <= target:
            return True
        if not self._mirror.is_read:
            raise MirrorBehindError
        # What is freed beyond the need is no more than another chunk like this one takes.
        slack = min(self._context.disk.whole.slack, pages)
        eviction = self._eviction(target - slack)
        promising = {self._is_promising(new, fitting) for new in fitting}
        values = [value for new in fitting if (value := new.item.meta.value) is not None]
        self._mirror.evict(
            eviction,
            self._batch.held,
            promising=True in promising,
            value=min(values, default=None),
            writer=self._writer(fitting),
        )
        self._transaction.count_evicted(eviction.objects)
        if self._limits.evicts_apart and eviction.objects:
            return False
        # Also return True if nothing more can be evicted. `_add` then stores the objects that do fit.
        return eviction.objects < eviction.max_objects or self._transaction.used_pages() <= target

    def _eviction(self, pages: int, nbytes: float = 0) -> Eviction:
        """Return an eviction until `pages` LMDB pages are in use, of `nbytes` bytes of an owner's share."""
        return Eviction(
            self._mirror, self._transaction, pages, self._evictions, self._context.unremovable, nbytes
        )

    def _is_promising(self, new: NewObject, fitting: Sequence[NewObject]) -> bool:
        """Return whether a restore could use the object as soon as `fitting` is stored."""
        namespace = new.item.meta.namespace
        number = self._transaction.namespace_id(namespace)
        if self._transaction.has_states(namespace):
            self._mirror.pages.require_states(number)
        if new.attached and any(other.page == new.page and not other.attached for other in fitting):
            return True
        return self._mirror.is_promising(new.page, number, attached=new.attached)
