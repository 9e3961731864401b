"""Sets of the `lmdb` store: a batch is cut into chunks, each of which should fit into one transaction.

A transaction evicts for its chunk and stores it. Other processes write between transactions, so each looks up
again which objects are stored. If LMDB finds no free pages, or the disk is full, the chunk is tried again:

    try 0, 1    long pieces          usually; once more in a transaction that only stores
    try 2       pieces of one page   a map that was once full has few long runs of adjacent free pages
    try 3 to 7  lower limits         more is evicted, so that more pages are free, for one object at a time

While the disk is full, the limit is what the file already has on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Final

from tiercache.core import Outcome
from tiercache.storage.base import SetItem, checksum_of
from tiercache.storage.checksum import Checksums, MacKey
from tiercache.storage.layouts import LAYOUT_BYTES
from tiercache.storage.residents import parents_first
from tiercache.storage.restorable import Admissibility
from tiercache_backends.lmdb.environment import Environment, ErrorCounters, MapFullError
from tiercache_backends.lmdb.mirror import Mirror
from tiercache_backends.lmdb.records import PART_PAGES, pages_for
from tiercache_backends.lmdb.transaction import NewObject, Pending, Transaction
from tiercache_backends.local.directory import is_full

_MAX_OBJECTS: Final = 256
"""Maximum number of objects stored in one transaction."""


_TRIES: Final = 8
"""Number of tries to store a chunk; see above."""
_APART: Final = 1
"""First try in which a transaction either evicts or stores, but never does both.

The pages that an eviction frees can be used two transactions later. A transaction that stores objects before
then needs other free pages.
"""
_SHORT: Final = 2
"""First try in which payloads are cut into pieces of one LMDB page; later ones lower the limit as well."""


class BatchWriter:
    """Writer of batches of objects, and of what waits for a transaction.

    Thread safety: any thread may call; the mirror runs one write transaction at a time.
    """

    def __init__(
        self,
        environment: Environment,
        mirror: Mirror,
        pending: Pending,
        errors: ErrorCounters,
        mac_key: MacKey,
    ) -> None:
        self._environment = environment
        self._mirror = mirror
        self._pending = pending
        self._errors = errors
        self._mac_key = mac_key
        self._used = 0
        """Number of LMDB pages in use after the last transaction of this process."""

    def store(self, items: Mapping[bytes, SetItem], digests: Iterable[bytes]) -> dict[bytes, Outcome]:
        """Store `items`, the missing objects of a batch, and return their outcomes by digest.

        `digests`: those of all objects of the batch, also of those that are stored already.
        """
        self._environment.try_growing()
        # The last objects of a batch could not be restored without the first objects, or without the pages
        # before them. So the call never evicts these.
        kept = {
            *(digest[LAYOUT_BYTES:] for digest in digests),
            *(item.meta.parent for item in items.values() if item.meta.parent),
        }
        outcomes: dict[bytes, Outcome] = {}
        missing = list(items)
        order = parents_first([(digest[LAYOUT_BYTES:], items[digest].meta.parent) for digest in missing])
        for chunk in self._chunks(self._prepare(missing[i], items[missing[i]]) for i in order):
            outcomes |= self._store(chunk, kept)
        try:
            while self._mirror.order.unfinished and self._mirror.write(self._sweep, whole=True):
                pass
        except OSError as error:
            self._errors.failed("an eviction", error)
        return outcomes

    def remove(self, digests: Sequence[bytes]) -> set[bytes]:
        """Remove objects, in several transactions; return the digests of the removed objects."""
        gone: set[bytes] = set()
        changes = self._environment.budget.changes
        try:
            for start in range(0, len(digests), changes):
                gone.update(self._remove(digests[start : start + changes]))
        except OSError as error:
            self._errors.failed("a deletion", error)
        return gone

    def flush(self) -> None:
        """Make all waiting changes; count and log a failure instead of raising it."""
        try:
            while self._pending.any_waiting():
                self._mirror.write(self._apply)  # as much as one transaction may change
        except OSError as error:
            self._errors.failed("writing recency", error)

    def _apply(self, transaction: Transaction) -> None:
        self._pending.apply(transaction, self._environment.budget.changes)

    def _remove(self, digests: Sequence[bytes]) -> list[bytes]:
        """Remove objects in one transaction, or each half by itself where the disk is too full for that."""

        def work(transaction: Transaction) -> list[bytes]:
            # Damaged objects go first. They count as absent, so their deletion is answered False.
            self._apply(transaction)
            gone: list[bytes] = []
            for digest in digests:
                record = transaction.find(digest)
                if record is not None and not self._pending.is_damaged(digest, record.number):
                    transaction.remove(digest, record)
                    gone.append(digest)
            return gone

        try:
            return self._mirror.write(work)
        except OSError as error:
            if not is_full(error) or len(digests) == 1:
                raise
        middle = len(digests) // 2
        return self._remove(digests[:middle]) + self._remove(digests[middle:])

    def _sweep(self, transaction: Transaction) -> int:
        """Evict the rest of a unit (pages of one conversation) that earlier transactions evicted in part."""
        transaction.may_evict(self._environment.budget.changes)
        self._mirror.order.sweep(transaction)
        return transaction.evicted

    def _prepare(self, digest: bytes, item: SetItem) -> NewObject:
        length = item.meta.length
        # Compute checksum and MAC before this thread takes the writer lock: they read the whole payload.
        checksums = Checksums(checksum_of(item), self._mac_key.mac(item.key, item.buffers, length))
        pages = pages_for(length, self._environment.page_bytes)
        return NewObject(digest, digest[LAYOUT_BYTES:], item, checksums, pages)

    def _chunks(self, objects: Iterable[NewObject]) -> Iterator[list[NewObject]]:
        """Yield the objects in chunks, each for one transaction; a fuller file gets shorter ones."""
        chunk: list[NewObject] = []
        room = 0  # LMDB pages that the chunk may still change
        for new in objects:
            if chunk and (new.pages + 1 > room or len(chunk) == _MAX_OBJECTS):
                yield chunk
                chunk = []
            if not chunk:
                room = self._environment.budget.burst(self._used)
            chunk.append(new)
            room -= new.pages + 1
        if chunk:
            yield chunk

    def _store(self, chunk: Sequence[NewObject], kept: Set[bytes]) -> dict[bytes, Outcome]:
        """Store a chunk by the first try that finds enough free pages, or find out that none does."""
        outcomes: dict[bytes, Outcome] = {}
        left = list(chunk)
        failure = OSError()
        try:
            for attempt in range(_TRIES):
                if attempt == _SHORT:
                    left = [new.in_short_pieces(self._environment.page_bytes) for new in left]
                for some in ([new] for new in left) if attempt > _SHORT else self._chunks(left):
                    try:
                        outcomes |= self._run(some, kept, attempt)
                    except OSError as error:
                        failure = error
                        self._make_way(error, attempt)
                left = [new for new in left if new.digest not in outcomes]
                if not left:
                    return outcomes
        except OSError as error:
            failure = error
        outcome = self._errors.failed("a set", failure)
        left = [new for new in left if new.digest not in outcomes]
        with self._mirror.lock:
            self._mirror.residents.pages.refuse(new.page for new in left if not new.attached)
        return outcomes | dict.fromkeys((new.digest for new in left), outcome)

    def _make_way(self, error: OSError, attempt: int) -> None:
        """Prepare for the next try, because this one found no free pages; raise `error` if that is vain."""
        if not is_full(error):
            raise error
        # The first time nothing is evicted for it: others may have filled the disk for a moment only.
        if attempt >= _APART and not isinstance(error, MapFullError):
            self._environment.note_full()
        self._environment.clear_readers()
        # A slow reader keeps LMDB from reusing pages. The pages of further evictions could not be reused
        # either.
        if attempt >= _SHORT and self._environment.is_held_back():
            raise error
        self._commit_nothing()

    def _commit_nothing(self) -> None:
        """Commit a tick, so that pages given up by the transaction before it can be used."""
        self._mirror.write(Transaction.take_tick)

    def _run(self, chunk: Sequence[NewObject], kept: Set[bytes], attempt: int) -> Mapping[bytes, Outcome]:
        """Run transactions until one stores the chunk; return the outcomes by digest."""
        if sum(new.pages + 1 for new in chunk) > self._environment.budget.burst(self._used):
            attempt = max(attempt, _APART)
        while True:
            outcomes = self._mirror.write(
                lambda transaction: self._attempt(transaction, chunk, kept, attempt), whole=True
            )
            self._environment.keep_ahead()
            if outcomes is not None:
                return outcomes
            if attempt >= _APART:
                # Transaction N + 2 is the first that can use the pages that transaction N gave up.
                self._commit_nothing()

    def _attempt(
        self, transaction: Transaction, chunk: Sequence[NewObject], kept: Set[bytes], attempt: int
    ) -> Mapping[bytes, Outcome] | None:
        """Evict, and store the objects of a chunk that may be stored and that fit; return the outcomes.

        Returns None if the transaction only evicts, so that another one must follow.
        """
        budget, pages = self._environment.budget, transaction.residents.pages
        # An eviction changes LMDB pages too, the fewest if it is of one object.
        left = 1 if budget.is_short and attempt > _SHORT else budget.changes
        self._pending.apply(transaction, left)
        outcomes: dict[bytes, Outcome] = {}
        refused: list[str] = []
        allowed = chunk
        if not transaction.hold_new(chunk):
            allowed = []
            for new in self._missing(transaction, chunk):
                if (verdict := transaction.admit(new)) is Admissibility.FINE:
                    allowed.append(new)
                    continue
                refused.append(f"refused_{verdict.value}")
                outcomes[new.digest] = (
                    Outcome.ERROR if verdict is Admissibility.IMPOSSIBLE else Outcome.THROTTLED
                )
                if not new.attached:
                    pages.refuse([new.page])
        limit = budget.limit - max(0, attempt - _SHORT) * budget.reserve  # LMDB pages in use, at most
        fitting: Sequence[NewObject] = [new for new in allowed if new.pages <= limit]  # no other ever fits
        wanted = sum(new.pages for new in fitting)
        if (used := transaction.used_pages()) > limit - wanted:
            # What is freed beyond the need is no more than another chunk like this one takes.
            target = limit - wanted
            for page in kept:
                transaction.hold(page)
            promising = any(map(transaction.is_promising, fitting))
            transaction.may_evict(left, target - min(budget.slack, wanted))
            self._mirror.order.evict(transaction, transaction.held(), promising=promising)
            self._used = used = transaction.used_pages()
            if (attempt >= _APART and transaction.evicted) or (transaction.full() and used > target):
                return None
        fitting = _filled(fitting, limit - used)
        transaction.add(fitting, PART_PAGES if attempt < _SHORT else 1)
        stored = {new.digest for new in fitting}
        for new in chunk:
            outcomes.setdefault(new.digest, Outcome.STORED if new.digest in stored else Outcome.HIT)
        crowded = [new for new in allowed if new.digest not in stored]
        outcomes |= dict.fromkeys((new.digest for new in crowded), Outcome.THROTTLED)
        pages.refuse(new.page for new in crowded if not new.attached)
        transaction.call_at_commit(lambda: self._errors.count(refused))
        self._used = transaction.used_pages()
        return outcomes

    def _missing(self, transaction: Transaction, chunk: Sequence[NewObject]) -> list[NewObject]:
        """Return the objects that are not stored, and record the use of the others.

        Another thread or process may have stored an object after the call looked for missing objects. A
        damaged object is removed, and counts as missing.
        """
        residents = transaction.residents
        missing: list[NewObject] = []
        for new, row in zip(chunk, residents.find_many([new.digest for new in chunk]), strict=True):
            if row >= 0 and not self._pending.is_damaged(new.digest, residents.number[row]):
                residents.renew(row)
                transaction.touch(new.digest)
                continue
            if row >= 0:
                transaction.drop_damaged(new.digest, residents.number[row])
            missing.append(new)
        return missing


def _filled(news: Sequence[NewObject], room: int) -> Sequence[NewObject]:
    """Return the objects that fit into `room` one after the other, without what depends on the others."""
    if sum(new.pages for new in news) <= room:
        return news
    fitting: list[NewObject] = []
    lost: set[bytes] = set()
    for new in news:
        if new.item.meta.parent not in lost and new.pages <= room:
            fitting.append(new)
            room -= new.pages
        elif not new.attached:
            lost.add(new.page)
    return fitting
