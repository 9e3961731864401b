"""Reads and writes of objects: packs that are put once and read in ranges, tombstones, and removals."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from typing import Final, NamedTuple

from tiercache.core import Outcome
from tiercache.storage.base import GetItem, meta_of
from tiercache.storage.checksum import checksum
from tiercache.storage.vectors import batches, copy_out, total
from tiercache_backends.s3.choices import CodecChoices
from tiercache_backends.s3.compression import Codec, decode
from tiercache_backends.s3.directory import (
    BucketDirectory,
    ObjectPlace,
    ObjectWrite,
    Pack,
    PackRemoval,
    WritePlan,
)
from tiercache_backends.s3.failures import AbsentError, BusyError, RequestError
from tiercache_backends.s3.pack import (
    FOLDER,
    MAX_ENTRIES,
    NewEntry,
    make_name,
    pack_head,
    read_head,
    tombstone,
)
from tiercache_backends.s3.service import BucketClient, PendingRequest

_TOMB_PACKS: Final = 32
"""Packs of one tombstone; keeps it below `pack.MAX_TOMBSTONE` if all entries of each are dead but one."""


class _Sent(NamedTuple):
    """A pack on its way."""

    pack: Pack
    writes: list[ObjectWrite]
    request: PendingRequest[None]


class PackWriter:
    """Writer of packs and tombstones, under names that no other writer has.

    Thread safety: any thread may call.
    """

    def __init__(
        self,
        service: BucketClient,
        directory: BucketDirectory,
        choices: CodecChoices,
        pack_bytes: int,
        time_ns: Callable[[], int],
    ) -> None:
        self._service = service
        self._directory = directory
        self._choices = choices
        self._pack_bytes = pack_bytes
        self._time_ns = time_ns
        self._writer: Final = secrets.token_hex(8)
        self._numbers: Final = count(1)

    def write(self, plan: WritePlan) -> list[Outcome]:
        """Write what a plan claims, wait for what other calls write, and return the outcomes."""
        waiting: list[_Sent] = []
        try:
            for group in batches(
                plan.writes, lambda write: write.item.meta.length, MAX_ENTRIES, self._pack_bytes
            ):
                self._send(group, waiting)
            for sent in waiting:
                self._finish(sent)
        finally:
            left = [write for write in plan.writes if not write.ended.is_set()]
            self._directory.fail(left, Outcome.ERROR)
        for write in plan.writes:
            plan.outcomes[write.index] = write.outcome
        for i, write in plan.waits:
            write.ended.wait()
            plan.outcomes[i] = Outcome.HIT if write.outcome is Outcome.STORED else write.outcome
        return [Outcome.ERROR if outcome is None else outcome for outcome in plan.outcomes]

    def remove(self, removal: PackRemoval) -> None:
        """Do in the bucket what a removal asks for. Raises RequestError; part of it may be done then."""
        names = list(removal.dead)
        for at in range(0, len(names), _TOMB_PACKS):
            self._bury({name: removal.dead[name] for name in names[at : at + _TOMB_PACKS]})
        self._service.delete([f"{FOLDER}/{pack.name}" for pack in removal.packs], self._service.deadline())

    def _bury(self, dead: dict[str, set[int]]) -> None:
        content = tombstone(dead)
        name, until = self._name(None), self._service.deadline()
        if not self._service.has_room(len(content), until, wait=True):
            raise BusyError(f"{self._service.where}: too much is in flight; raise in_flight")
        self._directory.expect(name, len(content))
        try:
            self._service.put(f"{FOLDER}/{name}", content, until).result()
        except RequestError:
            self._directory.fail((), Outcome.ERROR, name)
            raise
        self._directory.bury(name, len(content), dead)

    def _send(self, writes: list[ObjectWrite], waiting: list[_Sent]) -> None:
        """Begin to write one pack; finish earlier ones while the bytes in flight leave no room."""
        # The share is taken before anything is encoded, so that no more than `in_flight` is held in memory.
        share = sum(write.item.meta.length for write in writes)
        until = self._service.deadline(share)
        while not self._service.has_room(share, until, wait=not waiting):
            if not waiting:
                self._directory.fail(writes, Outcome.THROTTLED)
                return
            self._finish(waiting.pop(0))
        name = ""
        try:
            head, pieces = self._encoded(writes)
            nbytes = len(head) + total(pieces)
            self._service.in_flight.leave(share - nbytes)
            share = nbytes
            index = read_head(head, nbytes)
            assert index is not None, "a pack that was just made can be read"
            name = self._name(len(head))
            pack = Pack(name, nbytes, self._time_ns() // 1_000_000 / 1e3, index)
            self._directory.expect(name, nbytes)
            data = b"".join([head, *pieces])
            share = 0  # from here on it is the request's
            waiting.append(_Sent(pack, writes, self._service.put(f"{FOLDER}/{name}", data, until)))
        except RequestError as error:
            self._directory.fail(writes, error.outcome_of_set, name)
        finally:
            self._service.in_flight.leave(share)

    def _encoded(self, writes: Sequence[ObjectWrite]) -> tuple[bytes, list[memoryview]]:
        """Return the head of a pack of these objects, and their stored bytes."""
        entries, pieces = [], list[memoryview]()
        for write in writes:
            item = write.item
            encoded = self._choices.encode(item.key, item.buffers, item.meta.length)
            entries.append(NewEntry(item.key, meta_of(item), encoded.codec, total(encoded.pieces)))
            pieces += encoded.pieces
        return pack_head(entries), pieces

    def _finish(self, sent: _Sent) -> None:
        try:
            sent.request.result()
        except RequestError as error:
            self._directory.fail(sent.writes, error.outcome_of_set, sent.pack.name)
            return
        self._directory.publish(sent.pack, sent.writes)

    def _name(self, head: int | None) -> str:
        return make_name(self._time_ns() // 1_000_000, self._writer, next(self._numbers), head)


_CODECS: Final = frozenset(Codec)
"""Codecs that this version reads; an object with another codec, of a later version, is a miss."""
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
    """Reader of objects in packs.

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
                outcomes.update({one.index: error.outcome_of_get for one in part.wanted})
        for entry in waiting:
            outcomes.update(self._finish(*entry))
        return outcomes

    def _finish(self, part: _Range, request: PendingRequest[memoryview]) -> dict[int, Outcome]:
        try:
            data = request.result()
        except RequestError as error:
            if isinstance(error, AbsentError):
                self._vanished(part.wanted[0].place.pack.name)
            return {one.index: error.outcome_of_get for one in part.wanted}
        return {one.index: _deliver(one, data, part.start) for one in part.wanted}


def _deliver(one: WantedObject, data: memoryview, start: int) -> Outcome:
    """Verify the stored bytes of an object and copy them into the buffers of its item."""
    entry, item = one.place.entry, one.item
    if entry.codec not in _CODECS:
        return Outcome.MISS
    stored = data[entry.offset - start : entry.offset - start + entry.stored]
    payload = decode(entry.codec, stored, item.length) if stored.nbytes == entry.stored else None
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
