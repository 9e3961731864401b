"""KV events of the third tier, in SGLang's terms, on a socket of their own.

SGLang publishes events of its device and host tiers (`--kv-events-config`), but none of what a storage
backend has. Both name a page by the same hash, so a router can join the two streams:

    name of a page in storage      SHA-256 of its prefix, 64 hex digits
    hash in SGLang's events        the first 8 bytes of this SHA-256, as a signed integer

The exception are requests with a cache salt, an extra key or a LoRA adapter: SGLang puts other hashes into
its events than into the names of their pages, and does not pass them to a storage backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Event
from typing import Any, Final, NamedTuple

import msgpack

from tiercache.core import ObjectKey, Outcome, PoolName
from tiercache.events import EventKind, KVEvent, Medium, ObjectGroup, Place, runs_of
from tiercache.events.base import MAX_KEYS, EventSource, StoredObject
from tiercache.events.encoding import as_map
from tiercache.events.publisher import EventPublisher
from tiercache.events.settings import EventSettings
from tiercache.integrations.announcements import Announcements, EvictionWatch
from tiercache.integrations.sglang.pools import PageKeys
from tiercache.storage.base import NamespaceRecord, StorageBackend

MEDIUM: Final = "DISK"
"""SGLang's name of its third tier in events."""
_HASH_BYTES: Final = 8


class Page(NamedTuple):
    """Page of the KV, as SGLang names it."""

    sha: bytes
    """SHA-256 of the prefix."""
    parent: bytes | None
    """The same of the page before; None for the first page of a sequence, or if it is not known."""


class PagePublisher:
    """Publisher of the KV pages that a store has for this rank.

    At the start it lists what the store has already, on a thread of its own. A store that cannot be listed is
    told of page by page, as pages are read and written.

    Construction raises MissingExtraError without pyzmq, StorageError if an address cannot be bound.

    Thread safety: any thread; `close` is the last call.
    """

    def __init__(
        self,
        settings: EventSettings,
        store: StorageBackend,
        keys: PageKeys,
        layout: bytes,
        record: NamespaceRecord,
    ) -> None:
        self._store: Final = store
        self._keys: Final = keys
        self._layout: Final = layout
        self._namespace: Final = record.namespace
        self._pages: Final = Announcements[Page]()
        group = ObjectGroup(PoolName.KV, record.namespace, layout, int(record.identity["page_size"]))
        events = PageEvents(self._pages, group)
        self._publisher: Final = EventPublisher(settings, [events], encode=encode_pages)
        try:
            self._watch: Final = EvictionWatch(store, self._pages, self._list)
        except BaseException:  # whatever it is, no socket stays open, and it is raised again
            self._publisher.close()
            raise

    @property
    def age(self) -> int:
        """Number of times that a page was found in the store so far."""
        return self._pages.age

    def note(
        self,
        objects: Sequence[ObjectKey],
        outcomes: Sequence[Outcome],
        parents: Sequence[bytes | None],
        asked: int = 0,
    ) -> None:
        """Note the outcomes of a get or a set; `parents` are the page keys before these objects.

        `asked`: the `age` before the call, for a get.
        """
        self._pages.stored(
            self._named(key, parent)
            for key, outcome, parent in zip(objects, outcomes, parents, strict=True)
            if key.layout == self._layout and outcome in (Outcome.STORED, Outcome.HIT)
        )
        lost = (Outcome.MISS, Outcome.CORRUPT)
        self.gone([key for key, outcome in zip(objects, outcomes, strict=True) if outcome in lost], asked)

    def gone(self, objects: Iterable[ObjectKey], asked: int) -> None:
        """Note that the store did not have these objects; `asked`: the `age` before it was asked."""
        self._pages.gone((key.digest for key in objects), asked)

    def close(self) -> None:
        """Publish what is not yet published, and end."""
        self._watch.close()
        self._publisher.close()

    def _list(self, closing: Event) -> None:
        cursor = b""
        while not closing.is_set():
            page = self._store.scan(self._namespace, cursor)
            mine = [entry for entry in page.entries if entry.key.layout == self._layout]
            self._pages.stored(self._named(entry.key, entry.meta.parent) for entry in mine)
            cursor = page.cursor
            if not cursor:
                return

    def _named(self, key: ObjectKey, parent: bytes | None) -> tuple[ObjectKey, Page]:
        sha_of = self._keys.sha_of
        return key, Page(sha_of(key.page_key), None if parent is None else sha_of(parent))


class PageEvents(EventSource):
    """Events of the pages in `pages`, all of one group of objects.

    Thread safety: as `EventSource`.
    """

    def __init__(self, pages: Announcements[Page], group: ObjectGroup) -> None:
        self._pages: Final = pages
        self._group: Final = group
        self._place: Final = Place(Medium.STORAGE, "tiercache")

    def collect(self) -> Sequence[KVEvent]:
        """Return what was not yet told."""
        removed, stored = self._pages.take(MAX_KEYS)
        events = self._stored(stored)
        if removed:
            gone = [page.sha for page in removed]
            events.insert(0, KVEvent(EventKind.REMOVED, self._place, self._group, gone))
        return events

    def snapshot(self) -> Iterator[Sequence[KVEvent]]:
        """Yield STORED events of all that was told and not taken back."""
        told = self._pages.told()
        for start in range(0, len(told), MAX_KEYS):
            yield self._stored(told[start : start + MAX_KEYS])

    def follow(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever a page was stored, found or lost."""
        self._pages.wake = wake

    def close(self) -> None:
        """Wake the publisher no more."""
        self._pages.wake = lambda: None

    def _stored(self, pages: Iterable[Page]) -> list[KVEvent]:
        return runs_of(self._place, (StoredObject(self._group, page.sha, page.parent) for page in pages))


def encode_pages(time: float, events: Iterable[KVEvent]) -> bytes:
    """Return the payload of a batch, which SGLang 0.5.23 reads as a `KVEventBatch`."""
    maps = [_in_terms_of_sglang(as_map(event)) for event in events]
    packed: bytes = msgpack.packb([time, maps, None], use_bin_type=True)
    return packed


def _in_terms_of_sglang(found: Mapping[str, Any]) -> dict[str, Any]:
    changed = dict(found)
    if "block_hashes" in changed:
        changed["block_hashes"] = [_event_hash(sha) for sha in changed["block_hashes"]]
        changed["medium"] = MEDIUM
    if changed.get("parent_block_hash") is not None:
        changed["parent_block_hash"] = _event_hash(changed["parent_block_hash"])
    return changed


def _event_hash(sha: bytes) -> int:
    return int.from_bytes(sha[:_HASH_BYTES], "big", signed=True)
