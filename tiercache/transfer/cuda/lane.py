"""One direction of traffic: a stream, a thread that queues transfers in it, and a thread that sees them through."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from tiercache.errors import TransferError
from tiercache.transfer.cuda.copying import GROUP_BYTES, CopySet, bus_blocks, layer_groups
from tiercache.transfer.cuda.device import CudaDevice, Method
from tiercache.transfer.cuda.locked import LockedArena
from tiercache.transfer.cuda.ticket import CudaLayerTicket
from tiercache.transfer.cuda.watch import Queued
from tiercache.transfer.descriptors import Copies, Descriptors
from tiercache.transfer.fences import event_of, pass_fence
from tiercache.transfer.jobs import Job
from tiercache.transfer.lanes import Waiting

_log = logging.getLogger(__name__)

Choose: TypeAlias = Callable[[Copies], Method]
"""The method for a group of copies."""
Saw: TypeAlias = Callable[[Queued, float], object]
"""Is told what a transfer copied, and in how many seconds."""

_PATIENCE_S: Final = 10.0
STORES_IN_FLIGHT: Final = 3
"""Transfers in the stream at once: one on the bus, one behind it so that the bus never waits, one being queued."""
LOADS_IN_FLIGHT: Final = 8
"""As many as an engine admits at a time: who waits for a layer of one that is not queued yet waits on the host."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A transfer that was queued, wholly or, with `error`, up to where it failed. `last`: the event behind its last copy, 0 for none."""

    job: Job
    resources: CopySet
    queued: Queued
    last: int
    error: TransferError | None


class Lane:
    """Takes jobs in order. `memory`: the page-locked arena. `group_bytes`: layers of a load are queued together until they have as much.
    `in_flight`: how many transfers are in the stream at once, at most. `saw`: is told of each transfer that came through.

    A job that fails is seen through like any other: its ticket is done when the device is past everything that was queued for it.

    Thread safety: as `OneWay`.
    """

    def __init__(
        self,
        name: str,
        device: CudaDevice,
        choose: Choose,
        memory: LockedArena,
        *,
        urgent: bool,
        in_flight: int,
        group_bytes: int = GROUP_BYTES,
        saw: Saw | None = None,
        ended: Callable[[], object] = lambda: None,
    ) -> None:
        self._device, self._choose, self._memory, self._ended = device, choose, memory, ended
        self._here, self._saw = threading.local(), saw
        self._group_bytes = group_bytes
        self._blocks = bus_blocks(device.card.multiprocessors)
        self._waiting = Waiting()
        self._flights: queue.SimpleQueue[_Flight | None] = queue.SimpleQueue()
        self._resources: queue.SimpleQueue[CopySet] = queue.SimpleQueue()
        self._in_flight = in_flight
        for resources in CopySet.make(device, in_flight):
            self._resources.put(resources)
        try:
            self._stream = device.create_stream(urgent=urgent)
        except BaseException:
            self._give_back()
            raise
        self._threads = [
            threading.Thread(target=self._queue_all, name=f"{name}-queue", daemon=True),
            threading.Thread(target=self._see_all_through, name=name, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Take a job on; returns at once."""
        self._waiting.put(job)

    def stop(self) -> None:
        """Let the threads end after what is waiting now; the last thing they do is to give the stream back."""
        self._waiting.stop()

    def end(self) -> None:
        """Stop, and wait for the threads: of a lane that nothing was submitted to."""
        self.stop()
        self.join(time.monotonic() + _PATIENCE_S)

    def join(self, deadline: float) -> None:
        """Wait for the threads; at the deadline fail what is waiting, and let the job that is being queued stop at its next layer."""
        for thread in self._threads:
            if thread is not threading.current_thread():  # closed from a callback: the thread ends when the callback has returned
                thread.join(max(0.0, deadline - time.monotonic()))
        if self._threads[0].is_alive():
            self._waiting.abandon()

    def _queue_all(self) -> None:
        self._try_to_enter()
        while self._queue_one():
            pass
        self._flights.put(None)

    def _enter(self) -> None:
        """Make the device this thread's, once: until then nothing else is asked of the driver here, or another device would hear it."""
        if not getattr(self._here, "entered", False):
            self._device.activate()
            self._here.entered = True

    def _try_to_enter(self) -> None:
        try:
            self._enter()
        except Exception as error:  # noqa: BLE001  the thread goes on, or nobody would answer: without a device, every job fails by itself
            _log.error("a device is not to be had: %s", error)

    def _queue_one(self) -> bool:
        """In a function of its own, so that no local variable keeps a finished job's pools and memory while the thread waits."""
        job = self._waiting.next()
        if job is None:
            return False
        resources = self._resources.get()
        failure, step, last, queued = None, "before its first layer", 0, []
        try:
            self._enter()
            self._pass_fences(job, resources)
            descriptors = self._memory.seen(job.descriptors(self._memory.period))
            copies = descriptors.copies(to_host=job.to_host)
            groups = [(layers, rows, self._choose(copies[rows])) for layers, rows in self._groups(job, descriptors)]
            stream_queue = resources.queue(copies, [(rows, method) for _, rows, method in groups], self._blocks, self._stream)
            resources.begin(self._stream)
            for number, (layers, rows, method) in enumerate(groups):
                step = f"in layer {layers[0]}" if layers else "on its way"
                self._waiting.go_on()
                stream_queue.put(rows, method)
                queued.append((copies[rows], method))
                if len(queued) == len(groups):
                    resources.end(self._stream)
                last = resources.event(number)
                resources.pace.step(self._stream)
                self._device.record(last, self._stream)
                if isinstance(job.ticket, CudaLayerTicket):
                    job.ticket.queued(layers, last)
        except Exception as error:  # noqa: BLE001  a fence or the driver may raise anything; it belongs to the ticket
            failure = job.failure(step, error)
        self._flights.put(_Flight(job, resources, queued, last, failure))
        return True

    def _groups(self, job: Job, descriptors: Descriptors) -> list[tuple[Sequence[int], slice]]:
        """What is queued at once, and the layers in it. All of a store, for nobody waits for a part of it."""
        if not job.to_host:
            return layer_groups(descriptors, self._group_bytes)
        return [((), slice(0, len(descriptors)))] if len(descriptors) else []

    def _pass_fences(self, job: Job, resources: CopySet) -> None:
        for fence in job.after:
            event = event_of(fence)
            if event is None:
                pass_fence(fence, self._waiting.go_on)
            else:
                resources.pace.step(self._stream)
                self._device.wait_event(self._stream, event)

    def _see_all_through(self) -> None:
        self._try_to_enter()
        while self._see_one_through():
            pass
        try:
            self._enter()
            self._give_back()
            self._device.destroy_stream(self._stream)
        except Exception as error:  # noqa: BLE001  after an error of the whole device nothing can be given back, and nothing needs to be
            _log.warning("a stream could not be given back: %s", error)
        self._ended()

    def _give_back(self) -> None:
        for _ in range(self._in_flight):
            self._resources.get().destroy()

    def _see_one_through(self) -> bool:
        flight = self._flights.get()
        if flight is None:
            return False
        error = flight.error
        if error is None and flight.last:
            try:
                self._enter()
                self._device.synchronize_event(flight.last)
            except Exception as raised:  # noqa: BLE001  as above
                error = flight.job.failure("on its way", raised)
        if error is not None:
            # Some of its copies may be under way. If even this fails the device is lost, and nothing moves there any more.
            with contextlib.suppress(Exception):
                self._enter()
                self._device.synchronize_stream(self._stream)
        else:
            self._look_at(flight)
        flight.job.finish(error)
        self._resources.put(flight.resources)  # not before the ticket is done: until then its waiters use the events
        return True

    def _look_at(self, flight: _Flight) -> None:
        """Here, where nobody waits: how long did it take?"""
        if self._saw is None or not flight.last:
            return
        try:
            self._saw(flight.queued, flight.resources.seconds())
        except Exception as error:  # noqa: BLE001  its bytes are there, whatever comes of their time
            _log.warning("the time of a transfer is not known: %s", error)
