"""Payloads through memory that the daemon has mapped as well: GetInto and SetFrom. Only keys and places travel."""

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
"""Bytes for which a daemon takes an item and each of its extents in a request, once they are read: see its `Call.request`; rounded up."""

Item = TypeVar("Item", GetItem, SetItem)


@dataclass(slots=True)
class _Call(Generic[Item]):
    """Items that travel together."""

    items: list[Item] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Which of the batch they are."""
    extents: list[list[Extent]] = field(default_factory=list)
    staging: Staging | None = None
    leases: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(offset, size) in `staging` of those that go through it, by their place in `items`."""
    nbytes: int = 0
    weight: int = 0
    """What the daemon takes the request for, which must be less than a message."""
    abandoned: bool = False
    """Did we stop waiting for the daemon, which may still be at it?"""

    def staged(self, offset: int, size: int) -> memoryview:
        """Bytes of the staging memory."""
        assert self.staging is not None
        return self.staging.view(offset, size)

    def takes(self, size: int, extents: int, limits: pb.Limits) -> bool:
        """Is there room for an item of this size, in so many extents?"""
        weight = self.weight + _ITEM_WEIGHT + _EXTENT_WEIGHT * extents
        fits = len(self.items) < limits.keys and self.nbytes + size <= CALL_BYTES and weight <= limits.message_bytes
        return fits or not self.items


class _NotAttachedError(CallError):
    """A fresh connection has not all of the memories that the one before it had."""


class SharedPlane:
    """Moves the payloads of well-formed items, none larger than the daemon takes: from and to attached memory where their buffers lie in
    it, else through staging memory, with a copy; what finds no room there, or was not attached, goes through `stream`.

    A call whose reply does not come leaves the daemon free to touch those places later. Before its items are answered, the places are put
    under an embargo (staging memory is simply kept), and the session is ended: see `Hazards`.

    Thread safety: any thread.
    """

    def __init__(self, link: Link, settings: Settings, stream: StreamPlane) -> None:
        self._link = link
        self._settings = settings
        self._stream = stream
        self.hazards: Final = Hazards()
        self._lock = Lock()
        self._memories: tuple[Known, ...] = ()
        self._staging = _staging(settings.staging)  # now, for it takes a while to have all of its pages
        self._refused = ""
        self._declined = b""
        """The daemon that does not take staging memory."""

    @property
    def staging(self) -> Staging | None:
        """Our own memory; None: there is none."""
        return self._staging

    def attach(self, memory: SharedMemory) -> None:
        """Keep a memory in mind, and hand it over now if there is a connection."""
        known = Known(memory, memory.address, memory.nbytes)
        with self._lock:
            if any(other.memory is memory for other in self._memories):
                return
            self._memories += (known,)
        if self._link.peek() is None:
            return  # the next connection will have it
        try:
            self._link.perform(lambda connection, _: self._hand_over(connection, memory), self._settings.transfer_timeout)
        except CallError as error:
            _log.warning("memory could not be attached: %s", error.text)

    def prepare(self, connection: Connection) -> None:
        """Hand over every memory on a fresh connection; raises CallError."""
        if self._staging is not None:
            self._hand_over(connection, self._staging, quietly=True)
        if self._declined == connection.hello.instance:
            self._staging = None
        elif self._staging is None or id(self._staging) not in connection.regions:
            # Another daemon had it, and what was sealed once cannot be mapped anew (see `wire.memory`). Calls that are under way still have
            # the old one, and it goes with the last of them.
            self._staging = _staging(self._settings.staging)
            if self._staging is not None:
                self._hand_over(connection, self._staging)
            if id(self._staging) not in connection.regions:
                self._declined = connection.hello.instance  # it will not have any; not to be asked again and again
        for known in self._memories:
            self._hand_over(connection, known.memory)

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        """As the contract says."""

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
        """As the contract says, for distinct keys."""

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
        """Let go of the staging memory; nobody waits for what is still under an embargo."""
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
        """Answer items call by call; `otherwise` moves those for which there is no place."""
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
        """Items with their places, as many at a time as travel together; the numbers of the others in `placeless`.

        What a call holds of the staging memory is free again when the next one is asked for.
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
            call.abandoned = True  # until there is an answer: so that no place is given back by whoever unwinds this
            try:
                reply = connection.call(name, asked, seconds)
            except BaseException as error:  # Ctrl-C too: whoever catches it may use the buffers again
                if isinstance(error, CallError) and error.untouched:
                    call.abandoned = False
                    raise
                self._abandon(connection, call)
                if isinstance(error, CallError):
                    # Not to be repeated: what this call may still do would spoil what the next one did in the same places.
                    raise CallError(Kind.AWAY, error.text) from error
                raise
            call.abandoned = False
            return messages.read_outcomes(reply.outcomes, len(call.items))

        try:
            return self._link.perform(work, self._settings.transfer_timeout)
        except WireError as error:
            raise CallError(Kind.WRONG, str(error)) from error

    def _abandon(self, connection: Connection, call: _Call[Item]) -> None:
        """The daemon may still be at it: keep its places from being used until it is not."""
        assert connection.session is not None
        lifts: list[Callable[[], None]] = [partial(call.staging.give, *span) for span in call.leases.values() if call.staging is not None]
        lifts += embargo((extent for extents in call.extents for extent in extents if extent.memory != id(call.staging)), self._memories)
        self.hazards.begin(connection.session, lifts)

    def _return(self, call: _Call[Item]) -> None:
        if call.staging is not None and not call.abandoned:
            for span in call.leases.values():
                call.staging.give(*span)

    def _hand_over(self, connection: Connection, memory: SharedMemory, *, quietly: bool = False) -> None:
        """Attach a memory in the connection's session; where the daemon will not have it, the log tells once why."""
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
    """Copy bytes laid end to end: one side is a single view."""
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
