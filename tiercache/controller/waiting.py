"""The wait for an admission: by the owner's thread, or by a task of asyncio on that thread."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final, Self

from tiercache.controller.context import POLL_S, ControllerContext
from tiercache.core import Reason

_IDLE_S: Final = 10.0


class Status(enum.StrEnum):
    """State of an admission."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"
    """A restore was planned, but nothing could be restored."""


@dataclass(frozen=True, slots=True)
class Poll:
    """Answer to a poll."""

    status: Status
    depth: int
    """Restored depth in tokens; 0 with FAILED. The engine computes the tokens behind this depth."""
    reason: Reason
    """Reason of a failure. With READY, the reason why the depth is shallower than it could have been."""


class Awaited(ABC):
    """Something that is polled until it is no longer PENDING, and holds slots and pins until its release.

    A task awaits it, or enters it with `async with`, at whose end it is released. So is it by a wait that is
    cancelled or raises; copies under way keep what they use until they end.
    """

    _context: ControllerContext
    released: bool

    @abstractmethod
    def poll(self) -> Poll:
        """Advance without waiting, and return the status."""

    @abstractmethod
    def _pause(self) -> float:
        """Return after how many seconds a wait looks again, if no event comes."""

    def _end_wait(self) -> None:  # noqa: B027
        """End waits whose time is over."""

    def wait(self) -> Poll:
        """Poll until the admission is no longer PENDING, and return the last answer.

        Meant for callers that have nothing else to do. The deadline ends the wait for storage. After a layer
        has failed, the wait ends when the load of that layer has landed.
        """
        while (poll := self.poll()).status is Status.PENDING:
            self._context.events.arrived.wait(self._pause())
            self._end_wait()
        return poll

    def __await__(self) -> Generator[Any, None, Poll]:
        return self._await().__await__()

    async def _await(self) -> Poll:
        try:
            while (poll := self.poll()).status is Status.PENDING:
                await self._context.events.arrival(self._pause())
                self._end_wait()
        except BaseException:
            self._leave()
            raise
        return poll

    async def __aenter__(self) -> Self:
        await self
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._leave()

    def _leave(self) -> None:
        if not self.released:
            self._context.release(self)


async def apply_events(context: ControllerContext) -> None:
    """Apply events as they come, so that what goes on in the background does not wait for a call."""
    while True:
        context.drain()
        # A call that hangs posts no event.
        pause = POLL_S if context.device_work.retired else 0.1 if context.under_way else _IDLE_S
        await context.events.arrival(pause)
