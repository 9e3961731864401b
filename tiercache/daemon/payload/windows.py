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
from tiercache.daemon.call import Wanted, check_length, read_keys
from tiercache.daemon.node_metrics import NodeMetrics, Plane
from tiercache.daemon.store_threads import Threads
from tiercache.errors import WireError
from tiercache.storage.base import GetItem, SetItem, StorageBackend
from tiercache.storage.checksum import checksum
from tiercache.storage.vectors import batches, take, zero_tail
from tiercache.wire import messages
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

    def described(self, most: int) -> Iterator[tuple[pb.GetHeader, list[memoryview]]]:
        """Yield headers, each of objects of at most `most` bytes or of one, and the bytes that follow it."""
        sizes = [
            item.length if outcome is Outcome.HIT else 0
            for item, outcome in zip(self.items, self.outcomes, strict=True)
        ]
        for part in batches(range(len(sizes)), sizes.__getitem__, WINDOW_OBJECTS, most):
            start, stop = part[0], part[-1] + 1
            header = pb.GetHeader(
                items=range(self.first + start, self.first + stop),
                outcomes=[messages.NUMBER_OF[one] for one in self.outcomes[start:stop]],  # type: ignore[misc]
                sizes=sizes[start:stop],
                checksums=b"".join(self.checksums[start:stop]),
            )
            yield header, [view for n in part for view in take(self.items[n].buffers, 0, sizes[n])]


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


class ObjectReceiver:
    """Receiver of the objects of one Set; it stores one window of objects while the next arrives.

    Thread safety: the coroutine of its call.
    """

    def __init__(
        self, caller: Caller, threads: Threads, blocks: BlockPool, limits: pb.Limits, metrics: NodeMetrics
    ) -> None:
        self._caller = caller
        self._threads = threads
        self._blocks = blocks
        self._limits = limits
        self._metrics = metrics
        self._storing: Future[list[Outcome]] | None = None
        self._outcomes: list[Outcome] = []

    def objects(self, header: pb.SetHeader) -> list[tuple[ObjectKey, ObjectMeta]]:
        """Return the objects of a header; raises WireError, or LimitError for one beyond a limit."""
        keys = read_keys(header.keys, self._limits.keys)
        metas = [messages.read_meta(meta) for meta in header.metas]
        if len(metas) != len(keys):
            raise WireError(f"{len(keys)} keys came with {len(metas)} descriptions")
        largest = self._caller.budgets.payload.largest
        for meta in metas:
            check_length(meta.length, self._limits.object_bytes)
            if _leased_bytes((None, meta)) > largest:
                raise LimitError(
                    f"an object of {meta.length} bytes is more than this client may hold ({largest})"
                )
        return list(zip(keys, metas, strict=True))

    async def receive(
        self,
        objects: Sequence[tuple[ObjectKey, ObjectMeta]],
        fill: Callable[[list[memoryview]], Awaitable[None]],
        plane: Plane,
    ) -> list[Outcome]:
        """Let `fill` put the bytes of objects into leased blocks, window by window, and store them.

        Returns the outcomes of all objects. Raises what `fill` raises; the blocks of a window that a thread
        is storing are then given back when the thread is done.
        """
        most = min(WINDOW_BYTES, self._caller.budgets.payload.largest)
        try:
            for window in batches(objects, _leased_bytes, WINDOW_OBJECTS, most):
                await self._receive_window(window, fill, plane)
            await self._finish_storing()
        finally:
            if self._storing is not None:
                self._storing.cancel()  # ends a wait for a thread; a store call that has begun goes on
        return self._outcomes

    async def _receive_window(
        self,
        window: Sequence[tuple[ObjectKey, ObjectMeta]],
        fill: Callable[[list[memoryview]], Awaitable[None]],
        plane: Plane,
    ) -> None:
        lengths = [meta.length for _, meta in window]
        lease = Lease.try_take(self._blocks, self._caller.budgets.payload, lengths)
        if lease is None:
            await self._finish_storing()  # while this call waits for blocks, it holds none
            lease = await Lease.take(self._blocks, self._caller.budgets.payload, lengths)
        try:
            views = [take(blocks, 0, length) for blocks, length in zip(lease.views, lengths, strict=True)]
            await fill([view for some in views for view in some])
            self._metrics.count_payload(self._caller.permissions.name, plane, "in", sum(lengths))
            items = [
                _item(key, meta, blocks) for (key, meta), blocks in zip(window, lease.views, strict=True)
            ]
            await self._finish_storing()
        except BaseException:
            lease.release()
            raise
        self._storing = self._threads.start(
            self._caller.budgets.workers,
            _store_window,
            self._caller.permissions.store,
            items,
            self._metrics,
            landed=lease.release,
        )

    async def _finish_storing(self) -> None:
        """If a window is being stored, wait until it is stored, and keep the outcomes."""
        if self._storing is not None:
            storing, self._storing = self._storing, None
            self._outcomes += await storing


def _item(key: ObjectKey, meta: ObjectMeta, blocks: Sequence[memoryview]) -> SetItem:
    """Return the item for the store: whole blocks of BLOCK_ALIGN bytes, with zeros behind the payload."""
    buffers = take(blocks, 0, -(-meta.length // BLOCK_ALIGN) * BLOCK_ALIGN)
    zero_tail(buffers, meta.length)
    return SetItem(key, buffers, meta)


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
