"""The account of a daemon: what each tenant stored, read and saved in each hour.

One line of JSON for each hour and tenant in which something happened since the line before, in a file beside
the audit log. A reader adds up the lines of an hour:

    {"hour": 1763982000, "tenant": "red", "read_objects": 64, "restored_tokens": 4096, ...}

What happened since the last line is lost if the process is killed, and never more. `TenantAccount` turns the
calls of one tenant into counts: tokens, FLOPs and seconds by the records of its namespaces (`PriceList`).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Final, NamedTuple

import numpy as np

from tiercache.core import DIGEST_BYTES, ObjectKey, Outcome, PoolName
from tiercache.daemon.audit import append, size_of
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
from tiercache.storage.hits import Hits

_log = logging.getLogger(__name__)

HOUR_S: Final = 3600
MAX_HOURS: Final = 90 * 24
"""Number of hours of which rows are kept."""
_MAX_BYTES: Final = 16 << 20
"""Size of the file at which its lines are added up, unless they were not long ago."""
_MAX_LINE: Final = 4096
_PATIENCE_S: Final = 2.0
"""Seconds to wait at the end for the last write."""
_MAX_FUTURE: Final = 2**40
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


@dataclass(slots=True)
class Counts(Hits):
    """Figures of what one tenant did in some time.

    Thread safety: that of the owner.
    """

    written_objects: int = 0
    written_bytes: int = 0
    read_objects: int = 0
    read_bytes: int = 0
    missed_objects: int = 0
    """Objects that a get asked for, and that were not there."""
    found_objects: int = 0
    """Objects that were looked up, and were there."""
    absent_objects: int = 0
    """Objects that were looked up, and were not there."""
    unpriced_tokens: int = 0
    """Restored tokens of models whose FLOPs are not known."""
    saved_flops: float = 0.0
    """FLOPs of a prefill of the other restored tokens."""

    def add(self, other: Counts) -> None:
        """Add all counts of `other`."""
        for name in NAMES:
            if more := getattr(other, name):
                setattr(self, name, getattr(self, name) + more)


NAMES: Final = tuple(field.name for field in fields(Counts))
_LIMITS: Final[dict[str, float]] = {
    **dict.fromkeys(NAMES, 2**63),
    **dict.fromkeys(("saved_flops", "prefill_seconds", "read_seconds"), 1e300),
}
"""Number below which each count of a line must be; that of a count which is no whole number is a float."""
Rows = dict[tuple[int, str], Counts]
"""Counts by hour (its begin in seconds since 1970) and tenant ("": no tenant)."""


class Account:
    """Counts by hour and tenant, in memory until `write`, then in a file.

    A file that cannot be written is no reason to stop: the counts stay in memory, and are written later.

    Thread safety: any thread.
    """

    def __init__(
        self,
        path: Path,
        *,
        count_failed: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.time,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        """Keep the account in `path`; `count_failed` counts writes that failed."""
        self.path: Final = path
        self.clock: Final = clock
        self._count_failed: Final = count_failed
        self._max_bytes = max_bytes
        self._lock: Final = Lock()
        self._file_lock: Final = Lock()
        self._pending: Rows = {}
        self._totals: dict[str, Counts] = {}
        self._is_failing = False
        self._compact_at = max_bytes

    def add(self, tenant: str, counts: Counts) -> None:
        """Count something that happened just now."""
        hour = max(0, int(self.clock()) // HOUR_S * HOUR_S)
        with self._lock:
            self._pending.setdefault((hour, tenant), Counts()).add(counts)
            self._totals.setdefault(tenant, Counts()).add(counts)

    def hits(self) -> dict[str, Hits]:
        """Return the prompt tokens of each tenant since the start of this process."""
        with self._lock:
            return {tenant: Hits.total([counts]) for tenant, counts in self._totals.items()}

    def write(self) -> bool:
        """Append what was counted since the last call; return False if that was not possible."""
        with self._file_lock:
            with self._lock:
                pending, self._pending = self._pending, {}
            try:
                if pending:
                    append(self.path, b"".join(_line(*key, counts) for key, counts in pending.items()))
                    pending = {}
                if size_of(self.path) > self._compact_at:
                    self._compact()
            except OSError as error:
                with self._lock:
                    for key, counts in pending.items():
                        self._pending.setdefault(key, Counts()).add(counts)
                self._count_failed()
                if not self._is_failing:
                    self._is_failing = True
                    _log.error("the account %s cannot be written: %s", self.path, error.strerror or error)
                return False
            if self._is_failing:
                self._is_failing = False
                _log.warning("the account %s is written again", self.path)
            return True

    def close(self) -> None:
        """Write the rest, if the disk takes it within a moment."""
        # A daemon thread: a disk that hangs must not keep the process from its end.
        last = Thread(target=self.write, name="tiercache-account-end", daemon=True)
        last.start()
        last.join(_PATIENCE_S)

    def rows(self, tenant: str | None = None) -> Rows:
        """Return all rows, the oldest hour first; with `tenant`, only those of that tenant.

        Raises OSError.
        """
        with self._file_lock:
            found = self._read()
            with self._lock:
                for key, counts in self._pending.items():
                    found.setdefault(key, Counts()).add(counts)
        return {
            (hour, name): counts for (hour, name), counts in sorted(found.items()) if tenant in (None, name)
        }

    def _compact(self) -> None:
        """Write one line for each hour and tenant, without hours beyond MAX_HOURS; raises OSError."""
        rows = self._read()
        # The latest hours that have rows, not those before now: a clock that was wrong once costs nothing.
        kept = set(sorted({hour for hour, _ in rows})[-MAX_HOURS:])
        beside = self.path.with_name(self.path.name + ".new")
        beside.unlink(missing_ok=True)
        lines = [_line(*key, counts) for key, counts in sorted(rows.items()) if key[0] in kept]
        append(beside, b"".join(lines))
        beside.replace(self.path)
        self._compact_at = max(self._max_bytes, 2 * size_of(self.path))

    def _read(self) -> Rows:
        found: Rows = {}
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return found
        with open(file, "rb") as lines:
            while line := lines.readline(_MAX_LINE):
                row = _parsed(line)
                if row is not None:
                    found.setdefault(row[0], Counts()).add(row[1])
        return found


def _line(hour: int, tenant: str, counts: Counts) -> bytes:
    values = {name: value for name in NAMES if (value := getattr(counts, name))}
    return json.dumps({"hour": hour, "tenant": tenant, **values}).encode() + b"\n"


def _parsed(line: bytes) -> tuple[tuple[int, str], Counts] | None:
    """Return the row of a line; None for a line that is cut or damaged."""
    try:
        found: Any = json.loads(line)
        hour, tenant = found["hour"], found["tenant"]
        counts = Counts(**{name: found[name] for name in NAMES if name in found})
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    values = [(getattr(counts, name), limit) for name, limit in _LIMITS.items()]
    sound = all(type(value) in (int, type(limit)) and 0 <= value < limit for value, limit in values)
    is_row = sound and type(hour) is int and 0 <= hour < _MAX_FUTURE and isinstance(tenant, str)
    return ((hour, tenant), counts) if is_row else None


class _Price(NamedTuple):
    """Tokens and FLOPs for which one page of a namespace stands."""

    page_size: int
    flops: int | None
    """FLOPs of a prefill per token; None if they are not known."""
    seconds: float | None = None
    """Duration of a prefill per token; None if it is not known."""


class PriceList:
    """Prices of the pages of each namespace, by the records of a store.

    What is registered with this daemon is known at once. The records of others are known after the next
    `read_records`, beside the calls: of a bucket, that takes requests.

    Thread safety: any thread.
    """

    def __init__(self, store: StorageBackend) -> None:
        self._store: Final = store
        self._lock: Final = Lock()
        self._prices: Mapping[bytes, _Price] = {}

    def read_records(self) -> None:
        """Read all records of the store."""
        with suppress(StorageError, ClosedError):
            found = _prices(self._store.namespaces())
            with self._lock:
                self._prices = {**self._prices, **found}

    def learn_record(self, record: NamespaceRecord) -> None:
        """Learn of a record that is registered; what it does not tell stays as it was known."""
        with self._lock:
            for namespace, price in _prices([record]).items():
                known = self._prices.get(namespace, price)
                price = price._replace(
                    flops=price.flops or known.flops, seconds=price.seconds or known.seconds
                )
                self._prices = {**self._prices, namespace: price}

    def price_of(self, namespace: bytes | None) -> _Price | None:
        """Return what a page of a namespace stands for; None if no record says so."""
        return None if namespace is None else self._prices.get(namespace)

    def page_sizes(self, owns: Callable[[bytes], bool]) -> set[int]:
        """Return the page sizes of some namespaces."""
        return {price.page_size for namespace, price in self._prices.items() if owns(namespace)}


class TenantAccount:
    """Account of one tenant; all views of the tenant share it.

    Thread safety: any thread.
    """

    def __init__(
        self, account: Account, tenant: str, prices: PriceList, owns: Callable[[bytes], bool]
    ) -> None:
        """Count for `tenant`; `owns` says whether a namespace, by its name in the store, is the tenant's."""
        self._account: Final = account
        self._tenant: Final = tenant
        self._owns: Final = owns
        self._lock: Final = Lock()
        self.prices: Final = prices
        self._hour = 0
        self._usual: dict[bytes, bytes | None] = {}
        """Namespace of the objects of each layout, see `_see`; None if there are several."""
        self._is_timed = False
        """Whether the tokens that were read last have a price in seconds; states are read along with them."""
        self._layouts: dict[bytes, bytes] = {}
        """Layout whose pages stand for tokens in this hour, by namespace."""

    def count_exists(self, keys: Sequence[ObjectKey], answers: Sequence[bool]) -> None:
        """Count objects that were looked up, and the tokens for which they stand, found or not."""
        found = sum(answers)
        counts = Counts(found_objects=found, absent_objects=len(answers) - found)
        for key, objects in _by_layout(keys):
            namespace = self._usual.get(key.layout)
            if key.pool is not PoolName.KV:
                # A state of a model without pages stands for its whole prompt; of an absent one nothing is
                # known.
                if namespace is None and key.layout in self._usual:
                    counts.unsized_objects += objects
                continue
            price = self.prices.price_of(namespace)
            sizes = self.prices.page_sizes(self._owns) if price is None else {price.page_size}
            if len(sizes) != 1:
                counts.unsized_objects += objects
            elif self._stands_for_tokens(namespace or b"", key.layout):
                counts.asked_tokens += objects * sizes.pop()
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

    def _see(self, layout: bytes, kind: bytes | None) -> None:
        """Learn of an object of a layout: its namespace, b"" if it stands for no page, None to ask always."""
        with self._lock:
            if layout in self._usual:
                if self._usual[layout] != kind:
                    self._usual[layout] = None
            elif len(self._usual) < _MAX_LAYOUTS:
                self._usual[layout] = kind

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
                price = self.prices.price_of(namespace) if pages else None
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
        """Return the namespaces of objects of one layout, each with the pages for which they stand.

        The store is asked until the layout is known, and each time if several namespaces have the layout, as
        two revisions of a model have.
        """
        known = self._usual.get(layout)
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
