"""How a store closes while calls are inside it."""

from __future__ import annotations

from threading import Condition

from tiercache.errors import ClosedError


class CallGate:
    """Counts the calls inside a store, turns new ones away once it closes, and lets `close` wait for the rest.

    Thread rule: any thread may enter, leave or close.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._condition = Condition()
        self._inside = 0
        self._closed = False

    def __enter__(self) -> None:
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
        """Turn new calls away and wait for those inside. True for the first caller, who then releases what the store holds."""
        with self._condition:
            first = not self._closed
            self._closed = True
            self._condition.wait_for(lambda: not self._inside)
        return first
