"""Reading and deletion of objects in batches of limited size."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from mmap import mmap
from typing import Final, NamedTuple

import typer

from tiercache.cli.store.target import Target, check_allowed
from tiercache.cli.terminal import clean
from tiercache.core import BLOCK_ALIGN, Outcome
from tiercache.errors import RefusedError, StorageError, UnavailableError
from tiercache.storage.base import GetItem, ScanEntry, StorageBackend
from tiercache.storage.vectors import batches

BATCH_BYTES: Final = 64 << 20
"""Maximum bytes of a batch; a larger object is a batch of its own."""
_BATCH_OBJECTS: Final = 512
"""Maximum number of objects of a batch."""
_TRIES: Final = 20
"""Maximum number of attempts to read a throttled object."""
_PAUSE: Final = 0.1
"""Seconds between two attempts, in which a busy daemon can make progress."""


class Checked(NamedTuple):
    """Object that was read, with the outcome.

    HIT                 the object is intact
    CORRUPT             the object is damaged
    MISS                the object was removed after the scan
    ERROR, THROTTLED    the object could not be read
    """

    entry: ScanEntry
    outcome: Outcome


class ObjectReader:
    """Reader of one store's objects, in batches of at most `BATCH_BYTES` or of one larger object.

    Thread safety: one thread.
    """

    def __init__(self, store: StorageBackend) -> None:
        self._store = store
        self._buffer = memoryview(mmap(-1, BATCH_BYTES))

    def check(self, entries: Iterable[ScanEntry]) -> Iterator[list[Checked]]:
        """Read each object and yield the outcomes, one list for each batch; this is no use of the objects.

        A store that was opened for change drops the objects that it finds corrupt.
        """
        for batch in batches(entries, _padded, _BATCH_OBJECTS, BATCH_BYTES):
            found = [Outcome.THROTTLED] * len(batch)
            for tried in range(_TRIES):
                again = [n for n, outcome in enumerate(found) if outcome is Outcome.THROTTLED]
                if not again:
                    break
                if tried:
                    time.sleep(_PAUSE)
                for n, outcome in zip(again, self._read([batch[n] for n in again]), strict=True):
                    found[n] = outcome
            yield [Checked(entry, outcome) for entry, outcome in zip(batch, found, strict=True)]

    def _read(self, batch: list[ScanEntry]) -> list[Outcome]:
        try:
            buffer = (
                self._buffer if _padded(batch[0]) <= BATCH_BYTES else memoryview(mmap(-1, _padded(batch[0])))
            )
        except (OSError, OverflowError, MemoryError):
            # The batch is a single object, and its recorded length is more than this machine can map.
            return [Outcome.ERROR] * len(batch)
        items: list[GetItem] = []
        start = 0
        for entry in batch:
            items.append(GetItem(entry.key, [buffer[start : start + _padded(entry)]], entry.meta.length))
            start += _padded(entry)
        return self._store.peek(items)


def _padded(entry: ScanEntry) -> int:
    """Return the size in bytes of an object's buffer: whole pages of 4 KiB, which O_DIRECT needs."""
    return max(1, -(-entry.meta.length // BLOCK_ALIGN)) * BLOCK_ALIGN


_DELETED_OBJECTS: Final = 256
"""Maximum number of objects of one `delete` call."""


def check_removable(target: Target, store: StorageBackend) -> None:
    """Raise RefusedError if a daemon would refuse any of the calls that `remove` makes.

    Call this before anything is changed.
    """
    check_allowed(target, store, "to delete", ("Exists", "Delete", "Flush"))


class Removed(NamedTuple):
    """Batch of objects for which `delete` was called."""

    entries: Sequence[ScanEntry]
    """All objects of the batch."""
    failed: Sequence[ScanEntry]
    """Objects of the batch that are still stored."""


def remove(
    target: Target, store: StorageBackend, ordered: Sequence[ScanEntry], at_once: int = _DELETED_OBJECTS
) -> Iterator[Removed]:
    """Delete objects in the given order, `at_once` objects per call, and yield each batch when it is done.

    The store is flushed at the end, so that the deletion is durable. What is deleted stays deleted if the
    store cannot say that, such as a chain in which copies of other objects wait.
    """
    for start in range(0, len(ordered), at_once):
        batch = ordered[start : start + at_once]
        answers = store.delete([entry.key for entry in batch])
        # If `delete` did not remove an object, the object may have been gone before, which is no failure.
        doubtful = [entry for entry, gone in zip(batch, answers, strict=True) if not gone]
        there = store.exists([entry.key for entry in doubtful]) if doubtful else []
        yield Removed(batch, [entry for entry, still in zip(doubtful, there, strict=True) if still])
    if ordered:
        try:
            store.flush()
        except (UnavailableError, RefusedError):
            raise
        except StorageError as error:
            typer.echo(f"deleted, but a power cut could undo it: {clean(str(error))}", err=True)
