"""The calls Get and Set of gRPC, for clients of any language: payload in messages, in bounded memory.

The objects of a call go through the arena window by window (`windows`). The coroutine of a call may be
cancelled at any time. A store call that a thread makes for the coroutine goes on, and the blocks that it uses
are given back when it is done.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from tiercache.core import Outcome
from tiercache.daemon.access import Caller
from tiercache.daemon.budget import MESSAGE_COPIES, BlockPool, Lease
from tiercache.daemon.call import Call, read_wanted
from tiercache.daemon.node_metrics import NodeMetrics
from tiercache.daemon.payload.windows import (
    Window,
    read_window,
    room_in,
    store_window,
    windows_to_read,
    windows_to_store,
)
from tiercache.daemon.store_threads import Threads
from tiercache.errors import WireError
from tiercache.storage.vectors import parts
from tiercache.wire import data, messages
from tiercache.wire.v1 import storage_pb2 as pb

_HEADER_BYTES: Final = 64 << 10
"""Maximum bytes of the header of an outgoing message with objects."""


class StreamCalls:
    """Handlers of Get and Set.

    Thread safety: the event loop's thread.
    """

    def __init__(self, threads: Threads, blocks: BlockPool, limits: pb.Limits, metrics: NodeMetrics) -> None:
        self._chunk: Final = min(messages.CHUNK_BYTES, limits.message_bytes // 2)
        self._metrics: Final = metrics
        self._threads: Final = threads
        self._blocks: Final = blocks
        self._limits: Final = limits

    async def get(self, call: Call) -> None:
        """Serve Get: stream objects out of the store."""
        request = await call.request(pb.GetRequest)
        wanted = read_wanted(request.keys, request.lengths, self._limits)
        budgets, permissions = call.caller.budgets, call.caller.permissions
        windows = list(windows_to_read(wanted, budgets.payload.largest))
        async with _transfer(call.caller, self._chunk + _HEADER_BYTES):
            await call.begin()
            for window in windows:
                lease = await Lease.take(self._blocks, budgets.payload, window.lengths)
                reading = self._threads.start(
                    budgets.workers, read_window, permissions.store, window, lease, request.peek,
                    undo=lease.release,
                )  # fmt: skip
                try:
                    found = await reading
                    self._metrics.count_reads(permissions.name, "stream", found.items, found.outcomes)
                    await self._send(call, found)
                finally:
                    # Without a result, `undo` releases the blocks.
                    if reading.done() and not reading.cancelled() and reading.exception() is None:
                        lease.release()

    async def _send(self, call: Call, window: Window) -> None:
        for header, views in window.described(self._chunk):
            for number, payload in enumerate(parts(views, self._chunk)):
                reply = pb.GetReply(header=None if number else header, payload=payload)
                await call.send(reply.SerializeToString())

    async def set(self, call: Call) -> None:
        """Serve Set: store a stream of objects."""
        budgets, permissions = call.caller.budgets, call.caller.permissions
        outcomes: list[Outcome] = []
        async with _transfer(call.caller, self._limits.message_bytes):
            incoming = _Messages(call)
            header = await incoming.header()
            for window in windows_to_store(header, self._limits, budgets.payload.largest):
                lengths = [meta.length for _, meta in window]
                lease = await Lease.take(self._blocks, budgets.payload, lengths)
                try:
                    await incoming.fill(room_in(lease, window))
                except BaseException:
                    lease.release()
                    raise
                self._metrics.count_payload(permissions.name, "stream", "in", sum(lengths))
                outcomes += await self._threads.start(
                    budgets.workers, store_window, permissions.store, window, lease, self._metrics,
                    landed=lease.release,
                )  # fmt: skip
            await incoming.end()
            await call.send(messages.outcomes(outcomes).SerializeToString())


class _Messages:
    """Messages of a Set over gRPC: a header, and the payload behind it.

    Thread safety: the event loop's thread.
    """

    def __init__(self, call: Call) -> None:
        self._call: Final = call
        self._payload = memoryview(b"")
        """Bytes of the last message that were not taken yet."""

    async def header(self) -> pb.SetHeader:
        """Return the header of all objects, from the first message; raises WireError without one."""
        message = await self._call.read()
        found = messages.read_message(message or b"", pb.UnreadHeader, len(message or b""))
        self._payload = memoryview(found.payload)
        return messages.read_message(found.header, pb.SetHeader, self._call.request_bytes)

    async def fill(self, views: list[memoryview]) -> None:
        """Put the next bytes of the payload into these buffers; raises WireError if it has fewer.

        The bytes are copied, because a store is several times slower with buffers that are not aligned.
        """
        left = list(views)
        self._payload = data.place(self._payload, left)
        while left:
            self._payload = data.place(await self._next(), left)

    async def end(self) -> None:
        """Raise WireError if there is more than the objects of the header have."""
        if self._payload or await self._call.read() is not None:
            raise WireError("the payload of a Set has more bytes than its objects")

    async def _next(self) -> memoryview:
        message = await self._call.read()
        if message is None:
            raise WireError("the stream ends in the middle of an object")
        found = messages.read_message(message, pb.UnreadHeader, len(message))
        if found.header or not found.payload:
            raise WireError("a message of a Set behind the first one must have a payload, and no header")
        return memoryview(found.payload)


@asynccontextmanager
async def _transfer(caller: Caller, nbytes: int) -> AsyncIterator[None]:
    """Reserve room for messages of `nbytes` bytes each, or the largest room that the client may have."""
    held = min(MESSAGE_COPIES * nbytes, caller.budgets.transfers.largest)
    await caller.budgets.transfers.take(held)
    try:
        yield
    finally:
        caller.budgets.transfers.give(held)
