"""Threads that call the store, so that the engine's thread never does."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable


class IoThreads:
    """A few daemon threads over one queue.

    Not `concurrent.futures`: the interpreter joins that pool's threads at exit, and a store that hangs would hang the process with it. Jobs
    handle their own failures. Thread rule: `submit` from any thread; `close` from the owner.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"tiercache-{name}-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` soon."""
        self._jobs.put(job)

    def close(self, timeout: float) -> bool:
        """Let queued jobs finish and the threads end; False if some still run after `timeout` seconds. Twice is harmless."""
        deadline = time.monotonic() + timeout
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
