"""Steps of a call's coroutine, which a thread may take before the event loop does (`payload.call_threads`).

In a thread a coroutine runs until it would have to wait. If it waits for its socket, it calls `park`, and
another thread goes on with it. Before any other wait it calls `enter_loop`, and goes on in the event loop.
"""

from __future__ import annotations

import asyncio
import time
from asyncio.events import _get_running_loop
from collections.abc import Generator
from contextvars import ContextVar
from types import TracebackType, coroutine
from typing import Final


def in_loop() -> bool:
    """Return whether the event loop runs this step, so that it may wait."""
    return _get_running_loop() is not None


async def enter_loop() -> None:
    """Go on in the event loop, within the deadline of the call; do nothing if this is the event loop."""
    if not in_loop():
        await park(0)


async def park(awaited: int) -> None:
    """Leave the thread until a socket has changed in this way (a mask of epoll); 0: for the event loop.

    The event loop may go on with the call in any case.
    """
    await _leave(awaited)
    if in_loop() and (deadline := DEADLINE.get()) is not None:
        await deadline.hold()


@coroutine
def _leave(awaited: int) -> Generator[int, None, None]:
    yield awaited


class Deadline:
    """Time at which a call ends with TimeoutError, if the event loop serves it then.

    Thread safety: one thread at a time.
    """

    def __init__(self, seconds: float) -> None:
        self.until: Final = time.monotonic() + seconds
        """Seconds of the monotonic clock, which is the event loop's."""
        self._timeout: asyncio.Timeout | None = None

    async def __aenter__(self) -> None:
        if in_loop():
            await self.hold()
        elif self.until <= time.monotonic():
            raise TimeoutError
        DEADLINE.set(self)

    async def hold(self) -> None:
        """Hold from now on, in the event loop."""
        self._timeout = asyncio.timeout_at(self.until)
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        DEADLINE.set(None)
        if self._timeout is not None:
            await self._timeout.__aexit__(kind, error, trace)


DEADLINE: Final[ContextVar[Deadline | None]] = ContextVar("deadline", default=None)
"""Deadline of the call that is being served."""
