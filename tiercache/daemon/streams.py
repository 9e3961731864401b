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

from asyncio import Future
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from tiercache.daemon.access import Caller
from tiercache.daemon.budget import MESSAGE_COPIES, BlockPool, Lease
from tiercache.daemon.call import Call, Wanted, read_wanted
from tiercache.daemon.node_metrics import NodeMetrics, Plane
from tiercache.daemon.payload.receiving import ObjectReceiver
from tiercache.daemon.payload.windows import Window, read_window, release_window, windows_of
from tiercache.daemon.store_threads import Threads
from tiercache.steps import enter_loop
from tiercache.storage.base import GetItem
from tiercache.wire import messages
from tiercache.wire.pieces import CHUNK_BYTES
from tiercache.wire.v1 import storage_pb2 as pb

_HEADER_BYTES: Final = 64 << 10
"""Maximum bytes of the header of an outgoing message with objects."""


class StreamCalls:
    """Handlers of Get and Set.

    A call may have `max_keys` objects of up to `max_bytes` bytes each. Messages have up to `message_bytes`
    bytes.

    Thread safety: the event loop's thread.
    """

    def __init__(
        self,
        threads: Threads,
        blocks: BlockPool,
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
        self._blocks = blocks
        self._max_keys = max_keys
        self._max_bytes = max_bytes

    async def get(self, call: Call) -> None:
        """Serve Get: stream objects out of the store."""

        async def deliver(window: Window) -> None:
            for header, views in window.pieces(self._chunk):
                reply = pb.GetReply(pieces=header, payload=b"".join(views))
                await call.send(reply.SerializeToString())

        request = await call.request(pb.GetRequest)
        async with _transfer(call.caller, self._chunk + _HEADER_BYTES):
            await self._read_all(call, request, "stream", deliver)

    async def _read_all(
        self, call: Call, request: pb.GetRequest, plane: Plane, deliver: Callable[[Window], Awaitable[None]]
    ) -> None:
        """Read all objects of a request, window by window, and let `deliver` send each window."""
        wanted = read_wanted(request.keys, request.lengths, self._max_keys, self._max_bytes)
        windows = list(windows_of(wanted, call.caller.budgets.payload.largest))
        following: Future[Window] | None = None
        if len(windows) > 1:
            await enter_loop()  # where one window is sent while the next is read
        try:
            for number, window in enumerate(windows):
                if following is None:
                    lease = await Lease.take(self._blocks, call.caller.budgets.payload, window.lengths)
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
                    self._metrics.count_reads(name, plane, found.items, found.outcomes)
                    await deliver(found)
                finally:
                    found.lease.release()
        finally:
            if following is not None:  # the call ends early, while a thread may still read this window
                release_window(following) if following.done() else following.add_done_callback(release_window)

    def _read_ahead(self, caller: Caller, window: Wanted, *, peek: bool) -> Future[Window] | None:
        """Begin to read the next window if there is room for it now, else return None.

        This must not wait for room, because the current window holds room. Calls that hold room while they
        wait for more would deadlock.
        """
        lease = Lease.try_take(self._blocks, caller.budgets.payload, window.lengths)
        return None if lease is None else self._read(caller, window, lease, peek=peek)

    def _read(self, caller: Caller, window: Wanted, lease: Lease, *, peek: bool) -> Future[Window]:
        items = [
            GetItem(key, views, length)
            for key, views, length in zip(window.keys, lease.views, window.lengths, strict=True)
        ]
        return self._threads.start(
            caller.budgets.workers,
            read_window,
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
            incoming = self._receiver(call.caller)
            try:
                while (message := await call.read()) is not None:
                    await incoming.add(message)
                outcomes = await incoming.finish()
            finally:
                incoming.abandon()
            await call.send(messages.outcomes(outcomes).SerializeToString())

    def _receiver(self, caller: Caller) -> ObjectReceiver:
        return ObjectReceiver(
            caller, self._threads, self._blocks, self._max_keys, self._max_bytes, self._metrics
        )


@asynccontextmanager
async def _transfer(caller: Caller, nbytes: int) -> AsyncIterator[None]:
    """Reserve room for messages of `nbytes` bytes each, or the largest room that the client may have."""
    held = min(MESSAGE_COPIES * nbytes, caller.budgets.transfers.largest)
    await caller.budgets.transfers.take(held)
    try:
        yield
    finally:
        caller.budgets.transfers.give(held)
