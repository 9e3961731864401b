"""Answer to a subscriber that has missed batches: the batches that the log has, or a snapshot before them.

asked 10, the log has 40 to 57     snapshot: 57 everything is cleared, 57 stored ..., 57 stored ...
                                   then:     58, 59 (published during the snapshot)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from tiercache.errors import StorageError
from tiercache.events.base import EventKind, KVEvent
from tiercache.events.log import EventBatch, EventLog
from tiercache.events.source import EventSource


def replay(log: EventLog, sources: Sequence[EventSource], start: int) -> Iterator[EventBatch]:
    """Yield the batches from the number `start` on, to the last that the log has when this ends.

    If the log no longer has the first batch, or never had it, the answer begins with a snapshot of `sources`.
    Its batches have the number of the batch before those that follow it.

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
