"""Payload to and from a daemon: through memory that both map, else on data connections.

A buffer in attached memory (memory of the engine, such as the worker's arena, that the daemon on this host
has mapped too) is read and written by the daemon itself: a call carries keys and places only. The steps of
one read:

1. `locate` finds the item's buffers in attached memory.
2. The call GetInto carries keys, lengths and places. The daemon reads the objects into these places, and
   answers with outcomes only.
3. If no answer comes in time, the daemon may still write to the places later. Therefore the places are
   quarantined (not used for anything else), and the session (`session.Session`) is ended. When the daemon has
   closed its end of the session, nothing in the daemon refers to the memory any more.
   `session.AbandonedCalls` waits for this moment, and then ends the quarantine.

A write (SetFrom) works in the same way, in the other direction. Every other buffer goes through a socket
(`data`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final, Generic, TypeVar

from tiercache.core import ObjectKey, Outcome
from tiercache.errors import WireError
from tiercache.storage.attached import AttachedMemory, SharedExtent, locate, quarantine, withheld
from tiercache.storage.base import GetItem, SetItem, SharedMemory, checksum_of, meta_of
from tiercache.storage.wrappers import decide
from tiercache.wire import messages
from tiercache.wire.v1 import storage_pb2 as pb
from tiercache_backends.grpc.connection import Connection
from tiercache_backends.grpc.connection_manager import ConnectionManager
from tiercache_backends.grpc.data import DataConnection
from tiercache_backends.grpc.failures import CallError, Kind, ends_batch, outcome_of
from tiercache_backends.grpc.session import AbandonedCalls
from tiercache_backends.grpc.settings import CALL_BYTES, GrpcSettings

_log = logging.getLogger(__name__)

_ITEM_WEIGHT: Final = 1024
"""Upper bound of the bytes that one item of a request adds to the size that the daemon computes.

`Call.request` in the daemon adds up the exact numbers of bytes that the parsed request takes.
"""
_EXTENT_WEIGHT: Final = 320
"""Upper bound of the bytes that one extent of a request adds to the size that the daemon computes."""
_MAX_ITEMS: Final = 1024
"""Maximum number of items of one call on a data connection, whose header is then far below its limit."""
_ASK_FIRST_BYTES: Final = 256 << 10
"""Minimum size in bytes of an object for which a Set first asks whether the daemon has the object already.

A smaller object is sent without asking. If the daemon has this object, the Set counts as a use of the object.
"""

Item = TypeVar("Item", GetItem, SetItem)


@dataclass(slots=True)
class _Call(Generic[Item]):
    """Items of one call.

    Thread safety: only the caller's thread uses it.
    """

    items: list[Item] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Positions of the items in the batch."""
    extents: list[list[SharedExtent]] = field(default_factory=list)
    """Extents of each item in attached memory; empty for a call on a data connection."""
    outcomes: list[Outcome] = field(default_factory=list)
    """Outcomes of the first items; all of them, if the call has succeeded."""
    nbytes: int = 0
    """Payload bytes of all items."""
    weight: int = 0
    """Upper bound, in bytes, of the request's size as the daemon computes it."""

    def add(self, number: int, item: Item, nbytes: int, extents: list[SharedExtent] | None) -> None:
        """Add an item of `nbytes` bytes at this position of the batch."""
        self.items.append(item)
        self.numbers.append(number)
        self.nbytes += nbytes
        self.weight += _weight(extents)
        if extents is not None:
            self.extents.append(extents)

    def has_room(self, nbytes: int, extents: list[SharedExtent] | None, limits: pb.Limits) -> bool:
        """Return whether the call has room for one more item; a call without items takes any item."""
        most = limits.keys if extents is not None else min(limits.keys, _MAX_ITEMS)
        return not self.items or (
            len(self.items) < most
            and self.nbytes + nbytes <= CALL_BYTES
            and self.weight + _weight(extents) <= limits.message_bytes
        )


def _weight(extents: Sequence[SharedExtent] | None) -> int:
    return 0 if extents is None else _ITEM_WEIGHT + _EXTENT_WEIGHT * len(extents)


class _NotAttachedError(CallError):
    """The connection lacks a memory that the previous connection had."""


class Payload:
    """Transfer of payloads, for well-formed items that the daemon's limits allow.

    If no reply to a call comes, the daemon may still touch the places of the call later. Before the items of
    such a call get their outcomes, the places are quarantined and the session is ended (see
    `AbandonedCalls`).

    Thread safety: any thread may call.
    """

    def __init__(self, manager: ConnectionManager, settings: GrpcSettings) -> None:
        self._manager = manager
        self._settings = settings
        self.abandoned: Final = AbandonedCalls()
        self._lock = Lock()
        self._memories: tuple[AttachedMemory, ...] = ()
        self._refused = ""
        """Reason for which the daemon refused a memory, as it was last logged."""

    def attach(self, memory: SharedMemory) -> None:
        """Attach a memory on the current connection, if there is one, and on all later connections."""
        attached = AttachedMemory(memory, memory.address, memory.nbytes)
        with self._lock:
            if any(other.memory is memory for other in self._memories):
                return
            self._memories += (attached,)
        if self._manager.peek() is None:
            return  # `prepare` attaches the memory on the next connection
        try:
            self._manager.perform(
                lambda connection, _: self._attach_to(connection, memory), self._settings.transfer_timeout
            )
        except CallError as error:
            _log.warning("memory could not be attached: %s", error.text)

    def prepare(self, connection: Connection) -> None:
        """Attach every memory that a connection does not have yet; raises CallError without an answer."""
        for attached in self._memories:
            self._attach_to(connection, attached.memory)

    def get(self, items: Sequence[GetItem], *, peek: bool = False) -> list[Outcome]:
        """Read items, as `StorageBackend.get` does, or as `peek` does.

        An item is UNAVAILABLE while an earlier call, which was given up, may still write to its buffers.
        """

        def move(call: _Call[GetItem]) -> None:
            keys = messages.keys([item.key for item in call.items])
            lengths = [item.length for item in call.items]
            if call.extents:
                self._share(
                    call,
                    "GetInto",
                    lambda places: pb.GetIntoRequest(keys=keys, lengths=lengths, places=places, peek=peek),
                )
                return
            request = pb.GetRequest(keys=keys, lengths=lengths, peek=peek)

            def receive(connection: Connection, seconds: float) -> None:
                deadline = time.monotonic() + seconds

                def work(data: DataConnection) -> None:
                    call.outcomes.clear()
                    data.get(request, call.items, call.outcomes, deadline)

                connection.pool().perform(work, deadline)

            self._manager.perform(receive, self._settings.transfer_timeout)

        def read(free: Sequence[GetItem]) -> list[Outcome]:
            return self._batch(free, lambda item: item.length, move)

        held = iter(withheld(items, self._memories))
        return decide(items, lambda _: Outcome.UNAVAILABLE if next(held) else None, read)

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        """Store items with distinct keys, as `StorageBackend.set` does.

        The checksums are computed here. The daemon may read the payload after the call was given up, when the
        caller has written something else there. An object of such bytes does not match its checksum.
        """
        full = False  # whether an earlier call found no room

        def move(call: _Call[SetItem]) -> None:
            nonlocal full
            # Later items of a batch often depend on earlier items. An item that is THROTTLED shows that the
            # store is full. To store later items could then evict earlier items of this batch.
            if full:
                held = self._held(call.items)
                call.outcomes += [Outcome.HIT if i.key in held else Outcome.THROTTLED for i in call.items]
            elif call.extents:
                keys = messages.keys([item.key for item in call.items])
                metas = [messages.meta(meta_of(item)) for item in call.items]
                self._share(
                    call, "SetFrom", lambda places: pb.SetFromRequest(keys=keys, metas=metas, places=places)
                )
            else:
                call.outcomes += self._send(call.items)
            full = Outcome.THROTTLED in call.outcomes

        return self._batch(items, lambda item: item.meta.length, move)

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int) -> None:
        """Send values for keys of the right length; raise CallError if the daemon does not take them."""
        step = self._manager.limits.keys
        for at in range(0, len(keys), step):
            request = pb.AdviseRequest(
                keys=messages.keys(keys[at : at + step]), values=values[at : at + step], worker=worker
            )
            self._ask("Advise", request)

    def _send(self, items: Sequence[SetItem]) -> list[Outcome]:
        """Store items by a data connection; what the daemon has already is not sent."""
        held = self._held([item for item in items if item.meta.length >= _ASK_FIRST_BYTES])
        missing = [item for item in items if item.key not in held]
        # Objects that the daemon has are not sent, but their values are.
        for worker in {item.meta.worker for item in items if item.key in held}:
            known = [item for item in items if item.key in held and item.meta.worker == worker]
            valued = [(item.key, item.meta.value) for item in known if item.meta.value is not None]
            with suppress(CallError):  # the sets decide whether the daemon answers
                self.advise([key for key, _ in valued], [value for _, value in valued], worker)
        sums = [checksum_of(item) for item in missing]

        def send(connection: Connection, seconds: float) -> list[Outcome]:
            deadline = time.monotonic() + seconds
            return connection.pool().perform(lambda data: data.set(missing, sums, deadline), deadline)

        answers = iter(self._manager.perform(send, self._settings.transfer_timeout) if missing else ())
        return [Outcome.HIT if item.key in held else next(answers) for item in items]

    def _held(self, items: Sequence[SetItem]) -> AbstractSet[ObjectKey]:
        """Return the keys of the items that the daemon has; raise CallError if it gives no answer."""
        if not items:
            return frozenset()
        reply = self._ask("Exists", pb.ExistsRequest(keys=messages.keys([item.key for item in items])))
        try:
            present = messages.read_bits(reply.bits, len(items))
        except WireError as error:
            raise CallError(Kind.INVALID, str(error)) from error
        return {item.key for item, is_there in zip(items, present, strict=True) if is_there}

    def _ask(self, name: str, request: Any) -> Any:
        return self._manager.perform(
            lambda connection, seconds: connection.call(name, request, seconds),
            self._settings.transfer_timeout,
        )

    def _batch(
        self, items: Sequence[Item], length_of: Callable[[Item], int], move: Callable[[_Call[Item]], None]
    ) -> list[Outcome]:
        """Move items, one call after the other by `move`, and return their outcomes."""
        try:
            regions = self._manager.connected(self._settings.timeout).regions
        except CallError as error:
            return [outcome_of(error)] * len(items)
        answers: dict[int, Outcome] = {}
        rest = Outcome.ERROR
        for call in self._calls(items, length_of, regions.keys()):
            try:
                try:
                    move(call)
                except _NotAttachedError:
                    call.extents.clear()
                    move(call)
            except CallError as error:
                rest = outcome_of(error)
                call.outcomes += [rest] * (len(call.items) - len(call.outcomes))
                if ends_batch(error):
                    answers.update(zip(call.numbers, call.outcomes, strict=True))
                    break
            answers.update(zip(call.numbers, call.outcomes, strict=True))
        return [answers.get(number, rest) for number in range(len(items))]

    def _calls(
        self, items: Sequence[Item], length_of: Callable[[Item], int], known: AbstractSet[int]
    ) -> Iterator[_Call[Item]]:
        """Yield calls, each with as many items and their places as the limits allow, those with places first.

        `known`: the `id` of each memory that the daemon has.
        """
        memories = [attached for attached in self._memories if id(attached.memory) in known]
        located = [(locate(item.buffers, memories) if memories else None) for item in items]
        for is_shared in (True, False):
            call: _Call[Item] = _Call()
            for number, (item, extents) in enumerate(zip(items, located, strict=True)):
                if (extents is not None) is not is_shared:
                    continue
                if not call.has_room(length_of(item), extents, self._manager.limits):
                    yield call
                    call = _Call()
                call.add(number, item, length_of(item), extents)
            if call.items:
                yield call

    def _share(self, call: _Call[Item], name: str, request: Callable[[pb.Places], Any]) -> None:
        """Make a call whose payload lies in attached memory."""

        def work(connection: Connection, seconds: float) -> list[Outcome]:
            try:
                places = encode_places(call.extents, connection.regions)
            except KeyError:
                raise _NotAttachedError(
                    Kind.INVALID, f"{self._settings}: the daemon no longer has memory that was attached"
                ) from None
            try:
                reply = connection.call(name, request(places), seconds)
            except BaseException as error:  # also KeyboardInterrupt: its handler may reuse the buffers
                if isinstance(error, CallError) and error.untouched:
                    raise
                self._abandon(connection, call)
                if isinstance(error, CallError):
                    # The kind is UNREACHABLE, so that `perform` does not repeat the call in the same places.
                    # Otherwise:
                    # 1. The daemon is late with the first read.
                    # 2. A second read fills the places. The item is a HIT, and the caller uses its bytes.
                    # 3. The first read writes into the places.
                    raise CallError(Kind.UNREACHABLE, error.text) from error
                raise
            return messages.read_outcomes(reply.outcomes, len(call.items))

        try:
            call.outcomes += self._manager.perform(work, self._settings.transfer_timeout)
        except WireError as error:
            raise CallError(Kind.INVALID, str(error)) from error

    def _abandon(self, connection: Connection, call: _Call[Item]) -> None:
        """End the session, and quarantine the call's places until the daemon cannot touch them any more."""
        assert connection.session is not None
        extents = (extent for extents in call.extents for extent in extents)
        self.abandoned.add(connection.session, quarantine(extents, self._memories))

    def _attach_to(self, connection: Connection, memory: SharedMemory) -> None:
        """Attach a memory in the connection's session, unless it is attached already.

        If the daemon refuses the memory, the reason is logged once.
        """
        if connection.session is None or id(memory) in connection.regions:
            return
        try:
            # The daemon maps the whole memfd. With huge pages the memfd is larger than the memory's `nbytes`.
            number = connection.session.attach(
                memory.fd, os.fstat(memory.fd).st_size, time.monotonic() + self._settings.transfer_timeout
            )
        except WireError as error:
            if str(error) != self._refused:
                self._refused = str(error)
                _log.warning(
                    "%s does not accept this client's memory, so its payloads travel on sockets: %s",
                    self._settings,
                    error,
                )
            return
        connection.regions[id(memory)] = number


def encode_places(items: Sequence[Sequence[SharedExtent]], regions: Mapping[int, int]) -> pb.Places:
    """Return the message with the places of items, given the extents of each item.

    `regions`: the number that the daemon gave to each memory, by the `id` of the memory's object. Raises
    KeyError for a memory that the daemon does not have.
    """
    extents = [extent for item in items for extent in item]
    return pb.Places(
        counts=[len(item) for item in items],
        regions=[regions[extent.memory] for extent in extents],
        offsets=[extent.offset for extent in extents],
        sizes=[extent.size for extent in extents],
    )
