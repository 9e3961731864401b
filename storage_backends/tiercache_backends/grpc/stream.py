"""The calls Get and Set, whose payloads travel in messages.

A message carries pieces of objects; a piece is the part of an object that travels in one message. The header
of the message names the pieces, and their bytes follow. A large object takes several messages, and several
small objects may share one:

    message 1   header | object 1, first piece
    message 2   header | object 1, last piece | object 2 | object 3, first piece
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing, suppress
from dataclasses import replace
from threading import Lock
from typing import Final

from tiercache.core import ObjectKey, Outcome
from tiercache.errors import WireError
from tiercache.storage.base import GetItem, SetItem, checksum_of
from tiercache.storage.checksum import CHECKSUM_BYTES, checksum
from tiercache.storage.vectors import batches, copy_out, take
from tiercache.wire import messages
from tiercache.wire.pieces import CHUNK_BYTES, Piece, cut
from tiercache.wire.v1 import storage_pb2 as pb
from tiercache_backends.grpc.connection import Connection
from tiercache_backends.grpc.connection_manager import ConnectionManager
from tiercache_backends.grpc.data import DataConnection
from tiercache_backends.grpc.failures import CallError, Kind, ends_batch, outcome_of
from tiercache_backends.grpc.settings import CALL_BYTES

_ASK_FIRST_BYTES: Final = 256 << 10
"""Minimum size in bytes of an object for which a Set first asks whether the daemon has the object already.

A smaller object is sent without asking. If the daemon has this object, the Set counts as a use of the object.
"""


_MAX_HEADER: Final = 1 << 20
"""Maximum bytes of the columns of pieces in one message of a Get; parsed, they take several times as many."""
_DATA_ITEMS: Final = 1024
"""Maximum number of items of one Set on a data connection."""


class StreamPlane:
    """Transfer of payloads in messages, for well-formed items that the daemon's limits allow.

    Thread safety: any thread may call.
    """

    def __init__(self, manager: ConnectionManager, timeout: float) -> None:
        self._manager = manager
        self._timeout = timeout

    def get(self, items: Sequence[GetItem], *, peek: bool = False) -> list[Outcome]:
        """Read items, as `StorageBackend.get` does, or as `peek` does.

        An object that arrives damaged is ERROR, not CORRUPT: the daemon has verified the stored object, so
        only the copy that arrived is damaged.
        """
        outcomes: list[Outcome] = []
        for part in batches(items, lambda item: item.length, self._manager.limits.keys, CALL_BYTES):
            incoming = _Incoming(part, peek)
            try:
                self._manager.perform(incoming.receive, self._timeout)
            except CallError as error:
                incoming.fill(outcome_of(error))
                if ends_batch(error):
                    outcomes += incoming.outcomes
                    return outcomes + [outcome_of(error)] * (len(items) - len(outcomes))
            outcomes += incoming.outcomes
        return outcomes

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        """Store items with distinct keys, as `StorageBackend.set` does."""
        outcomes: list[Outcome] = []
        for part in batches(items, lambda item: item.meta.length, self._manager.limits.keys, CALL_BYTES):
            try:
                # Later items of a batch often depend on earlier items. An item that is THROTTLED shows that
                # the store is full. To store later items could then evict earlier items of this batch.
                full = Outcome.THROTTLED in outcomes
                outcomes += self.held_or_throttled(part) if full else self._set_part(part)
            except CallError as error:
                outcomes += [outcome_of(error)] * len(part)
                if ends_batch(error):
                    return outcomes + [outcome_of(error)] * (len(items) - len(outcomes))
        return outcomes

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int) -> None:
        """Send values for keys of the right length; raise CallError if the daemon does not take them."""
        step = self._manager.limits.keys
        for at in range(0, len(keys), step):
            self._advise(keys[at : at + step], values[at : at + step], worker)

    def _advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int) -> None:
        request = pb.AdviseRequest(keys=messages.keys(keys), values=values, worker=worker)
        self._manager.perform(lambda c, seconds: c.call("Advise", request, seconds), self._timeout)

    def held_or_throttled(self, items: Sequence[SetItem]) -> list[Outcome]:
        """Return HIT for each item that the daemon has, else THROTTLED.

        Call this for the items of a batch that follow an item for which the store had no room. Raises
        CallError if the daemon cannot be asked.
        """
        held = self._held(items)
        return [Outcome.HIT if item.key in held else Outcome.THROTTLED for item in items]

    def _set_part(self, items: Sequence[SetItem]) -> list[Outcome]:
        held = self._held([item for item in items if item.meta.length >= _ASK_FIRST_BYTES])
        missing = [item for item in items if item.key not in held]
        # Objects that the daemon has are not sent, but their values are.
        for worker in {item.meta.worker for item in items if item.key in held}:
            known = [item for item in items if item.key in held and item.meta.worker == worker]
            valued = [(item.key, item.meta.value) for item in known if item.meta.value is not None]
            with suppress(CallError):  # the sets decide whether the daemon answers
                self.advise([key for key, _ in valued], [value for _, value in valued], worker)
        sums = [checksum_of(item) for item in missing]
        answers = iter(
            self._manager.perform(lambda c, seconds: self._send(c, missing, sums, seconds), self._timeout)
            if missing
            else ()
        )
        return [Outcome.HIT if item.key in held else next(answers) for item in items]

    def _held(self, items: Sequence[SetItem]) -> AbstractSet[ObjectKey]:
        """Return the keys of the items that the daemon has; raise CallError if it gives no answer."""
        if not items:
            return frozenset()
        request = pb.ExistsRequest(keys=messages.keys([item.key for item in items]))
        reply = self._manager.perform(lambda c, seconds: c.call("Exists", request, seconds), self._timeout)
        try:
            present = messages.read_bits(reply.bits, len(items))
        except WireError as error:
            raise CallError(Kind.INVALID, str(error)) from error
        return {item.key for item, is_there in zip(items, present, strict=True) if is_there}

    def _send(
        self, connection: Connection, items: Sequence[SetItem], sums: Sequence[bytes], seconds: float
    ) -> list[Outcome]:
        deadline = time.monotonic() + seconds
        if connection.data is not None:
            stored = connection.data.attempt(lambda data: _set_parts(data, items, sums, deadline), deadline)
            if stored is not None:
                return stored
            seconds = deadline - time.monotonic()
        outgoing = _Outgoing(items, sums, min(CHUNK_BYTES, self._manager.limits.message_bytes // 2))
        try:
            reply = connection.call("Set", outgoing, seconds)
            return messages.read_outcomes(reply.outcomes, len(items))
        except WireError as error:
            raise CallError(Kind.INVALID, str(error)) from error
        finally:
            outgoing.end()


def _set_parts(
    data: DataConnection, items: Sequence[SetItem], sums: Sequence[bytes], deadline: float
) -> list[Outcome]:
    """Store items on a data connection, in calls whose requests are far below the limit on messages."""
    outcomes: list[Outcome] = []
    for at in range(0, len(items), _DATA_ITEMS):
        outcomes += data.set(items[at : at + _DATA_ITEMS], sums[at : at + _DATA_ITEMS], deadline)
    return outcomes


class _Outgoing:
    """Iterator over the messages of a Set.

    A thread of gRPC asks for each message when gRPC needs the message, perhaps even after the call has
    failed. By then the caller may use its buffers for something else. After `end` no bytes of these buffers
    are sent:

        1. The call fails. The caller calls `end`, which waits for a message that is being made.
        2. The caller uses its buffers for something else.
        3. gRPC asks for another message, and gets StopIteration.

    Thread safety: one thread iterates, another may call `end`.
    """

    def __init__(self, items: Sequence[SetItem], sums: Sequence[bytes], chunk: int) -> None:
        self._lock = Lock()
        self._items: Sequence[SetItem] = items
        self._sums = sums
        self._pieces = cut([item.meta.length for item in items], chunk)

    def __iter__(self) -> Iterator[pb.SetRequest]:
        return self

    def __next__(self) -> pb.SetRequest:
        with self._lock:
            if not self._items:
                raise StopIteration
            return self._message(next(self._pieces))

    def end(self) -> None:
        """Make no more messages; return when no thread uses the buffers any more."""
        with self._lock:
            self._items = ()

    def _message(self, pieces: Sequence[Piece]) -> pb.SetRequest:
        begun = [piece.item for piece in pieces if not piece.start]  # items that begin in this message
        header = pb.SetPieces(
            sizes=[piece.stop - piece.start for piece in pieces],
            begins=[not piece.start for piece in pieces],
            keys=messages.keys([self._items[n].key for n in begun]),
            metas=[messages.meta(replace(self._items[n].meta, checksum=self._sums[n])) for n in begun],
        )
        views = [
            view
            for piece in pieces
            for view in take(self._items[piece.item].buffers, piece.start, piece.stop)
        ]
        return pb.SetRequest(pieces=header, payload=b"".join(views))


class _Incoming:
    """Receiver of the items of one Get; items and their pieces arrive in order.

    Thread safety: only the caller's thread uses it.
    """

    def __init__(self, items: Sequence[GetItem], peek: bool) -> None:
        self._items = items
        self._peek = peek
        self._keys = messages.keys([item.key for item in items])
        self.outcomes: list[Outcome] = []
        """Outcomes of the items that have arrived completely, in order."""

    def receive(self, connection: Connection, seconds: float) -> None:
        """Make the call and fill the buffers.

        Raises CallError if the call fails, or if the answer breaks the protocol.
        """
        lengths = [item.length for item in self._items]
        request = pb.GetRequest(keys=self._keys, lengths=lengths, peek=self._peek)
        deadline = time.monotonic() + seconds
        if connection.data is not None:
            self.outcomes = []
            if connection.data.attempt(lambda data: self._receive_data(data, request, deadline), deadline):
                return
            seconds = deadline - time.monotonic()
        self.outcomes = []
        self._at = 0  # bytes of the current item that have arrived
        try:
            # mypy does not know that the iterator is a generator, which has the method `close`
            with closing(connection.stream("Get", request, seconds)) as replies:  # type: ignore[type-var]
                for reply in replies:
                    found = messages.read_message(reply, pb.UnreadPieces, len(reply))
                    header = messages.read_message(found.pieces, pb.GetPieces, _MAX_HEADER)
                    self._take_in(header, memoryview(found.payload))
        except WireError as error:
            raise CallError(Kind.INVALID, str(error)) from error
        if len(self.outcomes) != len(self._items):
            raise CallError(
                Kind.INVALID,
                f"the daemon answered {len(self.outcomes)} of {len(self._items)} items; is it another"
                " version?",
            )

    def _receive_data(self, data: DataConnection, request: pb.GetRequest, deadline: float) -> bool:
        data.get(request, self._items, self.outcomes, deadline)
        return True

    def fill(self, outcome: Outcome) -> None:
        """Give `outcome` to all items that have not arrived completely."""
        self.outcomes += [outcome] * (len(self._items) - len(self.outcomes))

    def _take_in(self, header: pb.GetPieces, payload: memoryview) -> None:
        if (
            not len(header.items) == len(header.outcomes) == len(header.sizes)
            or sum(header.sizes) != payload.nbytes
        ):
            raise WireError(
                "the columns of a message of pieces do not have the same length; is the daemon another"
                " version?"
            )
        # Each column has one value per piece. `outcomes` has an outcome for the first piece of an item, and 0
        # for its further pieces. `checksums` has one checksum per item that is a HIT and begins here.
        at = taken = 0  # bytes used of `payload`, and of `checksums`
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
            raise WireError(
                f"an object of {item.length} bytes comes with {stop} bytes; is the daemon another version?"
            )
        copy_out(payload, item.buffers, self._at)
        self._at = stop
        if stop == item.length:
            sound = checksum(item.key, item.buffers, item.length) == self._sum
            self.outcomes.append(Outcome.HIT if sound else Outcome.ERROR)
            self._at = 0
