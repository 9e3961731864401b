"""Threads that help a call along: one batch uses what the device, or the memory, can do at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Final, TypeVar

T = TypeVar("T")

SHARE_BYTES: Final = 4 << 20
"""What is worth a thread's while."""
MEMORY_THREADS: Final = 2
"""For bytes that are in memory: one copies while the other computes checksums. More would take cores from those who compute tokens."""


class Crew:
    """Up to `threads` threads for all calls of a store together; they are started when they are first needed.

    Thread safety: any thread; `close` when nobody is inside.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self.threads: Final = threads

    def spread(self, task: Callable[[T], None], shares: Iterable[T], threads: int) -> None:
        """Do `task` for each share, on this thread and at most `threads` - 1 others. A task deals with its own failures."""
        waiting = deque(shares)

        def work() -> None:
            while waiting:
                try:
                    share = waiting.popleft()
                except IndexError:
                    return
                task(share)

        helpers: list[Future[None]] = []
        with suppress(RuntimeError):  # no more threads to be had: those there are do it, and one that comes late finds nothing left
            helpers += (self._pool.submit(work) for _ in range(min(threads, len(waiting)) - 1))
        try:
            work()
        finally:
            # One that never began is not waited for: threads that hang in another call's disk must not hold this one up. All others are,
            # also when something failed: they work with the caller's buffers.
            waiting.clear()
            begun = [helper for helper in helpers if not helper.cancel()]
            wait(begun)
        for helper in begun:
            helper.result()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
