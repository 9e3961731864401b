"""Helper threads, which let one batch use the disk or the memory in parallel."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Final, TypeVar

T = TypeVar("T")

SHARE_BYTES: Final = 4 << 20
"""Minimum payload bytes of one share of work. A smaller share is not worth a thread."""
MEMORY_THREADS: Final = 2
"""Number of threads for bytes in memory: one copies while the other computes checksums.

Further threads would take cores from the inference engine.
"""


class ThreadPool:
    """Pool of up to `threads` threads, shared by all calls of a store.

    A thread starts when it is first needed.

    Thread safety: any thread may call `map`; `close` only when no call is in progress.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, name)
        self.threads: Final = threads

    def map(self, task: Callable[[T], None], shares: Iterable[T], threads: int) -> None:
        """Run `task` on each share of work, on this thread and at most `threads` - 1 others.

        A task handles its own failures.
        """
        waiting = deque(shares)
        if len(waiting) < 2:
            for share in waiting:
                task(share)
            return

        def work() -> None:
            while waiting:
                try:
                    share = waiting.popleft()
                except IndexError:  # another thread has taken the last share since the test
                    return
                task(share)

        helpers: list[Future[None]] = []
        # RuntimeError: no further thread can be started. This thread and the helpers that did start then do
        # all the work. A helper that starts late finds `waiting` empty.
        with suppress(RuntimeError):
            helpers += (self._executor.submit(work) for _ in range(min(threads, len(waiting)) - 1))
        try:
            work()
        finally:
            # Cancel the helpers that have not begun, and do not wait for them: they may be queued behind
            # another call whose threads hang in a disk access. Wait for all other helpers, even after a
            # failure, because they use the caller's buffers.
            waiting.clear()
            begun = [helper for helper in helpers if not helper.cancel()]
            wait(begun)
        for helper in begun:
            helper.result()

    def close(self) -> None:
        """Wait until the threads have finished their work, and end them."""
        self._executor.shutdown()
