"""Account of one tenant: its calls of the store in tokens and seconds, by the prices of its namespaces."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from threading import Lock, Thread
from typing import Final, NamedTuple

import numpy as np

from tiercache.core import DIGEST_BYTES, ObjectKey, Outcome, PoolName
from tiercache.daemon.tenants.account import HOUR_S, Account, Counts
from tiercache.errors import ClosedError, StorageError
from tiercache.storage.base import (
    FLOPS_FIELD,
    SPEED_FIELD,
    GetItem,
    NamespaceRecord,
    ScanEntry,
    SetItem,
    StorageBackend,
)

_REFRESH_S: Final = 60.0
"""Seconds after which the records of namespaces are read again."""
_AGAIN_S: Final = 10.0
"""Minimum seconds between two readings because of a namespace that is not known.

What is registered with this daemon is known at once; the records of others have to be read."""
_PATIENCE_S: Final = 1.0
"""Seconds that a call waits for the first reading."""
_ASK_AGAIN: Final = 16
"""Number of reads of which one asks the store again for the namespace of a layout that is known."""
_MAX_LAYOUTS: Final = 4096
"""Number of layouts of one tenant that are known; the store is asked for those of others each time."""
_FEW: Final = 64
"""If a call has fewer keys than this, NumPy does not make it faster."""
_MAX_PAGE_SIZE: Final = 2**20
"""Tokens per page above which a record is not believed, so that the counts of a row stay below 2**63."""
_MAX_FLOPS: Final = 10**16
"""FLOPs per token above which a record is not believed."""
_MAX_SPEED: Final = 10**19
"""FLOPs per second above which a record is not believed."""


class _Price(NamedTuple):
    """Tokens and FLOPs for which one page of a namespace stands."""

    page_size: int
    flops: int | None
    """FLOPs of a prefill per token; None if they are not known."""
    seconds: float | None = None
    """Duration of a prefill per token; None if it is not known."""


class TenantAccount:
    """Account of one tenant; all views of the tenant share it.

    Thread safety: any thread.
    """

    def __init__(self, account: Account, tenant: str, owns: Callable[[bytes], bool]) -> None:
        """Count for `tenant`; `owns` says whether a namespace, by its name in the store, is the tenant's."""
        self._account: Final = account
        self._tenant: Final = tenant
        self._owns: Final = owns
        self._lock: Final = Lock()
        self._prices: Mapping[bytes, _Price] = {}
        self._read_at = float("-inf")
        self._reading: Thread | None = None
        self._is_new = True
        """Whether the records were not read since the start; calls wait for that, a moment."""
        self._hour = 0
        self._turn = 0
        self._usual: dict[bytes, bytes | None] = {}
        """Namespace of the objects of each layout, see `_see`; None if there are several."""
        self._is_timed = False
        """Whether the tokens that were read last have a price in seconds; states are read along with them."""
        self._layouts: dict[bytes, bytes] = {}
        """Layout whose pages stand for tokens in this hour, by namespace."""

    def count_exists(self, store: StorageBackend, keys: Sequence[ObjectKey], answers: Sequence[bool]) -> None:
        """Count objects that were looked up, and the tokens for which they stand, found or not."""
        found = sum(answers)
        counts = Counts(found_objects=found, absent_objects=len(answers) - found)
        for key, objects in _by_layout(keys):
            self._count_asked(store, key, objects, counts)
        self._account.add(self._tenant, counts)

    def count_get(
        self, store: StorageBackend, items: Sequence[GetItem], outcomes: Sequence[Outcome], seconds: float
    ) -> None:
        """Count objects that were read in so many seconds, and the tokens for which they stand."""
        hits = [item for item, outcome in zip(items, outcomes, strict=True) if outcome is Outcome.HIT]
        missed = outcomes.count(Outcome.MISS) + outcomes.count(Outcome.CORRUPT)
        counts = Counts(
            read_objects=len(hits), read_bytes=sum(item.length for item in hits), missed_objects=missed
        )
        if hits:
            self._count_tokens(store, hits, counts)
            counts.read_seconds = seconds * (
                counts.timed_tokens / counts.restored_tokens if counts.restored_tokens else self._is_timed
            )
        self._account.add(self._tenant, counts)

    def count_set(self, items: Sequence[SetItem], outcomes: Sequence[Outcome]) -> None:
        """Count objects that were stored, and learn the namespaces of their layouts."""
        written = [
            item.meta.length
            for item, outcome in zip(items, outcomes, strict=True)
            if outcome is Outcome.STORED
        ]
        self._account.add(self._tenant, Counts(written_objects=len(written), written_bytes=sum(written)))
        for layout, namespace in {
            (item.key.layout, item.meta.namespace) for item in items if item.key.pool is PoolName.KV
        }:
            self._see(layout, namespace)

    def _usual_namespace(self, layout: bytes) -> bytes | None:
        """Return the namespace of a layout's objects; b"" if they stand for no page, None to ask the store.

        The store is asked until the layout is known, and about once in _ASK_AGAIN calls after that. It is
        asked each time if several namespaces have the layout, as two revisions of a model have.
        """
        with self._lock:
            self._turn += 1
            return self._usual.get(layout) if self._turn % _ASK_AGAIN else None

    def _count_asked(self, store: StorageBackend, key: ObjectKey, objects: int, counts: Counts) -> None:
        """Count the tokens of objects with the layout of `key` that were looked up, found or not."""
        layout = key.layout
        namespace = self._usual.get(layout)
        if key.pool is not PoolName.KV:
            # A state of a model without pages stands for its whole prompt; of an absent one nothing is known.
            if namespace is None and layout in self._usual:
                counts.unsized_objects += objects
            return
        price = self._price(store, namespace or b"")
        sizes = {one.page_size for one in self._prices.values()} if price is None else {price.page_size}
        if len(sizes) != 1:
            counts.unsized_objects += objects
        elif self._stands_for_tokens(namespace or b"", layout):
            counts.asked_tokens += objects * sizes.pop()

    def _see(self, layout: bytes, kind: bytes | None) -> None:
        """Learn of an object of a layout: its namespace, b"" if it stands for no page, None to ask always."""
        with self._lock:
            if layout in self._usual:
                if self._usual[layout] != kind:
                    self._usual[layout] = None
            elif len(self._usual) < _MAX_LAYOUTS:
                self._usual[layout] = kind

    def _price(self, store: StorageBackend, namespace: bytes) -> _Price | None:
        """Return what a page of a namespace stands for; None if no record says so.

        Records are read again beside the calls: of a bucket, each takes a request.
        """
        with self._lock:
            now = time.monotonic()
            age = now - self._read_at
            is_stale = age > _REFRESH_S or (namespace not in self._prices and age > _AGAIN_S)
            if is_stale and not (self._reading and self._reading.is_alive()):
                self._read_at = now
                self._reading = Thread(target=self._read, args=(store,), name="tiercache-prices", daemon=True)
                self._reading.start()
            first = self._reading if self._is_new else None
        if first is not None:
            first.join(_PATIENCE_S)
            self._is_new = False
        return self._prices.get(namespace)

    def learn(self, record: NamespaceRecord) -> None:
        """Learn of a record that is registered; what it does not tell stays as it was known."""
        with self._lock:
            for namespace, price in _prices([record]).items():
                known = self._prices.get(namespace, price)
                price = price._replace(
                    flops=price.flops or known.flops, seconds=price.seconds or known.seconds
                )
                self._prices = {**self._prices, namespace: price}

    def _read(self, store: StorageBackend) -> None:
        with suppress(StorageError, ClosedError):
            found = _prices(record for record in store.namespaces() if self._owns(record.namespace))
            with self._lock:
                self._prices = {**self._prices, **found}

    def _stands_for_tokens(self, namespace: bytes, layout: bytes) -> bool:
        """Return whether pages of this layout count as tokens.

        Each rank reads its part of a page, and the page's tokens count once: by the layout that was read
        first in this hour.
        """
        hour = int(self._account.clock()) // HOUR_S
        with self._lock:
            if hour != self._hour:
                self._hour, self._layouts = hour, {}
            return self._layouts.setdefault(namespace, layout) == layout

    def _count_tokens(self, store: StorageBackend, hits: Sequence[GetItem], counts: Counts) -> None:
        """Add the tokens for which the objects that were read stand, and their FLOPs."""
        by_layout: dict[bytes, list[ObjectKey]] = {}
        for item in hits:
            by_layout.setdefault(item.key.layout, []).append(item.key)
        for layout, keys in by_layout.items():
            for namespace, pages in self._pages(store, layout, keys):
                price = self._price(store, namespace) if pages else None
                if price is None or not self._stands_for_tokens(namespace, layout):
                    continue
                tokens = pages * price.page_size
                counts.restored_tokens += tokens
                if price.flops is None:
                    counts.unpriced_tokens += tokens
                else:
                    counts.saved_flops += float(tokens) * price.flops
                self._is_timed = price.seconds is not None
                if price.seconds is not None:
                    counts.timed_tokens += tokens
                    counts.prefill_seconds += tokens * price.seconds

    def _pages(
        self, store: StorageBackend, layout: bytes, keys: Sequence[ObjectKey]
    ) -> Iterable[tuple[bytes, int]]:
        """Return the namespaces of objects of one layout, each with the pages for which they stand."""
        known = self._usual_namespace(layout)
        if known is not None:
            return [(known, len(keys))] if known else []
        entries: Sequence[ScanEntry | None] = ()
        with suppress(StorageError, ClosedError):
            entries = store.describe(keys)
        pages: dict[bytes, int] = {}
        for entry in entries:
            if entry is not None:
                self._see(layout, _kind_of(entry))
                pages[entry.meta.namespace] = pages.get(entry.meta.namespace, 0) + _pages_of(entry)
        return pages.items()


def _by_layout(keys: Sequence[ObjectKey]) -> list[tuple[ObjectKey, int]]:
    """Return one key of each layout, and how many keys have it."""
    if len(keys) < _FEW:
        layouts = [key.layout for key in keys]
        some = dict(zip(layouts, keys, strict=True))
        return [(some[layout], n) for layout, n in Counter(layouts).items()]
    # The first word of a digest is of its layout. With NumPy, thousands of keys cost a tenth.
    words = np.frombuffer(b"".join([key.digest for key in keys]), np.uint64)[:: DIGEST_BYTES // 8]
    _, first, objects = np.unique(words, return_index=True, return_counts=True)
    return [(keys[at], n) for at, n in zip(first.tolist(), objects.tolist(), strict=True)]


def _kind_of(entry: ScanEntry) -> bytes | None:
    """Return the namespace of a page, b"" for an object that stands for no page, and None for others."""
    if entry.key.pool is PoolName.KV:
        return entry.meta.namespace
    return None if _pages_of(entry) else b""


def _pages_of(entry: ScanEntry) -> int:
    """Return for how many pages an object stands: KV for one, a state of a model without KV for its depth."""
    if entry.key.pool is PoolName.KV:
        return 1
    is_alone = entry.key.pool is PoolName.MAMBA and entry.meta.parent is None
    return (entry.meta.depth or 0) if is_alone else 0


def _prices(records: Iterable[NamespaceRecord]) -> dict[bytes, _Price]:
    found = {}
    for record in records:
        page_size = _number(record.identity.get("page_size"), _MAX_PAGE_SIZE)
        if page_size is not None:
            flops = _number(record.identity.get(FLOPS_FIELD), _MAX_FLOPS)
            speed = _number(record.identity.get(SPEED_FIELD), _MAX_SPEED)
            seconds = flops / speed if flops and speed else None
            found[record.namespace] = _Price(page_size, flops, seconds)
    return found


def _number(value: str | int | None, maximum: int) -> int | None:
    """Return a number from 1 to `maximum`; None for anything else."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 < value <= maximum else None
