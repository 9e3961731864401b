"""Announcements of a store to an engine's routers: which of the engine's objects it has.

Nothing is queued. What waits to be told is the difference between what the store has and what was told, which
is bounded:

    the store has             a b c d        an object that came and went again meanwhile costs nothing
    told so far               a b   d e
    the next `take`           +c -e
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Event, Lock, Thread
from typing import Final, Generic, NamedTuple, TypeVar

from tiercache.core import ObjectKey, PoolName
from tiercache.errors import TierCacheError
from tiercache.events import EventKind, KVEvent
from tiercache.storage.base import StorageBackend
from tiercache.storage.store_events import StoreEvents

_log = logging.getLogger(__name__)

MAX_OBJECTS: Final = 1 << 18
"""Maximum number of objects that are told. Behind it the oldest is told as removed, but stays stored."""
_MAX_DROPPED: Final = 1 << 14
"""Number of objects whose names are remembered after they were gone."""
_SUSPECTS: Final = 1024
"""Number of objects in one question to the store."""
_IDLE_S: Final = 0.25
"""Seconds after which the store is asked for changes without having said anything."""
_CLOSE_S: Final = 5.0

_Name = TypeVar("_Name")


class News(NamedTuple, Generic[_Name]):
    """Objects to tell, by the names that the engine gave them."""

    removed: list[_Name]
    stored: list[_Name]


class Announcements(Generic[_Name]):
    """Objects that the store has, and objects that were told; each with the engine's name for it.

    `limit`: maximum number of each.

    Thread safety: any thread. A lock is held for microseconds, during `take` for up to a few milliseconds.
    """

    def __init__(self, limit: int = MAX_OBJECTS) -> None:
        self._limit: Final = limit
        self._lock = Lock()
        self._there: OrderedDict[bytes, tuple[_Name, int]] = OrderedDict()
        """Name and age of each object that is there, by the digest of its key."""
        self._told: dict[bytes, _Name] = {}
        self._new: OrderedDict[bytes, None] = OrderedDict()
        """Objects that are there and were not told."""
        self._lost: OrderedDict[bytes, None] = OrderedDict()
        """Objects that were told and are not there."""
        self._dropped: OrderedDict[bytes, _Name] = OrderedDict()
        """Names of the objects that went last."""
        self._age = 0
        self.wake: Callable[[], None] = lambda: None
        """Function that is called when there may be something to take."""

    @property
    def age(self) -> int:
        """Number of times that an object was found in the store so far."""
        return self._age

    def stored(self, found: Iterable[tuple[ObjectKey, _Name]]) -> None:
        """Note that the store has these objects."""
        with self._lock:
            for (_, digest), name in found:
                self._age += 1
                if digest not in self._there:
                    self._dropped.pop(digest, None)
                    if len(self._there) >= self._limit:
                        self._drop(next(iter(self._there)))
                    if digest in self._told:
                        del self._lost[digest]
                    else:
                        self._new[digest] = None
                self._there[digest] = (name, self._age)
        self.wake()

    def gone(self, digests: Iterable[bytes], asked: int) -> None:
        """Note that the store does not have these objects.

        `asked`: the `age` before the store was asked. An object that was found after that is there.
        """
        with self._lock:
            for digest in digests:
                known = self._there.get(digest)
                if known is not None and known[1] <= asked:
                    self._drop(digest)
        self.wake()

    def back(self, digests: Iterable[bytes]) -> None:
        """Note that the store has these objects, of which only those that went lately are known.

        An object that moves down a chain may for a moment be in no tier.
        """
        with self._lock:
            names = [(ObjectKey(PoolName.KV, d), self._dropped[d]) for d in digests if d in self._dropped]
        if names:
            self.stored(names)

    def known(self, digests: Iterable[bytes] | None = None) -> list[bytes]:
        """Return those of these objects, or of all, that are thought to be there."""
        with self._lock:
            return [d for d in (self._there if digests is None else digests) if d in self._there]

    def told(self) -> list[_Name]:
        """Return the names of all objects that were told and not taken back, in the order of telling."""
        with self._lock:
            return list(self._told.values())

    def forget(self) -> None:
        """Forget everything, because whoever was told has forgotten it too.

        What is still stored is told again when it is next found in the store.
        """
        with self._lock:
            for table in (self._there, self._told, self._new, self._lost, self._dropped):
                table.clear()

    def take(self, limit: int) -> News[_Name]:
        """Return what was not yet told, of at most `limit` objects.

        Removals come first, so that never more than the maximum number of objects is told as stored.
        """
        news = News[_Name]([], [])
        with self._lock:
            while self._lost and len(news.removed) < limit:
                news.removed.append(self._told.pop(self._lost.popitem(last=False)[0]))
            while self._new and len(news.removed) + len(news.stored) < limit:
                digest, _ = self._new.popitem(last=False)
                self._told[digest] = name = self._there[digest][0]
                news.stored.append(name)
        return news

    def _drop(self, digest: bytes) -> None:
        self._dropped[digest] = self._there.pop(digest)[0]
        if len(self._dropped) > _MAX_DROPPED:
            self._dropped.popitem(last=False)
        if digest in self._told:
            self._lost[digest] = None
        else:
            del self._new[digest]


class EvictionWatch:
    """Watch over a store, on a thread of its own, that notes what the store gives up.

    Of a store that cannot tell of changes (a daemon's, or one that other hosts share) nothing is noted here:
    the next lookup of an object shows that it is gone. `first` is called once on the thread, before all else;
    it returns soon after its argument is set.

    Thread safety: any thread may call `close`.
    """

    def __init__(
        self,
        store: StorageBackend,
        objects: Announcements[_Name],
        first: Callable[[Event], None] | None = None,
    ) -> None:
        self._store: Final = store
        self._objects: Final = objects
        self._first = first
        self._source: Final = StoreEvents(store, "store")
        self._wake = Event()
        self._closing = Event()
        self._thread = Thread(target=self._run, name="tiercache-evictions", daemon=True)
        self._source.follow(self._wake.set)
        self._thread.start()

    def close(self) -> None:
        """End the watch. If the store hangs, the thread ends after its answer."""
        self._closing.set()
        self._wake.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                if self._first is not None:
                    first, self._first = self._first, None
                    first(self._closing)
                while not self._closing.is_set() and self._look():
                    pass
            except TierCacheError as error:  # the objects count as there; lookups show what is gone
                _log.debug("the store was not asked for what it has: %s", error)
            except Exception:  # noqa: BLE001  the thread must not end
                _log.exception("tiercache: changes of the store could not be noted")
                self._closing.wait(_IDLE_S)
            self._wake.wait(_IDLE_S)
            self._wake.clear()
        self._source.close()

    def _look(self) -> bool:
        """Note what the store has given up; return whether it has told anything."""
        changes = self._source.collect()
        if any(event.kind is EventKind.CLEARED for event in changes):
            suspects = self._objects.known()
        else:
            suspects = self._objects.known(_digests(changes, EventKind.REMOVED))
        for start in range(0, len(suspects), _SUSPECTS):
            self._check(suspects[start : start + _SUSPECTS])
        self._objects.back(_digests(changes, EventKind.STORED))
        return bool(changes)

    def _check(self, suspects: Sequence[bytes]) -> None:
        # What one tier of a chain gave up may be in another, and what was evicted may be stored again.
        asked = self._objects.age
        # Stores tell objects apart by their digests, so any pool will do.
        there = self._store.exists([ObjectKey(PoolName.KV, digest) for digest in suspects])
        self._objects.gone((d for d, found in zip(suspects, there, strict=True) if not found), asked)


def _digests(events: Iterable[KVEvent], kind: EventKind) -> Iterator[bytes]:
    for event in events:
        if event.kind is kind and event.group is not None:
            yield from (event.group.layout + key for key in event.keys)
