"""Reading and checking of objects in batches of limited size, into a buffer that is reused."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from mmap import mmap
from typing import Final, NamedTuple

from tiercache.core import BLOCK_ALIGN, Outcome
from tiercache.storage.base import GetItem, ScanEntry, StorageBackend

BATCH_BYTES: Final = 64 << 20
"""Bytes of a batch at most; a larger object is a batch of its own."""
_BATCH_OBJECTS: Final = 512
"""Objects of a batch at most."""
_TRIES: Final = 20
"""Times that a throttled object is read at most."""
_PAUSE: Final = 0.1
"""Seconds between two tries of throttled objects, in which a busy daemon can make progress."""


class Checked(NamedTuple):
    """The outcome for one object: HIT is sound, CORRUPT is not, MISS is gone meanwhile, ERROR and THROTTLED could not be read."""

    entry: ScanEntry
    outcome: Outcome


class Reading:
    """Reads objects of one store in batches of at most `BATCH_BYTES`; a larger object gets a buffer of its own size.

    Thread safety: one thread.
    """

    def __init__(self, store: StorageBackend) -> None:
        self._store = store
        self._buffer = memoryview(mmap(-1, BATCH_BYTES))

    def check(self, entries: Iterable[ScanEntry]) -> Iterator[list[Checked]]:
        """Read and check each object, batch by batch. A store that is open for change drops objects that it finds corrupt."""
        for batch in _batches(entries):
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
            buffer = self._buffer if _padded(batch[0]) <= BATCH_BYTES else memoryview(mmap(-1, _padded(batch[0])))
        except (OSError, OverflowError, MemoryError):
            return [Outcome.ERROR] * len(batch)  # a batch of one object, whose recorded length exceeds what this machine can map
        items: list[GetItem] = []
        start = 0
        for entry in batch:
            items.append(GetItem(entry.key, [buffer[start : start + _padded(entry)]], entry.meta.length))
            start += _padded(entry)
        return self._store.get(items)


def _batches(entries: Iterable[ScanEntry]) -> Iterator[list[ScanEntry]]:
    batch: list[ScanEntry] = []
    nbytes = 0
    for entry in entries:
        if batch and (nbytes + _padded(entry) > BATCH_BYTES or len(batch) >= _BATCH_OBJECTS):
            yield batch
            batch, nbytes = [], 0
        batch.append(entry)
        nbytes += _padded(entry)
    if batch:
        yield batch


def _padded(entry: ScanEntry) -> int:
    """Return the bytes of the object's buffer: whole blocks, one at least, because O_DIRECT requires them."""
    return max(1, -(-entry.meta.length // BLOCK_ALIGN)) * BLOCK_ALIGN
