"""The threads that call the store, and how the event loop gets their results."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Generic, TypeVar, TypeVarTuple

from tiercache.daemon.budget import Budget
from tiercache.steps import in_loop
from tiercache.threads import IoThreads

A = TypeVarTuple("A")
T = TypeVar("T")


class Threads:
    """Threads in which calls of the store run.

    Results come back through one list, so that threads which end together wake the event loop once.

    Thread safety: the event loop's thread, for all methods; the given `work` runs in one of the threads.
    A thread that serves a call may `start` work, which it then does itself.
    """

    def __init__(self, count: int) -> None:
        self.count: Final = count
        self.loop: Final = asyncio.get_running_loop()
        # All threads start now. If one failed to start later, work would stay queued.
        self._threads: Final = IoThreads("store", count)
        self._under_way: set[_Work[Any]] = set()
        self._ended: Final[deque[_Work[Any]]] = deque()
        """Work that has ended, and whose future is to be told."""
        self._is_called = False
        """Whether the event loop was asked to look at `_ended`, and has not begun to."""
        self._changed: Final = asyncio.Event()
        """Set when `_under_way` has shrunk."""

    def start(
        self,
        workers: Budget,
        work: Callable[[*A], T],
        *arguments: *A,
        landed: Callable[[], None] | None = None,
        undo: Callable[[], None] | None = None,
    ) -> Future[T]:
        """Run `work` in a thread, and return the future of its result, whose exception may go unread.

        `work` begins once a unit of `workers` is free. Therefore work never waits for a thread, where it
        could not be cancelled, and no client occupies all threads. If the future is cancelled, work that has
        not begun never begins, and work that has begun continues.

        The callbacks run on the event loop, once, after `work` has ended in any way, or when it cannot begin
        any more. `landed` always runs. `undo` runs only if the future has no result.

            1. The store thread fills leased blocks.
            2. The future is cancelled.
            3. The thread still writes to the blocks, so they stay leased.
            4. The thread ends, and `landed` and `undo` run.
        """
        begun: _Work[T] = _Work(self, workers, partial(work, *arguments), landed, undo)
        self._under_way.add(begun)
        if not in_loop():  # the thread that serves the call has a unit of `workers`, and does the work itself
            begun.do()
            self._under_way.discard(begun)
            begun.tell()
        elif workers.try_take(1):
            self._threads.submit(begun.run)
        else:
            waiting = self.loop.create_task(workers.take(1))
            waiting.add_done_callback(partial(self._admit, begun))
            begun.future.add_done_callback(lambda _: waiting.cancel())
        return begun.future

    def _admit(self, work: _Work[Any], waiting: Future[None]) -> None:
        """Let `work` begin if it still may, when its wait for a unit of `workers` is over."""
        if not work.future.cancelled():
            self._threads.submit(work.run)
            return
        if not waiting.cancelled():
            work.workers.give(1)
        self._finish(work)

    def post(self, work: _Work[Any]) -> None:
        """Let the event loop tell the future of work that has ended; any thread may call this."""
        self._ended.append(work)
        if not self._is_called:
            self._is_called = True
            with suppress(RuntimeError):  # the event loop has ended
                self.loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        self._is_called = False  # first: what is appended from now on calls again
        while self._ended:
            work = self._ended.popleft()
            work.workers.give(1)
            self._finish(work)

    def _finish(self, work: _Work[Any]) -> None:
        self._under_way.discard(work)
        self._changed.set()
        work.tell()

    async def close(self, seconds: float) -> bool:
        """Wait up to `seconds` for the work under way; return False if it has not ended by then.

        Threads whose work has not ended are left running.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._under_way:
                    self._changed.clear()
                    await self._changed.wait()
        self._threads.close(0)
        return not self._under_way


class _Work(Generic[T]):
    """Work for a store thread, and the future of its result.

    Thread safety: `run` in one thread; the rest on the event loop's, before and after `run`.
    """

    __slots__ = ("_error", "_landed", "_result", "_threads", "_undo", "_work", "future", "workers")

    def __init__(
        self,
        threads: Threads,
        workers: Budget,
        work: Callable[[], T],
        landed: Callable[[], None] | None,
        undo: Callable[[], None] | None,
    ) -> None:
        self._threads = threads
        self.workers = workers
        self.future: Future[T] = threads.loop.create_future()
        self._work = work
        self._landed = landed
        self._undo = undo
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work and let the event loop tell of it; runs in a store thread."""
        self.do()
        self._threads.post(self)

    def do(self) -> None:
        """Do the work."""
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001  whoever awaits the future gets it
            self._error = error

    def tell(self) -> None:
        """Call the callbacks, and give the future its result."""
        if self._landed is not None:
            self._landed()
        if self._undo is not None and (self._error is not None or self.future.cancelled()):
            self._undo()
        if self.future.cancelled():
            return
        if self._error is None:
            self.future.set_result(self._result)
        else:
            self.future.set_exception(self._error)
            self.future.exception()  # otherwise asyncio logs it if nothing awaits the future
            self._error = None  # its traceback holds this object
