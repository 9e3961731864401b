"""`EventLog`: numbered batches of KV events, the latest of which are kept, and replays of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final

from tiercache.errors import InputError, StorageError
from tiercache.events.base import EventKind, EventSource, KVEvent

MAX_BATCHES: Final = 10_000
"""Default number of batches that a log keeps, as in vLLM."""
KEYS_PER_BATCH: Final = 64
"""A log keeps at most this many keys for each batch that it may keep."""
_TICKS: Final = 1 << 20
"""Numbers between the first numbers of two logs that were made a second apart.

A log with fewer batches a second than this has larger numbers than any log before it.
"""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events that were published together."""

    sequence: int
    """Number of the batch; the next batch of the same log has the next number."""
    time: float
    """Seconds since 1970."""
    events: tuple[KVEvent, ...]


@dataclass(frozen=True, slots=True)
class EventReading:
    """Answer of `EventLog.read`."""

    batches: Sequence[EventBatch]
    missed: int
    """Number of batches before the first of these that were asked for and that the log has no more.

    A number that the log has not yet given, as after a restart of a publisher whose clock went back, counts
    as one missed batch.
    """
    next: int
    """Number to read from the next time."""


class EventLog:
    """Ring of the last batches of KV events, numbered one by one.

    `batches` is the maximum number of batches that the ring keeps; of their keys it keeps at most
    `KEYS_PER_BATCH` for each. Numbers begin with the time of day, so that a reader of an earlier log of the
    same publisher sees a gap, and not numbers that it takes for known ones.

    Thread safety: any thread. No method waits, except for a lock that is held for a few microseconds.
    """

    def __init__(self, batches: int = MAX_BATCHES, clock: Callable[[], float] = time.time) -> None:
        if batches < 1:
            raise InputError(f"a log of {batches} batches is not possible; keep one at least")
        self._ring: list[EventBatch | None] = [None] * batches
        self._max_keys = batches * KEYS_PER_BATCH
        self._keys = 0
        self._clock = clock
        self._lock = Lock()
        self._oldest = self._next = max(1, int(clock() * _TICKS))
        self._pid = os.getpid()
        self.events = 0
        """Number of events published so far."""

    @property
    def next(self) -> int:
        """Number that the next batch will have."""
        return self._next

    @property
    def oldest(self) -> int:
        """Number of the oldest batch that is kept; equals `next` if none is."""
        return self._oldest

    def follows(self, number: int) -> bool:
        """Return whether the log has every batch from `number` on, also if that is the next one."""
        return self._oldest <= number <= self._next

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Append a batch. An empty batch is ignored, and so is every batch in a forked process."""
        if not events or os.getpid() != self._pid:
            return
        with self._lock:
            batch = EventBatch(self._next, self._clock(), tuple(events))
            place = self._next % len(self._ring)
            self._keys += _keys_of(batch)
            if self._next - self._oldest == len(self._ring):
                self._forget()
            self._ring[place] = batch
            self._next += 1
            while self._keys > self._max_keys and self._next - self._oldest > 1:
                self._forget()
            self.events += len(batch.events)

    def read(self, start: int, limit: int = 256) -> EventReading:
        """Return at most `limit` batches with the numbers from `start` on."""
        with self._lock:
            if start > self._next:
                return EventReading((), 1, self._next)
            first = max(start, self._oldest)
            end = min(self._next, first + limit)
            size = len(self._ring)
            found = [batch for n in range(first, end) if (batch := self._ring[n % size]) is not None]
        return EventReading(found, first - start, end)

    def _forget(self) -> None:
        place = self._oldest % len(self._ring)
        batch = self._ring[place]
        assert batch is not None, "the ring has every batch from the oldest on"
        self._keys -= _keys_of(batch)
        self._ring[place] = None
        self._oldest += 1


def _keys_of(batch: EventBatch) -> int:
    return sum(1 + len(event.keys) + len(event.tokens) // 4 for event in batch.events)


def replay(log: EventLog, sources: Sequence[EventSource], start: int) -> Iterator[EventBatch]:
    """Yield the batches from the number `start` on, to the last that the log has when this ends.

    If the log no longer has the first batch, or never had it, the answer begins with a snapshot of `sources`.
    Its batches have the number of the batch before those that follow it:

        asked 10, the log has 40 to 57     snapshot: 57 everything is cleared, 57 stored ..., 57 stored ...
                                           then:     58, 59 (published during the snapshot)

    Raises StorageError if a source cannot be asked, or if the snapshot took longer than the log remembers:
    the subscriber asks again.
    """
    at = start
    if not log.follows(start):
        at = log.next
        yield EventBatch(at - 1, time.time(), (KVEvent(EventKind.CLEARED, None),))
        for source in sources:
            for events in source.snapshot():
                if events:
                    yield EventBatch(at - 1, time.time(), tuple(events))
    while at < log.next:
        reading = log.read(at)
        if reading.missed:
            raise StorageError("batches were forgotten before they could be sent again")
        yield from reading.batches
        at = reading.next
