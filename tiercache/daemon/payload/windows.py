"""Windows of objects in leased blocks, one store call each: those of a Get, and those arriving for a Set."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Final

from tiercache.core import BLOCK_ALIGN, ObjectKey, ObjectMeta, Outcome
from tiercache.daemon.access import Caller, LimitError
from tiercache.daemon.budget import BlockPool, Lease, blocks_for
from tiercache.daemon.call import Wanted, check_length, read_keys, request_bytes
from tiercache.daemon.node_metrics import NodeMetrics
from tiercache.daemon.store_threads import Threads
from tiercache.errors import WireError
from tiercache.storage.base import GetItem, SetItem, StorageBackend
from tiercache.storage.checksum import checksum
from tiercache.storage.vectors import batches, copy_out, take, zero_tail
from tiercache.wire import messages
from tiercache.wire.pieces import Piece, cut
from tiercache.wire.v1 import storage_pb2 as pb

WINDOW_BYTES: Final = 8 << 20
"""Maximum bytes of blocks that one store call of Get or Set uses; a larger object is moved alone.

Larger windows let the store profit from batches; smaller windows let more clients share the budget."""
WINDOW_OBJECTS: Final = 1024
"""Maximum number of objects of one store call."""

_FIRST_WINDOW_BYTES: Final = 1 << 20
"""Maximum bytes of the first window of a Get; the limit doubles with each window, up to WINDOW_BYTES."""
_DESCRIBED_BYTES: Final = 128 << 10
"""Minimum length in bytes of an object whose checksum is asked of the store.

For a shorter object it is cheaper to compute the checksum again."""


@dataclass(frozen=True, slots=True)
class Window:
    """Objects that were read, and the blocks that hold them."""

    first: int
    """Position of the first object in the request."""
    items: Sequence[GetItem]
    outcomes: Sequence[Outcome]
    checksums: Sequence[bytes]
    """Checksum of each object; empty unless the outcome is HIT."""
    lease: Lease

    def pieces(self, chunk: int) -> Iterator[tuple[pb.GetPieces, list[memoryview]]]:
        """Yield messages with at most `chunk` bytes of these objects, each as header and payload."""
        sizes = [
            item.length if outcome is Outcome.HIT else 0
            for item, outcome in zip(self.items, self.outcomes, strict=True)
        ]
        for pieces in cut(sizes, chunk):
            yield self._message(pieces)

    def _message(self, pieces: Sequence[Piece]) -> tuple[pb.GetPieces, list[memoryview]]:
        # An object's outcome and checksum travel with its first piece, which starts at byte 0.
        begun = [piece.item for piece in pieces if not piece.start]
        outcomes = (None if piece.start else self.outcomes[piece.item] for piece in pieces)
        header = pb.GetPieces(
            items=[self.first + piece.item for piece in pieces],
            outcomes=[messages.NUMBER_OF[one] if one else 0 for one in outcomes],  # type: ignore[misc]
            sizes=[piece.stop - piece.start for piece in pieces],
            checksums=b"".join(self.checksums[item] for item in begun),
        )
        return header, [
            view for piece in pieces for view in take(self.items[piece.item].buffers, piece.start, piece.stop)
        ]


def read_window(
    store: StorageBackend, items: Sequence[GetItem], first: int, lease: Lease, peek: bool
) -> Window:
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
    return Window(first, items, outcomes, sums, lease)


def windows_of(wanted: Wanted, max_bytes: int) -> Iterator[Wanted]:
    """Yield the windows of a Get: runs of objects for one store call each, or single larger objects.

    A window has at most WINDOW_OBJECTS objects, whose blocks take at most WINDOW_BYTES and `max_bytes`. The
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
        if at > start and (held + size > room or at - start == WINDOW_OBJECTS):
            yield Wanted(start, wanted.keys[start:at], wanted.lengths[start:at])
            start, held, room = at, 0, min(2 * room, WINDOW_BYTES, max_bytes)
        held += size
    if start < len(wanted.keys):
        yield Wanted(start, wanted.keys[start:], wanted.lengths[start:])


def release_window(reading: Future[Window]) -> None:
    """Release the blocks of a window that was read ahead and will not be sent."""
    if not reading.cancelled() and reading.exception() is None:
        reading.result().lease.release()


@dataclass(slots=True)
class _PartialObject:
    """An object that is being received."""

    key: ObjectKey
    meta: ObjectMeta
    views: Sequence[memoryview]
    """Leased blocks."""
    lease: Lease | None
    """Lease of the blocks, and perhaps of objects behind this one, which have None."""
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
        copy_out(part, self.views, self.size)
        self.size += part.nbytes

    def item(self) -> SetItem:
        """Return the item for the store: whole blocks of BLOCK_ALIGN bytes, with zeros behind the payload."""
        buffers = take(self.views, 0, -(-self.size // BLOCK_ALIGN) * BLOCK_ALIGN)
        zero_tail(buffers, self.size)
        return SetItem(self.key, buffers, self.meta)


class ObjectReceiver:
    """Receiver of the objects of one Set; it stores one window of objects while the next arrives.

    Thread safety: the coroutine of its call.
    """

    def __init__(
        self, caller: Caller, threads: Threads, blocks: BlockPool, limits: pb.Limits, metrics: NodeMetrics
    ) -> None:
        self._blocks = blocks
        self._principal = caller.permissions.name
        self._metrics = metrics
        self._store = caller.permissions.store
        self._budget = caller.budgets.payload
        self._workers = caller.budgets.workers
        self._threads = threads
        self._max_keys = limits.keys
        self._max_bytes = limits.object_bytes
        self._max_header = request_bytes(limits.keys)
        self._current: _PartialObject | None = None
        self._ready: list[_PartialObject] = []
        self._storing: Future[list[Outcome]] | None = None
        self._outcomes: list[Outcome] = []
        self._seen = 0

    async def add(self, message: bytes) -> None:
        """Process one message; raises WireError if it is malformed, LimitError if it is beyond a limit."""
        found = messages.read_message(message, pb.UnreadPieces, len(message))
        header = messages.read_message(found.pieces, pb.SetPieces, self._max_header)
        payload = memoryview(found.payload)
        keys = read_keys(header.keys, self._max_keys)
        if len(header.sizes) > 2 * self._max_keys:  # each takes time of the event loop, however few bytes
            raise LimitError(
                f"a message of {len(header.sizes)} pieces is beyond the limit of {2 * self._max_keys}; send"
                " the bytes of an object in one piece"
            )
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

    async def receive(
        self,
        objects: Sequence[tuple[ObjectKey, ObjectMeta]],
        fill: Callable[[list[memoryview]], Awaitable[None]],
    ) -> None:
        """Let `fill` put the bytes of objects straight into leased blocks, window by window.

        Raises WireError, or LimitError for an object beyond a limit, and what `fill` raises.
        """
        for _, meta in objects:
            self._check(meta)
        most = min(WINDOW_BYTES, self._budget.largest)
        for window in batches(objects, _leased_bytes, WINDOW_OBJECTS, most):
            lengths = [meta.length for _, meta in window]
            lease = await self._lease(lengths)
            views = list(lease.views)
            self._ready = [
                _PartialObject(key, meta, blocks, None if number else lease, meta.length)
                for number, ((key, meta), blocks) in enumerate(zip(window, views, strict=True))
            ]
            await fill([view for part in self._ready for view in take(part.views, 0, part.size)])
            self._metrics.count_payload(self._principal, "data", "in", sum(lengths))
            await self._start_storing()

    async def _begin(self, key: ObjectKey, meta: ObjectMeta) -> None:
        if self._current is not None:
            raise WireError("an object begins before the previous one is complete")
        self._check(meta)
        held = sum(part.lease.nbytes for part in self._ready if part.lease is not None)
        if len(self._ready) == WINDOW_OBJECTS or held + meta.length > WINDOW_BYTES:
            await self._start_storing()
        lease = await self._lease([meta.length])
        self._current = _PartialObject(key, meta, lease.views[0], lease)

    async def _lease(self, lengths: Sequence[int]) -> Lease:
        """Lease blocks; while this call waits for them, it holds no others."""
        lease = Lease.try_take(self._blocks, self._budget, lengths)
        if lease is None:
            await self._start_storing()
            await self._finish_storing()
            lease = await Lease.take(self._blocks, self._budget, lengths)
        return lease

    def _check(self, meta: ObjectMeta) -> None:
        """Count an object of the call; raises LimitError for one beyond a limit."""
        check_length(meta.length, self._max_bytes)
        self._seen += 1
        if self._seen > self._max_keys:
            raise LimitError(f"one Set may have at most {self._max_keys} objects; send them in parts")
        if _leased_bytes((None, meta)) > self._budget.largest:
            raise LimitError(
                f"an object of {meta.length} bytes is more than this client may hold ({self._budget.largest})"
            )

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
        if part.lease is not None:
            part.lease.release()


def _leased_bytes(item: tuple[object, ObjectMeta]) -> int:
    """Return the bytes of the blocks that an object takes."""
    return blocks_for([item[1].length])[0] * Lease.block_bytes


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
