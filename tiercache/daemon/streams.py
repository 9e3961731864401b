"""The calls Get and Set: payloads travel in messages, with bounded memory at every step.

A window is a group of objects that one store call moves. Get reads a window into leased blocks of the arena,
and sends it while the next window is read. Set gathers objects in leased blocks, and stores one window while
the next arrives:

    Get   store thread   | read 0 | read 1 | read 2 |
          event loop              | send 0 | send 1 | send 2 |
    Set   event loop     | take 0  | take 1  | take 2  |
          store thread             | store 0 | store 1 | store 2 |

The coroutine of a call may be cancelled at any time. A store call that a thread makes for the coroutine goes
on. The blocks that the store call uses are given back when the store call is done.
"""

from __future__ import annotations

from asyncio import Task
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Final

from tiercache.core import BLOCK_ALIGN, ObjectKey, ObjectMeta, Outcome
from tiercache.daemon.access import Caller, LimitError
from tiercache.daemon.budget import Lease, blocks_for
from tiercache.daemon.call import Call, Threads, Wanted, check_length, read_keys, read_wanted, request_bytes
from tiercache.daemon.node_metrics import NodeMetrics
from tiercache.errors import WireError
from tiercache.pools import HostArena
from tiercache.storage.base import GetItem, SetItem, StorageBackend
from tiercache.storage.checksum import checksum
from tiercache.storage.vectors import take, zero_tail
from tiercache.wire import messages
from tiercache.wire.frames import CHUNK_BYTES, cut, decode, encode
from tiercache.wire.v1 import storage_pb2 as pb

WINDOW_BYTES: Final = 8 << 20
"""Maximum bytes of blocks that one store call of Get or Set uses; a larger object is moved alone.

Larger windows let the store profit from batches; smaller windows let more clients share the budget."""

_FIRST_WINDOW_BYTES: Final = 1 << 20
"""Maximum bytes of the first window of a Get; the limit doubles with each window, up to WINDOW_BYTES."""
_WINDOW_OBJECTS: Final = 1024
"""Maximum number of objects of one store call."""
_HEADER_BYTES: Final = 64 << 10
"""Maximum bytes of the header of an outgoing message with objects."""

_DESCRIBED_BYTES: Final = 128 << 10
"""Minimum length in bytes of an object whose checksum is asked of the store.

For a shorter object it is cheaper to compute the checksum again."""


class StreamCalls:
    """Handlers of Get and Set.

    A call may have `max_keys` objects of up to `max_bytes` bytes each. Messages have up to `message_bytes`
    bytes.

    Thread safety: the event loop's thread.
    """

    def __init__(
        self,
        threads: Threads,
        arena: HostArena,
        *,
        max_keys: int,
        max_bytes: int,
        message_bytes: int,
        metrics: NodeMetrics | None = None,
    ) -> None:
        self._message_bytes = message_bytes
        self._chunk = min(CHUNK_BYTES, message_bytes // 2)
        self._metrics = metrics or NodeMetrics()
        self._threads = threads
        self._arena = arena
        self._max_keys = max_keys
        self._max_bytes = max_bytes

    async def get(self, call: Call) -> None:
        """Serve Get: stream objects out of the store."""
        request = await call.request(pb.GetRequest)
        wanted = read_wanted(request.keys, request.lengths, self._max_keys, self._max_bytes)
        windows = list(_windows(wanted, call.caller.budgets.payload.largest))
        async with _transfer(call.caller, self._chunk + _HEADER_BYTES):
            following: Task[_Window] | None = None
            try:
                for number, window in enumerate(windows):
                    if following is None:
                        lease = await Lease.take(self._arena, call.caller.budgets.payload, window.lengths)
                        following = self._read(call.caller, window, lease, peek=request.peek)
                    if number == 0:
                        await call.begin()  # while the store reads
                    # If this wait is cancelled, `following` stays set, and the blocks of the window that it
                    # reads are released below.
                    found, following = await following, None
                    try:
                        if number + 1 < len(windows):
                            following = self._read_ahead(call.caller, windows[number + 1], peek=request.peek)
                        name = call.caller.permissions.name
                        self._metrics.count_reads(name, "stream", found.items, found.outcomes)
                        for frame in found.frames(self._chunk):
                            await call.send(frame)
                    finally:
                        found.lease.release()
            finally:
                if following is not None:  # the call ends early, while a thread may still read this window
                    following.add_done_callback(_release_window)

    def _read_ahead(self, caller: Caller, window: Wanted, *, peek: bool) -> Task[_Window] | None:
        """Begin to read the next window if there is room for it now, else return None.

        This must not wait for room, because the current window holds room. Calls that hold room while they
        wait for more would deadlock.
        """
        lease = Lease.try_take(self._arena, caller.budgets.payload, window.lengths)
        return None if lease is None else self._read(caller, window, lease, peek=peek)

    def _read(self, caller: Caller, window: Wanted, lease: Lease, *, peek: bool) -> Task[_Window]:
        items = [
            GetItem(key, views, length)
            for key, views, length in zip(window.keys, lease.views, window.lengths, strict=True)
        ]
        return self._threads.start(
            caller.budgets.workers,
            _read_window,
            caller.permissions.store,
            items,
            window.first,
            lease,
            peek,
            undo=lease.release,
        )

    async def set(self, call: Call) -> None:
        """Serve Set: store a stream of objects."""
        async with _transfer(call.caller, self._message_bytes):
            incoming = _ObjectReceiver(
                call.caller, self._threads, self._arena, self._max_keys, self._max_bytes, self._metrics
            )
            try:
                while (message := await call.read()) is not None:
                    await incoming.add(message)
                outcomes = await incoming.finish()
            finally:
                incoming.abandon()
            await call.send(messages.outcomes(outcomes).SerializeToString())


@dataclass(frozen=True, slots=True)
class _Window:
    """Objects that were read, and the blocks that hold them."""

    first: int
    """Position of the first object in the request."""
    items: Sequence[GetItem]
    outcomes: Sequence[Outcome]
    checksums: Sequence[bytes]
    """Checksum of each object; empty unless the outcome is HIT."""
    lease: Lease

    def frames(self, chunk: int) -> Iterator[bytes]:
        """Yield the messages that carry these objects, with at most `chunk` bytes of payload each."""
        sizes = [
            item.length if outcome is Outcome.HIT else 0
            for item, outcome in zip(self.items, self.outcomes, strict=True)
        ]
        for pieces in cut(sizes, chunk):
            # An object's outcome and checksum travel with its first piece, which starts at byte 0.
            begun = [piece.item for piece in pieces if not piece.start]
            outcomes = (None if piece.start else self.outcomes[piece.item] for piece in pieces)
            header = pb.GetPieces(
                items=[self.first + piece.item for piece in pieces],
                outcomes=[messages.NUMBER_OF[one] if one else 0 for one in outcomes],  # type: ignore[misc]
                sizes=[piece.stop - piece.start for piece in pieces],
                checksums=b"".join(self.checksums[item] for item in begun),
            )
            yield encode(
                header,
                [
                    view
                    for piece in pieces
                    for view in take(self.items[piece.item].buffers, piece.start, piece.stop)
                ],
            )


def _read_window(
    store: StorageBackend, items: Sequence[GetItem], first: int, lease: Lease, peek: bool
) -> _Window:
    """Read objects, as `peek` does or as `get` does, and find their checksums; runs in a store thread.

    A checksum covers the key and the payload. The client computes the checksum of the key that it asked for
    and the payload that it received, and compares the two.
    """
    outcomes = store.peek(items) if peek else store.get(items)
    large = [
        i.key
        for i, outcome in zip(items, outcomes, strict=True)
        if outcome is Outcome.HIT and i.length >= _DESCRIBED_BYTES
    ]
    known = {
        entry.key: entry.meta.checksum
        for entry in (store.describe(large) if large else ())
        if entry is not None
    }
    sums = [
        (
            (known.get(item.key) or checksum(item.key, item.buffers, item.length))
            if outcome is Outcome.HIT
            else b""
        )
        for item, outcome in zip(items, outcomes, strict=True)
    ]
    return _Window(first, items, outcomes, sums, lease)


def _windows(wanted: Wanted, max_bytes: int) -> Iterator[Wanted]:
    """Yield the windows of a Get: runs of objects for one store call each, or single larger objects.

    A window has at most _WINDOW_OBJECTS objects, whose blocks take at most WINDOW_BYTES and `max_bytes`. The
    first windows are smaller, so that the client can soon check objects while the others are read. Raises
    LimitError for an object whose blocks take more than `max_bytes`.
    """
    room = min(_FIRST_WINDOW_BYTES, max_bytes)
    start = held = 0
    for at, blocks in enumerate(blocks_for(wanted.lengths)):
        size = blocks * Lease.block_bytes
        if size > max_bytes:
            raise LimitError(
                f"an object of {wanted.lengths[at]} bytes is more than this client may hold ({max_bytes});"
                " raise limits.client_bytes"
            )
        if at > start and (held + size > room or at - start == _WINDOW_OBJECTS):
            yield Wanted(start, wanted.keys[start:at], wanted.lengths[start:at])
            start, held, room = at, 0, min(2 * room, WINDOW_BYTES, max_bytes)
        held += size
    if start < len(wanted.keys):
        yield Wanted(start, wanted.keys[start:], wanted.lengths[start:])


def _release_window(task: Task[_Window]) -> None:
    """Release the blocks of a window that was read ahead and will not be sent."""
    if not task.cancelled() and task.exception() is None:
        task.result().lease.release()


@dataclass(slots=True)
class _PartialObject:
    """An object that is being received."""

    key: ObjectKey
    meta: ObjectMeta
    lease: Lease
    size: int = 0
    """Number of bytes that have arrived."""

    def add(self, part: memoryview) -> None:
        """Copy the next bytes into the leased blocks; raises WireError if the object has fewer bytes.

        The bytes are copied, because a store is several times slower with buffers that are not aligned.
        """
        if self.size + part.nbytes > self.meta.length:
            raise WireError(
                f"an object of {self.meta.length} bytes comes with {self.size + part.nbytes} or more bytes"
            )
        for view in take(self.lease.views[0], self.size, self.size + part.nbytes):
            view[:] = part[: view.nbytes]
            part = part[view.nbytes :]
            self.size += view.nbytes

    def item(self) -> SetItem:
        """Return the item for the store: whole blocks of BLOCK_ALIGN bytes, with zeros behind the payload."""
        buffers = take(self.lease.views[0], 0, -(-self.size // BLOCK_ALIGN) * BLOCK_ALIGN)
        zero_tail(buffers, self.size)
        return SetItem(self.key, buffers, self.meta)


class _ObjectReceiver:
    """Receiver of the objects of one Set; it stores one window of objects while the next arrives.

    Thread safety: the event loop's thread.
    """

    def __init__(
        self,
        caller: Caller,
        threads: Threads,
        arena: HostArena,
        max_keys: int,
        max_bytes: int,
        metrics: NodeMetrics,
    ) -> None:
        self._arena = arena
        self._principal = caller.permissions.name
        self._metrics = metrics
        self._store = caller.permissions.store
        self._budget = caller.budgets.payload
        self._workers = caller.budgets.workers
        self._threads = threads
        self._max_keys = max_keys
        self._max_bytes = max_bytes
        self._max_header = request_bytes(max_keys)
        self._current: _PartialObject | None = None
        self._ready: list[_PartialObject] = []
        self._storing: Task[list[Outcome]] | None = None
        self._outcomes: list[Outcome] = []
        self._seen = 0

    async def add(self, message: bytes) -> None:
        """Process one message; raises WireError if it is malformed, LimitError if it is beyond a limit."""
        header, payload = decode(message, pb.SetPieces, self._max_header)
        keys = read_keys(header.keys, self._max_keys)
        if not (
            len(header.sizes) == len(header.begins) and len(keys) == len(header.metas) == sum(header.begins)
        ):
            raise WireError("the columns of a message of objects do not have the same length")
        if sum(header.sizes) != payload.nbytes:
            raise WireError(
                f"the pieces of a message have {sum(header.sizes)} bytes, its payload has {payload.nbytes}"
            )
        self._metrics.count_payload(self._principal, "stream", "in", payload.nbytes)
        # header.sizes    4096   100   4096    bytes of each piece, in the order of the payload
        # header.begins   no     yes   yes     whether the piece is the first one of an object
        # keys, metas            0     1       one entry for each object that begins
        fresh = iter(zip(keys, map(messages.read_meta, header.metas), strict=True))
        at = 0
        for size, begins in zip(header.sizes, header.begins, strict=True):
            if begins:
                await self._begin(*next(fresh))
            if self._current is None:
                raise WireError("a piece continues an object, but none has begun")
            self._current.add(payload[at : at + size])
            at += size
            if self._current.size == self._current.meta.length:
                self._ready.append(self._current)
                self._current = None

    async def _begin(self, key: ObjectKey, meta: ObjectMeta) -> None:
        if self._current is not None:
            raise WireError("an object begins before the previous one is complete")
        check_length(meta.length, self._max_bytes)
        self._seen += 1
        if self._seen > self._max_keys:
            raise LimitError(f"one Set may have at most {self._max_keys} objects; send them in parts")
        if blocks_for([meta.length])[0] * Lease.block_bytes > self._budget.largest:
            raise LimitError(
                f"an object of {meta.length} bytes is more than this client may hold ({self._budget.largest})"
            )
        if (
            len(self._ready) == _WINDOW_OBJECTS
            or sum(part.lease.nbytes for part in self._ready) + meta.length > WINDOW_BYTES
        ):
            await self._start_storing()
        lease = Lease.try_take(self._arena, self._budget, [meta.length])
        if lease is None:
            await self._start_storing()
            await self._finish_storing()  # now this call holds no blocks while it waits for more
            lease = await Lease.take(self._arena, self._budget, [meta.length])
        self._current = _PartialObject(key, meta, lease)

    async def finish(self) -> list[Outcome]:
        """Store the rest and return the outcomes of all objects.

        Raises WireError if the last object is incomplete.
        """
        if self._current is not None:
            raise WireError("the stream ends in the middle of an object")
        await self._start_storing()
        await self._finish_storing()
        return self._outcomes

    def abandon(self) -> None:
        """Give back the blocks of objects that will not be stored.

        The blocks of a window that a thread is storing are given back when the thread is done.
        """
        _release([*self._ready, *([self._current] if self._current else [])])
        self._ready, self._current = [], None
        if self._storing is not None:
            self._storing.cancel()  # ends a wait for a thread; a store call that has begun goes on

    async def _start_storing(self) -> None:
        """Wait until the previous window is stored, then let a thread store the complete objects."""
        await self._finish_storing()
        if not self._ready:
            return
        window, self._ready = self._ready, []
        items = [part.item() for part in window]
        self._storing = self._threads.start(
            self._workers, _store_window, self._store, items, self._metrics, landed=lambda: _release(window)
        )

    async def _finish_storing(self) -> None:
        """If a window is being stored, wait until it is stored, and keep the outcomes."""
        if self._storing is not None:
            storing, self._storing = self._storing, None
            self._outcomes += await storing


def _release(parts: Sequence[_PartialObject]) -> None:
    for part in parts:
        part.lease.release()


def _store_window(store: StorageBackend, items: Sequence[SetItem], metrics: NodeMetrics) -> list[Outcome]:
    """Store the objects whose checksum is right or was not given; return ERROR for the others.

    Runs in a store thread.
    """
    intact = [
        not i.meta.checksum or checksum(i.key, i.buffers, i.meta.length) == i.meta.checksum for i in items
    ]
    metrics.count_damaged(intact.count(False))
    answers = iter(store.set(list(compress(items, intact))))
    return [next(answers) if is_intact else Outcome.ERROR for is_intact in intact]


@asynccontextmanager
async def _transfer(caller: Caller, nbytes: int) -> AsyncIterator[None]:
    """Reserve room for two messages of `nbytes` bytes each, or the largest room that the client may have.

    One message is on its way, while the other is made or parsed.
    """
    held = min(2 * nbytes, caller.budgets.transfers.largest)
    await caller.budgets.transfers.take(held)
    try:
        yield
    finally:
        caller.budgets.transfers.give(held)
