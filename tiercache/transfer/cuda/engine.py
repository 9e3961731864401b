"""Transfer engine for one CUDA device, with a stream for stores and a stream for loads."""

from __future__ import annotations

import contextlib
import logging
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

from tiercache.core import CacheTransferUnits, PoolName
from tiercache.errors import ConfigError, TierCacheError, TransferError
from tiercache.pools.blocks import BlockArena
from tiercache.pools.device import DevicePool
from tiercache.pools.host import HostPool
from tiercache.transfer.base import Fence, LayerTicket, event_of
from tiercache.transfer.copy import LaneEngine, Sides
from tiercache.transfer.cuda.copying import GROUP_BYTES, PIECE_BYTES, CopySet, LockedArena, best_method
from tiercache.transfer.cuda.device import CudaDevice, Method
from tiercache.transfer.cuda.hardware import CupyDevice
from tiercache.transfer.cuda.lane import LOADS_IN_FLIGHT, STORES_IN_FLIGHT, Choose, CudaLayerTicket, Lane
from tiercache.transfer.cuda.self_test import self_test
from tiercache.transfer.descriptors import Copies

_log = logging.getLogger(__name__)

_IN_FLIGHT: Final = 8
"""Maximum number of forks that may be on the device at once."""
_FORK_BLOCKS: Final = 4
"""Thread blocks per multiprocessor for a fork.

A fork may fill the device, because the work behind the fork in the stream waits for it anyway.
"""


class CudaEngine(LaneEngine):
    """Engine that copies between the pools of one CUDA device and the host arena.

    The engine keeps the arena page-locked until the engine is closed. Loads have a stream of high priority,
    and stores have a stream of low priority. Each direction has a thread that queues transfers and a thread
    that waits for their end. No thread waits for a fence that is a `torch.cuda.Event`, nor in `wait_layer`
    with a stream: in both cases the device waits.

    - `device` replaces the device that CuPy opens.
    - `choose` returns the method for a group of copies, in place of `best_method`.
    - `piece_bytes` is the number of bytes that are page-locked in one call.
    - `group_bytes` is the minimum size of a group (layers of a load that are queued together).

    Raises:

    - ConfigError if the pools are not on one CUDA device and in one arena, if the device or CuPy is missing,
      if no method works, or if the driver does not page-lock the arena;
    - GeometryError for a pool whose geometry is not the same on both sides;
    - TransferError for any other failure of the driver.

    Thread safety: as `TransferEngine`. Callbacks run on the threads `tiercache-store` and `tiercache-load`.
    """

    def __init__(
        self,
        device_pools: Mapping[PoolName, DevicePool],
        host_pools: Mapping[PoolName, HostPool],
        *,
        device: CudaDevice | None = None,
        choose: Choose | None = None,
        piece_bytes: int = PIECE_BYTES,
        group_bytes: int = GROUP_BYTES,
    ) -> None:
        super().__init__(Sides(device_pools, host_pools))
        ordinal, arena = _ordinal(device_pools), _arena(host_pools)
        self.device = device or CupyDevice(ordinal)
        if self.device.ordinal != ordinal:
            raise ConfigError(
                f"the pools are on cuda:{ordinal} and `device` is cuda:{self.device.ordinal}; give the device"
                " of the pools"
            )
        self._lanes_left = 2
        self._group_bytes = group_bytes
        self._choose = choose or partial(best_method, self.device)
        with _start_errors(self.device), self.device.current(), ExitStack() as undo:
            self_test(self.device)
            self._locked = LockedArena(arena, self.device, piece_bytes)
            undo.callback(self._locked.unlock)
            self._forks = _Forks(self.device)
            undo.callback(self._forks.destroy)
            self._stores = self._lane("tiercache-store", STORES_IN_FLIGHT, urgent=False)
            undo.callback(self._stores.end)
            self._loads = self._lane("tiercache-load", LOADS_IN_FLIGHT, urgent=True)
            undo.pop_all()
        missing = "".join(f"; no {name}: {reason}" for name, reason in self.device.unavailable.items())
        self.report = f"cuda:{ordinal}: {self.device.card}{missing}; {self._locked.report}"
        """Text for a log: the device, the unavailable methods and the page-locked memory."""
        _log.info("%s", self.report)

    def fork(self, units: Sequence[CacheTransferUnits], *, stream: int = 0) -> None:  # noqa: D102
        copies = self._sides.forks(units)
        # While this lock is held, the last lane cannot release the resources that forks use.
        with self._submitting:
            self._require_open()
            try:
                with self.device.current():
                    self._forks.queue(copies, stream)
            except RuntimeError as error:
                raise TransferError(f"a fork failed: {error}") from error

    def _layer_ticket(self, layers: Iterable[int]) -> LayerTicket:
        return CudaLayerTicket(layers, self.device)

    def order(self, fences: Sequence[Fence], *, stream: int | None = None) -> None:  # noqa: D102
        try:
            with self.device.current():  # the handle of a default stream refers to the current device
                for fence in fences:
                    event = event_of(fence)
                    if event is None or stream is None:
                        fence.synchronize()
                    else:
                        self.device.wait_event(stream, event)
        except RuntimeError as error:
            raise TransferError(f"earlier work on the device cannot be waited for: {error}") from error

    def _lane(self, name: str, in_flight: int, *, urgent: bool) -> Lane:
        return Lane(
            name,
            self.device,
            self._choose,
            self._locked,
            urgent=urgent,
            in_flight=in_flight,
            group_bytes=self._group_bytes,
            ended=self._lane_ended,
        )

    def _lane_ended(self) -> None:
        """Release the resources that both lanes share, when both have ended.

        Each lane calls this method once, at the end of its last thread.
        """
        with self._submitting:
            self._lanes_left -= 1
            if self._lanes_left:
                return
        self._forks.destroy()
        self._locked.unlock()


class _Forks:
    """Queue of copies within the device, in streams of the caller.

    A fork must not be captured in a CUDA graph: a later launch of the graph would read the table of another
    fork.

    Thread safety: one thread at a time, with the device current.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._ring = deque(CopySet.make(device, _IN_FLIGHT))
        self._used = 0

    def queue(self, copies: Copies, stream: int) -> None:
        """Queue the copies. If `_IN_FLIGHT` forks are on the device, wait until the oldest is over."""
        if not len(copies):
            return
        # A set has one table of copies, and the device reads the table only when the fork's kernel starts:
        #   1. fork 0 fills the table of set 0; its kernel waits in the stream behind the forward pass
        #   2. forks 1 to 7 use sets 1 to 7
        #   3. fork 8 takes set 0 again, and waits for fork 0. Without this wait, the kernel of fork 0 would
        #      read the table of fork 8
        resources = self._ring[0]
        if self._used >= _IN_FLIGHT:
            self._device.synchronize_event(resources.event(0))
        self._ring.rotate(-1)
        self._used += 1
        # If the kernel is not available, use one memcpy per copy and not a batch: a batch is made by the copy
        # engines, which are slow within a device.
        rows, method = (
            slice(0, len(copies)),
            Method.MEMCPY if Method.KERNEL in self._device.unavailable else Method.KERNEL,
        )
        blocks = _FORK_BLOCKS * self._device.card.multiprocessors
        try:
            resources.queue(copies, [(rows, method)], blocks, stream).put(rows, method)
        finally:
            self._device.record(resources.event(0), stream)

    def destroy(self) -> None:
        """Wait until no fork is under way, then release all events and tables."""
        with contextlib.suppress(RuntimeError):  # the device is lost
            for resources in self._ring:
                self._device.synchronize_event(resources.event(0))
            for resources in self._ring:
                resources.destroy()


@contextlib.contextmanager
def _start_errors(device: CudaDevice) -> Iterator[None]:
    try:
        yield
    except TierCacheError:
        raise
    except RuntimeError as error:
        raise TransferError(f"the transfer engine could not start on {device.card}: {error}") from error


def _ordinal(pools: Mapping[PoolName, DevicePool]) -> int:
    """Return the number of the CUDA device that all pools are on; raise ConfigError if there is none."""
    devices = sorted({pool.device for pool in pools.values()})
    if len(devices) != 1 or not re.fullmatch(r"cuda(:\d{1,3})?", devices[0]):
        raise ConfigError(
            f"the pools are on {', '.join(devices) or 'no device'} and this transfer engine serves one CUDA"
            " device; use one engine for each device"
        )
    return int(devices[0].partition(":")[2] or 0)


def _arena(pools: Mapping[PoolName, HostPool]) -> BlockArena:
    """Return the arena that all pools share; raise ConfigError if there are several."""
    first, *others = {id(pool.arena): pool.arena for pool in pools.values()}.values()
    if others:
        raise ConfigError(
            "the host pools draw on several arenas and this transfer engine page-locks one; make all host"
            " pools on one arena"
        )
    return first
