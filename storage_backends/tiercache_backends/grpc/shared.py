"""Transfer of payloads through memory that the client and a daemon on the same host both map.

Words of this module:

    attached memory    memory of the engine, such as the worker's arena, that the daemon has mapped too
    staging memory     memory of this client that the daemon has mapped, for buffers outside attached memory
    place              where a payload lies: (number of the memory in this session, offset, size), or several
    session            a connection to the daemon's attach socket; at its end the daemon unmaps the memory

The steps of one read, on the client's side:

1. The plane finds the item's buffers in attached memory (`locate`), or takes a range of staging memory for
   the item (`Staging`).
2. The call GetInto carries keys, lengths and places. The daemon reads the objects into these places, and
   answers with outcomes only.
3. A payload in staging memory is copied into the item's buffers, and its range is given back.
4. If no answer comes in time, the daemon may still write to the places later. Therefore the places are
   quarantined (not used for anything else), and the session (`session.Session`) is ended. When the daemon has
   closed its end of the session, nothing in the daemon refers to the memory any more.
   `session.AbandonedCalls` waits for this moment, and then ends the quarantine.

A write (SetFrom) works in the same way, in the other direction.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from tiercache.core import Outcome
from tiercache.errors import WireError
from tiercache.storage.attached import AttachedMemory, SharedExtent, align, locate, quarantine, withheld
from tiercache.storage.base import GetItem, SetItem, SharedMemory, meta_of
from tiercache.storage.vectors import copy_in, copy_out
from tiercache.storage.wrappers import decide
from tiercache.wire import messages
from tiercache.wire.v1 import storage_pb2 as pb
from tiercache_backends.grpc.connection import Connection
from tiercache_backends.grpc.connection_manager import ConnectionManager
from tiercache_backends.grpc.failures import CallError, Kind, ends_batch, outcome_of
from tiercache_backends.grpc.session import AbandonedCalls, Staging
from tiercache_backends.grpc.settings import CALL_BYTES, GrpcSettings

if TYPE_CHECKING:
    from tiercache_backends.grpc.stream import StreamPlane

_log = logging.getLogger(__name__)

_ITEM_WEIGHT: Final = 1024
"""Upper bound of the bytes that one item of a request adds to the size that the daemon computes.

`Call.request` in the daemon adds up the exact numbers of bytes that the parsed request takes.
"""
_EXTENT_WEIGHT: Final = 320
"""Upper bound of the bytes that one extent of a request adds to the size that the daemon computes."""

Item = TypeVar("Item", GetItem, SetItem)


@dataclass(slots=True)
class _Call(Generic[Item]):
    """Items of one call, and the places of their payloads.

    Thread safety: only the caller's thread uses it.
    """

    items: list[Item] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Positions of the items in the batch."""
    extents: list[list[SharedExtent]] = field(default_factory=list)
    """Extents of each item, in the order of `items`."""
    staging: Staging | None = None
    leases: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Ranges in `staging` as (offset, size) in bytes. The key is the item's position in `items`."""
    nbytes: int = 0
    """Payload bytes of all items."""
    weight: int = 0
    """Upper bound, in bytes, of the request's size as the daemon computes it.

    It is at most `limits.message_bytes`.
    """
    abandoned: bool = False
    """Whether the daemon has not answered the call, so that it may still use the places."""

    def staging_view(self, offset: int, size: int) -> memoryview:
        """Return a view of `size` bytes of the staging memory."""
        assert self.staging is not None
        return self.staging.view(offset, size)

    def has_room(self, size: int, extents: int, limits: pb.Limits) -> bool:
        """Return whether the call has room for one more item, of `size` bytes in `extents` extents.

        A call without items takes any item.
        """
        weight = self.weight + _ITEM_WEIGHT + _EXTENT_WEIGHT * extents
        fits = (
            len(self.items) < limits.keys
            and self.nbytes + size <= CALL_BYTES
            and weight <= limits.message_bytes
        )
        return fits or not self.items


class _NotAttachedError(CallError):
    """The connection lacks a memory that the previous connection had."""


class SharedPlane:
    """Transfer of payloads through shared memory, for well-formed items that the daemon's limits allow.

    The daemon uses buffers in attached memory directly. Other payloads are copied through staging memory. An
    item goes through `stream` if staging memory has no room for the item, or if the item's memory is not
    attached on the connection.

    If no reply to a call comes, the daemon may still touch the places of the call later. Before the items of
    such a call get their outcomes, the places are quarantined and the session is ended (see
    `AbandonedCalls`). A quarantined range of staging memory is simply not given back.

    Thread safety: any thread may call.
    """

    def __init__(self, manager: ConnectionManager, settings: GrpcSettings, stream: StreamPlane) -> None:
        self._manager = manager
        self._settings = settings
        self._stream = stream
        self.abandoned: Final = AbandonedCalls()
        self._lock = Lock()
        self._memories: tuple[AttachedMemory, ...] = ()
        # Make staging memory now and not at its first use: touching all of its pages takes long.
        self._staging = _staging(settings.staging)
        self._refused = ""
        """Reason for which the daemon refused a memory, as it was last logged."""
        self._declining_instance = b""
        """Instance (the random id of one run) of a daemon that does not accept staging memory."""

    @property
    def staging(self) -> Staging | None:
        """Staging memory of this client; None where there is none."""
        return self._staging

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
        """Attach every memory that a connection does not have yet.

        Raises CallError if the daemon does not answer.
        """
        if self._staging is not None:
            self._attach_to(connection, self._staging, quietly=True)
        if self._declining_instance == connection.hello.instance:
            self._staging = None
        elif self._staging is None or id(self._staging) not in connection.regions:
            # An earlier daemon has sealed the staging memory, so that this daemon cannot map it
            # (`wire.attachment`). Calls under way keep the old memory, which is freed after the last of them.
            self._staging = _staging(self._settings.staging)
            if self._staging is not None:
                self._attach_to(connection, self._staging)
            if id(self._staging) not in connection.regions:
                # This daemon accepts no staging memory: do not ask it again.
                self._declining_instance = connection.hello.instance
        for attached in self._memories:
            self._attach_to(connection, attached.memory)

    def get(self, items: Sequence[GetItem], *, peek: bool = False) -> list[Outcome]:
        """Read items, as `StorageBackend.get` does, or as `peek` does.

        An item is UNAVAILABLE while an earlier call, which was given up, may still write to its buffers.
        """

        def move(call: _Call[GetItem]) -> list[Outcome]:
            keys = messages.keys([item.key for item in call.items])
            lengths = [item.length for item in call.items]

            def request(regions: dict[int, int]) -> pb.GetIntoRequest:
                places = encode_places(call.extents, regions)
                return pb.GetIntoRequest(keys=keys, lengths=lengths, places=places, peek=peek)

            answers = self._perform(call, "GetInto", request)
            for at, (offset, _) in call.leases.items():
                if answers[at] is Outcome.HIT:
                    item = call.items[at]
                    copy_out(call.staging_view(offset, item.length), item.buffers)
            return answers

        def read(free: Sequence[GetItem]) -> list[Outcome]:
            return self._batch(free, lambda item: item.length, move, partial(self._stream.get, peek=peek))

        held = iter(withheld(items, self._memories))
        return decide(items, lambda _: Outcome.UNAVAILABLE if next(held) else None, read)

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        """Store items with distinct keys, as `StorageBackend.set` does.

        The checksums are computed here. The daemon may read the payload after the call was given up, when the
        caller has written something else there. An object of such bytes does not match its checksum.
        """
        full = False  # whether an earlier call found no room

        def move(call: _Call[SetItem]) -> list[Outcome]:
            nonlocal full
            if full:
                return self._stream.held_or_throttled(call.items)
            keys = messages.keys([item.key for item in call.items])
            metas = [messages.meta(meta_of(item)) for item in call.items]

            def request(regions: dict[int, int]) -> pb.SetFromRequest:
                places = encode_places(call.extents, regions)
                return pb.SetFromRequest(keys=keys, metas=metas, places=places)

            for at, (offset, _) in call.leases.items():
                item = call.items[at]
                copy_in(call.staging_view(offset, item.meta.length), item.buffers)
            answers = self._perform(call, "SetFrom", request)
            full = Outcome.THROTTLED in answers
            return answers

        return self._batch(items, lambda item: item.meta.length, move, self._stream.set)

    def close(self) -> None:
        """Release the staging memory; do not wait until quarantines have ended."""
        if self._staging is not None:
            staging, self._staging = self._staging, None
            staging.close()

    def _batch(
        self,
        items: Sequence[Item],
        length_of: Callable[[Item], int],
        move: Callable[[_Call[Item]], list[Outcome]],
        otherwise: Callable[[Sequence[Item]], list[Outcome]],
    ) -> list[Outcome]:
        """Move items, one call after the other, and return their outcomes.

        `move` makes one call. `otherwise` moves the items that have no place in shared memory, at the end.
        """
        try:
            regions = self._manager.connected(self._settings.timeout).regions
        except CallError as error:
            return [outcome_of(error)] * len(items)
        answers: dict[int, Outcome] = {}
        placeless: list[int] = []
        failed: CallError | None = None
        for call in self._calls(items, length_of, regions.keys(), placeless):
            try:
                if failed is None:
                    answers.update(zip(call.numbers, move(call), strict=True))
            except _NotAttachedError:
                placeless += call.numbers
            except CallError as error:
                answers.update((number, outcome_of(error)) for number in call.numbers)
                failed = error if ends_batch(error) else None
            finally:
                self._return_staging(call)
        if failed is not None:
            return [answers.get(number, outcome_of(failed)) for number in range(len(items))]
        if placeless:
            answers.update(zip(placeless, otherwise([items[n] for n in placeless]), strict=True))
        return [answers[number] for number in range(len(items))]

    def _calls(
        self,
        items: Sequence[Item],
        length_of: Callable[[Item], int],
        known: AbstractSet[int],
        placeless: list[int],
    ) -> Iterator[_Call[Item]]:
        """Yield calls, each with as many items and their places as the limits allow.

        `known`: the `id` of each memory that the daemon has. `placeless`: a list to which the positions of
        items without a place in shared memory are added. The caller must give back the staging memory of a
        call before it asks for the next call.
        """
        memories = [attached for attached in self._memories if id(attached.memory) in known]
        staging = self._staging if id(self._staging) in known else None
        call: _Call[Item] = _Call(staging=staging)
        for number, item in enumerate(items):
            length = length_of(item)
            extents = locate(item.buffers, memories) if memories else None
            ranges = max(1, len(extents or ()))  # an item in staging memory takes one range
            if not call.has_room(length, ranges, self._manager.limits):
                yield call
                call = _Call(staging=staging)
            if extents is None:
                offset = staging.free.take(length) if staging else None
                if offset is None and call.leases:
                    # The items of this call fill the staging memory. After the call their ranges are free.
                    yield call
                    call = _Call(staging=staging)
                    offset = staging.free.take(length) if staging else None
                if offset is None:
                    placeless.append(number)
                    continue
                call.leases[len(call.items)] = (offset, length)
                extents = [SharedExtent(id(staging), offset, align(length))]
            call.items.append(item)
            call.numbers.append(number)
            call.extents.append(extents)
            call.weight += _ITEM_WEIGHT + _EXTENT_WEIGHT * len(extents)
            call.nbytes += length
        if call.items:
            yield call

    def _perform(
        self, call: _Call[Item], name: str, request: Callable[[dict[int, int]], Any]
    ) -> list[Outcome]:
        def work(connection: Connection, seconds: float) -> list[Outcome]:
            try:
                asked = request(connection.regions)
            except KeyError:
                raise _NotAttachedError(
                    Kind.INVALID, f"{self._settings}: the daemon no longer has memory that was attached"
                ) from None
            # Until there is an answer, an exception must not let `_return_staging` give a place back.
            call.abandoned = True
            try:
                reply = connection.call(name, asked, seconds)
            except BaseException as error:  # also KeyboardInterrupt: its handler may reuse the buffers
                if isinstance(error, CallError) and error.untouched:
                    call.abandoned = False
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
            call.abandoned = False
            return messages.read_outcomes(reply.outcomes, len(call.items))

        try:
            return self._manager.perform(work, self._settings.transfer_timeout)
        except WireError as error:
            raise CallError(Kind.INVALID, str(error)) from error

    def _abandon(self, connection: Connection, call: _Call[Item]) -> None:
        """End the session, and quarantine the call's places until the daemon cannot touch them any more."""
        assert connection.session is not None
        releases: list[Callable[[], None]] = [
            partial(call.staging.free.give, *span)
            for span in call.leases.values()
            if call.staging is not None
        ]
        releases += quarantine(
            (extent for extents in call.extents for extent in extents if extent.memory != id(call.staging)),
            self._memories,
        )
        self.abandoned.add(connection.session, releases)

    def _return_staging(self, call: _Call[Item]) -> None:
        # `_abandon` has arranged when the places of an abandoned call are given back.
        if call.staging is not None and not call.abandoned:
            for span in call.leases.values():
                call.staging.free.give(*span)

    def _attach_to(
        self, connection: Connection, memory: SharedMemory | Staging, *, quietly: bool = False
    ) -> None:
        """Attach a memory in the connection's session, unless it is attached already.

        If the daemon refuses the memory, the reason is logged once, but with `quietly` never.
        """
        if connection.session is None or id(memory) in connection.regions:
            return
        try:
            # The daemon maps the whole memfd. With huge pages the memfd is larger than the memory's `nbytes`.
            number = connection.session.attach(
                memory.fd, os.fstat(memory.fd).st_size, time.monotonic() + self._settings.transfer_timeout
            )
        except WireError as error:
            if str(error) != self._refused and not quietly:
                self._refused = str(error)
                _log.warning(
                    "%s does not accept this client's memory, so its payloads travel in messages: %s",
                    self._settings,
                    error,
                )
            return
        connection.regions[id(memory)] = number


def _staging(nbytes: int) -> Staging | None:
    if not nbytes:
        return None
    try:
        return Staging(nbytes)
    except OSError as error:
        _log.warning(
            "%d bytes of staging memory cannot be allocated (%s); payloads outside attached memory travel in"
            " messages",
            nbytes,
            error,
        )
        return None


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
