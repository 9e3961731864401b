"""The queue of writers: which thread of which process writes next.

LMDB's own lock is a robust mutex in shared memory. When its holder dies, the next process gets it; but when a process dies that was just
woken up to take it, and a third one took it in between, the rest sleep for ever (seen: one run in forty with a killed writer among four).
The kernel's file locks leave no waiter asleep, so they decide which writer is next, and LMDB's mutex is never waited for. A thread can also
stop waiting for a file lock, when the process that writes was stopped.
"""

from __future__ import annotations

import os
from contextlib import suppress
from errno import EAGAIN
from threading import Lock
from typing import Final

from tiercache.storage.env import Env, let_go

PATIENCE: Final = 5.0
"""Seconds that a writer waits for the others before it gives up."""
_HURRY: Final = 0.05
"""Seconds that a writer waits after the last one of this process waited for another process in vain."""
_SHORTEST: Final = 0.0001
_LONGEST: Final = 0.0005
"""Seconds between two tries for the lock: `_SHORTEST` at first, then doubled up to this."""


class BusyError(OSError):
    """Another writer holds the lock for too long; nothing was changed."""


class Queue:
    """A context that one thread of all processes is inside at a time. Entering it raises OSError: BusyError after too long a wait.

    Thread safety: any thread may enter; a thread that is inside must not enter again.
    """

    def __init__(self, env: Env, path: str) -> None:
        self._env = env
        self._path = path
        self._ours = Lock()
        self._fd = -1
        self._stuck = False

    def __enter__(self) -> None:
        patience = _HURRY if self._stuck else PATIENCE
        if not self._ours.acquire(timeout=patience):
            raise self._busy()
        try:
            self._wait(patience)
        except BaseException:
            self._ours.release()
            raise

    def __exit__(self, *exc: object) -> None:
        with suppress(OSError):  # unlock first: a process forked meanwhile has the descriptor too, so closing it here is not enough
            self._env.unlock(self._fd)
        let_go(self._env, self._fd)
        self._ours.release()

    def _wait(self, patience: float) -> None:
        # A descriptor of its own for each turn: closing it gives up the lock.
        self._fd = self._env.open(self._path, os.O_RDWR | os.O_CREAT)
        try:
            deadline = self._env.monotonic() + patience
            pause = _SHORTEST
            while not self._env.try_lock(self._fd):
                if self._env.monotonic() > deadline:
                    self._stuck = True
                    raise self._busy()
                self._env.sleep(pause)
                pause = min(_LONGEST, 2 * pause)
            self._stuck = False
        except BaseException:
            let_go(self._env, self._fd)
            raise

    def _busy(self) -> BusyError:
        return BusyError(EAGAIN, f"{self._path} is held by another writer, which does not get on")
