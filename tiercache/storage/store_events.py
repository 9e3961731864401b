"""KV events of a store: what its tiers have stored and removed, told to all who watch it.

A store notes the digests of objects that come and go, under its mutex and so in their order. The publisher's
thread then asks the store what is known of those that came.

    calls of the store       note: +a +b        note: -a        note: +c
    collect                          [stored a b]       [removed a]     [stored c]
"""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from threading import Event, Lock, Thread, current_thread
from typing import Final
from weakref import WeakKeyDictionary

from tiercache.core import ObjectKey, PoolName
from tiercache.errors import ClosedError, StorageError
from tiercache.events import EventKind, KVEvent, Medium, ObjectGroup, Place, runs_of
from tiercache.events.base import MAX_KEYS, ChangeNote, EventSource, StoredObject
from tiercache.storage.base import NamespaceRecord, ScanEntry, StorageBackend
from tiercache.storage.layouts import LAYOUT_BYTES
from tiercache.storage.tiers import ObservedTier
from tiercache.storage.wrappers import unwrap

_log = logging.getLogger(__name__)

MAX_NOTES: Final = 1 << 18
"""Number of notes of one tier that wait to be collected. Behind it the tier is cleared and told anew."""
_CLOSE_S: Final = 10.0
_NAMESPACES_S: Final = 1.0
"""Minimum seconds from one question for the names of namespaces to the next."""


class StoreEvents(EventSource):
    """Events of `store`, or of each of its tiers if it is a chain.

    A tier that cannot be asked counts as cleared, and is told anew when it answers again. `silent` names the
    tiers whose stores cannot tell of changes: nothing is published of them.

    Thread safety: as `EventSource`.
    """

    def __init__(self, store: StorageBackend, name: str) -> None:
        self._store: Final = unwrap(store, whole=True)
        self._name: Final = name
        self._wake: Callable[[], None] = lambda: None
        self._tiers: dict[str, _TierEvents] = {}
        self._page_sizes: dict[bytes, int] = {}
        self._ask_again = 0.0
        self.silent: frozenset[str] = frozenset()
        self._look(is_first=True)

    def follow(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def collect(self) -> Sequence[KVEvent]:
        events = self._look()
        for tier in self._tiers.values():
            if len(events) >= MAX_KEYS:
                break
            events += tier.collect()
        return events

    def snapshot(self) -> Iterator[Sequence[KVEvent]]:
        for tier in list(self._tiers.values()):
            yield from tier.snapshot()

    def close(self) -> None:
        for tier in self._tiers.values():
            tier.close()
        self._tiers = {}

    def warn_of_silence(self) -> None:
        """Log which tiers nothing is published of, if there are any."""
        if self.silent:
            _log.warning(
                "no KV events are published of %s: others change what is there without telling this process;"
                " a remote daemon publishes its own events",
                ", ".join(sorted(self.silent)),
            )

    def _look(self, *, is_first: bool = False) -> list[KVEvent]:
        """Follow the tiers that there are now; return that those which went are cleared."""
        present = {tier.name: tier for tier in observed_tiers(self._store, self._name)}
        events: list[KVEvent] = []
        silent = set()
        for name, tier in list(self._tiers.items()):
            now = present.get(name)
            if now is None or now.store is not tier.observed.store:
                tier.close()
                events.append(KVEvent(EventKind.CLEARED, tier.place))
                del self._tiers[name]
        for name, found in present.items():
            if name not in self._tiers:
                followed = _TierEvents(found, lambda: self._wake(), self._group_of)
                try:
                    if followed.begin(tell=not is_first):
                        self._tiers[name] = followed
                    else:
                        silent.add(name)
                except (StorageError, ClosedError) as error:
                    _log.debug("the store %s cannot be followed now: %s", followed.place, error)
        self.silent = frozenset(silent)
        return events

    def _group_of(self, key: ObjectKey, namespace: bytes) -> ObjectGroup:
        now = time.monotonic()
        if namespace not in self._page_sizes and now >= self._ask_again:
            self._page_sizes, self._ask_again = page_sizes(self._store), now + _NAMESPACES_S
        return ObjectGroup(key.pool, namespace, key.layout, self._page_sizes.get(namespace, 0))


class _TierEvents:
    """Changes of one tier."""

    def __init__(
        self,
        observed: ObservedTier,
        wake: Callable[[], None],
        group_of: Callable[[ObjectKey, bytes], ObjectGroup],
    ) -> None:
        self.observed: Final = observed
        self.place: Final = Place(Medium.STORAGE, observed.name)
        self._wake: Final = wake
        self._group_of: Final = group_of
        self._notes: deque[tuple[Sequence[bytes], bool]] = deque()
        """Digests, and whether they were stored or removed."""
        self._lost = False
        self._pools: dict[bytes, PoolName] = {}
        """Pools of the layouts of which something was told."""
        self._telling: str | bytes = ""
        """Cursor of the scan that tells what was there before; empty text if there is none."""

    def begin(self, *, tell: bool) -> bool:
        """Follow the store; `tell` also what it has already. Return False if it cannot tell of changes.

        Raises StorageError if the store cannot be read.
        """
        self._telling = b"" if tell else ""
        return begin_watch(self.observed.store, self._note)

    def close(self) -> None:
        """Follow the store no more."""
        with suppress(StorageError, ClosedError):
            end_watch(self.observed.store, self._note)

    def _note(self, digests: Sequence[bytes], stored: bool) -> None:
        # The store's mutex is held, so this only appends.
        if self._lost:
            return
        self._notes.append((digests, stored))
        waiting = len(self._notes)
        if waiting == 1:  # else `collect` has not come to the end of the notes, and will
            self._wake()
        elif waiting > MAX_NOTES:
            self._lost = True
            self._wake()

    def collect(self) -> list[KVEvent]:
        """Return the next changes."""
        if self._lost:
            # Notes that come from here on are kept, and the scan that tells the rest begins after them.
            self._notes.clear()
            self._lost = False
            self._telling = b""
            return [KVEvent(EventKind.CLEARED, self.place)]
        try:
            while self._notes:
                # There may be nothing to tell of some: what came is gone, or what went was never told.
                if events := self._changes():
                    return events
            if isinstance(self._telling, bytes):
                page = self.observed.residence.scan(None, self._telling)
                self._telling = page.cursor or ""
                return self._stored(page.entries)
        except (StorageError, ClosedError) as error:
            # The tier does not answer: it is left out soon, and then told anew.
            _log.debug("the store %s was not asked for its objects: %s", self.place, error)
        return []

    def snapshot(self) -> Iterator[Sequence[KVEvent]]:
        """Yield STORED events of all that is there; raises StorageError."""
        cursor = b""
        while True:
            page = self.observed.residence.scan(None, cursor)
            yield self._stored(page.entries)
            cursor = page.cursor
            if not cursor:
                return

    def _changes(self) -> list[KVEvent]:
        """Return events of the next notes of one kind, of about MAX_KEYS objects."""
        kind = self._notes[0][1]
        some: list[bytes] = []
        taken: list[tuple[Sequence[bytes], bool]] = []
        while self._notes and self._notes[0][1] is kind and len(some) < MAX_KEYS:
            taken.append(self._notes.popleft())
            some += taken[-1][0]
        if not kind:
            return self._removed(some)
        # The pool of the keys does not matter: stores tell objects apart by their digests.
        keys = [ObjectKey(PoolName.KV, digest) for digest in some]
        try:
            return self._stored([e for e in self.observed.residence.describe(keys) if e is not None])
        except (StorageError, ClosedError):
            self._notes.extendleft(reversed(taken))
            raise

    def _stored(self, entries: Sequence[ScanEntry]) -> list[KVEvent]:
        objects = []
        groups: dict[tuple[bytes, bytes], ObjectGroup] = {}
        for key, meta, *_ in entries:
            layout, page = key.digest[:LAYOUT_BYTES], key.digest[LAYOUT_BYTES:]
            group = groups.get((layout, meta.namespace))
            if group is None:
                self._pools[layout] = key.pool
                group = groups[layout, meta.namespace] = self._group_of(key, meta.namespace)
            objects.append(StoredObject(group, page, meta.parent, meta.depth))
        return runs_of(self.place, objects)

    def _removed(self, digests: Sequence[bytes]) -> list[KVEvent]:
        by_layout: dict[bytes, list[bytes]] = {}
        for digest in digests:
            by_layout.setdefault(digest[:LAYOUT_BYTES], []).append(digest[LAYOUT_BYTES:])
        # Of a layout of which nothing was told, nobody knows an object.
        return [
            KVEvent(EventKind.REMOVED, self.place, ObjectGroup(pool, layout=layout), keys)
            for layout, keys in by_layout.items()
            if (pool := self._pools.get(layout)) is not None
        ]


def observed_tiers(store: StorageBackend, name: str) -> Sequence[ObservedTier]:
    """Return the tiers of a chain that answer; for another store the store itself, under `name`."""
    tiers = store.observed_tiers()
    return [ObservedTier(name, store, store)] if tiers is None else tiers


def page_sizes(store: StorageBackend) -> dict[bytes, int]:
    """Return the page size of each namespace whose record has it."""
    records: Sequence[NamespaceRecord] = ()
    with suppress(StorageError):
        records = store.namespaces()
    return {
        record.namespace: size
        for record in records
        if isinstance(size := record.identity.get("page_size"), int) and size > 0
    }


class _Fan:
    """Function that passes changes on to all watchers of a store.

    Thread safety: the store calls it; `notes` is only ever replaced as a whole.
    """

    def __init__(self) -> None:
        self.notes: tuple[ChangeNote, ...] = ()

    def __call__(self, digests: Sequence[bytes], stored: bool) -> None:
        for note in self.notes:
            note(digests, stored)


_fans: Final[WeakKeyDictionary[StorageBackend, _Fan]] = WeakKeyDictionary()
_lock: Final = Lock()


def begin_watch(store: StorageBackend, note: ChangeNote) -> bool:
    """Let `note` be called for changes of `store`, beside other watchers; see `StorageBackend.watch`.

    Returns False if the store cannot tell of changes. Raises StorageError if it cannot be asked.
    """
    with _lock:
        fan = _fans.get(store)
        if fan is None:
            fan = _Fan()
            fan.notes = (note,)
            if not store.watch(fan):
                return False
            _fans[store] = fan
        elif note not in fan.notes:
            fan.notes = (*fan.notes, note)
        return True


def end_watch(store: StorageBackend, note: ChangeNote) -> None:
    """Call `note` no more; raises StorageError or ClosedError if the store cannot be told."""
    with _lock:
        fan = _fans.get(store)
        if fan is None:
            return
        fan.notes = tuple(other for other in fan.notes if other != note)
        if not fan.notes:
            del _fans[store]
            store.watch(None)


class Following:
    """Thread that calls `learn` every `pause` seconds, from `start` on until `close`.

    An error of the store is logged, and `learn` is called again.

    Thread safety: any thread may call; the caller makes sure that `start` and `close` do not overlap.
    """

    def __init__(self, name: str, pause: float, learn: Callable[[], object]) -> None:
        self._name: Final = name
        self._pause: Final = pause
        self._learn: Final = learn
        self._closing = Event()
        self._thread: Thread | None = None

    def start(self) -> None:
        """Begin, unless the thread runs already or this is closed."""
        if self._thread is None and not self._closing.is_set():
            self._thread = Thread(target=self._run, name=f"tiercache-{self._name}", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread; `learn` is not called any more, unless it hangs."""
        self._closing.set()
        if self._thread is not None and self._thread is not current_thread():
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._closing.wait(self._pause):
            try:
                self._learn()
            except (OSError, StorageError) as error:
                _log.debug("%s: what others have changed is not known: %s", self._name, error)
