"""Memory of removed objects, with which `tiercache explain` says when and why an object went.

It is bounded, and begins when the daemon starts. The latest removals are kept in columns of 28 bytes each,
under the first half of the page key; older ones are overwritten:

    ring   | removal n-k | ... | removal n | oldest ... |      `forgotten`: time of the last one overwritten
"""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tiercache.core import DIGEST_BYTES, ObjectKey, Outcome
from tiercache.errors import ClosedError, StorageError
from tiercache.events.base import ChangeNote
from tiercache.storage.base import GetItem, StorageBackend
from tiercache.storage.history import Cause, History, PastRemoval
from tiercache.storage.layouts import LAYOUT_BYTES
from tiercache.storage.store_events import observed_tiers
from tiercache.storage.tiers import ObservedTier
from tiercache.storage.watching import begin_watch, end_watch
from tiercache.storage.wrappers import Metered, StoreMetrics, unwrap

_log = logging.getLogger(__name__)

MAX_REMOVALS: Final = 1 << 18
"""Number of removals that are remembered."""
_MAX_LAYOUTS: Final = 4096
"""Number of layouts that are told apart."""
_MAX_TIERS: Final = 255
MAX_FOUND: Final = 16_384
"""Maximum number of removals of one answer."""
_PART: Final = 1 << 15
"""Number of rows that are searched at once."""
_FOLD: Final = 256
"""Number of removals that wait as digests before they are put into the columns."""
_LATE_S: Final = 5.0
"""Seconds within which a store tells of an object that a call has removed."""
_PAGE_WORDS: Final = 4
"""Words of 8 bytes of a page key, and of a layout digest."""

_CAUSES: Final = tuple(Cause)
_COLUMNS: Final[dict[str, npt.DTypeLike]] = {
    "page": np.uint64, "rest": np.uint64, "at": np.float64, "layout": np.uint16, "tier": np.uint8,
    "cause": np.uint8,
}  # fmt: skip


class RemovalMemory:
    """Bounded memory of removals.

    How long `find` takes depends on how much is remembered, and not on whether a page is among it.

    Thread safety: any thread. `note` may be called while a lock of a store is held.
    """

    def __init__(self, capacity: int = MAX_REMOVALS, clock: Callable[[], float] = time.time) -> None:
        self._clock: Final = clock
        self._lock: Final = Lock()
        # Memory of a page of these arrays is first taken when it is written to.
        self._columns: Final = {name: np.zeros(capacity, kind) for name, kind in _COLUMNS.items()}
        self._capacity: Final = capacity
        self._count = 0
        """Number of removals so far; removal n is in row n % capacity."""
        self._layouts: dict[bytes, int] = {b"": 0}
        self._tiers: dict[str, int] = {"": 0}
        self._waiting: list[tuple[Sequence[bytes], str, Cause, float]] = []
        self._waiting_count = 0
        self._forgotten = 0.0

    def note(self, tier: str, digests: Sequence[bytes], cause: Cause = Cause.EVICTED) -> None:
        """Remember that objects went from a tier; an empty `tier` stands for all tiers."""
        if not digests:
            return
        with self._lock:
            self._waiting.append((digests, tier, cause, self._clock()))
            self._waiting_count += len(digests)
            if self._waiting_count >= _FOLD:
                self._fold()

    @property
    def forgotten(self) -> float | None:
        """Time of the newest removal that is not remembered any more; None if none was forgotten."""
        with self._lock:
            self._fold()
            return self._forgotten or None

    def find(self, pages: Sequence[bytes]) -> list[PastRemoval]:
        """Return the latest removal of each object of these pages from each tier, the newest first.

        There are at most MAX_FOUND, or a few less.
        """
        keys = b"".join(page if len(page) == LAYOUT_BYTES else bytes(LAYOUT_BYTES) for page in pages)
        words = np.frombuffer(keys, np.uint64).reshape(-1, _PAGE_WORDS)
        order = np.argsort(words[:, 0], kind="stable")
        with self._lock:
            self._fold()
            count, used = self._count, min(self._count, self._capacity)
            layouts, tiers = list(self._layouts), list(self._tiers)
        if not used or not len(order):
            return []
        parts = [self._matching(words, order, at, min(at + _PART, used)) for at in range(0, used, _PART)]
        found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        newest = np.argsort((found["row"] - count) % self._capacity)[::-1]
        # One number for page, layout, tier and cause; the first of equal numbers is the newest.
        same = found["which"] << 32 | found["layout"].astype(np.int64) << 16
        same |= found["tier"].astype(np.int64) << 8 | found["cause"]
        first = np.sort(np.unique(same[newest], return_index=True)[1])[:MAX_FOUND]
        columns = (found[name][newest[first]].tolist() for name in ("which", "layout", "tier", "cause", "at"))
        return _latest(
            [
                PastRemoval(page, layouts[layout], tiers[tier], _CAUSES[cause], at)
                for page, layout, tier, cause, at in zip(*columns, strict=True)
                if layout < len(layouts) and tier < len(tiers)
            ]
        )

    def _matching(
        self, words: npt.NDArray[Any], order: npt.NDArray[Any], start: int, end: int
    ) -> dict[str, npt.NDArray[Any]]:
        """Return those of the rows from `start` to `end` whose page is asked for, and which page that is."""
        # A store that evicts waits for this lock, so it is held only while a part of the ring is copied.
        with self._lock:
            columns = {name: column[start:end].copy() for name, column in self._columns.items()}
        at = np.searchsorted(words[order, 0], columns["page"]).clip(max=len(order) - 1)
        which = order[at]
        same = (words[which, 0] == columns["page"]) & (words[which, 1] == columns["rest"])
        rows = np.flatnonzero(same)
        return {name: column[rows] for name, column in columns.items()} | {
            "row": rows + start,
            "which": which[rows],
        }

    def _fold(self) -> None:
        """Put what waits into the columns; the lock is held."""
        waiting, self._waiting, self._waiting_count = self._waiting, [], 0
        digests: list[bytes] = []
        rest: list[tuple[int, int, float]] = []
        for some, tier, cause, at in waiting:
            sound = [digest for digest in some if len(digest) == DIGEST_BYTES][-self._capacity :]
            digests += sound
            rest += [(_number(self._tiers, tier, _MAX_TIERS), _CAUSES.index(cause), at)] * len(sound)
        for start in range(0, len(digests), self._capacity):
            self._write(digests[start : start + self._capacity], rest[start : start + self._capacity])

    def _write(self, digests: Sequence[bytes], rest: Sequence[tuple[int, int, float]]) -> None:
        n, columns = len(digests), self._columns
        words = np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2 * _PAGE_WORDS)
        rows = np.arange(self._count, self._count + n) % self._capacity
        if self._count + n > self._capacity:
            lost = rows[max(0, self._capacity - self._count) :]
            self._forgotten = max(self._forgotten, float(columns["at"][lost].max()))
        columns["page"][rows], columns["rest"][rows] = words[:, _PAGE_WORDS], words[:, _PAGE_WORDS + 1]
        columns["layout"][rows] = [
            _number(self._layouts, digest[:LAYOUT_BYTES], _MAX_LAYOUTS) for digest in digests
        ]
        columns["tier"][rows], columns["cause"][rows], columns["at"][rows] = zip(*rest, strict=True)
        self._count += n


def _number(numbers: dict[Any, int], name: bytes | str, maximum: int) -> int:
    """Return the number of a name, a new one if there is room; otherwise 0, that of the empty name."""
    if name not in numbers and len(numbers) < maximum:
        numbers[name] = len(numbers)
    return numbers.get(name, 0)


def _latest(found: Sequence[PastRemoval]) -> list[PastRemoval]:
    """Return the latest removal of each object from each tier.

    A store tells that an object went, and the call that removed it says why, a moment sooner or later:

        store   evicted from ram, evicted from ssd                      result   deleted from ram
        call                                         deleted                     deleted from ssd
    """
    calls: dict[tuple[int, bytes], list[PastRemoval]] = {}
    for removal in found:
        if removal.cause is not Cause.EVICTED:
            calls.setdefault((removal.page, removal.layout), []).append(removal)
    explained: set[int] = set()  # ids of removals that are in `found`
    told: list[PastRemoval] = []
    for removal in found:
        for call in calls.get((removal.page, removal.layout), ()):
            if removal.cause is Cause.EVICTED and abs(call.at - removal.at) <= _LATE_S:
                removal = removal._replace(cause=call.cause)
                explained.add(id(call))
                break
        told.append(removal)
    latest: dict[tuple[int, bytes, str], PastRemoval] = {}
    told_of: set[tuple[int, bytes]] = set()
    for removal in told:
        if removal.tier:
            told_of.add((removal.page, removal.layout))
        # A call that is older than what a tier has told since says nothing new.
        elif id(removal) in explained or (removal.page, removal.layout) in told_of:
            continue
        latest.setdefault((removal.page, removal.layout, removal.tier), removal)
    return list(latest.values())


class DaemonStore(Metered):
    """The store of a daemon, whose calls are counted and whose removals are remembered.

    What a store tells of by `watch` counts as evicted, unless a call has deleted it, or has found it corrupt.

    Thread safety: as `Wrapper`.
    """

    def __init__(
        self, inner: StorageBackend, kind: str = "store", metrics: StoreMetrics | None = None
    ) -> None:
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

    def stop(self) -> None:
        """Follow the tiers no more."""
        with self._look_lock:
            for tier, note, _ in self._followed.values():
                with suppress(StorageError, ClosedError):
                    end_watch(tier.store, note)
            self._followed = {}

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
        self.stop()
        super().close()

    def _note(self, tier: str, digests: Sequence[bytes], stored: bool) -> None:
        if not stored:
            self.memory.note(tier, digests)

    def _checked(self, items: Sequence[GetItem], outcomes: list[Outcome]) -> list[Outcome]:
        if Outcome.CORRUPT in outcomes:
            self.memory.note("", _corrupt(items, outcomes), Cause.CORRUPT)
        return outcomes


def _corrupt(items: Iterable[GetItem], outcomes: Iterable[Outcome]) -> list[bytes]:
    return [
        item.key.digest for item, outcome in zip(items, outcomes, strict=True) if outcome is Outcome.CORRUPT
    ]
