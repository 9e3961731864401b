"""The calls Get and Set: payloads travel in messages or on data connections, in bounded memory.

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

from asyncio import Future, get_running_loop
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from google.protobuf.message import Message
from grpc import StatusCode

from tiercache.daemon.access import Caller
from tiercache.daemon.budget import MESSAGE_COPIES, BlockPool, Lease
from tiercache.daemon.call import Call, Wanted, check_weight, read_wanted
from tiercache.daemon.node_metrics import NodeMetrics, Plane
from tiercache.daemon.payload.channel import Channel, DisconnectedError
from tiercache.daemon.payload.windows import (
    WINDOW_BYTES,
    ObjectReceiver,
    Window,
    read_window,
    release_window,
    windows_of,
)
from tiercache.daemon.store_threads import Threads
from tiercache.errors import WireError
from tiercache.steps import enter_loop
from tiercache.storage.base import GetItem
from tiercache.storage.vectors import parts
from tiercache.wire import data, messages
from tiercache.wire.data import FrameKind
from tiercache.wire.v1 import data_pb2
from tiercache.wire.v1 import storage_pb2 as pb

_HEADER_BYTES: Final = 64 << 10
"""Maximum bytes of the header of an outgoing message with objects."""

M = TypeVar("M", bound=Message)


class DataCall(Call):
    """Call that came on a data connection.

    Thread safety: the coroutine that serves it.
    """

    def __init__(
        self,
        caller: Caller,
        channel: Channel,
        call: data_pb2.DataCall,
        payload: int,
        limits: pb.Limits,
        max_request: int,
    ) -> None:
        super().__init__(caller, None, 0.0, limits.message_bytes, max_request)
        self.name: Final = call.method
        # `>=` is false for NaN, which no timer must ever get.
        self.seconds: Final = call.seconds if call.seconds >= 0 else 0.0
        self._request = call.request
        self._channel = channel
        self._call_seconds = limits.call_seconds
        self.unread = payload
        """Bytes of the frame's payload that have not been received."""

    async def request(self, kind: type[M], weigh: Callable[[M], int] = lambda _: 0) -> M:
        """Return the request, for which the connection has taken room before it received it."""
        message = messages.read_message(self._request, kind, self.request_bytes)
        check_weight(len(self._request), weigh(message), self.message_bytes)
        return message

    async def begin(self) -> None:
        """Do nothing: an answer begins with its first frame."""

    async def end(self) -> None:
        """Do nothing: the connection gives back what it has taken."""

    async def send(self, data: bytes) -> None:
        """Send the one reply of a call, whose payload was received."""
        await self._send(FrameKind.REPLY, data)

    async def send_window(self, window: Window) -> None:
        """Send the objects of a window, straight from the blocks where they lie."""
        for header, views in window.described(WINDOW_BYTES):
            first = data.pack(FrameKind.OBJECTS, header.SerializeToString(), sum(header.sizes))
            await self._channel.send([memoryview(first), *views])

    async def fill(self, views: list[memoryview]) -> None:
        """Receive the next bytes of the payload into these buffers; raises WireError if it has fewer."""
        nbytes = sum(view.nbytes for view in views)
        if nbytes > self.unread:
            raise WireError(f"the payload of a call has {self.unread} bytes left, and {nbytes} are due")
        await self._channel.fill(views)
        self.unread -= nbytes

    async def settle(self) -> None:
        """Receive what is left of the payload, within `limits.call`, so that the next frame can be told."""
        if not self.unread:
            return
        await enter_loop()
        await self._channel.discard(self.unread, get_running_loop().time() + self._call_seconds)
        self.unread = 0

    async def fail(self, code: StatusCode, text: str) -> None:
        """Answer with a failure; raises DisconnectedError if the connection is no good for that."""
        if self._channel.partial or (self.unread and code is StatusCode.DEADLINE_EXCEEDED):
            raise DisconnectedError(text)
        await self.settle()
        failure = data_pb2.DataFailure(code=code.value[0], text=text)
        await self._send(FrameKind.FAILED, failure.SerializeToString())

    async def _send(self, kind: FrameKind, header: bytes) -> None:
        await self._channel.send([memoryview(data.pack(kind, header))])


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


class PayloadCalls:
    """Handlers of Get and Set, for streams of gRPC and for data connections.

    Thread safety: the event loop's thread for streams; of a call of a data connection any thread may take
    steps, one at a time.
    """

    def __init__(self, threads: Threads, blocks: BlockPool, limits: pb.Limits, metrics: NodeMetrics) -> None:
        self._chunk: Final = min(messages.CHUNK_BYTES, limits.message_bytes // 2)
        self._metrics: Final = metrics
        self._threads: Final = threads
        self._blocks: Final = blocks
        self._limits: Final = limits

    async def get(self, call: Call) -> None:
        """Serve Get: stream objects out of the store."""

        async def deliver(window: Window) -> None:
            for header, views in window.described(self._chunk):
                for number, payload in enumerate(parts(views, self._chunk)):
                    reply = pb.GetReply(header=None if number else header, payload=payload)
                    await call.send(reply.SerializeToString())

        request = await call.request(pb.GetRequest)
        async with _transfer(call.caller, self._chunk + _HEADER_BYTES):
            await self._read_all(call, request, "stream", deliver)

    async def _read_all(
        self, call: Call, request: pb.GetRequest, plane: Plane, deliver: Callable[[Window], Awaitable[None]]
    ) -> None:
        """Read all objects of a request, window by window, and let `deliver` send each window."""
        wanted = read_wanted(request.keys, request.lengths, self._limits)
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
        async with _transfer(call.caller, self._limits.message_bytes):
            incoming, received = _Messages(call), self._receiver(call.caller)
            objects = received.objects(await incoming.header())
            outcomes = await received.receive(objects, incoming.fill, "stream")
            await incoming.end()
            await call.send(messages.outcomes(outcomes).SerializeToString())

    async def get_data(self, call: DataCall) -> None:
        """Serve Get: send objects out of leased blocks."""
        await self._read_all(call, await call.request(pb.GetRequest), "data", call.send_window)

    async def set_data(self, call: DataCall) -> None:
        """Serve Set: receive objects into leased blocks and store them."""
        header = await call.request(pb.SetHeader)
        if call.unread > WINDOW_BYTES:
            await enter_loop()  # where one window is stored while the next arrives
        received = self._receiver(call.caller)
        objects = received.objects(header)
        if sum(meta.length for _, meta in objects) != call.unread:
            raise WireError(
                f"{len(objects)} objects came with a payload of {call.unread} bytes, not of theirs"
            )
        outcomes = await received.receive(objects, call.fill, "data")
        await call.send(messages.outcomes(outcomes).SerializeToString())

    def _receiver(self, caller: Caller) -> ObjectReceiver:
        return ObjectReceiver(caller, self._threads, self._blocks, self._limits, self._metrics)


@asynccontextmanager
async def _transfer(caller: Caller, nbytes: int) -> AsyncIterator[None]:
    """Reserve room for messages of `nbytes` bytes each, or the largest room that the client may have."""
    held = min(MESSAGE_COPIES * nbytes, caller.budgets.transfers.largest)
    await caller.budgets.transfers.take(held)
    try:
        yield
    finally:
        caller.budgets.transfers.give(held)
