"""Get, Set, GetInto and SetFrom: payloads between the store and a client, with bounded memory at every step.

Get reads a window of objects into leased blocks and sends it while the next window is read. Set gathers objects in leased blocks, and
stores one window of them while the next arrives. GetInto and SetFrom let the store move bytes straight to and from attached memory.

A coroutine may be cancelled at any time. What a thread does for it goes on, and what that thread uses is given back when it is done.
"""

from __future__ import annotations

from asyncio import Task
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from grpc import StatusCode

from tiercache.core import BLOCK_ALIGN, ObjectKey, ObjectMeta, Outcome
from tiercache.daemon.access import Caller, Refusal
from tiercache.daemon.call import Call, Threads, request_bytes
from tiercache.daemon.meters import LimitError, Meters, Plane
from tiercache.daemon.sessions import Session
from tiercache.daemon.staging import Lease, blocks_for
from tiercache.errors import WireError
from tiercache.pools import HostArena
from tiercache.storage.base import GetItem, SetItem, StorageBackend
from tiercache.storage.checksum import checksum
from tiercache.storage.vectors import take, zero_tail
from tiercache.wire import messages
from tiercache.wire.frames import CHUNK_BYTES, cut, decode, encode
from tiercache.wire.v1 import storage_pb2 as pb

WINDOW_BYTES: Final = 8 << 20
"""Most bytes of blocks that one store call of Get or Set uses; a larger object is moved alone.

It is large enough for batches to pay, and small enough to share the budget."""

_FIRST_WINDOW_BYTES: Final = 1 << 20
"""Most bytes of the first window of a Get; the limit doubles with each window, up to WINDOW_BYTES."""
_PLACED_BYTES: Final = 128 << 20
"""Bytes of attached memory that one call may name, in addition to the size of the largest object."""
_WINDOW_ITEMS: Final = 1024
"""Most objects of one store call."""
_DIRECT_BYTES: Final = 128 << 20
"""Most bytes between store and attached memory that one store call moves; a store call that has begun cannot be cancelled."""

_EXTENT_BYTES: Final = 256
"""Estimated bytes of the Python objects for one extent of attached memory."""

_HEADER_BYTES: Final = 64 << 10
"""Most bytes of the header of an outgoing message with objects."""

_DESCRIBED_BYTES: Final = 128 << 10
"""Object length in bytes from which asking the store for a checksum is cheaper than computing it again."""

Item = TypeVar("Item", GetItem, SetItem)


class Objects:
    """Handlers of the calls that move payloads.

    Thread safety: the event loop's thread.
    """

    def __init__(
        self, threads: Threads, arena: HostArena, *, most_keys: int, most_bytes: int, message_bytes: int, meters: Meters | None = None
    ) -> None:
        self._message_bytes = message_bytes
        self._chunk = min(CHUNK_BYTES, message_bytes // 2)
        self._meters = meters or Meters()
        self._threads = threads
        self._arena = arena
        self._most_keys = most_keys
        self._most_bytes = most_bytes

    async def get(self, call: Call) -> None:
        """Serve Get: stream objects out of the store."""
        request = await call.request(pb.GetRequest)
        wanted = self._wanted(request.keys, request.lengths)
        windows = list(_windows(wanted, call.caller.bounds.payload.largest))
        async with _transfer(call.caller, self._chunk + _HEADER_BYTES):
            following: Task[_Window] | None = None
            try:
                for number, window in enumerate(windows):
                    if following is None:
                        lease = await Lease.take(self._arena, call.caller.bounds.payload, window.lengths)
                        following = self._read(call.caller, window, lease)
                    found, following = await following, None
                    try:
                        if number + 1 < len(windows):
                            following = self._read_ahead(call.caller, windows[number + 1])
                        self._count_got(call.caller, "stream", found.items, found.outcomes)
                        for frame in found.frames(self._chunk):
                            await call.send(frame)
                    finally:
                        found.lease.release()
            finally:
                if following is not None:
                    following.add_done_callback(_give_back)

    def _read_ahead(self, caller: Caller, window: _Wanted) -> Task[_Window] | None:
        """Begin to read the next window if there is room for it now, else return None.

        Waiting for room while the current window holds some could last for ever.
        """
        lease = Lease.try_take(self._arena, caller.bounds.payload, window.lengths)
        return None if lease is None else self._read(caller, window, lease)

    def _read(self, caller: Caller, window: _Wanted, lease: Lease) -> Task[_Window]:
        items = [GetItem(key, views, length) for key, views, length in zip(window.keys, lease.views, window.lengths, strict=True)]
        return self._threads.start(caller.bounds.workers, _read_window, caller.grants.store, items, window.first, lease, undo=lease.release)

    async def set(self, call: Call) -> None:
        """Serve Set: take a stream of objects into the store."""
        async with _transfer(call.caller, self._message_bytes):
            incoming = _Incoming(call.caller, self._threads, self._arena, self._most_keys, self._most_bytes, self._meters)
            try:
                while (message := await call.read()) is not None:
                    await incoming.add(message)
                outcomes = await incoming.finish()
            finally:
                incoming.abandon()
            await call.send(messages.outcomes(outcomes).SerializeToString())

    async def get_into(self, call: Call) -> None:
        """Serve GetInto: let the store fill memory that the client attached."""
        request = await call.request(pb.GetIntoRequest, _weigh)
        wanted = self._wanted(request.keys, request.lengths)
        session = _session(call.caller)
        places = _places(session, request.places, len(wanted.keys), self._most_bytes + _PLACED_BYTES)
        items = [GetItem(key, views, length) for key, views, length in zip(wanted.keys, places, wanted.lengths, strict=True)]
        outcomes = await self._move(call.caller, session, call.caller.grants.store.get, items)
        self._count_got(call.caller, "shared", items, outcomes)
        await call.send(messages.outcomes(outcomes).SerializeToString())

    async def set_from(self, call: Call) -> None:
        """Serve SetFrom: let the store take objects from memory that the client attached."""
        request = await call.request(pb.SetFromRequest, _weigh)
        keys = read_keys(request.keys, self._most_keys)
        metas = [messages.read_meta(meta) for meta in request.metas]
        if len(metas) != len(keys):
            raise WireError(f"{len(keys)} keys came with {len(metas)} descriptions")
        session = _session(call.caller)
        places = _places(session, request.places, len(keys), self._most_bytes + _PLACED_BYTES)
        for meta in metas:
            _check_length(meta.length, self._most_bytes)
        items = [SetItem(key, views, meta) for key, views, meta in zip(keys, places, metas, strict=True)]
        outcomes = await self._move(call.caller, session, call.caller.grants.store.set, items)
        stored = sum(meta.length for meta, outcome in zip(metas, outcomes, strict=True) if outcome is Outcome.STORED)
        self._meters.moved(call.caller.grants.name, "shared", "in", stored)
        await call.send(messages.outcomes(outcomes).SerializeToString())

    async def _move(
        self, caller: Caller, session: Session, work: Callable[[Sequence[Item]], list[Outcome]], items: Sequence[Item]
    ) -> list[Outcome]:
        """Run `work` on attached memory, one portion of `items` after the other; a cancelled call begins no further portion."""
        outcomes: list[Outcome] = []
        session.begin()  # once for the call, and once for each portion, whose thread may outlive a cancelled call
        try:
            for part in _portions(items):
                session.begin()
                outcomes += await self._threads.run(caller.bounds.workers, work, part, landed=session.finish)
        finally:
            session.finish()
        return outcomes

    def _count_got(self, caller: Caller, plane: Plane, items: Sequence[GetItem], outcomes: Sequence[Outcome]) -> None:
        self._meters.got([item.key for item in items], outcomes)
        read = sum(item.length for item, outcome in zip(items, outcomes, strict=True) if outcome is Outcome.HIT)
        self._meters.moved(caller.grants.name, plane, "out", read)

    def _wanted(self, keys: pb.Keys, lengths: Sequence[int]) -> _Wanted:
        found = read_keys(keys, self._most_keys)
        if len(lengths) != len(found):
            raise WireError(f"{len(found)} keys came with {len(lengths)} lengths")
        for length in lengths:
            _check_length(length, self._most_bytes)
        return _Wanted(0, found, list(lengths))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Objects to read; `first` is the position of the first of them in the request."""

    first: int
    keys: Sequence[ObjectKey]
    lengths: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Window:
    """Objects that were read, and the blocks that hold them; `first` is the position of the first of them in the request."""

    first: int
    items: Sequence[GetItem]
    outcomes: Sequence[Outcome]
    checksums: Sequence[bytes]
    lease: Lease

    def frames(self, chunk: int) -> Iterator[bytes]:
        """Yield the messages that carry these objects, with at most `chunk` bytes of payload each."""
        sizes = [item.length if outcome is Outcome.HIT else 0 for item, outcome in zip(self.items, self.outcomes, strict=True)]
        for pieces in cut(sizes, chunk):
            begun = [piece.item for piece in pieces if not piece.start]
            header = pb.GetPieces(
                items=[self.first + piece.item for piece in pieces],
                outcomes=[0 if piece.start else messages.NUMBER_OF[self.outcomes[piece.item]] for piece in pieces],  # type: ignore[misc]
                sizes=[piece.stop - piece.start for piece in pieces],
                checksums=b"".join(self.checksums[item] for item in begun),
            )
            yield encode(header, [view for piece in pieces for view in take(self.items[piece.item].buffers, piece.start, piece.stop)])


def _read_window(store: StorageBackend, items: Sequence[GetItem], first: int, lease: Lease) -> _Window:
    """Read objects and find their checksums; runs in a store thread.

    The client checks what it received against these checksums, together with the key that it asked for.
    """
    outcomes = store.get(items)
    large = [i.key for i, outcome in zip(items, outcomes, strict=True) if outcome is Outcome.HIT and i.length >= _DESCRIBED_BYTES]
    known = {entry.key: entry.meta.checksum for entry in (store.describe(large) if large else ()) if entry is not None}
    sums = [
        (known.get(item.key) or checksum(item.key, item.buffers, item.length)) if outcome is Outcome.HIT else b""
        for item, outcome in zip(items, outcomes, strict=True)
    ]
    return _Window(first, items, outcomes, sums, lease)


def read_keys(message: pb.Keys, most: int) -> list[ObjectKey]:
    """Return the object keys of a message; raises LimitError for more than `most`."""
    if len(message.pool_of) > most:
        raise LimitError(f"a batch of {len(message.pool_of)} keys is beyond the limit of {most}; send it in parts")
    return messages.read_keys(message, most)


def _windows(wanted: _Wanted, most: int) -> Iterator[_Wanted]:
    """Yield runs of at most _WINDOW_ITEMS objects whose blocks take at most WINDOW_BYTES, and at most `most` bytes; or single objects.

    The first windows are smaller, so that the client has something to do while the others are read. Raises LimitError for an object whose
    blocks take more than `most` bytes.
    """
    room = min(_FIRST_WINDOW_BYTES, most)
    start = held = 0
    for at, blocks in enumerate(blocks_for(wanted.lengths)):
        size = blocks * Lease.block_bytes
        if size > most:
            raise LimitError(
                f"an object of {wanted.lengths[at]} bytes is more than this client may hold ({most}); raise limits.client_bytes"
            )
        if at > start and (held + size > room or at - start == _WINDOW_ITEMS):
            yield _Wanted(start, wanted.keys[start:at], wanted.lengths[start:at])
            start, held, room = at, 0, min(2 * room, WINDOW_BYTES, most)
        held += size
    if start < len(wanted.keys):
        yield _Wanted(start, wanted.keys[start:], wanted.lengths[start:])


def _give_back(task: Task[_Window]) -> None:
    """Release the blocks of a window that was read ahead and is not sent."""
    if not task.cancelled() and task.exception() is None:
        task.result().lease.release()


@dataclass(slots=True)
class _Partial:
    """An object that is being received; `size` counts the bytes that have arrived."""

    key: ObjectKey
    meta: ObjectMeta
    lease: Lease
    size: int = 0

    def add(self, part: memoryview) -> None:
        """Copy the next bytes into the leased blocks; raises WireError for more than the object has.

        They are not used where they lie, because a store is several times slower with bytes that are not aligned.
        """
        if self.size + part.nbytes > self.meta.length:
            raise WireError(f"an object of {self.meta.length} bytes comes with {self.size + part.nbytes} at least")
        for view in take(self.lease.views[0], self.size, self.size + part.nbytes):
            view[:] = part[: view.nbytes]
            part = part[view.nbytes :]
            self.size += view.nbytes

    def item(self) -> SetItem:
        """Return the item for the store: whole blocks of BLOCK_ALIGN bytes, with zeros behind the payload instead of old data."""
        buffers = take(self.lease.views[0], 0, -(-self.size // BLOCK_ALIGN) * BLOCK_ALIGN)
        zero_tail(buffers, self.size)
        return SetItem(self.key, buffers, self.meta)


class _Incoming:
    """Receiver of the objects of one Set: takes them from the messages, and stores one window while the next arrives.

    Thread safety: the event loop's thread.
    """

    def __init__(self, caller: Caller, threads: Threads, arena: HostArena, most_keys: int, most_bytes: int, meters: Meters) -> None:
        self._arena = arena
        self._caller = caller.grants.name
        self._meters = meters
        self._store = caller.grants.store
        self._budget = caller.bounds.payload
        self._workers = caller.bounds.workers
        self._threads = threads
        self._most_keys = most_keys
        self._most_bytes = most_bytes
        self._most_header = request_bytes(most_keys)
        self._current: _Partial | None = None
        self._ready: list[_Partial] = []
        self._storing: Task[list[Outcome]] | None = None
        self._outcomes: list[Outcome] = []
        self._seen = 0

    async def add(self, message: bytes) -> None:
        """Take in one message. Raises WireError if it is malformed, LimitError if it is beyond a limit."""
        header, payload = decode(message, pb.SetPieces, self._most_header)
        keys = read_keys(header.keys, self._most_keys)
        if not (len(header.sizes) == len(header.begins) and len(keys) == len(header.metas) == sum(header.begins)):
            raise WireError("the columns of a message of objects do not have the same length")
        if sum(header.sizes) != payload.nbytes:
            raise WireError(f"the pieces of a message have {sum(header.sizes)} bytes and its payload has {payload.nbytes}")
        self._meters.moved(self._caller, "stream", "in", payload.nbytes)
        fresh = iter(zip(keys, map(messages.read_meta, header.metas), strict=True))
        at = 0
        for size, begins in zip(header.sizes, header.begins, strict=True):
            if begins:
                await self._begin(*next(fresh))
            if self._current is None:
                raise WireError("a piece goes on with no object")
            self._current.add(payload[at : at + size])
            at += size
            if self._current.size == self._current.meta.length:
                self._ready.append(self._current)
                self._current = None

    async def _begin(self, key: ObjectKey, meta: ObjectMeta) -> None:
        if self._current is not None:
            raise WireError("an object begins before the one before it is complete")
        _check_length(meta.length, self._most_bytes)
        self._seen += 1
        if self._seen > self._most_keys:
            raise LimitError(f"a set has at most {self._most_keys} objects; send them in parts")
        if blocks_for([meta.length])[0] * Lease.block_bytes > self._budget.largest:
            raise LimitError(f"an object of {meta.length} bytes is more than this client may hold ({self._budget.largest})")
        if len(self._ready) == _WINDOW_ITEMS or sum(part.lease.nbytes for part in self._ready) + meta.length > WINDOW_BYTES:
            await self._store_ready()
        lease = Lease.try_take(self._arena, self._budget, [meta.length])
        if lease is None:
            await self._store_ready()
            await self._land()  # this call holds no blocks while it waits for more
            lease = await Lease.take(self._arena, self._budget, [meta.length])
        self._current = _Partial(key, meta, lease)

    async def finish(self) -> list[Outcome]:
        """Store the rest and return the outcomes of all objects; raises WireError if the last one is incomplete."""
        if self._current is not None:
            raise WireError("the stream ends in the middle of an object")
        await self._store_ready()
        await self._land()
        return self._outcomes

    def abandon(self) -> None:
        """Give back the blocks of objects that will not be stored. A window that a thread is storing is given back when that is done."""
        _release([*self._ready, *([self._current] if self._current else [])])
        self._ready, self._current = [], None
        if self._storing is not None:
            self._storing.cancel()  # ends a wait for a thread; a store call that has begun goes on

    async def _store_ready(self) -> None:
        """Let a thread store the complete objects, once the window before is stored."""
        await self._land()
        if not self._ready:
            return
        window, self._ready = self._ready, []
        items = [part.item() for part in window]
        self._storing = self._threads.start(self._workers, _store_window, self._store, items, self._meters, landed=lambda: _release(window))

    async def _land(self) -> None:
        """Wait until the window that is being stored, if any, is done, and keep its outcomes."""
        if self._storing is not None:
            storing, self._storing = self._storing, None
            self._outcomes += await storing


def _release(parts: Sequence[_Partial]) -> None:
    for part in parts:
        part.lease.release()


def _store_window(store: StorageBackend, items: Sequence[SetItem], meters: Meters) -> list[Outcome]:
    """Store those objects whose checksum is right, or was not given; the others are answered ERROR. Runs in a store thread."""
    sound = [not i.meta.checksum or checksum(i.key, i.buffers, i.meta.length) == i.meta.checksum for i in items]
    meters.damaged(sound.count(False))
    answers = iter(store.set([item for item, well in zip(items, sound, strict=True) if well]))
    return [next(answers) if well else Outcome.ERROR for well in sound]


def _portions(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Yield runs of at most _WINDOW_ITEMS items with at most _DIRECT_BYTES of memory; or single larger items."""
    start = held = 0
    for at, item in enumerate(items):
        size = sum(view.nbytes for view in item.buffers)
        if at > start and (held + size > _DIRECT_BYTES or at - start == _WINDOW_ITEMS):
            yield items[start:at]
            start, held = at, 0
        held += size
    if start < len(items):
        yield items[start:]


def _weigh(request: pb.GetIntoRequest | pb.SetFromRequest) -> int:
    """Return the estimated bytes of the Python objects for the extents of a request."""
    return _EXTENT_BYTES * len(request.places.regions)


def _session(caller: Caller) -> Session:
    if not isinstance(caller.session, Session):
        raise Refusal(StatusCode.FAILED_PRECONDITION, "memory is shared over the unix sockets only; use Get and Set here")
    return caller.session


def _places(session: Session, places: pb.Places, expected: int, most: int) -> list[list[memoryview]]:
    """Return the views of each item's extents, one list for each of `expected` items.

    Raises WireError if the columns do not fit together or an extent is not attached, LimitError for more than `most` bytes.
    """
    columns = (places.regions, places.offsets, places.sizes)
    extents_in_all = sum(places.counts)
    if len(places.counts) != expected or any(len(column) != extents_in_all for column in columns):
        raise WireError(f"{expected} items came with places for {len(places.counts)}, or these are not complete")
    if sum(places.sizes) > most:
        raise LimitError(f"one call has places of {sum(places.sizes)} bytes; it may have {most}, so send the items in parts")
    extents = iter(zip(*columns, strict=True))
    return [[session.view(*next(extents)) for _ in range(count)] for count in places.counts]


def _check_length(length: int, most: int) -> None:
    if not 0 < length <= most:
        raise LimitError(f"an object of {length} bytes is not possible; limits.object_bytes is {most}")


@asynccontextmanager
async def _transfer(caller: Caller, nbytes: int) -> AsyncIterator[None]:
    """Hold room for two messages of `nbytes` bytes each, or all that the client may: one is on its way, one is made or taken apart."""
    held = min(2 * nbytes, caller.bounds.transfers.largest)
    await caller.bounds.transfers.take(held)
    try:
        yield
    finally:
        caller.bounds.transfers.give(held)
