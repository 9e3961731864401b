"""`EventLog`: numbered batches of KV events, the latest of which are kept, and replays of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tiercache.errors import StorageError
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


class EventLog:
    """The last batches of KV events, numbered one by one.

    `batches` is the maximum number of batches that are kept, one at least; of their keys at most
    `KEYS_PER_BATCH` for each. Numbers begin with the time of day, so that a reader of an earlier log of the
    same publisher sees a gap, and not numbers that it takes for known ones.

    Thread safety: one thread.
    """

    def __init__(self, batches: int = MAX_BATCHES, clock: Callable[[], float] = time.time) -> None:
        self._kept: deque[EventBatch] = deque()
        self._max_batches = batches
        self._keys = 0
        self._clock = clock
        self.next = max(1, int(clock() * _TICKS))
        """Number that the next batch will have."""
        self.events = 0
        """Number of events published so far."""

    @property
    def oldest(self) -> int:
        """Number of the oldest batch that is kept; equals `next` if none is."""
        return self.next - len(self._kept)

    def follows(self, number: int) -> bool:
        """Return whether the log has every batch from `number` on, also if that is the next one."""
        return self.oldest <= number <= self.next

    def publish(self, events: Sequence[KVEvent]) -> EventBatch:
        """Append a batch, and return it."""
        batch = EventBatch(self.next, self._clock(), tuple(events))
        self._kept.append(batch)
        self.next += 1
        self.events += len(batch.events)
        self._keys += _keys_of(batch)
        too_many = KEYS_PER_BATCH * self._max_batches
        while len(self._kept) > self._max_batches or (self._keys > too_many and len(self._kept) > 1):
            self._keys -= _keys_of(self._kept.popleft())
        return batch

    def replay(self, sources: Sequence[EventSource], start: int) -> Iterator[EventBatch]:
        """Yield the batches from the number `start` on, to the last that the log has when this ends.

        If the log no longer has the first batch, or never had it, the answer begins with a snapshot of
        `sources`. Its batches have the number of the batch before those that follow it:

            asked 10, the log has 40 to 57    snapshot: 57 everything is cleared, 57 stored ..., 57 stored ...
                                              then:     58, 59 (published during the snapshot)

        Raises StorageError if a source cannot be asked, or if the snapshot took longer than the log
        remembers: the subscriber asks again.
        """
        at = start
        if not self.follows(start):
            at = self.next
            yield EventBatch(at - 1, self._clock(), (KVEvent(EventKind.CLEARED, None),))
            for source in sources:
                for events in source.snapshot():
                    if events:
                        yield EventBatch(at - 1, self._clock(), tuple(events))
        while at < self.next:
            if at < self.oldest:
                raise StorageError("batches were forgotten before they could be sent again")
            yield self._kept[at - self.oldest]
            at += 1


def _keys_of(batch: EventBatch) -> int:
    return sum(1 + len(event.keys) + len(event.tokens) // 4 for event in batch.events)
