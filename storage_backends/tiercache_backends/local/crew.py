"""Helper threads for a call: with them one batch uses all the parallelism of the disk or of the memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Final, TypeVar

T = TypeVar("T")

SHARE_BYTES: Final = 4 << 20
"""Bytes at which a share of work is worth a thread."""
MEMORY_THREADS: Final = 2
"""Threads for bytes in memory: one copies while the other computes checksums. More would take cores from the engine's computation."""


class Crew:
    """Up to `threads` threads for all calls of a store together, each started when it is first needed.

    Thread safety: any thread may call `spread`; `close` only when no call is in progress.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self.threads: Final = threads

    def spread(self, task: Callable[[T], None], shares: Iterable[T], threads: int) -> None:
        """Run `task` on each share, on this thread and at most `threads` - 1 others. A task handles its own failures."""
        waiting = deque(shares)

        def work() -> None:
            while waiting:
                try:
                    share = waiting.popleft()
                except IndexError:
                    return
                task(share)

        helpers: list[Future[None]] = []
        with suppress(RuntimeError):  # no thread can be started: the existing ones do the work, and a helper that starts late finds none
            helpers += (self._pool.submit(work) for _ in range(min(threads, len(waiting)) - 1))
        try:
            work()
        finally:
            # A helper that never began is cancelled and not waited for: threads that hang in the disk access of another call must not
            # hold this call up. All others are waited for, also after a failure: they work with the caller's buffers.
            waiting.clear()
            begun = [helper for helper in helpers if not helper.cancel()]
            wait(begun)
        for helper in begun:
            helper.result()

    def close(self) -> None:
        """End the threads, after the work that was handed to them."""
        self._pool.shutdown()
