"""Who writes next, among the threads of all processes.

LMDB's own lock is a robust mutex in shared memory. When its holder dies, the next one gets it; but when a process dies that was just woken
up to take it, and a third one took it in between, the rest sleep for ever (seen: one run in forty with a killed writer among four). The
kernel's file locks lose nobody, so they decide who comes next, and LMDB's mutex is never waited for. They can also be given up on, when the
process that writes was stopped.
"""

from __future__ import annotations

import os
from contextlib import suppress
from errno import EAGAIN
from threading import Lock
from typing import Final

from tiercache.storage.env import Env, let_go

PATIENCE: Final = 5.0
"""Seconds that a writer waits for the others."""
_HURRY: Final = 0.05
"""Seconds that it waits where the last one waited in vain."""
_SHORTEST: Final = 0.0001
_LONGEST: Final = 0.0005


class BusyError(OSError):
    """Another writer does not get on; nothing was changed."""


class Queue:
    """A context that one thread of one process is inside. Entering it raises OSError.

    Thread safety: any thread may enter, none twice at once.
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
        with suppress(OSError):  # a process that was forked meanwhile has the descriptor too
            self._env.unlock(self._fd)
        let_go(self._env, self._fd)
        self._ours.release()

    def _wait(self, patience: float) -> None:
        # A descriptor of its own for each turn: to close it is to give up the lock.
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
