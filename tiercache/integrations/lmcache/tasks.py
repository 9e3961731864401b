"""Tasks of one kind: pieces of work on threads, results that are fetched once, and a signal at each end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Final

from tiercache.core import Outcome
from tiercache.errors import StorageError
from tiercache.threads import IoThreads

_log = logging.getLogger(__name__)

PATIENCE_S: Final = 60.0
"""Seconds after which a piece of a task is not begun any more.

The lock that keeps LMCache from using the buffers of a task again ends by itself, by default after 300 s.
"""
_CLOSE_S: Final = 15.0
"""Most seconds that `close` waits for pieces that have begun."""

Work = Callable[[int, int], Sequence[Outcome]]
"""Function that does a range of a task's items, and returns their outcomes."""


class Task:
    """One task, whose items have sizes in bytes, and outcomes."""

    def __init__(self, number: int, work: Work, sizes: Sequence[int], outcome: Outcome) -> None:
        self.number: Final = number
        self.work: Final = work
        self.sizes: Final = sizes
        self.outcomes = [outcome] * len(sizes)
        self.until: Final = time.monotonic() + PATIENCE_S
        self.left = 0
        """Number of pieces that have not ended."""
        self.lost = False
        """Whether a piece has failed or found the store out of reach, so that no other begins."""

    def numbers(self, wanted: Outcome) -> list[int]:
        """Return the numbers of the items with this outcome."""
        return [number for number, outcome in enumerate(self.outcomes) if outcome is wanted]


class Tasks:
    """Tasks of one kind.

    A task is cut into pieces of about `piece` bytes, which the threads do in turn. At most `limit` bytes
    wait: a task beyond it ends at once, its items THROTTLED, unless it would be alone. Items whose piece
    fails, is late, or follows one that failed are UNAVAILABLE. `signal` is called when a result is there.

    Thread safety: any thread.
    """

    def __init__(self, name: str, threads: int, piece: int, limit: int, signal: Callable[[], None]) -> None:
        self._threads: Final = IoThreads(f"lmcache-{name}", threads)
        self._piece: Final = piece
        self._limit: Final = limit
        self._signal: Final = signal
        self._lock: Final = Lock()  # guards the fields from here on, and tasks
        self._last = 0
        self._ended: dict[int, Task] = {}
        self.waiting = 0
        """Number of bytes that wait or are under way."""
        self._fails = False
        self._closed = False

    def submit(self, work: Work, sizes: Sequence[int]) -> int:
        """Begin a task of items of these sizes, in bytes; return its number."""
        nbytes, pieces = sum(sizes), self._cut(sizes)
        with self._lock:
            self._last += 1
            if self._closed or (self.waiting and self.waiting + nbytes > self._limit):
                pieces = []
            outcome = Outcome.UNAVAILABLE if pieces else Outcome.THROTTLED
            task = Task(self._last, work, sizes, outcome)
            task.left = len(pieces)
            self.waiting += nbytes
        for start, stop in pieces:
            self._threads.submit(partial(self._do, task, start, stop))
        if not pieces:
            self._end(task)
        return task.number

    def fetch(self, number: int) -> Task | None:
        """Return a task that has ended, once; None before, and after that."""
        with self._lock:
            return self._ended.pop(number, None)

    def fetch_all(self) -> dict[int, Task]:
        """Return all tasks that have ended, each once."""
        with self._lock:
            found, self._ended = self._ended, {}
        return found

    def close(self) -> None:
        """End the threads; pieces that have not begun are left out."""
        with self._lock:
            self._closed = True
        self._threads.close(_CLOSE_S)

    def _cut(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        pieces, start, held = [], 0, 0
        for stop, size in enumerate(sizes, 1):
            held += size
            if held >= self._piece or stop == len(sizes):
                pieces.append((start, stop))
                start, held = stop, 0
        return pieces

    def _do(self, task: Task, start: int, stop: int) -> None:
        outcomes: Sequence[Outcome] = ()
        if not (self._closed or task.lost or time.monotonic() > task.until):
            try:
                outcomes = task.work(start, stop)
                self._fails = False
            except StorageError:  # the store has logged it
                pass
            except Exception:  # noqa: BLE001  LMCache waits for the end of each task
                if not self._fails:  # else the log would have one for each piece
                    _log.exception("tiercache: a task of LMCache failed")
                self._fails = True
        with self._lock:
            task.outcomes[start : start + len(outcomes)] = outcomes
            task.lost |= not outcomes or Outcome.UNAVAILABLE in outcomes
            task.left -= 1
            is_over = not task.left
        if is_over:
            self._end(task)

    def _end(self, task: Task) -> None:
        with self._lock:
            self.waiting -= sum(task.sizes)
            self._ended[task.number] = task
            is_open = not self._closed
        if is_open:
            self._signal()
