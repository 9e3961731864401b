"""Reads: range requests that join neighbours in a pack, and verify before a caller's buffer is touched."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from tiercache.core import Outcome
from tiercache.storage.base import GetItem
from tiercache.storage.checksum import checksum
from tiercache.storage.vectors import copy_out
from tiercache_backends.s3.choices import CODECS, decode_stored
from tiercache_backends.s3.directory.objects import ObjectPlace
from tiercache_backends.s3.failures import FailureKind, RequestError, outcome_of
from tiercache_backends.s3.pack import FOLDER
from tiercache_backends.s3.service import BucketClient, PendingRequest

_log = logging.getLogger(__name__)

_GAP: Final = 64 << 10
"""Unwanted bytes between two objects that are read along: cheaper than a request of their own."""
_RANGE: Final = 8 << 20
"""Bytes after which a range ends, so that several requests share a long run."""


@dataclass(slots=True)
class WantedObject:
    """An item of a get, and where its object lies."""

    index: int
    item: GetItem
    place: ObjectPlace


@dataclass(slots=True)
class _Range:
    """Objects that one request reads: bytes [start, stop) of a pack."""

    wanted: list[WantedObject]
    start: int
    stop: int


class PackReader:
    """PackReader of objects in packs.

    Thread safety: any thread may call.
    """

    def __init__(self, service: BucketClient, vanished: Callable[[str], None]) -> None:
        self._service = service
        self._vanished = vanished
        """Called with the name of a pack that is gone."""
        self.read_again = 0
        """Number of objects that were right only when they were read a second time."""

    def read(self, wanted: Sequence[WantedObject]) -> dict[int, Outcome]:
        """Read and verify objects into the buffers of their items; return the outcomes by index.

        CORRUPT: the bytes were wrong twice.
        """
        outcomes = self._read(wanted)
        suspects = [one for one in wanted if outcomes[one.index] is Outcome.CORRUPT]
        if suspects:
            # The bytes may have been damaged on their way. So ask once more before the object is dropped.
            again = self._read(suspects)
            self.read_again += sum(outcome is Outcome.HIT for outcome in again.values())
            outcomes.update(again)
        return outcomes

    def _read(self, wanted: Sequence[WantedObject]) -> dict[int, Outcome]:
        outcomes: dict[int, Outcome] = {}
        ranges = _ranges(wanted)
        until = self._service.deadline(sum(part.stop - part.start for part in ranges))
        waiting: list[tuple[_Range, PendingRequest[memoryview]]] = []
        for part in ranges:
            nbytes = part.stop - part.start
            while not self._service.has_room(nbytes, until, wait=not waiting):
                if not waiting:
                    return outcomes | {
                        one.index: Outcome.THROTTLED for one in wanted if one.index not in outcomes
                    }
                outcomes.update(self._finish(*waiting.pop(0)))
            name = f"{FOLDER}/{part.wanted[0].place.pack.name}"
            try:
                waiting.append((part, self._service.read(name, part.start, part.stop, until)))
            except RequestError as error:
                outcomes.update({one.index: outcome_of(error) for one in part.wanted})
        for entry in waiting:
            outcomes.update(self._finish(*entry))
        return outcomes

    def _finish(self, part: _Range, request: PendingRequest[memoryview]) -> dict[int, Outcome]:
        try:
            data = request.result()
        except RequestError as error:
            if error.kind is FailureKind.ABSENT:
                self._vanished(part.wanted[0].place.pack.name)
            return {one.index: outcome_of(error) for one in part.wanted}
        return {one.index: _deliver(one, data, part.start) for one in part.wanted}


def _deliver(one: WantedObject, data: memoryview, start: int) -> Outcome:
    """Verify the stored bytes of an object and copy them into the buffers of its item."""
    entry, item = one.place.entry, one.item
    if entry.codec not in CODECS:
        return Outcome.MISS
    stored = data[entry.offset - start : entry.offset - start + entry.stored]
    payload = decode_stored(entry.codec, stored, item.length) if stored.nbytes == entry.stored else None
    if payload is None or checksum(item.key, [payload], item.length) != entry.meta.checksum:
        return Outcome.CORRUPT
    copy_out(payload, item.buffers)
    return Outcome.HIT


def _ranges(wanted: Sequence[WantedObject]) -> list[_Range]:
    """Join objects that are neighbours in a pack."""
    found: list[_Range] = []
    ordered = sorted(wanted, key=lambda one: (one.place.pack.name, one.place.entry.offset))
    for _, group in groupby(ordered, key=lambda one: one.place.pack.name):
        last: _Range | None = None
        for one in group:
            start, stop = one.place.entry.offset, one.place.entry.offset + one.place.entry.stored
            if last is not None and start <= last.stop + _GAP and stop - last.start <= _RANGE:
                last.wanted.append(one)
                last.stop = max(last.stop, stop)
            else:
                last = _Range([one], start, stop)
                found.append(last)
    return found
