"""Gate that lets a store close safely while calls are inside it."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition
from typing import Final

from tiercache.errors import ClosedError


class CallGate:
    """Counter of the calls inside a store: calls that have begun and not returned yet.

    Once the store closes, the gate refuses new calls, and `close` waits for the calls inside. After that no
    call uses the store's resources.

    `getpid` returns the id of the calling process. With this function, the gate also refuses every call in a
    process that was forked after the gate was made: the files, locks and threads of the store belong to the
    parent. In such a process `close` does nothing.

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
        # Check the process first. In a forked process, waiting for the lock could hang for ever:
        #   1. a thread of the parent takes the lock   2. another thread forks
        #   3. in the child the lock is still taken, and the thread that would release it does not exist
        if self._getpid() != self._pid:
            raise ClosedError(
                f"{self._name} was opened before this process was forked; open it again in this process"
            )
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
        """Refuse new calls and wait for the calls inside.

        Returns True to the first caller, which then releases the store's resources.
        """
        if self._getpid() != self._pid:
            return False
        with self._condition:
            first = not self._closed
            self._closed = True
            self._condition.wait_for(lambda: not self._inside)
        return first
