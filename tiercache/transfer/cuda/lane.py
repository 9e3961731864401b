"""One direction of traffic: a stream, a thread that queues transfers, and a thread that waits for their end.

submit --> Waiting --> queue thread --> stream (the device) --> end thread --> ticket done
           jobs        fences, then     copies, one event        waits for the
                       copies by group  behind each group        last event

A *group* has the copies of one or more whole layers, which are queued together.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

from tiercache.errors import TransferError
from tiercache.transfer.base import LayerTicket, event_of
from tiercache.transfer.copy import Job, Waiting
from tiercache.transfer.cuda.copying import GROUP_BYTES, CopySet, LockedArena, Pace, layer_groups
from tiercache.transfer.cuda.device import CudaDevice, Method
from tiercache.transfer.descriptors import Descriptors

_POLL_S: Final = 200e-6
"""Seconds between two queries of an event by a thread that waits for one layer.

This is a fraction of the time that a layer takes.
"""


class CudaLayerTicket(LayerTicket):
    """A `LayerTicket` whose `wait_layer` makes a stream wait, once the copies of the layer are queued.

    Later transfers reuse the events of earlier ones. A waiting thread could therefore use a wrong event:

        1. load A records event 5 behind layer 0; its ticket names event 5
        2. load A ends: its ticket is marked as done, and then event 5 may be reused
        3. load B records event 5 behind its own layer 3
        4. a thread that still used event 5 to wait for layer 0 of A would wait for layer 3 of B

    To prevent step 4, `wait_layer` holds the ticket's lock from the check of `_done` until it has used the
    event. `finish` needs the same lock to mark the ticket as done.

    Thread safety: as `LayerTicket`; `queued` belongs to the engine.
    """

    def __init__(self, layers: Iterable[int], device: CudaDevice) -> None:
        super().__init__(layers)
        self._device = device
        self._events: dict[int, int] = {}

    def queued(self, layers: Iterable[int], event: int) -> None:
        """Record that the copies of `layers` are in the stream, before `event`. The engine calls this."""
        with self._changed:
            self._events |= dict.fromkeys(layers, event)
            self._changed.notify_all()

    def wait_layer(self, layer: int, timeout: float | None = None, *, stream: int | None = None) -> bool:  # noqa: D102
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            # Wait on this thread until the layer's event is recorded: a stream's wait for an event that was
            # never recorded would return at once.
            if not self._changed.wait_for(
                lambda: self._done or layer not in self._pending or layer in self._events, timeout
            ):
                return False
            # The lock is held while the event is used. Once the ticket is done, the event may have been
            # reused (see the class) or destroyed. `wait` releases the lock, so the loop checks `_done` again.
            while not self._done and layer in self._events:
                if stream is not None:
                    self._make_stream_wait(stream, layer)
                    return True
                if self._has_passed(layer):
                    return True
                left = _POLL_S if deadline is None else min(_POLL_S, deadline - time.monotonic())
                if left <= 0:
                    return False
                self._changed.wait(left)
        return super().wait_layer(layer, 0)

    def _has_passed(self, layer: int) -> bool:
        with self._on_device(layer):
            return self._device.has_passed(self._events[layer])

    def _make_stream_wait(self, stream: int, layer: int) -> None:
        with self._on_device(layer):  # the handle of a default stream refers to the current device
            self._device.wait_event(stream, self._events[layer])

    @contextmanager
    def _on_device(self, layer: int) -> Iterator[None]:
        """Make the device current on the caller's thread; turn RuntimeError into TransferError."""
        try:
            with self._device.current():
                yield
        except RuntimeError as error:
            raise TransferError(f"layer {layer} cannot be waited for: {error}") from error


_log = logging.getLogger(__name__)

Choose: TypeAlias = Callable[[Descriptors], Method]
"""Function that returns the method for a group of copies."""

_END_TIMEOUT_S: Final = 10.0
"""Seconds that `Lane.end_threads` waits for the threads."""
STORES_IN_FLIGHT: Final = 3
"""Maximum number of stores in the stream at once.

One store is on the bus, one waits behind it so that the bus is never idle, and one is being queued.
"""
LOADS_IN_FLIGHT: Final = 8
"""Maximum number of loads in the stream at once: as many as an inference engine begins at a time.

With a lower limit, some of these loads would not be in the stream yet. `wait_layer` would then block the
inference engine's thread until the load of the layer is in the stream.
"""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A transfer that was queued in the stream, or the part of it before an error."""

    job: Job
    resources: CopySet
    last: int
    """Event behind the last group that was queued; 0 if no group was."""
    error: TransferError | None


class Lane:
    """One direction of a CUDA engine, which takes its jobs in order.

    - `choose` returns the method for each group of copies.
    - `memory` is the page-locked arena.
    - `urgent` says whether the stream has high priority.
    - `in_flight` is the maximum number of transfers in the stream at once.
    - `group_bytes` is the minimum size of a group of a load.
    - `ended` is called once, at the end of the lane's last thread.

    A job may fail after some of its copies were queued. Even then its ticket is done only when the device has
    finished these copies.

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
        ended: Callable[[], object] = lambda: None,
    ) -> None:
        self._device, self._choose, self._memory, self._ended = device, choose, memory, ended
        self._here = threading.local()
        self._group_bytes = group_bytes
        self._waiting = Waiting()
        self._flights: queue.SimpleQueue[_Flight | None] = queue.SimpleQueue()
        self._resources: queue.SimpleQueue[CopySet] = queue.SimpleQueue()
        self._pace = Pace(device, device.create_stream(urgent=urgent))
        try:
            for _ in range(in_flight):
                self._resources.put(CopySet(device, self._pace))
        except BaseException:
            self._give_back()
            raise
        self._threads = [
            threading.Thread(target=self._queue_all, name=f"{name}-queue", daemon=True),
            threading.Thread(target=self._finish_all, name=name, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; return at once."""
        self._waiting.put(job)

    def stop(self) -> None:
        """Let the threads end after the jobs that are waiting now. The last thread releases the stream."""
        self._waiting.stop()

    def end_threads(self) -> None:
        """Stop a lane that got no jobs, and wait up to `_END_TIMEOUT_S` seconds for its threads."""
        self.stop()
        self.join(time.monotonic() + _END_TIMEOUT_S)

    def join(self, deadline: float) -> None:
        """Wait for the threads until `deadline` (monotonic seconds).

        If a job is still being queued then, it stops at its next group, and the waiting jobs fail.
        """
        for thread in self._threads:
            # A callback may call `close` on a thread of the lane. That thread cannot wait for itself.
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        if self._threads[0].is_alive():
            self._waiting.abandon()

    def _queue_all(self) -> None:
        self._try_to_enter()
        while self._queue_one():
            pass
        self._flights.put(None)

    def _enter(self) -> None:
        """Make the device current on this thread, if it is not. Call this before any other driver call."""
        if not getattr(self._here, "entered", False):
            self._device.activate()
            self._here.entered = True

    def _try_to_enter(self) -> None:
        try:
            self._enter()
        except Exception as error:  # noqa: BLE001
            # the thread goes on without the device; each job calls `_enter` again, and fails if this fails
            _log.error("the device is not available: %s", error)

    def _queue_one(self) -> bool:
        """Queue the next job; return False if there is none because the lane was stopped.

        This is a separate function, so that no local variable keeps the memory of a finished job alive while
        the thread waits.
        """
        job = self._waiting.next()
        if job is None:
            return False
        resources = self._resources.get()
        # The steps: wait for the fences, cut the job into groups, choose a method for each group, then queue
        # the groups with an event behind each. `last` is the event behind the last group that is in the
        # stream. It is kept after a failure too, because that group is still being copied.
        failure, step, last = None, "before its first layer", 0
        try:
            self._enter()
            self._pass_fences(job)
            copies = job.descriptors().cut(self._memory.address, self._memory.period)
            groups = [(layers, rows, self._choose(copies[rows])) for layers, rows in self._groups(copies)]
            resources.begin_transfer(copies, {method for _, _, method in groups})
            for number, (layers, rows, method) in enumerate(groups):
                step = f"in layer {layers[0]}" if layers else "on its way"
                self._waiting.check_abandoned()
                resources.put(rows, method)
                last = resources.mark(number)
                if isinstance(job.ticket, CudaLayerTicket):
                    job.ticket.queued(layers, last)
        except Exception as error:  # noqa: BLE001
            # a fence or the driver may raise any exception; the ticket reports it
            failure = job.failure(step, error)
        self._flights.put(_Flight(job, resources, last, failure))
        return True

    def _groups(self, copies: Descriptors) -> list[tuple[Sequence[int], slice]]:
        """Return the groups of a job's copies, each as its layers and its rows.

        A store is one group and names no layers, because no caller waits for a layer of a store.
        """
        if not copies.to_host:
            return layer_groups(copies, self._group_bytes)
        return [((), slice(0, len(copies)))] if len(copies) else []

    def _pass_fences(self, job: Job) -> None:
        for fence in job.after:
            event = event_of(fence)
            if event is None:
                fence.synchronize()
            else:
                self._device.wait_event(self._pace.step(), event)

    def _finish_all(self) -> None:
        self._try_to_enter()
        while self._finish_one():
            pass
        try:
            self._enter()
            self._give_back()
        except Exception as error:  # noqa: BLE001
            # after an error of the whole device, its resources are lost and cannot be released
            _log.warning("a stream could not be released: %s", error)
        self._ended()

    def _give_back(self) -> None:
        """Release the stream and what was made for it, once no work is in it."""
        while not self._resources.empty():
            self._resources.get().destroy()
        self._pace.destroy()
        self._device.destroy_stream(self._pace.stream)

    def _finish_one(self) -> bool:
        flight = self._flights.get()
        if flight is None:
            return False
        error = flight.error
        if error is None and flight.last:
            try:
                self._enter()
                self._device.synchronize_event(flight.last)
            except Exception as raised:  # noqa: BLE001  the driver may raise any exception
                error = flight.job.failure("on its way", raised)
        if error is not None:
            # Some copies of the transfer may still be running, so wait for the whole stream. If this wait
            # fails too, the device is lost, and no copy is running.
            with contextlib.suppress(Exception):
                self._enter()
                self._device.synchronize_stream(self._pace.stream)
        flight.job.finish(error)
        # The resources are reused only after the ticket is done. Until then, threads that wait for a layer
        # use the events of these resources.
        self._resources.put(flight.resources)
        return True
