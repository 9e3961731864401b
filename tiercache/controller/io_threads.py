"""Threads that call the store, so that the engine's thread never has to."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable


class IoThreads:
    """A few daemon threads that serve one queue of jobs.

    `concurrent.futures` does not do here: the interpreter joins its threads at exit, so that a hung store would hang the process. The
    caller guarantees that jobs handle their own failures.

    Thread safety: `submit` from any thread; `replace` and `close` from the owner's.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._replaced: set[int] = set()
        for _ in range(threads):
            self._start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue `job`, to run when a thread is free."""
        self._jobs.put(job)

    def replace(self, thread: int) -> None:
        """Start another thread in place of the one with identity `thread`, which ends when its present job does, if ever."""
        self._replaced.add(thread)
        self._start()

    def close(self, timeout: float) -> bool:
        """Let queued jobs finish and the threads end; return False if some still run after `timeout` seconds. A second call is harmless."""
        deadline = time.monotonic() + timeout
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name=f"tiercache-{self._name}", daemon=True)
        thread.start()
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]

    def _work(self) -> None:
        me = threading.get_ident()
        while me not in self._replaced and (job := self._jobs.get()) is not None:
            job()
        self._replaced.discard(me)  # the system reuses thread identities
