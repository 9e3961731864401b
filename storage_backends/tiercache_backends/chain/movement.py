"""Copies between the tiers of a chain, in the background: write-through, write-back, promotion, catching up.

Each tier has a `Mover`, a thread that copies objects to it. What waits is the keys; a copy reads the object
from the tier that has it. Only promoted objects bring their bytes with them, because reading them again from
a slow tier would cost as much as the first time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from tiercache.core import ObjectKey, Outcome
from tiercache.errors import StorageError, UnavailableError, UnlistedError
from tiercache.storage.base import GetItem, ScanEntry, SetItem
from tiercache.storage.residents import parents_first
from tiercache.storage.vectors import batches, copy_in
from tiercache_backends.chain.settings import WritePolicy
from tiercache_backends.chain.write_back import ColdestWatch

if TYPE_CHECKING:
    from tiercache_backends.chain.tier import Tier

_log = logging.getLogger(__name__)

_MAX_WAITING: Final = 1 << 13
"""Maximum number of objects that wait for one tier (some 3 MB); catching up finds what comes beyond."""
_MAX_LISTED: Final = 1 << 16
"""Number of objects up to which absent parents are added to what a scan has listed."""
_MAX_STAGED: Final = 64 << 20
"""Maximum bytes of promoted objects that wait for one tier; what comes beyond is promoted another time."""
_BATCH_OBJECTS: Final = 64
_BATCH_BYTES: Final = 16 << 20
_TICK_S: Final = 0.2
"""Seconds from one look at an idle tier to the next."""
_PATIENCE_S: Final = 1.0
"""Maximum seconds that a batch of promotions waits for tiers below; the rest is promoted another time."""
_FULL: Final = 0.9
"""Part of its capacity above which a tier counts as full: catching up would only make it evict."""


Digests = set[bytes]
"""Digests of object keys."""


class Job(NamedTuple):
    """An object to be copied from the tier `source`; `payload` is its bytes, if they came with it."""

    key: ObjectKey
    source: Tier
    payload: memoryview | None = None


class Deletions:
    """Watch over deletions, which keeps copies from bringing a deleted object back.

        1. get: finds object 5 in tier 1, and is about to promote it
        2. delete: notes object 5, withdraws it from all queues, waits for copies of it, and deletes it
        3. get: offers object 5 for promotion; the watch of the get has object 5, so it is not copied

    `changed` is the lock of all queues of a chain, and is notified when one of them changes.

    Thread safety: any thread.
    """

    def __init__(self) -> None:
        self.changed: Final = threading.Condition()
        self._watches: list[Digests] = []
        self._under_way: list[Digests] = []

    @contextmanager
    def watch(self) -> Iterator[Digests]:
        """Yield a set of the keys (their digests) that are being deleted, or are during the `with` block."""
        with self.changed:
            watch: Digests = set().union(*self._under_way)
            self._watches.append(watch)
        try:
            yield watch
        finally:
            with self.changed:
                self._watches = [other for other in self._watches if other is not watch]

    @contextmanager
    def note(self, digests: Digests) -> Iterator[None]:
        """Add deleted keys to all watches, also to those that are opened during the `with` block.

        1. delete: notes object 5, and deletes it from tier 1
        2. get: begins, finds object 5 in tier 2, and offers it for promotion; its watch has object 5
        3. delete: deletes object 5 from tier 2
        """
        with self.changed:
            self._under_way.append(digests)
            for watch in self._watches:
                watch.update(digests)
        try:
            yield
        finally:
            with self.changed:
                self._under_way = [other for other in self._under_way if other is not digests]


class Mover:
    """Thread that copies objects to the tier `target`, and examines it when that is due.

    `above` returns the tiers above the target, the first first; `below` the movers of those below it.

    Thread safety: any thread.
    """

    def __init__(
        self,
        target: Tier,
        above: Callable[[], Sequence[Tier]],
        below: Callable[[], Sequence[Mover]],
        deletions: Deletions,
    ) -> None:
        self.target: Final = target
        self._above: Final = above
        self._below: Final = below
        self._deletions: Final = deletions
        self._changed: Final = deletions.changed  # guards the fields from here on
        self._queue: OrderedDict[bytes, Job] = OrderedDict()
        self._copying: Digests = set()
        self._staged = 0
        self._closed = False
        self._is_behind = True  # what an earlier process or an outage left out has to be found
        self._left_out = 0
        """Number of objects that were not copied since the tier was compared with those above."""
        self._was_level = False
        """Whether catching up has come to its end once."""
        self._lacks_some = False
        """Whether objects that were not copied cannot be found, because a tier above lists nothing."""
        self._comparison: Iterator[None] | None = None
        """Comparison with the tiers above that is under way."""
        self._skipped: list[Tier] = []
        """Tiers above that were out when the present or last comparison with them began."""
        self._named: set[bytes] = set()
        """Namespaces whose records the target was given, if any tier has them."""
        self._write_back: Final = ColdestWatch(target)
        self._is_awaited = False
        """Whether a promotion to the tier above waits for this tier."""
        self._thread = threading.Thread(target=self._work, name=f"tiercache-mover-{target.name}", daemon=True)

    def follow(self, tiers: Collection[Tier]) -> None:
        """Begin, or follow a change of the chain's tiers.

        Objects that wait to be copied from a tier that is not in `tiers` are dropped. Catching up finds them
        in the other tiers.
        """
        if self._thread.ident is None:
            self._thread.start()
            return
        with self._changed:
            for digest in [digest for digest, job in self._queue.items() if job.source not in tiers]:
                self._forget(self._queue.pop(digest), lost=True)
            self._is_behind = True
            self._changed.notify_all()

    def settle(self, digests: Digests, until: Callable[[], bool]) -> None:
        """Wait until none of these objects waits or is being copied, or `until` returns True."""
        with self._changed:
            while not until() and (self.is_copying(digests) or digests & self._queue.keys()):
                self._changed.wait(_TICK_S)

    @property
    def waiting(self) -> int:
        """Number of objects that wait or are being copied."""
        with self._changed:
            return len(self._queue) + len(self._copying)

    @property
    def missing(self) -> int:
        """Number of objects, as far as they are known, that should be in the tier and are not yet."""
        with self._changed:
            return len(self._queue) + len(self._copying) + self._left_out

    def stage(self, item: GetItem) -> memoryview | None:
        """Return a copy of an object's payload, to be promoted; None if too many bytes wait already."""
        with self._changed:
            if self._staged + item.length > _MAX_STAGED:
                return None
            self._staged += item.length
        copy = memoryview(np.empty(item.length, np.uint8).data)
        copy_in(copy, item.buffers)
        return copy

    def offer(self, jobs: Iterable[Job], deleted: Digests) -> None:
        """Queue objects to be copied, except those in `deleted`, the watch of the caller's operation.

        Objects for which there is no room in the queue, or that the target does not take now, are found later
        by catching up.
        """
        room = _MAX_WAITING if self.target.is_writable else 0
        with self._changed:
            for job in jobs:
                digest = job.key.digest
                if digest in deleted or digest in self._queue or len(self._queue) >= room:
                    self._forget(job, lost=digest not in deleted and digest not in self._queue)
                else:
                    self._queue[digest] = job
            self._changed.notify_all()

    def offer_behind_parents(self, source: Tier, entries: Sequence[ScanEntry], deleted: Digests) -> None:
        """Queue objects that a scan of `source` has listed, each behind the pages before it.

        A store takes no page without its parent, and a scan may list pages in any order. So parents that
        the target lacks too are queued as well. Raises StorageError.
        """
        found = list(entries)
        known = {entry.key.digest for entry in entries}
        while entries and len(found) < _MAX_LISTED and not self._closed:
            parents = {
                above.digest: above
                for key, meta, *_ in entries
                if meta.parent not in (None, key.page_key)
                and (above := ObjectKey(key.pool, key.layout + meta.parent)).digest not in known
            }
            known |= parents.keys()
            keys = list(parents.values())
            held = self.target.exists(keys)
            absent = source.describe([key for key, there in zip(keys, held, strict=True) if not there])
            entries = [entry for entry in absent if entry is not None]
            found += entries
        order = parents_first([(entry.key.page_key, entry.meta.parent) for entry in found])
        self.offer([Job(found[n].key, source) for n in order], deleted)

    def withdraw(self, digests: Digests) -> None:
        """Drop these objects from the queue; the caller holds `changed`."""
        for digest in digests & self._queue.keys():
            self._forget(self._queue.pop(digest), lost=False)

    def is_copying(self, digests: Digests) -> bool:
        """Return whether one of these objects is being copied now; the caller holds `changed`."""
        return not self._copying.isdisjoint(digests)

    def drain(self, until: float, *, caught_up: bool = False) -> bool:
        """Wait until nothing waits for a tier that takes objects, or `time.monotonic()` is `until`.

        Returns whether nothing waits. With `caught_up`, wait also until the target has what the tiers above
        hold, as far as it is written through; False at once if what it lacks cannot be found.
        """
        with self._changed:
            while self._queue or self._copying or (caught_up and self._is_compared()):
                left = until - time.monotonic()
                if left <= 0 or not self.target.is_writable:
                    return False
                self._changed.wait(min(left, _TICK_S))
            # What was left out may be in a tier above that is out, and is found when that is back.
            return not (caught_up and (self._lacks_some or self._left_out))

    def allowance(self, source: Tier) -> int:
        """Return the bytes that `source` may take at once without evicting what was not copied from it."""
        return self._write_back.step if self._write_back.watches(source, self._above()) else _BATCH_BYTES

    def come_ahead(self, source: Tier, until: float) -> bool:
        """Wait until what `source` evicts next was copied from it, or `time.monotonic()` is `until`.

        Without this, promoted objects would evict those there that no other tier has. Returns whether it was
        copied, or need not or cannot be.
        """

        def lags() -> bool:
            is_due = self._write_back.is_due(self._above())
            return self.target.is_writable and (bool(self._queue or self._copying) or is_due)

        with self._changed:
            if self._write_back.watches(source, self._above()) and lags():
                self._is_awaited = True  # once: the target is not looked at in a loop
                self._changed.notify_all()
                left = max(0.0, until - time.monotonic())
                return self._changed.wait_for(lambda: self._closed or not lags(), left) and not self._closed
            return True

    def stop(self) -> None:
        """Let the thread end after its present copy; what waits is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop, and wait until the thread has ended."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join()

    def _forget(self, job: Job, *, lost: bool) -> None:
        if job.payload is not None:
            self._staged -= job.payload.nbytes
        if lost:
            self._give_up(1)

    def _is_busy(self) -> bool:
        """Return whether there is more to do than to look at the tier; the caller holds `_changed`."""
        is_comparing = self._comparison is not None and self.target.is_writable
        return self._closed or self._is_awaited or bool(self._queue) or is_comparing

    def _is_compared(self) -> bool:
        """Return whether the target is to be compared with tiers above; the caller holds `_changed`."""
        is_back = any(tier.is_readable for tier in self._skipped)
        return self._is_behind or self._comparison is not None or is_back

    def _work(self) -> None:
        while True:
            with self._changed:
                # All movers share `_changed`: without a condition, each would wake the others at every look.
                self._changed.wait_for(self._is_busy, _TICK_S)
                if self._closed:
                    return
                self._is_awaited = False
            batch: list[Job] = []
            try:
                if self.target.tick():
                    self._is_behind = True
                    self._write_back.reset()
                    for other in self._others():
                        other.learn_namespaces([self.target])
                self._copy_coldest()
                with self._changed:
                    batch = self._next_batch()
                if any(tier.is_readable for tier in self._skipped):
                    self._is_behind = True
                if batch:
                    self._copy(batch)
                elif self._is_behind or self._comparison is not None:
                    self._catch_up()
                    with self._changed:
                        if not (self._is_behind or self._comparison is not None or self._skipped):
                            self._left_out = 0
            except Exception:  # noqa: BLE001
                # A store may raise any exception; the thread has to go on with the next objects.
                _log.exception("a copy to tier %s failed", self.target.name)
                self._give_up(len(batch))
            finally:
                with self._changed:
                    self._copying.clear()
                    self._staged -= sum(job.payload.nbytes for job in batch if job.payload is not None)
                    self._changed.notify_all()

    def _copy_coldest(self) -> None:
        """Offer what the tier above will evict soon, if it is time to look there."""
        above = self._above()
        if not self._write_back.is_due(above):
            return
        with self._deletions.watch() as deleted:
            try:
                found = self._write_back.look(above)
            except StorageError:
                return  # it is asked again at the next look at this tier
            if found is not None:
                source, entries = found
                self.offer([Job(entry.key, source) for entry in entries], deleted)

    def _next_batch(self) -> list[Job]:
        batch: list[Job] = []
        while self._queue and len(batch) < _BATCH_OBJECTS:
            batch.append(self._queue.popitem(last=False)[1])
        self._copying.update(job.key.digest for job in batch)
        return batch

    def _copy(self, batch: Sequence[Job]) -> None:
        """Copy those objects of a batch that the target lacks, in order: pages come before their states."""
        until = time.monotonic() + _PATIENCE_S
        with self._deletions.watch() as deleted:
            try:
                if not self.target.is_writable:
                    raise UnavailableError(f"tier {self.target.name!r} takes no objects")
                held = self.target.exists([job.key for job in batch])
            except StorageError:
                self._give_up(len(batch))
                return
            jobs = [job for job, there in zip(batch, held, strict=True) if not there]
            for source, group in groupby(jobs, key=lambda job: job.source):
                wanted = list(group)
                try:
                    entries = source.describe([job.key for job in wanted])
                except StorageError:
                    self._give_up(len(wanted))
                    continue
                sized = [
                    (job, entry) for job, entry in zip(wanted, entries, strict=True) if entry is not None
                ]
                self.target.figures.count_dropped(len(wanted) - len(sized))
                followers = self._below() if any(job.payload is not None for job in wanted) else ()
                most = min([_BATCH_BYTES, *(mover.allowance(self.target) for mover in followers)])
                for part in batches(sized, lambda pair: pair[1].meta.length, _BATCH_OBJECTS, most):
                    if self._closed or not all(mover.come_ahead(self.target, until) for mover in followers):
                        self.target.figures.count_dropped(len(part))
                    else:
                        self._copy_part(source, part, deleted)

    def _copy_part(self, source: Tier, part: Sequence[tuple[Job, ScanEntry]], deleted: Digests) -> None:
        lengths = [entry.meta.length for _, entry in part]
        views = [
            memoryview(np.empty(length, np.uint8).data) if job.payload is None else job.payload
            for (job, _), length in zip(part, lengths, strict=True)
        ]
        reads = [n for n, (job, _) in enumerate(part) if job.payload is None]
        found = [Outcome.HIT] * len(part)
        if reads:
            items = [GetItem(part[n][0].key, [views[n]], lengths[n]) for n in reads]
            answers = source.get(items, is_use=False, owned=True)
            for n, outcome in zip(reads, answers, strict=True):
                found[n] = outcome
        copies = [
            SetItem(job.key, [view], entry.meta)
            for (job, entry), view, outcome in zip(part, views, found, strict=True)
            if outcome is Outcome.HIT and view.nbytes == entry.meta.length and job.key.digest not in deleted
        ]
        # The source may answer another time. What it does not have any more is lost to this tier.
        lost = sum(outcome in (Outcome.MISS, Outcome.CORRUPT) for outcome in found)
        self.target.figures.count_dropped(lost)
        if later := sum(outcome is not Outcome.HIT for outcome in found) - lost:
            self._give_up(later)
        if not copies:
            return
        if not self._named.issuperset(item.meta.namespace for item in copies):
            self.target.learn_namespaces(self._others())
            self._named.update(item.meta.namespace for item in copies)
        outcomes = self.target.set(copies, deleted, owned=True)
        if later := sum(outcome in (Outcome.UNAVAILABLE, Outcome.ERROR) for outcome in outcomes):
            self._give_up(later)
        self.target.figures.count_dropped(
            sum(outcome not in (Outcome.STORED, Outcome.HIT) for outcome in outcomes) - later
        )

    def _give_up(self, objects: int) -> None:
        """Leave objects to catching up."""
        with self._changed:
            self._is_behind = True
            self._left_out += objects
        self.target.figures.count_dropped(objects)

    def _others(self) -> list[Tier]:
        return [*self._above(), *(mover.target for mover in self._below())]

    # --- catching up
    # --------------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Offer objects that should be here and are not, from one more batch of a scan of the tiers above."""
        if self._is_behind and self.target.is_writable:
            self.target.learn_namespaces(self._others())
        if not self.target.settings.writes_through:
            self._is_behind = False
            return
        if not self.target.is_writable:
            return
        if self._comparison is None:
            self._comparison = self._compare()
        try:
            next(self._comparison)
        except StopIteration:
            self._comparison = None
        except StorageError:
            self._is_behind, self._comparison = True, None

    def _compare(self) -> Iterator[None]:
        """Compare the target with those above, a page of a scan at a time; ends early if it is full."""
        above = self._above()
        readable = [tier for tier in above if tier.is_readable]
        with self._changed:
            self._is_behind = False
            self._skipped = [tier for tier in above if tier not in readable]
        for source in readable:
            cursor: bytes | None = b""
            while cursor is not None:
                usage = self.target.call("usage", lambda store: store.usage())
                if usage.capacity_bytes and usage.used_bytes >= _FULL * usage.capacity_bytes:
                    return
                cursor = self._scan(source, cursor) or None
                yield
        self._was_level |= bool(readable)

    def _scan(self, source: Tier, cursor: bytes) -> bytes:
        """Offer what the target lacks of one page of a scan; return the cursor of the next page."""
        settings = self.target.settings
        with self._deletions.watch() as deleted:
            try:
                page = source.scan(None, cursor)
            except UnlistedError:  # what earlier processes left in it does not count
                self._lacks_some |= self._was_level or self.target.figures.dropped > 0
                return b""
            entries = [e for e in page.entries if settings.write_policy(e.key.pool) is WritePolicy.THROUGH]
            self.offer_behind_parents(source, self.target.lacking(entries), deleted)
        return page.cursor
