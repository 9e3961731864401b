"""Threads for calls that may hang.

Such a thread can be replaced by another, and does not keep the process from ending.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable


class IoThreads:
    """A few daemon threads that serve one queue of jobs.

    `concurrent.futures` is not suitable, because the interpreter joins its threads at exit: a hanging store
    would keep the process from ending. The caller guarantees that no job raises.

    Thread safety: any thread.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._replaced: set[int] = set()
        self._lock = threading.Lock()  # guards `_threads`
        for _ in range(threads):
            self._start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue `job`, to run when a thread is free."""
        self._jobs.put(job)

    def replace(self, thread: int) -> None:
        """Start a new thread in place of the thread with identity `thread`.

        The replaced thread ends after its present job, if that job ever ends.
        """
        self._replaced.add(thread)
        self._start()

    def close(self, timeout: float) -> bool:
        """Let the threads end after all queued jobs; return False if some still run after `timeout` seconds.

        A second call is harmless.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            threads = self._threads
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name=f"tiercache-{self._name}", daemon=True)
        thread.start()
        with self._lock:
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]

    def _work(self) -> None:
        me = threading.get_ident()
        while me not in self._replaced and (job := self._jobs.get()) is not None:
            job()
            del job  # what it refers to, such as views of memory, must not stay until the next job comes
        self._replaced.discard(me)  # another thread may get the same identity later
