"""The calls Get and Set, whose payloads travel in messages of gRPC, or on a data connection.

The first message of a Set has a header, which describes all objects. Their bytes follow, one after the other,
in as many messages as it takes. The answer to a Get has a header for each group of objects:

    Set    header, bytes | bytes | bytes
    Get    header, bytes | bytes | header, bytes
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing, suppress
from threading import Lock
from typing import Final

from tiercache.core import ObjectKey, Outcome
from tiercache.errors import WireError
from tiercache.storage.base import GetItem, SetItem, checksum_of
from tiercache.storage.vectors import batches, parts, take
from tiercache.wire import messages
from tiercache.wire.data import place
from tiercache.wire.v1 import storage_pb2 as pb
from tiercache_backends.grpc.connection import Connection
from tiercache_backends.grpc.connection_manager import ConnectionManager
from tiercache_backends.grpc.data import DataConnection, receive_items, set_header
from tiercache_backends.grpc.failures import CallError, Kind, ends_batch, outcome_of
from tiercache_backends.grpc.settings import CALL_BYTES

_ASK_FIRST_BYTES: Final = 256 << 10
"""Minimum size in bytes of an object for which a Set first asks whether the daemon has the object already.

A smaller object is sent without asking. If the daemon has this object, the Set counts as a use of the object.
"""


_MAX_HEADER: Final = 1 << 20
"""Maximum bytes of a header in the answer to a Get; parsed, it takes several times as many."""
_MAX_ITEMS: Final = 1024
"""Maximum number of items of one Set, whose header is then far below the limit on messages."""


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
        most = min(self._manager.limits.keys, _MAX_ITEMS)
        for part in batches(items, lambda item: item.meta.length, most, CALL_BYTES):
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
            stored = connection.data.attempt(lambda data: data.set(items, sums, deadline), deadline)
            if stored is not None:
                return stored
            seconds = deadline - time.monotonic()
        outgoing = _Outgoing(items, sums, min(messages.CHUNK_BYTES, self._manager.limits.message_bytes // 2))
        try:
            reply = connection.call("Set", outgoing, seconds)
            return messages.read_outcomes(reply.outcomes, len(items))
        except WireError as error:
            raise CallError(Kind.INVALID, str(error)) from error
        finally:
            outgoing.end()


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
        self._header: pb.SetHeader | None = set_header(items, sums)
        self._parts: Iterator[bytes] = parts(
            [view for item in items for view in take(item.buffers, 0, item.meta.length)], chunk
        )

    def __iter__(self) -> Iterator[pb.SetRequest]:
        return self

    def __next__(self) -> pb.SetRequest:
        with self._lock:
            header, self._header = self._header, None
            return pb.SetRequest(header=header, payload=next(self._parts))

    def end(self) -> None:
        """Make no more messages; return when no thread uses the buffers any more."""
        with self._lock:
            self._parts = iter(())


class _Incoming:
    """Receiver of the items of one Get, which arrive in order.

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
        try:
            # mypy does not know that the iterator is a generator, which has the method `close`
            with closing(connection.stream("Get", request, seconds)) as replies:  # type: ignore[type-var]
                answer = _Answer(replies)
                while len(self.outcomes) < len(self._items):
                    receive_items(answer.header(), self._items, self.outcomes, answer.fill)
                answer.end()
        except WireError as error:
            raise CallError(Kind.INVALID, f"{error}; is the daemon another version?") from error

    def _receive_data(self, data: DataConnection, request: pb.GetRequest, deadline: float) -> bool:
        data.get(request, self._items, self.outcomes, deadline)
        return True

    def fill(self, outcome: Outcome) -> None:
        """Give `outcome` to all items that have not arrived completely."""
        self.outcomes += [outcome] * (len(self._items) - len(self.outcomes))


class _Answer:
    """Answer to a Get in messages: headers, and the payload behind each.

    Thread safety: only the caller's thread uses it.
    """

    def __init__(self, replies: Iterator[bytes]) -> None:
        self._replies = replies
        self._payload = memoryview(b"")
        """Bytes of the last message that were not taken yet."""

    def header(self) -> pb.GetHeader:
        """Return the next header; raises WireError if there are other bytes before it."""
        found = self._next()
        if self._payload or not found.header:
            raise WireError("objects come with more bytes than their header says")
        self._payload = memoryview(found.payload)
        return messages.read_message(found.header, pb.GetHeader, _MAX_HEADER)

    def fill(self, views: list[memoryview]) -> None:
        """Put the next bytes of the payload into these buffers; raises WireError if it has fewer."""
        left = list(views)
        self._payload = place(self._payload, left)
        while left:
            found = self._next()
            if found.header or not found.payload:
                raise WireError("objects come with fewer bytes than their header says")
            self._payload = place(memoryview(found.payload), left)

    def end(self) -> None:
        """Wait for the end of the call; raises WireError if something comes before it."""
        if self._payload or next(self._replies, None) is not None:
            raise WireError("an answer has more than the objects that were asked for")

    def _next(self) -> pb.UnreadHeader:
        reply = next(self._replies, None)
        if reply is None:
            raise WireError("an answer has fewer objects than were asked for")
        return messages.read_message(reply, pb.UnreadHeader, len(reply))
