"""The CUDA transfer engine: two streams beside those of the inference engine."""

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
from tiercache.transfer.base import LayerTicket
from tiercache.transfer.cuda.calibration import Calibration
from tiercache.transfer.cuda.copying import GROUP_BYTES, CopySet
from tiercache.transfer.cuda.device import CudaDevice, Direction, Method
from tiercache.transfer.cuda.hardware import CupyDevice
from tiercache.transfer.cuda.kept import calibrated, forget_calibration
from tiercache.transfer.cuda.lane import LOADS_IN_FLIGHT, STORES_IN_FLIGHT, Lane
from tiercache.transfer.cuda.locked import PIECE_BYTES, LockedArena
from tiercache.transfer.cuda.proof import prove
from tiercache.transfer.cuda.ticket import CudaLayerTicket
from tiercache.transfer.cuda.watch import Watch
from tiercache.transfer.descriptors import Copies
from tiercache.transfer.fences import Fence, event_of, pass_fence
from tiercache.transfer.jobs import Sides
from tiercache.transfer.lanes import LaneEngine

_log = logging.getLogger(__name__)

_IN_FLIGHT: Final = 8
"""Forks that may be on the device at once."""
_FORK_BLOCKS: Final = 4
"""Kernel blocks per multiprocessor for a fork. It may fill the device, for the work behind it in the stream waits for it anyway."""


class CudaEngine(LaneEngine):
    """Engine that copies between the pools of one CUDA device and the host arena, which it keeps page-locked until it is closed.

    Loads have a stream of high priority, stores one of low. Each direction has one thread that queues transfers and one that waits for
    their end. For a fence that is a `torch.cuda.Event`, and for `wait_layer` with a stream, the device waits and no thread does.

    `device`: the device to use instead of CuPy's. `calibration`: which method copies what (default: measured at the first start on a
    machine, see `calibration`). `method`: one method for everything. `piece_bytes`: bytes of host memory that are page-locked in one call.
    `group_bytes`: layers of a load are queued together until they have this many bytes.

    Raises ConfigError for pools that are not on one CUDA device, for a missing device or CuPy, a method that cannot be used, and an arena
    that the driver does not page-lock; GeometryError where the two sides differ; TransferError if the driver fails otherwise.

    Thread safety: as `TransferEngine`. Callbacks run on the threads `tiercache-store` and `tiercache-load`.
    """

    def __init__(
        self,
        device_pools: Mapping[PoolName, DevicePool],
        host_pools: Mapping[PoolName, HostPool],
        *,
        device: CudaDevice | None = None,
        calibration: Calibration | None = None,
        method: Method | None = None,
        piece_bytes: int = PIECE_BYTES,
        group_bytes: int = GROUP_BYTES,
    ) -> None:
        super().__init__(Sides(device_pools, host_pools))
        ordinal, arena = _ordinal(device_pools), _arena(host_pools)
        self.device = device or CupyDevice(ordinal)
        if self.device.ordinal != ordinal:
            raise ConfigError(f"the pools are on cuda:{ordinal} and `device` is cuda:{self.device.ordinal}; give that of the pools")
        self._lanes_left = 2
        self._group_bytes = group_bytes
        with _starting(self.device), self.device.current(), ExitStack() as undo:
            prove(self.device)
            self.calibration, how = _how_to_copy(self.device, calibration, method)
            self._watch = _watch(self.device, self.calibration) if calibration is None else None
            self._locked = LockedArena(arena, self.device, piece_bytes)
            undo.callback(self._locked.unlock)
            self._forks = _Forks(self.device)
            undo.callback(self._forks.destroy)
            self._stores = self._lane("tiercache-store", Direction.TO_HOST, method)
            undo.callback(self._stores.end)
            self._loads = self._lane("tiercache-load", Direction.TO_DEVICE, method)
            undo.pop_all()
        missing = "".join(f"; no {name}: {reason}" for name, reason in self.device.unavailable.items())
        self.report = f"cuda:{ordinal}: {self.device.card}; {how}{missing}; {self._locked.report}"
        """Outcome of the start in words, for a log: device, calibration, unavailable methods, page-locked memory."""
        _log.info("%s", self.report)

    def fork(self, units: Sequence[CacheTransferUnits], *, stream: int = 0) -> None:  # noqa: D102
        copies = self._sides.forks(units)
        with self._submitting:  # else `close` could release the device's resources meanwhile
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
            with self.device.current():  # the handle of a default stream means that of the current device
                for fence in fences:
                    event = event_of(fence)
                    if event is None or stream is None:
                        pass_fence(fence)
                    else:
                        self.device.wait_event(stream, event)
        except RuntimeError as error:
            raise TransferError(f"earlier work on the device cannot be waited for: {error}") from error

    def _lane(self, name: str, direction: Direction, method: Method | None) -> Lane:
        def choose(copies: Copies) -> Method:
            if method is not None:
                return method
            assert self.calibration is not None
            return self.calibration.choose(direction, copies)

        loads = direction is Direction.TO_DEVICE
        return Lane(
            name,
            self.device,
            choose,
            self._locked,
            urgent=loads,
            in_flight=LOADS_IN_FLIGHT if loads else STORES_IN_FLIGHT,
            group_bytes=self._group_bytes,
            saw=None if self._watch is None else partial(self._watch.saw, direction),
            ended=self._lane_ended,
        )

    def _lane_ended(self) -> None:
        """Release what both lanes share once both have ended; called on the last thread of each lane."""
        with self._submitting:
            self._lanes_left -= 1
            if self._lanes_left:
                return
        self._forks.destroy()
        self._locked.unlock()


class _Forks:
    """Queue of copies within the device, in streams of the caller.

    Must not be used while a CUDA graph is being captured in the stream: a replay would read the table of another fork.

    Thread safety: one thread at a time, with the device current.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._ring = deque(CopySet.make(device, _IN_FLIGHT))
        self._used = 0

    def queue(self, copies: Copies, stream: int) -> None:
        """Queue the copies. Blocks until the eighth fork before this one is over."""
        if not len(copies):
            return
        resources = self._ring[0]
        if self._used >= _IN_FLIGHT:
            self._device.synchronize_event(resources.event(0))
        self._ring.rotate(-1)
        self._used += 1
        # Without the kernel, copy one by one: batches are done by the copy engines, which are slow within a device.
        rows, method = slice(0, len(copies)), Method.MEMCPY if Method.KERNEL in self._device.unavailable else Method.KERNEL
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
def _starting(device: CudaDevice) -> Iterator[None]:
    try:
        yield
    except TierCacheError:
        raise
    except RuntimeError as error:
        raise TransferError(f"the transfer engine could not start on {device.card}: {error}") from error


def _how_to_copy(device: CudaDevice, calibration: Calibration | None, method: Method | None) -> tuple[Calibration | None, str]:
    """Return the calibration to use, None if `method` copies everything, and its description for the report."""
    if method is None:
        return (calibration, "calibration as given") if calibration else calibrated(device)
    if method in device.unavailable:
        raise ConfigError(f"copies by {method} are not possible here: {device.unavailable[method]}")
    return None, f"every copy by {method}"


def _watch(device: CudaDevice, calibration: Calibration | None) -> Watch | None:
    """Return a watch that removes the calibration's file if copies prove slower or faster, so that the next start measures anew."""
    return Watch(calibration, partial(forget_calibration, calibration, device.methods)) if calibration else None


def _ordinal(pools: Mapping[PoolName, DevicePool]) -> int:
    """Return the number of the one CUDA device that all pools are on; ConfigError if there is none."""
    devices = sorted({pool.device for pool in pools.values()})
    if len(devices) != 1 or not re.fullmatch(r"cuda(:\d{1,3})?", devices[0]):
        raise ConfigError(
            f"the pools are on {', '.join(devices) or 'no device'} and this transfer engine serves one CUDA device; use one engine a device"
        )
    return int(devices[0].partition(":")[2] or 0)


def _arena(pools: Mapping[PoolName, HostPool]) -> BlockArena:
    """Return the one arena that all pools draw on; ConfigError if there are several."""
    first, *others = {id(pool.arena): pool.arena for pool in pools.values()}.values()
    if others:
        raise ConfigError("the host pools draw on several arenas and this transfer engine page-locks one; make them on one arena")
    return first
