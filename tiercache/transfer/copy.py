"""Transfer engine that copies with the CPU, and the choice of an engine by device.

The engine here is the reference for all other transfer engines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from tiercache_kernels.reference import copy_segments

from tiercache.core import CacheTransferUnits, PoolName
from tiercache.errors import ConfigError, TransferError
from tiercache.pools.device import DevicePool
from tiercache.pools.host import HostPool
from tiercache.transfer.base import LayerTicket, TransferEngine
from tiercache.transfer.descriptors import Descriptors
from tiercache.transfer.lanes import Job, LaneEngine, Sides, Waiting

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

    def fork(self, units: Sequence[CacheTransferUnits], *, stream: int = 0) -> None:  # noqa: D102
        self._require_open()
        copies = self._sides.forks(units)
        try:
            self._copier(copies.source, copies.destination, copies.length)
        except Exception as error:
            raise TransferError(f"a fork failed: {str(error) or type(error).__name__}") from error

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
            job.pass_fences(self._waiting.check_abandoned)
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
        moved = copies.copies(to_host=job.to_host)[rows]
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
