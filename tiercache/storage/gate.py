"""Gate that lets a store close safely while calls are inside it."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition
from typing import Final

from tiercache.errors import ClosedError


class CallGate:
    """Counter of the calls inside a store: turns new ones away once the store closes, and lets `close` wait for the rest.

    With `getpid`, which returns the id of the calling process, it also turns away every call in a process that was forked since it was
    made, because the files, locks and threads of the store are the parent's. `close` does nothing there.

    Thread safety: any thread may enter, leave or close.
    """

    def __init__(self, name: str, getpid: Callable[[], int] = lambda: 0) -> None:
        self._name = name
        self._getpid: Final = getpid
        self._pid = getpid()
        self._condition = Condition()
        self._inside = 0
        self._closed = False

    def __enter__(self) -> None:
        # Before the lock: at the moment of the fork another thread of the parent may have held it.
        if self._getpid() != self._pid:
            raise ClosedError(f"{self._name} was opened before this process was forked; open it again in this process")
        with self._condition:
            if self._closed:
                raise ClosedError(f"{self._name} is closed; open it again before you use it")
            self._inside += 1

    def __exit__(self, *exc: object) -> None:
        with self._condition:
            self._inside -= 1
            if self._closed and not self._inside:
                self._condition.notify_all()

    def close(self) -> bool:
        """Turn new calls away and wait for those inside. Return True for the first caller, which then releases what the store holds."""
        if self._getpid() != self._pid:
            return False
        with self._condition:
            first = not self._closed
            self._closed = True
            self._condition.wait_for(lambda: not self._inside)
        return first
