"""The CPU transfer engine: the reference for every other one, and what runs where there is no accelerator."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from tiercache_kernels.reference import copy_segments

from tiercache.core import CacheTransferUnits, Locations, PoolName
from tiercache.errors import ClosedError, ConfigError, GeometryError, TransferError
from tiercache.pools.device import DevicePool
from tiercache.pools.host import HostPool
from tiercache.transfer.base import Fence, LayerTicket, Ticket, TransferEngine, pass_fence
from tiercache.transfer.descriptors import Descriptors, build_descriptors, join_descriptors

Copier: TypeAlias = Callable[[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.int64]], object]
"""Copies `lengths[i]` bytes from address `sources[i]` to `destinations[i]`, for all i, before it returns."""


class CopyEngine(TransferEngine):
    """Copies with the CPU: one thread for stores, one for loads, each taking its jobs in order.

    `copier` moves the bytes of one layer of one job; layers come in ascending order, in stores too. Tests pass one that delays or fails.
    Raises ConfigError for pools that are not in CPU memory or not on both sides, GeometryError where the two sides differ.

    Thread rule: as `TransferEngine`. Callbacks run on the two threads, `tiercache-store` and `tiercache-load`.
    """

    def __init__(
        self, device_pools: Mapping[PoolName, DevicePool], host_pools: Mapping[PoolName, HostPool], *, copier: Copier = copy_segments
    ) -> None:
        _check_pools(device_pools, host_pools)
        self._device_pools = dict(device_pools)
        self._host_pools = dict(host_pools)
        self._closed = False
        self._submitting = threading.Lock()
        self._stores = _Worker("tiercache-store", copier)
        self._loads = _Worker("tiercache-load", copier)

    def store(self, units: Sequence[CacheTransferUnits], *, after: Fence | None = None) -> Ticket:  # noqa: D102
        parts = tuple(self._part(u.pool, u.sources, u.destinations) for u in units)
        ticket = Ticket()
        self._submit(self._stores, _Job(True, parts, ticket, after))
        return ticket

    def load(self, units: Sequence[CacheTransferUnits], *, after: Fence | None = None) -> LayerTicket:  # noqa: D102
        parts = tuple(self._part(u.pool, u.destinations, u.sources) for u in units)
        ticket = LayerTicket(layer for part in parts if len(part.slots) for layer in part.device.geometry.layers)
        self._submit(self._loads, _Job(False, parts, ticket, after))
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

    def _part(self, pool: PoolName, slots: Locations, handles: Locations) -> _Part:
        if pool not in self._device_pools:
            raise ConfigError(f"pool {pool} is not registered with this transfer engine; pass it to the constructor")
        device, host = self._device_pools[pool], self._host_pools[pool]
        # Checked and resolved now, so that a wrong number is the caller's error; copied, so that the caller may reuse its arrays.
        return _Part(device, host, device.checked(slots).copy(), host.blocks(handles), host.arena.hold())

    def _submit(self, worker: _Worker, job: _Job) -> None:
        with self._submitting:  # or a job could get behind the mark that ends the worker, and never be answered
            if self._closed:
                raise ClosedError("the transfer engine was closed")
            worker.jobs.put(job)


@dataclass(frozen=True, slots=True)
class _Part:
    """One pool's units of a job. `region` keeps the arena mapped until the job is over."""

    device: DevicePool
    host: HostPool
    slots: Locations
    blocks: npt.NDArray[np.int64]
    region: memoryview

    def descriptors(self) -> Descriptors:
        arena = self.host.arena
        return build_descriptors(self.device.segments, self.slots, self.blocks, arena.block_bytes, arena.address)


@dataclass(frozen=True, slots=True)
class _Job:
    to_host: bool
    parts: tuple[_Part, ...]
    ticket: Ticket
    fence: Fence | None

    def finish(self, error: TransferError | None) -> None:
        for part in self.parts:
            part.region.release()
        self.ticket.finish(error)


class _Worker:
    """One thread and its queue. Thread rule: `jobs` is thread-safe; `stop` is called once."""

    def __init__(self, name: str, copier: Copier) -> None:
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._copier = copier
        self._abandon = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end after what is queued now."""
        self.jobs.put(None)

    def join(self, deadline: float) -> None:
        """Wait for the thread; at the deadline fail what is queued, and let the running job stop at its next layer."""
        if self._thread is threading.current_thread():  # closed from a callback: the thread ends when the callback has returned
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if not self._thread.is_alive():
            return
        self._abandon.set()
        while True:
            try:
                job = self.jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job.finish(TransferError("the transfer engine was closed before this transfer began"))
        self.jobs.put(None)  # the drain above may have taken the mark

    def _serve(self) -> None:
        while self._serve_one():
            pass

    def _serve_one(self) -> bool:
        """In a function of its own, so that no local variable keeps a finished job's pools and memory while the thread waits."""
        job = self.jobs.get()
        if job is None:
            return False
        step = "before its first layer"
        try:
            pass_fence(job.fence)
            copies = join_descriptors([part.descriptors() for part in job.parts])
            for layer, rows in copies.by_layer():
                step = f"in layer {layer}"
                self._copy_layer(job, layer, copies, rows)
        except Exception as error:  # noqa: BLE001  a fence or a copier may raise anything; it belongs to the ticket
            failure = TransferError(f"a {'store' if job.to_host else 'load'} failed {step}: {str(error) or type(error).__name__}")
            failure.__cause__ = error
            job.finish(failure)
        else:
            job.finish(None)
        return True

    def _copy_layer(self, job: _Job, layer: int, copies: Descriptors, rows: slice) -> None:
        if self._abandon.is_set():
            raise TransferError("the transfer engine was closed")
        device, host, length = copies.device[rows], copies.host[rows], copies.length[rows]
        if job.to_host:
            self._copier(device, host, length)
        else:
            self._copier(host, device, length)
        if isinstance(job.ticket, LayerTicket):
            job.ticket.finish_layer(layer)


def _check_pools(device_pools: Mapping[PoolName, DevicePool], host_pools: Mapping[PoolName, HostPool]) -> None:
    for name in sorted(device_pools.keys() ^ host_pools.keys()):
        raise ConfigError(f"pool {name} is on one side only; give the transfer engine a device pool and a host pool for each kind")
    for name, pool in device_pools.items():
        if pool.device != "cpu":
            raise ConfigError(
                f"pool {name} is on {pool.device} and this transfer engine copies CPU memory only; use the engine for that device"
            )
        if pool.geometry.fingerprint != host_pools[name].geometry.fingerprint:
            raise GeometryError(f"pool {name} has different geometries on device and host; make both from one geometry")
