"""One direction of traffic: a stream, a thread that queues transfers in it, and a thread that waits for their end."""

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
"""Function that returns the method for a group of copies."""
Saw: TypeAlias = Callable[[Queued, float], object]
"""Callback that is told what a transfer copied, and in how many seconds."""

_PATIENCE_S: Final = 10.0
"""Seconds that `Lane.end` waits for the threads."""
STORES_IN_FLIGHT: Final = 3
"""Stores in the stream at once: one on the bus, one behind it so that the bus never waits, one being queued."""
LOADS_IN_FLIGHT: Final = 8
"""Loads in the stream at once: as many as an engine admits at a time.

A thread that waits for a layer of a load that is not queued yet would block on the host."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A transfer that was queued, completely or, with `error`, up to its failure. `last`: the event behind its last copy, 0 for none."""

    job: Job
    resources: CopySet
    queued: Queued
    last: int
    error: TransferError | None


class Lane:
    """One direction of a CUDA engine, which takes its jobs in order.

    `choose`: the method for each group of copies. `memory`: the page-locked arena. `urgent`: whether the stream has high priority.
    `in_flight`: most transfers in the stream at once. `group_bytes`: layers of a load are queued together until they have this many bytes.
    `saw`: is told of each transfer that succeeded. `ended`: is called once, as the last thing on the lane's last thread.

    The ticket of a job that fails is done, like any other, only when the device is past everything that was queued for it.

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
        """Take on a job; returns at once."""
        self._waiting.put(job)

    def stop(self) -> None:
        """Let the threads end after the jobs that are waiting now. Before they end they release the stream."""
        self._waiting.stop()

    def end(self) -> None:
        """Stop a lane that got no jobs, and wait for its threads, for at most 10 seconds."""
        self.stop()
        self.join(time.monotonic() + _PATIENCE_S)

    def join(self, deadline: float) -> None:
        """Wait for the threads until `deadline` (monotonic seconds).

        Then fail the jobs that are waiting, and let the one that is being queued stop at its next layer.
        """
        for thread in self._threads:
            if thread is not threading.current_thread():  # `close` was called in a callback: this thread ends after it
                thread.join(max(0.0, deadline - time.monotonic()))
        if self._threads[0].is_alive():
            self._waiting.abandon()

    def _queue_all(self) -> None:
        self._try_to_enter()
        while self._queue_one():
            pass
        self._flights.put(None)

    def _enter(self) -> None:
        """Make the device current on this thread, once, before any other call to the driver, which might go to another device."""
        if not getattr(self._here, "entered", False):
            self._device.activate()
            self._here.entered = True

    def _try_to_enter(self) -> None:
        try:
            self._enter()
        except Exception as error:  # noqa: BLE001  the thread goes on, or nobody would answer: without a device, every job fails by itself
            _log.error("a device is not to be had: %s", error)

    def _queue_one(self) -> bool:
        """Queue the next job; False at the end.

        A function of its own, so that no local variable keeps a finished job's pools and memory alive while the thread waits.
        """
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
        """Return the rows that are queued at once, with the layers in them. A store is one group, for no caller waits for part of it."""
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
            # Some of its copies may still be under way. If even this fails the device is lost, and nothing moves there any more.
            with contextlib.suppress(Exception):
                self._enter()
                self._device.synchronize_stream(self._stream)
        else:
            self._look_at(flight)
        flight.job.finish(error)
        self._resources.put(flight.resources)  # only after the ticket is done: until then threads that wait for a layer use the events
        return True

    def _look_at(self, flight: _Flight) -> None:
        """Tell `saw` how long a transfer took on the device. Runs on the thread that waits for ends, so it delays no queueing."""
        if self._saw is None or not flight.last:
            return
        try:
            self._saw(flight.queued, flight.resources.seconds())
        except Exception as error:  # noqa: BLE001  its bytes are there, whatever comes of their time
            _log.warning("the time of a transfer is not known: %s", error)
