"""Base of transfer engines with one lane per direction: jobs, their queue, and closing."""

from __future__ import annotations

import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tiercache.core import CacheTransferUnits, Locations, PoolName
from tiercache.errors import ClosedError, ConfigError, GeometryError, TransferError
from tiercache.pools.device import DevicePool
from tiercache.pools.host import HostPool
from tiercache.transfer.base import LayerTicket, Ticket, TransferEngine
from tiercache.transfer.descriptors import (
    Copies,
    Descriptors,
    build_descriptors,
    join_copies,
    join_descriptors,
    slot_copies,
)
from tiercache.transfer.fences import Fence, checked_fences, pass_fence


@dataclass(frozen=True, slots=True)
class Part:
    """The transfer units of a job in one pool."""

    device: DevicePool
    host: HostPool
    slots: Locations
    """Device slot of each unit, shape [n]."""
    blocks: npt.NDArray[np.int64]
    """Host blocks of each unit, shape [n, blocks per object]."""
    region: memoryview
    """View of the arena's memory. The memory stays mapped until the job releases this view."""

    def descriptors(self, period: int = 0) -> Descriptors:
        """Return the copies, sorted by layer, split at every multiple of `period` bytes in the arena.

        With a `period` of 0 no copy is split.
        """
        arena = self.host.arena
        built = build_descriptors(
            self.device.segments, self.slots, self.blocks, arena.block_bytes, arena.address
        )
        return built.cut(arena.address, period) if period else built


@dataclass(frozen=True, slots=True)
class Job:
    """A call of `store` or `load` that is under way. One thread at a time works on a job."""

    to_host: bool
    parts: tuple[Part, ...]
    ticket: Ticket
    after: tuple[Fence, ...]

    def pass_fences(self, check_abandoned: Callable[[], object]) -> None:
        """Block until all fences of the job have passed. `check_abandoned`: see `pass_fence`."""
        for fence in self.after:
            pass_fence(fence, check_abandoned)

    def descriptors(self, period: int = 0) -> Descriptors:
        """Return the copies, sorted by layer, split at every multiple of `period` bytes in the arena.

        With a `period` of 0 no copy is split.
        """
        return join_descriptors([part.descriptors(period) for part in self.parts])

    def finish(self, error: TransferError | None) -> None:
        """Release the memory and finish the ticket. No copy may touch the bytes of the job any more."""
        for part in self.parts:
            part.region.release()
        self.ticket.finish(error)

    def failure(self, step: str, error: Exception) -> TransferError:
        """Return the ticket's error for a job that failed with `error`; `step` says where, in words."""
        failure = TransferError(
            f"a {'store' if self.to_host else 'load'} failed {step}: {str(error) or type(error).__name__}"
        )
        # The frames of the traceback refer to the job's memory. With them, the ticket would keep that memory
        # alive.
        failure.__cause__ = error.with_traceback(None)
        return failure


class Sides:
    """Pools of one engine on the device and on the host, by name.

    Raises ConfigError for a pool that is on one side only, and GeometryError for a pool whose geometry is not
    the same on both sides.

    Thread safety: any thread.
    """

    def __init__(
        self, device_pools: Mapping[PoolName, DevicePool], host_pools: Mapping[PoolName, HostPool]
    ) -> None:
        for name in sorted(device_pools.keys() ^ host_pools.keys()):
            raise ConfigError(
                f"pool {name} is on one side only; give the transfer engine a device pool and a host pool for"
                " each kind"
            )
        for name, pool in device_pools.items():
            if pool.geometry.fingerprint != host_pools[name].geometry.fingerprint:
                raise GeometryError(
                    f"pool {name} has different geometries on device and host; make both from one geometry"
                )
        self.device = dict(device_pools)
        self.host = dict(host_pools)

    def parts(self, units: Sequence[CacheTransferUnits], *, to_host: bool) -> tuple[Part, ...]:
        """Return the parts of a job, with the blocks of every handle.

        Raises SlotError for a slot or handle that does not exist, and ConfigError for an unknown pool.
        """
        return tuple(
            self._part(u.pool, *((u.sources, u.destinations) if to_host else (u.destinations, u.sources)))
            for u in units
        )

    def forks(self, units: Sequence[CacheTransferUnits]) -> Copies:
        """Return the copies from device slots to other device slots of the same pools."""
        pools = [(self.device_pool(u.pool), u) for u in units]
        return join_copies(
            [
                slot_copies(pool.segments, pool.checked(u.sources), pool.checked(u.destinations))
                for pool, u in pools
            ]
        )

    def device_pool(self, name: PoolName) -> DevicePool:
        """Return the device pool of this name; raise ConfigError if it is not registered."""
        if name not in self.device:
            raise ConfigError(
                f"pool {name} is not registered with this transfer engine; pass it to the constructor"
            )
        return self.device[name]

    def _part(self, name: PoolName, slots: Locations, handles: Locations) -> Part:
        device = self.device_pool(name)
        host = self.host[name]
        # Slots and handles are checked here, on the caller's thread, so that a wrong one raises in the call.
        # The slots are copied, because the caller may reuse its array.
        return Part(device, host, device.checked(slots).copy(), host.blocks(handles), host.arena.hold())


def layers_of(parts: Sequence[Part]) -> Iterator[int]:
    """Return the layers that have bytes in these parts; a layer may occur several times."""
    return (layer for part in parts if len(part.slots) for layer in part.device.geometry.layers)


class Waiting:
    """Queue of the jobs that a lane has not begun, with an end mark behind the last job.

    Every job is finished exactly once, even if the engine is closed while a job hangs and others wait:

        1. `submit` checks that the engine is open and queues job 7, under the engine's lock
        2. `close` marks the engine as closed and queues the end mark behind job 7, under the same lock
        3. the lane's thread hangs in job 6; the deadline of `join` passes, and `join` calls `abandon`
        4. `abandon` empties the queue: job 7 fails, and the end mark is queued again
        5. the lane's thread continues with job 6: `check_abandoned` raises, job 6 fails, and `next` finds the
           end mark

    Thread safety: `next` belongs to the lane's thread; any thread may call the rest.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._abandoned = threading.Event()

    def put(self, job: Job) -> None:
        """Add a job."""
        self._jobs.put(job)

    def stop(self) -> None:
        """Put the end mark: after the jobs that are waiting now, `next` returns None."""
        self._jobs.put(None)

    def next(self) -> Job | None:
        """Block until there is a job, and return it; return None at the end mark."""
        return self._jobs.get()

    def abandon(self) -> None:
        """Fail all waiting jobs. The job under way ends at its next call of `check_abandoned`."""
        self._abandoned.set()
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job.finish(TransferError("the transfer engine was closed before this transfer began"))
        self.stop()  # the loop above may have taken the end mark

    def check_abandoned(self) -> None:
        """Raise TransferError if `abandon` was called."""
        if self._abandoned.is_set():
            raise TransferError("the transfer engine was closed")


class OneWay(Protocol):
    """A lane, which takes the jobs of one direction in order.

    Thread safety: any thread, also a thread of the lane.
    """

    def submit(self, job: Job) -> None:
        """Queue a job; return at once."""

    def stop(self) -> None:
        """Let the lane's threads end after the jobs that are waiting now. Call it once."""

    def join(self, deadline: float) -> None:
        """Wait for the lane's threads until `deadline` (monotonic seconds), then fail unfinished jobs."""


class LaneEngine(TransferEngine):
    """An engine with a lane for stores and a lane for loads. The subclass makes the two lanes.

    Thread safety: as `TransferEngine`.
    """

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
        # The lock is released before the lanes' threads are joined: their callbacks may call `store` or
        # `close`, which need the lock.
        with self._submitting:
            if not self._closed:
                self._closed = True
                self._stores.stop()
                self._loads.stop()
        deadline = time.monotonic() + timeout
        self._stores.join(deadline)
        self._loads.join(deadline)

    def _submit(self, lane: OneWay, job: Job) -> None:
        # The lock keeps the job ahead of the end mark. A job behind the end mark would never be served.
        with self._submitting:
            self._require_open()
            lane.submit(job)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the transfer engine was closed")
