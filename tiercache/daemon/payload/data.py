"""The calls of data connections, each served by the thread of its connection.

A window of objects (`windows`) is sent while the next is read, and stored while the next arrives:

    Get   this thread   | read 0 | send 0 | send 1 | send 2 |
          store thread           | read 1 | read 2 |
    Set   this thread   | take 0 | take 1  | take 2  | store 2 |
          store thread           | store 0 | store 1 |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, TypeVar, TypeVarTuple

from google.protobuf.message import Message
from grpc import StatusCode

from tiercache.core import Outcome
from tiercache.daemon.access import Caller
from tiercache.daemon.budget import BlockPool, Lease
from tiercache.daemon.call import check_weight, read_keys, read_wanted
from tiercache.daemon.node_metrics import NodeMetrics
from tiercache.daemon.payload.windows import (
    WINDOW_BYTES,
    Window,
    read_window,
    room_in,
    store_window,
    windows_to_read,
    windows_to_store,
)
from tiercache.daemon.store_threads import Threads
from tiercache.errors import WireError
from tiercache.wire import data, messages
from tiercache.wire.data import FrameKind, FrameSocket
from tiercache.wire.v1 import data_pb2
from tiercache.wire.v1 import storage_pb2 as pb

A = TypeVarTuple("A")
M = TypeVar("M", bound=Message)
T = TypeVar("T")


class DataCall:
    """Call that came on a data connection.

    Thread safety: the thread that serves it.
    """

    def __init__(
        self,
        caller: Caller,
        channel: FrameSocket,
        called: data_pb2.DataCall,
        payload: int,
        limits: pb.Limits,
        max_request: int,
    ) -> None:
        self.caller: Final = caller
        self.name: Final = called.method
        # `>=` is false for NaN, which nothing must ever wait for.
        self.seconds: Final = called.seconds if called.seconds >= 0 else 0.0
        self.until = 0.0
        """Deadline in seconds of the monotonic clock, once the call was admitted."""
        self.unread = payload
        """Bytes of the frame's payload that have not been received."""
        self._request = called.request
        self._max_request = max_request
        self._channel = channel
        self._limits = limits

    def request(self, kind: type[M]) -> M:
        """Return the request; raises WireError if it cannot be read, or is too large."""
        message = messages.read_message(self._request, kind, self._max_request)
        check_weight(len(self._request), 0, self._limits.message_bytes)
        return message

    def ask(self, threads: Threads, work: Callable[[*A], T], *arguments: *A) -> T:
        """Run `work`, which calls the store, in this thread."""
        return threads.call(self.caller.budgets.workers, self.until, work, *arguments)

    def result(self, future: Future[T]) -> T:
        """Wait for work that was begun beside this thread; raises TimeoutError at the deadline."""
        return future.result(self.until - time.monotonic())

    def lease(self, blocks: BlockPool, lengths: Sequence[int]) -> Lease:
        """Wait for blocks for objects of these lengths; raises TimeoutError at the deadline."""
        return Lease.wait(blocks, self.caller.budgets.payload, lengths, self.until - time.monotonic())

    def reply(self, message: Message) -> None:
        """Send the one reply of a call, whose payload was received."""
        self._send(FrameKind.REPLY, message, self.until)

    def send_window(self, window: Window) -> None:
        """Send the objects of a window, straight from the blocks where they lie."""
        for header, views in window.described(WINDOW_BYTES):
            first = data.pack(FrameKind.OBJECTS, header.SerializeToString(), sum(header.sizes))
            self._channel.send([memoryview(first), *views], self.until)

    def fill(self, views: list[memoryview]) -> None:
        """Receive the next bytes of the payload into these buffers, of which it has enough."""
        self._channel.fill(views, self.until)
        self.unread -= sum(view.nbytes for view in views)

    def fail(self, code: StatusCode, text: str) -> None:
        """Answer with a failure; raises ConnectionError if the connection is no good for that."""
        if self._channel.partial or (self.unread and code is StatusCode.DEADLINE_EXCEEDED):
            raise ConnectionAbortedError(text)
        until = time.monotonic() + self._limits.call_seconds
        self._channel.discard(self.unread, until)  # so that the next frame can be told
        self._send(FrameKind.FAILED, data_pb2.DataFailure(code=code.value[0], text=text), until)

    def _send(self, kind: FrameKind, header: Message, until: float) -> None:
        self._channel.send([memoryview(data.pack(kind, header.SerializeToString()))], until)


class DataCalls:
    """Handlers of Exists, Get and Set.

    Thread safety: any thread.
    """

    def __init__(self, threads: Threads, blocks: BlockPool, limits: pb.Limits, metrics: NodeMetrics) -> None:
        self._threads: Final = threads
        self._blocks: Final = blocks
        self._limits: Final = limits
        self._metrics: Final = metrics

    def exists(self, call: DataCall) -> None:
        """Serve Exists."""
        keys = read_keys(call.request(pb.ExistsRequest).keys, self._limits.keys)
        answers = call.ask(self._threads, call.caller.permissions.store.exists, keys)
        self._metrics.count_exists(keys, answers)
        call.reply(pb.BitmapReply(bits=messages.bits(answers)))

    def get(self, call: DataCall) -> None:
        """Serve Get: send objects out of leased blocks."""
        request = call.request(pb.GetRequest)
        wanted = read_wanted(request.keys, request.lengths, self._limits)
        budgets, permissions = call.caller.budgets, call.caller.permissions
        following: Future[Window] | None = None
        windows = list(windows_to_read(wanted, budgets.payload.largest))
        try:
            for number, window in enumerate(windows):
                if following is None:
                    lease = call.lease(self._blocks, window.lengths)
                    try:
                        found = call.ask(
                            self._threads, read_window, permissions.store, window, lease, request.peek
                        )
                    except BaseException:
                        lease.release()
                        raise
                else:
                    found, following = call.result(following), None
                try:
                    # This must not wait for room, because the present window holds room. Calls that hold room
                    # while they wait for more would deadlock.
                    ahead = windows[number + 1 : number + 2]
                    room = ahead and Lease.try_take(self._blocks, budgets.payload, ahead[0].lengths)
                    if room:
                        following = self._threads.aside(
                            budgets.workers, read_window, permissions.store, ahead[0], room, request.peek
                        )
                        if following is None:
                            room.release()
                        else:
                            following.add_done_callback(partial(_release_failed, room))
                    self._metrics.count_reads(permissions.name, "data", found.items, found.outcomes)
                    call.send_window(found)
                finally:
                    found.lease.release()
        finally:
            if following is not None:  # the call ends early, while a thread may still read this window
                following.add_done_callback(_release_read)

    def set(self, call: DataCall) -> None:
        """Serve Set: receive objects into leased blocks and store them."""
        budgets, permissions = call.caller.budgets, call.caller.permissions
        windows = windows_to_store(call.request(pb.SetHeader), self._limits, budgets.payload.largest)
        due = sum(meta.length for window in windows for _, meta in window)
        if due != call.unread:
            raise WireError(f"objects of {due} bytes came with a payload of {call.unread} bytes")
        outcomes: list[Outcome] = []
        storing: Future[list[Outcome]] | None = None

        def finish_storing() -> None:
            nonlocal storing
            if storing is not None:
                stored, storing = call.result(storing), None
                outcomes.extend(stored)

        for number, window in enumerate(windows, 1):
            lengths = [meta.length for _, meta in window]
            lease = Lease.try_take(self._blocks, budgets.payload, lengths)
            if lease is None:  # while this call waits for blocks, it holds none
                finish_storing()
                lease = call.lease(self._blocks, lengths)
            try:
                call.fill(room_in(lease, window))
                self._metrics.count_payload(permissions.name, "data", "in", sum(lengths))
                finish_storing()
            except BaseException:
                lease.release()
                raise
            if number < len(windows):
                storing = self._threads.aside(
                    budgets.workers, store_window, permissions.store, window, lease, self._metrics
                )
            if storing is not None:
                storing.add_done_callback(partial(_release, lease))
                continue
            try:
                outcomes += call.ask(
                    self._threads, store_window, permissions.store, window, lease, self._metrics
                )
            finally:
                lease.release()
        call.reply(messages.outcomes(outcomes))


def _release(lease: Lease, _: Future[object]) -> None:
    lease.release()


def _release_failed(lease: Lease, reading: Future[Window]) -> None:
    if reading.exception() is not None:
        lease.release()


def _release_read(reading: Future[Window]) -> None:
    if reading.exception() is None:
        reading.result().lease.release()
