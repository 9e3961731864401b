"""The threads that call the store, and how the event loop gets their results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import Condition
from typing import Final, TypeVar, TypeVarTuple

from tiercache.daemon.budget import Budget
from tiercache.threads import IoThreads

A = TypeVarTuple("A")
T = TypeVar("T")


class Threads:
    """Threads in which calls of the store run, and a count of the store calls of all threads.

    Work begins once a unit of the given `workers` is free. Therefore it never waits for a thread, where it
    could not be cancelled, and no client occupies all threads.

    Thread safety: `start` and `close` the event loop's thread; `call` and `aside` any other.
    """

    def __init__(self, count: int) -> None:
        self._loop: Final = asyncio.get_running_loop()
        # All threads start now. If one failed to start later, work would stay queued.
        self._threads: Final = IoThreads("store", count)
        self._changed: Final = Condition()
        self._under_way = 0
        """Number of pieces of work that wait or run."""

    def start(
        self,
        workers: Budget,
        work: Callable[[*A], T],
        *arguments: *A,
        landed: Callable[[], None] | None = None,
        undo: Callable[[], None] | None = None,
    ) -> asyncio.Future[T]:
        """Run `work` in a thread, and return the future of its result, whose exception may go unread.

        If the future is cancelled, work that has not begun never begins, and work that has begun continues.

        The callbacks run on the event loop, once, after `work` has ended in any way, or when it cannot begin
        any more. `landed` always runs. `undo` runs only if the future has no result.

            1. The store thread fills leased blocks.
            2. The future is cancelled.
            3. The thread still writes to the blocks, so they stay leased.
            4. The thread ends, and `landed` and `undo` run.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody need read it
        self._count(1)

        def land(made: Future[T] | None) -> None:
            if made is not None:
                workers.give(1)
            self._count(-1)
            if landed is not None:
                landed()
            if undo is not None and (made is None or made.exception() or future.cancelled()):
                undo()
            if made is not None and not future.cancelled():
                _copy(made, future)

        def begin() -> None:
            made: Future[T] = Future()
            made.add_done_callback(lambda _: self._in_loop(partial(land, made)))
            self._threads.submit(partial(fulfil, made, partial(work, *arguments)))

        def admit(waited: asyncio.Future[None]) -> None:
            if not future.cancelled():
                begin()
                return
            if not waited.cancelled():
                workers.give(1)
            land(None)

        if workers.try_take(1):
            begin()
        else:
            waiting = self._loop.create_task(workers.take(1))
            waiting.add_done_callback(admit)
            future.add_done_callback(lambda _: waiting.cancel())
        return future

    def call(self, workers: Budget, until: float, work: Callable[[*A], T], *arguments: *A) -> T:
        """Run `work` in this thread; raises TimeoutError if it cannot begin before `until` (monotonic)."""
        workers.wait(1, until - time.monotonic())
        self._count(1)
        try:
            return work(*arguments)
        finally:
            self._count(-1)
            workers.give(1)

    def aside(self, workers: Budget, work: Callable[[*A], T], *arguments: *A) -> Future[T] | None:
        """Run `work` beside the thread that asks, if it may begin now; return the future of its result."""
        if not workers.try_take(1):
            return None
        self._count(1)
        made: Future[T] = Future()

        def run() -> None:
            try:
                fulfil(made, partial(work, *arguments))
            finally:
                self._count(-1)
                workers.give(1)

        self._threads.submit(run)
        return made

    async def close(self, seconds: float) -> bool:
        """Wait up to `seconds` for the work under way; return False if it has not ended by then.

        Threads whose work has not ended are left running.
        """

        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: not self._under_way, seconds)

        ended = await asyncio.to_thread(wait)
        self._threads.close(0)
        return ended

    def _count(self, more: int) -> None:
        with self._changed:
            self._under_way += more
            if not self._under_way:
                self._changed.notify_all()

    def _in_loop(self, work: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(work)


def fulfil(future: Future[T], work: Callable[[], T]) -> None:
    """Do the work, and tell its future; any thread may call this."""
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001  whoever waits for the future gets it
        future.set_exception(error)
    else:
        future.set_result(result)


def _copy(made: Future[T], future: asyncio.Future[T]) -> None:
    if (error := made.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(made.result())
