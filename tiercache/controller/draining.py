"""Waiting for everything that is under way, for `flush` and `close` of a controller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from tiercache.controller.context import WRITE_BACK, ControllerContext
from tiercache.controller.in_flight import InFlight
from tiercache.controller.writes import Write

if TYPE_CHECKING:
    from tiercache.controller.write_back import WriteBack
    from tiercache.controller.write_through import WriteThrough


class Draining:
    """Waits for operations, and counts what storage does not have.

    Thread safety: the owner's thread.
    """

    def __init__(
        self, context: ControllerContext, write_through: WriteThrough, write_back: WriteBack
    ) -> None:
        self._context = context
        self._write_through, self._write_back = write_through, write_back
        self._hanging: threading.Thread | None = None

    @property
    def not_begun(self) -> int:
        """Number of objects that are not in storage, and that no write in progress stores."""
        found = self._context.unstored + self._write_through.objects
        if self._context.options.write == WRITE_BACK:
            hang = _writes(self._context.in_flight.stranded)
            found += self._write_back.objects + sum(write.objects for write in hang if write.stays_on_host)
        return found

    def missing(self) -> int:
        """Return the number of objects that are not in storage."""
        return self.not_begun + sum(write.objects for write in _writes(self._context.in_flight.operations))

    def within(self, timeout: float, call: Callable[[], None]) -> bool:
        """Run `call` on a thread, and return whether the call ended within `timeout` seconds.

        Returns False at once while an earlier call still hangs. A thread that hangs is left behind. If `call`
        raises in time, the exception is raised here.
        """
        if self._hanging is not None and self._hanging.is_alive():
            return False
        raised: list[BaseException] = []

        def run() -> None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001  raised below, on the caller's thread
                raised.append(error)

        self._hanging = threading.Thread(target=run, name="tiercache-flush", daemon=True)
        self._hanging.start()
        self._hanging.join(max(0.0, timeout))
        if raised:
            raise raised[0]
        return not self._hanging.is_alive()

    def drain_all(self, timeout: float) -> bool:
        """Apply events until no operation is in flight; return False after `timeout` seconds.

        With write-back, everything on the host is written. Writes that wait until a failed store works again
        do not count.
        """
        end = time.monotonic() + timeout
        self._context.is_draining = True
        try:
            drained = self._drain_until(end)
            if self._context.options.write == WRITE_BACK:
                self._write_back.want_all()  # only now is everything on the host
                if drained:
                    self._write_back.follow()
                    drained = self._drain_until(end)
            return drained
        finally:
            self._context.is_draining = False

    def _drain_until(self, end: float) -> bool:
        self._context.drain()
        # Every call in `writes.waiting` belongs to one operation, so the difference of the two numbers is the
        # number of operations that do not wait for a failed store.
        while len(self._context.in_flight.operations) > len(self._context.writes.waiting) or not (
            self._write_through.is_idle and self._write_back.is_idle
        ):
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._context.events.arrived.wait(min(left, 0.1))
            self._context.drain()
        return True


def _writes(operations: Mapping[int, InFlight]) -> Iterator[Write]:
    return (operation for operation in operations.values() if isinstance(operation, Write))
