"""Memory of removed objects, with which `tiercache explain` says when and why an object went.

It is bounded, begins when the daemon starts, and forgets the oldest removals first.
"""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Final

from tiercache.core import DIGEST_BYTES, ObjectKey, Outcome
from tiercache.errors import ClosedError, StorageError
from tiercache.events.base import ChangeNote
from tiercache.metrics.families import Families
from tiercache.storage.base import GetItem, StorageBackend
from tiercache.storage.history import Cause, History, PastRemoval
from tiercache.storage.layouts import LAYOUT_BYTES
from tiercache.storage.store_events import begin_watch, end_watch, observed_tiers
from tiercache.storage.tiers import ObservedTier
from tiercache.storage.wrappers import Metered, unwrap

_log = logging.getLogger(__name__)

MAX_REMOVALS: Final = 1 << 16
"""Number of removals that are remembered, of 120 to 300 bytes each."""
MAX_FOUND: Final = 16_384
"""Maximum number of removals of one answer."""
_LATE_S: Final = 5.0
"""Seconds within which a store tells of an object that a call has removed."""


class RemovalMemory:
    """Bounded memory of removals.

    How long `find` takes depends on how much is remembered, and not on whether a page is among it.

    Thread safety: any thread. `note` may be called while a lock of a store is held.
    """

    def __init__(self, capacity: int = MAX_REMOVALS, clock: Callable[[], float] = time.time) -> None:
        self._clock: Final = clock
        self._lock: Final = Lock()
        self._capacity: Final = capacity
        self._batches: deque[tuple[Sequence[bytes], str, Cause, float]] = deque()
        """Digests of objects that went together, from which tier, why and when."""
        self._count = 0
        self.forgotten: float | None = None
        """Time of the newest removal that is not remembered any more; None if none was forgotten."""

    def note(self, tier: str, digests: Sequence[bytes], cause: Cause = Cause.EVICTED) -> None:
        """Remember that objects went from a tier; an empty `tier` stands for all tiers."""
        sound = [digest for digest in digests if len(digest) == DIGEST_BYTES]
        if not sound:
            return
        with self._lock:
            now = self._clock()
            if len(sound) > self._capacity:
                self.forgotten, sound = now, sound[-self._capacity :]
            self._batches.append((sound, tier, cause, now))
            self._count += len(sound)
            while self._count > self._capacity:
                lost, _, _, at = self._batches.popleft()
                self._count -= len(lost)
                self.forgotten = max(at, self.forgotten or 0.0)

    def find(self, pages: Sequence[bytes]) -> list[PastRemoval]:
        """Return the latest removal of each object of these pages from each tier, the newest first.

        There are at most MAX_FOUND.
        """
        asked = {page: number for number, page in reversed([*enumerate(pages)])}
        with self._lock:
            batches = list(self._batches)
        found: list[PastRemoval] = []
        for digests, tier, cause, at in reversed(batches):
            found += [
                PastRemoval(asked[page], digest[:LAYOUT_BYTES], tier, cause, at)
                for digest in reversed(digests)
                if (page := digest[LAYOUT_BYTES:]) in asked
            ]
        return _latest(found)[:MAX_FOUND]


def _latest(found: Sequence[PastRemoval]) -> list[PastRemoval]:
    """Return the latest removal of each object from each tier, the newest first, as `found` is.

    A store tells that an object went, and the call that removed it says why, a moment sooner or later:

        store   evicted from ram, evicted from ssd                      result   deleted from ram
        call                                         deleted                     deleted from ssd

    Of a call that no tier has told of there is a removal from all tiers.
    """
    calls: dict[tuple[int, bytes], list[PastRemoval]] = {}
    for removal in found:
        if removal.cause is not Cause.EVICTED:
            calls.setdefault(removal[:2], []).append(removal)
    latest: dict[tuple[int, bytes, str], PastRemoval] = {}
    told_at: dict[tuple[int, bytes], float] = {}
    for removal in found:
        if removal.cause is Cause.EVICTED and removal[:3] not in latest:
            near = (call.cause for call in calls.get(removal[:2], ()) if abs(call.at - removal.at) <= _LATE_S)
            latest[removal[:3]] = removal._replace(cause=next(near, Cause.EVICTED))
            told_at.setdefault(removal[:2], removal.at)
    alone = [last for name, (last, *_) in calls.items() if last.at > told_at.get(name, 0.0) + _LATE_S]
    return sorted([*latest.values(), *alone], key=lambda removal: -removal.at)


class DaemonStore(Metered):
    """The store of a daemon, whose calls are counted and whose removals are remembered.

    What a store tells of by `watch` counts as evicted, unless a call has deleted it, or has found it corrupt.

    Thread safety: as `Wrapper`.
    """

    def __init__(self, inner: StorageBackend, kind: str = "store", metrics: Families | None = None) -> None:
        super().__init__(inner, kind, metrics)
        self.memory: Final = RemovalMemory()
        self._look_lock: Final = Lock()
        self._followed: dict[str, tuple[ObservedTier, ChangeNote, float]] = {}
        """Tiers that tell of changes, with the function that they tell, and since when."""
        self._left_at = 0.0
        """Time at which a tier last left, with what only it had."""

    def look(self) -> None:
        """Follow the tiers that there are now; call this from time to time."""
        with self._look_lock:
            present = {tier.name: tier for tier in observed_tiers(unwrap(self.inner, whole=True), "")}
            for name, (gone, told, _) in list(self._followed.items()):
                if name not in present or present[name].store is not gone.store:
                    with suppress(StorageError, ClosedError):
                        end_watch(gone.store, told)
                    del self._followed[name]
                    self._left_at = time.time()
            for name, tier in present.items():
                # Objects of a shared store that does not evict go by calls only; `watch` may cost requests.
                able = tier.store.capabilities
                if name not in self._followed and (able.bounded or not able.shared):
                    note: ChangeNote = partial(self._note, name)
                    try:
                        if begin_watch(tier.store, note):
                            self._followed[name] = tier, note, time.time()
                    except (StorageError, ClosedError) as error:
                        _log.debug("removals from the store %r are not known: %s", name, error)

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        return self._checked(items, super().get(items))

    def peek(self, items: Sequence[GetItem]) -> list[Outcome]:
        return self._checked(items, super().peek(items))

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        deleted = super().delete(keys)
        gone = [key.digest for key, is_gone in zip(keys, deleted, strict=True) if is_gone]
        self.memory.note("", gone, Cause.DELETED)
        return deleted

    def history(self, keys: Sequence[ObjectKey], pages: Sequence[bytes]) -> History:
        self.look()
        found = super().history(keys, pages)
        since = {name: max(at, self._left_at) for name, (_, _, at) in self._followed.items()}
        return History(
            [replace(tier, since=since.get(tier.name, tier.since)) for tier in found.tiers],
            [*self.memory.find(pages), *found.removals],
            max(filter(None, (self.memory.forgotten, found.forgotten)), default=None),
        )

    def close(self) -> None:
        with self._look_lock:
            for tier, note, _ in self._followed.values():
                with suppress(StorageError, ClosedError):
                    end_watch(tier.store, note)
            self._followed = {}
        super().close()

    def _note(self, tier: str, digests: Sequence[bytes], stored: bool) -> None:
        if not stored:
            self.memory.note(tier, digests)

    def _checked(self, items: Sequence[GetItem], outcomes: list[Outcome]) -> list[Outcome]:
        if Outcome.CORRUPT in outcomes:
            answers = zip(items, outcomes, strict=True)
            corrupt = [item.key.digest for item, outcome in answers if outcome is Outcome.CORRUPT]
            self.memory.note("", corrupt, Cause.CORRUPT)
        return outcomes
