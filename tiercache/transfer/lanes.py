"""Base of the transfer engines that have one lane per direction: waiting jobs, submission and close."""

from __future__ import annotations

import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

from tiercache.core import CacheTransferUnits
from tiercache.errors import ClosedError, TransferError
from tiercache.transfer.base import LayerTicket, Ticket, TransferEngine
from tiercache.transfer.fences import Fence, checked_fences
from tiercache.transfer.jobs import Job, Sides, layers_of


class Waiting:
    """Queue of the jobs that a lane has not begun. Thread safety: `next` belongs to the lane's thread, the rest to any."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._abandoned = threading.Event()

    def put(self, job: Job) -> None:
        """Add a job."""
        self._jobs.put(job)

    def stop(self) -> None:
        """Mark the end: after the jobs that are waiting now, `next` returns None."""
        self._jobs.put(None)

    def next(self) -> Job | None:
        """Block until there is a job and return it; None at the end."""
        return self._jobs.get()

    def abandon(self) -> None:
        """Fail all waiting jobs, and make `go_on` raise, so that the job under way ends where it is."""
        self._abandoned.set()
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job.finish(TransferError("the transfer engine was closed before this transfer began"))
        self.stop()  # the loop above may have taken the end mark

    def go_on(self) -> None:
        """Raise TransferError if the lane was abandoned."""
        if self._abandoned.is_set():
            raise TransferError("the transfer engine was closed")


class OneWay(Protocol):
    """A lane, which takes the jobs of one direction in order.

    Thread safety: any thread may call `submit` and `join`, the lane's own too.
    """

    def submit(self, job: Job) -> None:
        """Take on a job; returns at once."""

    def stop(self) -> None:
        """Let the lane's threads end after the jobs that are waiting now. Call it once."""

    def join(self, deadline: float) -> None:
        """Wait for the lane's threads until `deadline` (monotonic seconds), then abandon the remaining jobs."""


class LaneEngine(TransferEngine):
    """An engine with a lane for stores and one for loads, which the subclass makes. Thread safety: as `TransferEngine`."""

    _stores: OneWay
    _loads: OneWay

    def __init__(self, sides: Sides) -> None:
        self._sides = sides
        self._closed = False
        self._submitting = threading.Lock()

    @abstractmethod
    def _layer_ticket(self, layers: Iterable[int]) -> LayerTicket:
        """Make a ticket for a load of these layers."""

    def store(self, units: Sequence[CacheTransferUnits], *, after: Sequence[Fence] = ()) -> Ticket:  # noqa: D102
        fences, ticket = checked_fences(after), Ticket()
        self._submit(self._stores, Job(True, self._sides.parts(units, to_host=True), ticket, fences))
        return ticket

    def load(self, units: Sequence[CacheTransferUnits], *, after: Sequence[Fence] = ()) -> LayerTicket:  # noqa: D102
        fences = checked_fences(after)
        parts = self._sides.parts(units, to_host=False)
        ticket = self._layer_ticket(layers_of(parts))
        self._submit(self._loads, Job(False, parts, ticket, fences))
        return ticket

    def close(self, timeout: float = 30.0) -> None:  # noqa: D102
        with self._submitting:
            if not self._closed:
                self._closed = True
                self._stores.stop()
                self._loads.stop()
        deadline = time.monotonic() + timeout
        self._stores.join(deadline)
        self._loads.join(deadline)

    def _submit(self, lane: OneWay, job: Job) -> None:
        with self._submitting:  # else a job could get behind the end mark, and its ticket would never be done
            self._require_open()
            lane.submit(job)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the transfer engine was closed")
