"""Calls on data connections: Get and Set, whose payload moves between the socket and leased blocks.

They keep to the rules of every call (`service`), and differ only in how bytes come and go (`streams`).
"""

from __future__ import annotations

from asyncio import get_running_loop
from collections.abc import Callable
from typing import Final, TypeVar

from google.protobuf.message import Message
from grpc import StatusCode

from tiercache.daemon.access import Caller
from tiercache.daemon.call import PARSED, Call, read_keys
from tiercache.daemon.payload.channel import Channel, DisconnectedError
from tiercache.daemon.payload.windows import WINDOW_BYTES, Window
from tiercache.daemon.streams import StreamCalls
from tiercache.errors import WireError
from tiercache.steps import enter_loop
from tiercache.wire import data, messages
from tiercache.wire.data import FrameKind
from tiercache.wire.v1 import data_pb2
from tiercache.wire.v1 import storage_pb2 as pb

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
        weight = PARSED * len(self._request) + weigh(message)
        if weight > self.message_bytes:
            raise WireError(
                f"a request of {len(self._request)} bytes needs {weight} bytes of memory, and at most"
                f" {self.message_bytes} are allowed; send it in parts"
            )
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
        for header, views in window.pieces(max(WINDOW_BYTES, *(item.length for item in window.items))):
            packed = header.SerializeToString()
            first = data.pack(FrameKind.PIECES, packed, sum(header.sizes))
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


class DataCalls(StreamCalls):
    """Handlers of Get and Set on data connections.

    Thread safety: any thread may take steps of a call, one at a time for each call.
    """

    async def get_data(self, call: DataCall) -> None:
        """Serve Get: send objects out of leased blocks."""
        await self._read_all(call, await call.request(pb.GetRequest), "data", call.send_window)

    async def set_data(self, call: DataCall) -> None:
        """Serve Set: receive objects into leased blocks and store them."""
        request = await call.request(data_pb2.DataSet)
        if call.unread > WINDOW_BYTES:
            await enter_loop()  # where one window is stored while the next arrives
        keys = read_keys(request.keys, self._max_keys)
        metas = [messages.read_meta(meta) for meta in request.metas]
        if len(metas) != len(keys) or sum(meta.length for meta in metas) != call.unread:
            raise WireError(
                f"{len(keys)} keys came with {len(metas)} descriptions and a payload of {call.unread} bytes;"
                " they do not belong together"
            )
        incoming = self._receiver(call.caller)
        try:
            await incoming.receive(list(zip(keys, metas, strict=True)), call.fill)
            outcomes = await incoming.finish()
        finally:
            incoming.abandon()
        await call.send(messages.outcomes(outcomes).SerializeToString())
