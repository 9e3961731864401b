"""One call: its messages, each within the time that a stream may stand still, and the threads in which stores work for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Barrier
from typing import Any, Final, TypeVar, TypeVarTuple

from google.protobuf.message import Message
from grpc import StatusCode
from grpc.aio import EOF, AbortError

from tiercache.daemon.access import Caller, Refusal
from tiercache.daemon.budget import Budget
from tiercache.errors import WireError
from tiercache.wire.frames import read_message

A = TypeVarTuple("A")
T = TypeVar("T")
M = TypeVar("M", bound=Message)


_START_SECONDS: Final = 30.0
_PARSED: Final = 5
"""Python's objects for a batch of keys take this many times the bytes of the message."""


def request_bytes(most_keys: int) -> int:
    """The largest request that names so many keys: some 300 bytes for each with its description, and places in attached memory."""
    return (64 << 10) + 512 * most_keys


@dataclass(slots=True)
class Call:
    """A call that was let in; `close` it.

    Thread safety: the event loop's thread.
    """

    caller: Caller
    context: Any
    """gRPC's; reads and writes bytes."""
    idle: float
    message_bytes: int
    """The largest message that can come."""
    request_bytes: int
    """The largest request that this call can have."""
    _held: int = 0

    def close(self) -> None:
        """Give back what the request was counted for."""
        self.caller.bounds.requests.give(self._held)
        self._held = 0

    async def read(self) -> bytes | None:
        """The next message; None at the end. Raises Refusal where it does not come in time."""
        message = await self._in_time(self.context.read())
        return None if message is EOF else message

    async def request(self, kind: type[M], weigh: Callable[[M], int] = lambda _: 0) -> M:
        """The one message of a call whose request is no stream. `weigh`: how many bytes it takes beside its keys, once it is read.

        It is not asked for before there is room for the largest, for nobody knows how large it is until it is there. Afterwards the room
        that it does not need is given back.
        """
        await self.caller.bounds.requests.take(self.message_bytes)
        self._held = self.message_bytes
        data = await self.read()
        if data is None:
            raise WireError("the call ended before its request came")
        message = read_message(data, kind, self.request_bytes)
        weight = _PARSED * len(data) + weigh(message)
        if weight > self.message_bytes:
            raise WireError(f"a request of {len(data)} bytes takes {weight} of the {self.message_bytes} that it may; send it in parts")
        self.caller.bounds.requests.give(self._held - weight)
        self._held = weight
        return message

    async def send(self, data: bytes) -> None:
        """Send one message; returns when the transport has taken it. Raises Refusal where the client does not."""
        await self._in_time(self.context.write(data))

    async def _in_time(self, step: Any) -> Any:
        try:
            async with asyncio.timeout(self.idle):
                return await step
        except TimeoutError:
            raise Refusal(StatusCode.DEADLINE_EXCEEDED, f"the stream stood still for {self.idle:g} s (limits.idle)") from None


class Threads:
    """Where stores work.

    Thread safety: `run` on the event loop's thread; what it runs, in one of the threads.
    """

    def __init__(self, count: int) -> None:
        self.count: Final = count
        self._pool: Final = ThreadPoolExecutor(count, "tiercache-store")
        # All threads now: a pool that cannot start one when there is work keeps the work, and tells nobody when it is done.
        together = Barrier(count)
        for started in [self._pool.submit(together.wait, _START_SECONDS) for _ in range(count)]:
            started.result()
        self._under_way: set[asyncio.Future[Any]] = set()

    async def run(
        self,
        workers: Budget,
        work: Callable[[*A], T],
        *arguments: *A,
        landed: Callable[[], None] | None = None,
        undo: Callable[[], None] | None = None,
    ) -> T:
        """The result of `work`, which goes on when the caller is cancelled, but does not begin.

        It waits until `workers` has a thread: so none of them waits for a thread of the pool, where nobody could call it off, and no client
        keeps all threads from the others. `landed` is called on the event loop when it has ended, in any way; `undo` where nobody is left
        to take its result.
        """
        try:
            await workers.take(1)
        except BaseException:
            for end in (landed, undo):
                if end is not None:
                    end()
            raise
        future = asyncio.get_running_loop().run_in_executor(self._pool, lambda: work(*arguments))
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        future.add_done_callback(lambda _: workers.give(1))
        if landed is not None:
            future.add_done_callback(lambda _: landed())
        try:
            return await asyncio.shield(future)
        except BaseException:
            if undo is not None:
                future.add_done_callback(lambda _: undo())
            future.add_done_callback(_retrieve)
            raise
        finally:
            del future  # with what was raised it would hold this frame, and this frame it

    def start(
        self,
        workers: Budget,
        work: Callable[[*A], T],
        *arguments: *A,
        landed: Callable[[], None] | None = None,
        undo: Callable[[], None] | None = None,
    ) -> asyncio.Task[T]:
        """`run` in a task of its own, also where that is cancelled before its first step. What it raises need not be fetched."""
        begun = False

        async def steps() -> T:
            nonlocal begun
            begun = True
            return await self.run(workers, work, *arguments, landed=landed, undo=undo)

        def over(task: asyncio.Task[T]) -> None:
            _retrieve(task)
            for end in (landed, undo):
                if end is not None and not begun:
                    end()

        task = asyncio.create_task(steps())
        task.add_done_callback(over)
        return task

    async def close(self, seconds: float) -> bool:
        """Wait for what is under way; False where it is not done in time, and its threads are left behind."""
        if self._under_way:
            await asyncio.wait(set(self._under_way), timeout=seconds)
        self._pool.shutdown(wait=False)
        return not self._under_way


@contextmanager
def untangled() -> Iterator[None]:
    """Around a handler: where it aborted, what was raised ends here, and gRPC, which keeps it, raises it once more by itself.

    With a traceback it would hold the frames, these the call, and this again what was raised: memory that any refused caller could make us
    hold until the next collection.
    """
    try:
        yield
    except AbortError as abort:
        abort.__traceback__ = None


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Nobody waits for this any more, and asyncio would say so of its exception."""
    if not future.cancelled():
        future.exception()
