"""A call's messages, each within the time that a stream may stand still, and the threads in which stores work for calls."""

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
"""Seconds that the threads may take to start."""
_PARSED: Final = 5
"""Bytes of the Python objects for a batch of keys, per byte of the message."""


def request_bytes(most_keys: int) -> int:
    """Return the size in bytes of the largest request with `most_keys` keys.

    Each key takes some 300 bytes with its description; the rest is for places in attached memory.
    """
    return (64 << 10) + 512 * most_keys


@dataclass(slots=True)
class Call:
    """A call that was admitted; the caller must `close` it.

    Thread safety: the event loop's thread.
    """

    caller: Caller
    context: Any
    """gRPC's context of the call; it reads and writes bytes."""
    idle: float
    """Seconds that the stream may stand still."""
    message_bytes: int
    """Size in bytes of the largest message that gRPC receives."""
    request_bytes: int
    """Size in bytes of the largest request that this call may have."""
    _held: int = 0
    """Bytes that are held of the client's budget for requests."""

    def close(self) -> None:
        """Give back the bytes that are held for the request."""
        self.caller.bounds.requests.give(self._held)
        self._held = 0

    async def read(self) -> bytes | None:
        """Return the next message, or None at the end of the stream; raises Refusal if none comes in time."""
        message = await self._in_time(self.context.read())
        return None if message is EOF else message

    async def request(self, kind: type[M], weigh: Callable[[M], int] = lambda _: 0) -> M:
        """Return the one message of a call whose request is no stream. `weigh`: returns the bytes of its Python objects beside its keys.

        The message is not read before there is room for the largest one, because its size is not known until it is there. The room that it
        does not need is given back afterwards. Raises WireError for a message that is missing, malformed or too large, Refusal for one that
        does not come in time.
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
        """Send one message, and return when the transport has taken it; raises Refusal if the client does not read it in time."""
        await self._in_time(self.context.write(data))

    async def _in_time(self, step: Any) -> Any:
        try:
            async with asyncio.timeout(self.idle):
                return await step
        except TimeoutError:
            raise Refusal(StatusCode.DEADLINE_EXCEEDED, f"the stream stood still for {self.idle:g} s (limits.idle)") from None


class Threads:
    """The threads in which stores work.

    Thread safety: methods on the event loop's thread; the work that they are given runs in one of the threads.
    """

    def __init__(self, count: int) -> None:
        self.count: Final = count
        self._pool: Final = ThreadPoolExecutor(count, "tiercache-store")
        # Start all threads now: a pool that fails to start one later keeps the work queued, and its future never reports a result.
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
        """Run `work` in a thread and return its result. If the caller is cancelled, `work` does not begin, or goes on if it has begun.

        It begins once a unit of `workers` is free. Therefore work never waits inside the pool, where it could not be cancelled, and no
        client occupies all threads. Both callbacks run on the event loop. `landed` is called when `work` has ended in any way, or will
        not begin; `undo` is called as well if this method raises, so that the caller gets no result.
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
            del future  # it holds the exception, whose traceback holds this frame: without `del` that is a reference cycle

    def start(
        self,
        workers: Budget,
        work: Callable[[*A], T],
        *arguments: *A,
        landed: Callable[[], None] | None = None,
        undo: Callable[[], None] | None = None,
    ) -> asyncio.Task[T]:
        """Start `run` in a new task, whose exception need not be retrieved.

        `landed` and `undo` are called even if the task is cancelled before its first step.
        """
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
        """Wait for the work under way; return False if it is not done within `seconds`, with its threads left behind."""
        if self._under_way:
            await asyncio.wait(set(self._under_way), timeout=seconds)
        self._pool.shutdown(wait=False)
        return not self._under_way


@contextmanager
def untangled() -> Iterator[None]:
    """Swallow the AbortError of a handler and drop its traceback; gRPC keeps the error, and raises it again itself.

    With its traceback the error would hold the frames, these the call, and the call the error: a reference cycle whose memory any refused
    caller could make the daemon hold until the next garbage collection.
    """
    try:
        yield
    except AbortError as abort:
        abort.__traceback__ = None


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a future that nothing awaits any more, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()
