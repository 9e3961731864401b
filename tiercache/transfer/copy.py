"""The CPU transfer engine: the reference for every other one, and what runs where there is no accelerator."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from tiercache_kernels.reference import copy_segments

from tiercache.core import CacheTransferUnits, PoolName
from tiercache.errors import ClosedError, ConfigError, TransferError
from tiercache.pools.device import DevicePool
from tiercache.pools.host import HostPool
from tiercache.transfer.base import Fence, LayerTicket, Ticket, TransferEngine
from tiercache.transfer.descriptors import Descriptors
from tiercache.transfer.jobs import Job, Sides, layers_of

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
        self._sides = Sides(device_pools, host_pools)
        for name, pool in device_pools.items():
            if pool.device != "cpu":
                raise ConfigError(
                    f"pool {name} is on {pool.device} and this transfer engine copies CPU memory only; use the engine for that device"
                )
        self._copier = copier
        self._closed = False
        self._submitting = threading.Lock()
        self._stores = _Worker("tiercache-store", copier)
        self._loads = _Worker("tiercache-load", copier)

    def store(self, units: Sequence[CacheTransferUnits], *, after: Sequence[Fence] = ()) -> Ticket:  # noqa: D102
        ticket = Ticket()
        self._submit(self._stores, Job(True, self._sides.parts(units, to_host=True), ticket, tuple(after)))
        return ticket

    def load(self, units: Sequence[CacheTransferUnits], *, after: Sequence[Fence] = ()) -> LayerTicket:  # noqa: D102
        parts = self._sides.parts(units, to_host=False)
        ticket = LayerTicket(layers_of(parts))
        self._submit(self._loads, Job(False, parts, ticket, tuple(after)))
        return ticket

    def fork(self, units: Sequence[CacheTransferUnits], *, stream: int = 0) -> None:  # noqa: D102
        copies = self._sides.forks(units)
        try:
            self._copier(copies.source, copies.destination, copies.length)
        except Exception as error:
            raise TransferError(f"a fork failed: {str(error) or type(error).__name__}") from error

    def close(self, timeout: float = 30.0) -> None:  # noqa: D102
        with self._submitting:
            if not self._closed:
                self._closed = True
                self._stores.stop()
                self._loads.stop()
        deadline = time.monotonic() + timeout
        self._stores.join(deadline)
        self._loads.join(deadline)

    def _submit(self, worker: _Worker, job: Job) -> None:
        with self._submitting:  # or a job could get behind the mark that ends the worker, and never be answered
            if self._closed:
                raise ClosedError("the transfer engine was closed")
            worker.jobs.put(job)


class _Worker:
    """One thread and its queue. Thread rule: `jobs` is thread-safe; `stop` is called once."""

    def __init__(self, name: str, copier: Copier) -> None:
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
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
            job.pass_fences()
            copies = job.descriptors()
            for layer, rows in copies.by_layer():
                step = f"in layer {layer}"
                self._copy_layer(job, layer, copies, rows)
        except Exception as error:  # noqa: BLE001  a fence or a copier may raise anything; it belongs to the ticket
            job.finish(job.failure(step, error))
        else:
            job.finish(None)
        return True

    def _copy_layer(self, job: Job, layer: int, copies: Descriptors, rows: slice) -> None:
        if self._abandon.is_set():
            raise TransferError("the transfer engine was closed")
        moved = copies.copies(to_host=job.to_host)[rows]
        self._copier(moved.source, moved.destination, moved.length)
        if isinstance(job.ticket, LayerTicket):
            job.ticket.finish_layer(layer)
