"""Transfer engine that copies with the CPU, and the choice of an engine by device.

The engine here is the reference for all other transfer engines.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from tiercache_kernels.reference import copy_segments

from tiercache.core import CacheTransferUnits, Locations, PoolName
from tiercache.errors import ClosedError, ConfigError, GeometryError, TransferError
from tiercache.pools.arena import HostPool
from tiercache.pools.device import DevicePool
from tiercache.transfer.base import Fence, LayerTicket, Ticket, TransferEngine, checked_fences
from tiercache.transfer.descriptors import Descriptors, build_descriptors, join_descriptors


class Part(NamedTuple):
    """The transfer units of a job in one pool."""

    device: DevicePool
    host: HostPool
    slots: Locations
    """Device slot of each unit, or of each of its segments (see `DevicePool.places`)."""
    blocks: npt.NDArray[np.int64]
    """Host blocks of each unit, shape [n, blocks per object]."""
    region: memoryview
    """View of the arena's memory. The memory stays mapped until the job releases this view."""


class Job(NamedTuple):
    """A call of `store` or `load` that is under way. One thread at a time works on a job."""

    to_host: bool
    parts: tuple[Part, ...]
    ticket: Ticket
    after: tuple[Fence, ...]

    def descriptors(self) -> Descriptors:
        """Return the copies, sorted by layer."""
        return join_descriptors(
            [
                build_descriptors(
                    part.device.segments,
                    part.slots,
                    part.blocks,
                    part.host.arena.block_bytes,
                    part.host.arena.address,
                    to_host=self.to_host,
                )
                for part in self.parts
            ]
        )

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

    def _part(self, name: PoolName, slots: Locations, handles: Locations) -> Part:
        if name not in self.device:
            raise ConfigError(
                f"pool {name} is not registered with this transfer engine; pass it to the constructor"
            )
        device, host = self.device[name], self.host[name]
        # Slots and handles are checked here, on the caller's thread, so that a wrong one raises in the call.
        # The places are copies, because the caller may reuse its array.
        return Part(device, host, device.places(slots), host.blocks(handles), host.arena.hold())


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


Copier: TypeAlias = Callable[[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.int64]], object]
"""Function `(sources, destinations, lengths)` that copies memory; the arguments have shape [copies].

Before the function returns, it copies `lengths[i]` bytes from address `sources[i]` to `destinations[i]`.
"""


class CopyEngine(LaneEngine):
    """Engine that copies with the CPU, on one thread for stores and one thread for loads.

    Each thread takes its jobs in order. It calls `copier` for one layer of a job at a time, in ascending
    order of layers. Tests pass a copier that delays or fails.

    Raises ConfigError for a pool that is not in CPU memory, and otherwise as `Sides` does.

    Thread safety: as `TransferEngine`. Callbacks run on the two threads, `tiercache-store` and
    `tiercache-load`.
    """

    def __init__(
        self,
        device_pools: Mapping[PoolName, DevicePool],
        host_pools: Mapping[PoolName, HostPool],
        *,
        copier: Copier = copy_segments,
    ) -> None:
        super().__init__(Sides(device_pools, host_pools))
        for name, pool in device_pools.items():
            if pool.device != "cpu":
                raise ConfigError(
                    f"pool {name} is on {pool.device} and this transfer engine copies CPU memory only; use"
                    " the engine for that device"
                )
        self._copier = copier
        self._stores = _Worker("tiercache-store", copier)
        self._loads = _Worker("tiercache-load", copier)

    def _layer_ticket(self, layers: Iterable[int]) -> LayerTicket:
        return LayerTicket(layers)


class _Worker:
    """A lane with one thread.

    Thread safety: as `OneWay`.
    """

    def __init__(self, name: str, copier: Copier) -> None:
        self._waiting = Waiting()
        self._copier = copier
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._waiting.put(job)

    def stop(self) -> None:
        self._waiting.stop()

    def join(self, deadline: float) -> None:
        # A callback may call `close`. This method then runs on the lane's thread, which cannot wait for
        # itself.
        if self._thread is threading.current_thread():
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._waiting.abandon()

    def _serve(self) -> None:
        while self._serve_one():
            pass

    def _serve_one(self) -> bool:
        """Run the next job; return False if there is none because the engine was closed.

        This is a separate function, so that no local variable keeps the memory of a finished job alive while
        the thread waits.
        """
        job = self._waiting.next()
        if job is None:
            return False
        step = "before its first layer"
        try:
            for fence in job.after:
                fence.synchronize()
            copies = job.descriptors()
            for layer, rows in copies.by_layer():
                step = f"in layer {layer}"
                self._copy_layer(job, layer, copies, rows)
        except Exception as error:  # noqa: BLE001
            # a fence or a copier may raise any exception; the ticket reports it
            job.finish(job.failure(step, error))
        else:
            job.finish(None)
        return True

    def _copy_layer(self, job: Job, layer: int, copies: Descriptors, rows: slice) -> None:
        self._waiting.check_abandoned()
        moved = copies[rows]
        self._copier(moved.source, moved.destination, moved.length)
        if isinstance(job.ticket, LayerTicket):
            job.ticket.finish_layer(layer)


def engine_for(
    device_pools: Mapping[PoolName, DevicePool], host_pools: Mapping[PoolName, HostPool]
) -> TransferEngine:
    """Return an engine for the device of the pools: `CudaEngine`, or `CopyEngine` for CPU memory.

    Raises as the constructors of these classes do.
    """
    if any(pool.device.startswith("cuda") for pool in device_pools.values()):
        from tiercache.transfer.cuda import CudaEngine

        return CudaEngine(device_pools, host_pools)
    return CopyEngine(device_pools, host_pools)
