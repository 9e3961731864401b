"""Payloads through memory that the daemon maps as well (GetInto and SetFrom): only keys and places are sent."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, Final, Generic, TypeVar

from tiercache.core import Outcome
from tiercache.errors import WireError
from tiercache.storage.base import GetItem, SetItem, SharedMemory
from tiercache.storage.vectors import take
from tiercache.wire import messages
from tiercache.wire.v1 import storage_pb2 as pb
from tiercache_backends.grpc.connection import Connection
from tiercache_backends.grpc.failures import CallError, Kind
from tiercache_backends.grpc.hazards import Hazards
from tiercache_backends.grpc.link import Link
from tiercache_backends.grpc.parts import CALL_BYTES, cut_off, unread, unwritten
from tiercache_backends.grpc.places import Extent, Known, embargo, locate, message
from tiercache_backends.grpc.settings import Settings
from tiercache_backends.grpc.staging import Staging, whole_pages
from tiercache_backends.grpc.stream import StreamPlane

_log = logging.getLogger(__name__)

_ITEM_WEIGHT: Final = 1024
_EXTENT_WEIGHT: Final = 320
"""Bytes, rounded up, that a daemon counts for an item and for each of its extents once the request is parsed; see its `Call.request`."""

Item = TypeVar("Item", GetItem, SetItem)


@dataclass(slots=True)
class _Call(Generic[Item]):
    """Items that one call carries.

    Thread safety: used by the caller's thread only.
    """

    items: list[Item] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Positions of the items in the batch."""
    extents: list[list[Extent]] = field(default_factory=list)
    staging: Staging | None = None
    leases: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(offset, size) in `staging`, in bytes, of the items that go through it, by their position in `items`."""
    nbytes: int = 0
    weight: int = 0
    """Bytes that the daemon counts for the request; at most `limits.message_bytes`."""
    abandoned: bool = False
    """Whether the daemon may still use the places, because its reply has not come or is no longer awaited."""

    def staged(self, offset: int, size: int) -> memoryview:
        """Return a view of `size` bytes of the staging memory."""
        assert self.staging is not None
        return self.staging.view(offset, size)

    def takes(self, size: int, extents: int, limits: pb.Limits) -> bool:
        """Return whether there is room for an item of `size` bytes in `extents` extents; an empty call takes any item."""
        weight = self.weight + _ITEM_WEIGHT + _EXTENT_WEIGHT * extents
        fits = len(self.items) < limits.keys and self.nbytes + size <= CALL_BYTES and weight <= limits.message_bytes
        return fits or not self.items


class _NotAttachedError(CallError):
    """The connection lacks a memory that the previous one had."""


class SharedPlane:
    """Payload transfer through shared memory, for well-formed items, none larger than the daemon accepts.

    Buffers in attached memory are used directly. Other payloads are copied through staging memory. Items for which that has no room, or
    whose memory the connection lacks, go through `stream`.

    If the reply to a call does not come, the daemon may still touch its places later. Before the items of such a call are answered, the
    places are put under an embargo (staging memory is simply not given back), and the session is ended: see `Hazards`.

    Thread safety: any thread.
    """

    def __init__(self, link: Link, settings: Settings, stream: StreamPlane) -> None:
        self._link = link
        self._settings = settings
        self._stream = stream
        self.hazards: Final = Hazards()
        self._lock = Lock()
        self._memories: tuple[Known, ...] = ()
        self._staging = _staging(settings.staging)  # made early, because faulting in all of its pages takes a while
        self._refused = ""
        self._declined = b""
        """Instance of the daemon that does not accept staging memory."""

    @property
    def staging(self) -> Staging | None:
        """Staging memory of this client; None where there is none."""
        return self._staging

    def attach(self, memory: SharedMemory) -> None:
        """Remember a memory for later connections, and attach it to the current one, if there is one."""
        known = Known(memory, memory.address, memory.nbytes)
        with self._lock:
            if any(other.memory is memory for other in self._memories):
                return
            self._memories += (known,)
        if self._link.peek() is None:
            return  # the next connection attaches it
        try:
            self._link.perform(lambda connection, _: self._hand_over(connection, memory), self._settings.transfer_timeout)
        except CallError as error:
            _log.warning("memory could not be attached: %s", error.text)

    def prepare(self, connection: Connection) -> None:
        """Attach every memory that a connection does not have yet; raise CallError."""
        if self._staging is not None:
            self._hand_over(connection, self._staging, quietly=True)
        if self._declined == connection.hello.instance:
            self._staging = None
        elif self._staging is None or id(self._staging) not in connection.regions:
            # An earlier daemon sealed the staging memory, so it cannot be mapped again (see `wire.memory`). Calls that are under way keep
            # the old one, which is freed with the last of them.
            self._staging = _staging(self._settings.staging)
            if self._staging is not None:
                self._hand_over(connection, self._staging)
            if id(self._staging) not in connection.regions:
                self._declined = connection.hello.instance  # it accepts none, so it is not asked again
        for known in self._memories:
            self._hand_over(connection, known.memory)

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        """Read items, as `StorageBackend.get` does."""

        def move(call: _Call[GetItem]) -> list[Outcome]:
            keys, lengths = messages.keys([item.key for item in call.items]), [item.length for item in call.items]
            answers = self._perform(
                call, "GetInto", lambda regions: pb.GetIntoRequest(keys=keys, lengths=lengths, places=message(call.extents, regions))
            )
            for at, (offset, _) in call.leases.items():
                if answers[at] is Outcome.HIT:
                    item = call.items[at]
                    _copy(take(item.buffers, 0, item.length), [call.staged(offset, item.length)])
            return answers

        return self._batch(items, lambda item: item.length, move, unread, self._stream.get)

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        """Store items with distinct keys, as `StorageBackend.set` does."""

        full = False

        def move(call: _Call[SetItem]) -> list[Outcome]:
            nonlocal full
            if full:
                return self._stream.held_or_throttled(call.items)
            keys, metas = messages.keys([item.key for item in call.items]), [messages.meta(item.meta) for item in call.items]
            for at, (offset, _) in call.leases.items():
                item = call.items[at]
                _copy([call.staged(offset, item.meta.length)], take(item.buffers, 0, item.meta.length))
            answers = self._perform(
                call, "SetFrom", lambda regions: pb.SetFromRequest(keys=keys, metas=metas, places=message(call.extents, regions))
            )
            full = Outcome.THROTTLED in answers
            return answers

        return self._batch(items, lambda item: item.meta.length, move, unwritten, self._stream.set)

    def close(self) -> None:
        """Release the staging memory, without waiting for places that are still under an embargo."""
        if self._staging is not None:
            staging, self._staging = self._staging, None
            staging.close()

    def _batch(
        self,
        items: Sequence[Item],
        length_of: Callable[[Item], int],
        move: Callable[[_Call[Item]], list[Outcome]],
        unserved: Callable[[CallError], Outcome],
        otherwise: Callable[[Sequence[Item]], list[Outcome]],
    ) -> list[Outcome]:
        """Move items call by call and return their outcomes; `otherwise` moves those that have no place in shared memory."""
        try:
            regions = self._link.connected(self._settings.timeout).regions
        except CallError as error:
            return [unserved(error)] * len(items)
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
                answers.update((number, unserved(error)) for number in call.numbers)
                failed = error if cut_off(error) else None
            finally:
                self._return(call)
        if failed is not None:
            return [answers.get(number, unserved(failed)) for number in range(len(items))]
        answers.update(zip(placeless, otherwise([items[number] for number in placeless]) if placeless else (), strict=True))
        return [answers[number] for number in range(len(items))]

    def _calls(
        self, items: Sequence[Item], length_of: Callable[[Item], int], attached: AbstractSet[int], placeless: list[int]
    ) -> Iterator[_Call[Item]]:
        """Yield calls, each with as many items and their places as fit; add the positions of items without a place to `placeless`.

        The caller gives back the staging memory of a call before it asks for the next call.
        """
        memories = [known for known in self._memories if id(known.memory) in attached]
        staging = self._staging if id(self._staging) in attached else None
        call: _Call[Item] = _Call(staging=staging)
        for number, item in enumerate(items):
            length = length_of(item)
            extents = locate(item.buffers, memories) if memories else None
            if not call.takes(length, len(extents or ("one",)), self._link.limits):
                yield call
                call = _Call(staging=staging)
            if extents is None:
                offset = staging.take(length) if staging else None
                if offset is None and call.leases:
                    yield call
                    call = _Call(staging=staging)
                    offset = staging.take(length) if staging else None
                if offset is None:
                    placeless.append(number)
                    continue
                call.leases[len(call.items)] = (offset, length)
                extents = [Extent(id(staging), offset, whole_pages(length))]
            call.items.append(item)
            call.numbers.append(number)
            call.extents.append(extents)
            call.weight += _ITEM_WEIGHT + _EXTENT_WEIGHT * len(extents)
            call.nbytes += length
        if call.items:
            yield call

    def _perform(self, call: _Call[Item], name: str, request: Callable[[dict[int, int]], Any]) -> list[Outcome]:
        def work(connection: Connection, seconds: float) -> list[Outcome]:
            try:
                asked = request(connection.regions)
            except KeyError:
                raise _NotAttachedError(Kind.WRONG, f"{self._settings}: memory that was attached is no more") from None
            call.abandoned = True  # until there is an answer, so that no exception makes `_return` give a place back
            try:
                reply = connection.call(name, asked, seconds)
            except BaseException as error:  # KeyboardInterrupt too: its handler may reuse the buffers
                if isinstance(error, CallError) and error.untouched:
                    call.abandoned = False
                    raise
                self._abandon(connection, call)
                if isinstance(error, CallError):
                    # AWAY, so that the call is not repeated: its late effects could overwrite those of a second one in the same places.
                    raise CallError(Kind.AWAY, error.text) from error
                raise
            call.abandoned = False
            return messages.read_outcomes(reply.outcomes, len(call.items))

        try:
            return self._link.perform(work, self._settings.transfer_timeout)
        except WireError as error:
            raise CallError(Kind.WRONG, str(error)) from error

    def _abandon(self, connection: Connection, call: _Call[Item]) -> None:
        """End the session, and keep the places of a call from being reused until the daemon cannot touch them any more."""
        assert connection.session is not None
        lifts: list[Callable[[], None]] = [partial(call.staging.give, *span) for span in call.leases.values() if call.staging is not None]
        lifts += embargo((extent for extents in call.extents for extent in extents if extent.memory != id(call.staging)), self._memories)
        self.hazards.begin(connection.session, lifts)

    def _return(self, call: _Call[Item]) -> None:
        if call.staging is not None and not call.abandoned:
            for span in call.leases.values():
                call.staging.give(*span)

    def _hand_over(self, connection: Connection, memory: SharedMemory, *, quietly: bool = False) -> None:
        """Attach a memory in the connection's session; if the daemon refuses, log the reason once, or never if `quietly`."""
        if connection.session is None or id(memory) in connection.regions:
            return
        try:
            # On huge pages the memfd is larger than what is used of it.
            number = connection.session.attach(memory.fd, os.fstat(memory.fd).st_size, time.monotonic() + self._settings.transfer_timeout)
        except WireError as error:
            if str(error) != self._refused and not quietly:
                self._refused = str(error)
                _log.warning("%s does not take memory of ours, so its payloads go another way: %s", self._settings, error)
            return
        connection.regions[id(memory)] = number


def _staging(nbytes: int) -> Staging | None:
    if not nbytes:
        return None
    try:
        return Staging(nbytes)
    except OSError as error:
        _log.warning("there are no %d bytes for staging (%s); payloads outside of attached memory go in messages", nbytes, error)
        return None


def _copy(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
    """Copy bytes between views that are taken end to end; one of the two sides is a single view."""
    if len(targets) == 1:
        whole, at = targets[0], 0
        for view in sources:
            whole[at : at + view.nbytes] = view
            at += view.nbytes
        return
    whole, at = sources[0], 0
    for view in targets:
        view[:] = whole[at : at + view.nbytes]
        at += view.nbytes
