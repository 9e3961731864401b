"""Payloads in messages (Get and Set)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from dataclasses import replace
from threading import Lock
from typing import Final

from tiercache.core import ObjectKey, Outcome
from tiercache.errors import WireError
from tiercache.storage.base import GetItem, SetItem, checksum_of
from tiercache.storage.checksum import CHECKSUM_BYTES, checksum
from tiercache.storage.vectors import take
from tiercache.wire import messages
from tiercache.wire.frames import CHUNK_BYTES, Piece, cut, decode, encode
from tiercache.wire.v1 import storage_pb2 as pb
from tiercache_backends.grpc.connection import Connection
from tiercache_backends.grpc.failures import CallError, Kind
from tiercache_backends.grpc.link import Link
from tiercache_backends.grpc.parts import cut_off, parts, unread, unwritten

_ASK_FIRST: Final = 256 << 10
"""Object size in bytes from which on the daemon is first asked for the object. A smaller one is sent at once, which counts as a use."""


class StreamPlane:
    """Payload transfer in messages, for well-formed items, none larger than the daemon accepts.

    Thread safety: any thread may call.
    """

    def __init__(self, link: Link, timeout: float) -> None:
        self._link = link
        self._timeout = timeout

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        """Read items, as `StorageBackend.get` does.

        An object that arrives damaged is ERROR and not CORRUPT: the stored object is sound, nothing is dropped in the store, and it must
        not be counted as corrupt.
        """
        outcomes: list[Outcome] = []
        for part in parts([item.length for item in items], self._link.limits.keys):
            incoming = _Incoming(items[part])
            try:
                self._link.perform(incoming.receive, self._timeout)
            except CallError as error:
                incoming.fill(unread(error))
                if cut_off(error):
                    return outcomes + incoming.outcomes + [unread(error)] * (len(items) - part.stop)
            outcomes += incoming.outcomes
        return outcomes

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        """Store items with distinct keys, as `StorageBackend.set` does."""
        outcomes: list[Outcome] = []
        for part in parts([item.meta.length for item in items], self._link.limits.keys):
            try:
                # Later items of a batch often depend on earlier ones, and must not evict them from a full store.
                full = Outcome.THROTTLED in outcomes
                outcomes += self.held_or_throttled(items[part]) if full else self._set_part(items[part])
            except CallError as error:
                outcomes += [unwritten(error)] * (part.stop - part.start)
                if cut_off(error):
                    return outcomes + [unwritten(error)] * (len(items) - part.stop)
        return outcomes

    def held_or_throttled(self, items: Sequence[SetItem]) -> list[Outcome]:
        """Return HIT for items that the daemon has, else THROTTLED, once an earlier item found no room; raise CallError."""
        held = self._held(items)
        return [Outcome.HIT if item.key in held else Outcome.THROTTLED for item in items]

    def _set_part(self, items: Sequence[SetItem]) -> list[Outcome]:
        held = self._held([item for item in items if item.meta.length >= _ASK_FIRST])
        missing = [item for item in items if item.key not in held]
        sums = [checksum_of(item) for item in missing]
        answers = iter(self._link.perform(lambda c, seconds: self._send(c, missing, sums, seconds), self._timeout) if missing else ())
        return [Outcome.HIT if item.key in held else next(answers) for item in items]

    def _held(self, items: Sequence[SetItem]) -> AbstractSet[ObjectKey]:
        """Return the keys of those items that the daemon has; raise CallError."""
        if not items:
            return frozenset()
        request = pb.ExistsRequest(keys=messages.keys([item.key for item in items]))
        bits = self._link.perform(lambda c, seconds: c.call("Exists", request, seconds).bits, self._timeout)
        return {item.key for item, there in zip(items, messages.read_bits(bits, len(items)), strict=True) if there}

    def _send(self, connection: Connection, items: Sequence[SetItem], sums: Sequence[bytes], seconds: float) -> list[Outcome]:
        outgoing = _Outgoing(items, sums, min(CHUNK_BYTES, self._link.limits.message_bytes // 2))
        try:
            reply = connection.call("Set", outgoing, seconds)
            return messages.read_outcomes(reply.outcomes, len(items))
        except WireError as error:
            raise CallError(Kind.WRONG, str(error)) from error
        finally:
            outgoing.end()


class _Outgoing:
    """Messages of a set, each made when gRPC asks for it, on one of gRPC's threads.

    gRPC may ask once more after the call has failed, while the caller already reuses the buffers. So `end` waits for a message that is
    being made; afterwards none is made, and the buffers are not kept.

    Thread safety: one thread iterates, another may call `end`.
    """

    def __init__(self, items: Sequence[SetItem], sums: Sequence[bytes], chunk: int) -> None:
        self._lock = Lock()
        self._items: Sequence[SetItem] = items
        self._sums = sums
        self._pieces = cut([item.meta.length for item in items], chunk)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        with self._lock:
            if not self._items:
                raise StopIteration
            return self._frame(next(self._pieces))

    def end(self) -> None:
        """Stop using the buffers, after any message that is being made."""
        with self._lock:
            self._items = ()

    def _frame(self, pieces: Sequence[Piece]) -> bytes:
        begun = [piece.item for piece in pieces if not piece.start]
        header = pb.SetPieces(
            sizes=[piece.stop - piece.start for piece in pieces],
            begins=[not piece.start for piece in pieces],
            keys=messages.keys([self._items[n].key for n in begun]),
            metas=[messages.meta(replace(self._items[n].meta, checksum=self._sums[n])) for n in begun],
        )
        return encode(header, [view for piece in pieces for view in take(self._items[piece.item].buffers, piece.start, piece.stop)])


class _Incoming:
    """Items of one get, as they arrive.

    Thread safety: used by the caller's thread only.
    """

    def __init__(self, items: Sequence[GetItem]) -> None:
        self._items = items
        self._keys = messages.keys([item.key for item in items])
        self.outcomes: list[Outcome] = []
        """Outcomes of the items that are complete."""

    def receive(self, connection: Connection, seconds: float) -> None:
        """Make the call and fill the buffers; raise CallError, also for an answer that violates the protocol."""
        request = pb.GetRequest(keys=self._keys, lengths=[item.length for item in self._items])
        self.outcomes = []
        self._at = 0  # bytes of the current item that have arrived
        try:
            with closing(connection.stream("Get", request, seconds)) as frames:  # type: ignore[type-var]  # a generator has close
                for frame in frames:
                    self._take_in(*decode(frame, pb.GetPieces))
        except WireError as error:
            raise CallError(Kind.WRONG, str(error)) from error
        if len(self.outcomes) != len(self._items):
            raise CallError(Kind.WRONG, f"the daemon answered {len(self.outcomes)} of {len(self._items)} items; is it another version?")

    def fill(self, outcome: Outcome) -> None:
        """Give `outcome` to all items that are not complete."""
        self.outcomes += [outcome] * (len(self._items) - len(self.outcomes))

    def _take_in(self, header: pb.GetPieces, payload: memoryview) -> None:
        if not len(header.items) == len(header.outcomes) == len(header.sizes) or sum(header.sizes) != payload.nbytes:
            raise WireError("the columns of a message of pieces do not have the same length; is the daemon another version?")
        at = taken = 0
        for item, number, size in zip(header.items, header.outcomes, header.sizes, strict=True):
            if item != len(self.outcomes) or item >= len(self._items) or bool(number) != (not self._at):
                raise WireError("a message of pieces is out of order; is the daemon another version?")
            outcome = messages.read_outcome(number) if number else Outcome.HIT
            if outcome is not Outcome.HIT:
                self.outcomes.append(outcome)
                continue
            if number:
                self._sum = header.checksums[taken : taken + CHECKSUM_BYTES]
                taken += CHECKSUM_BYTES
            self._copy(self._items[item], payload[at : at + size])
            at += size

    def _copy(self, item: GetItem, payload: memoryview) -> None:
        stop = self._at + payload.nbytes
        if stop > item.length or not payload.nbytes:
            raise WireError(f"an object of {item.length} bytes comes with {stop}; is the daemon another version?")
        for view in take(item.buffers, self._at, stop):
            view[:] = payload[: view.nbytes]
            payload = payload[view.nbytes :]
        self._at = stop
        if stop == item.length:
            sound = checksum(item.key, item.buffers, item.length) == self._sum
            self.outcomes.append(Outcome.HIT if sound else Outcome.ERROR)
            self._at = 0
