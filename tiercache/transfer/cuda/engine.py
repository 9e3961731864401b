"""Transfer engine for one CUDA device, with a stream for stores and a stream for loads."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from tiercache.core import PoolName
from tiercache.errors import ConfigError, TierCacheError, TransferError
from tiercache.pools.blocks import BlockArena
from tiercache.pools.device import DevicePool
from tiercache.pools.host import HostPool
from tiercache.transfer.base import Fence, LayerTicket, event_of
from tiercache.transfer.copy import LaneEngine, Sides
from tiercache.transfer.cuda.copying import GROUP_BYTES, PIECE_BYTES, LockedArena, best_method
from tiercache.transfer.cuda.device import CudaDevice
from tiercache.transfer.cuda.hardware import CupyDevice
from tiercache.transfer.cuda.lane import LOADS_IN_FLIGHT, STORES_IN_FLIGHT, Choose, CudaLayerTicket, Lane
from tiercache.transfer.cuda.self_test import self_test

_log = logging.getLogger(__name__)


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
            self._stores = self._lane("tiercache-store", STORES_IN_FLIGHT, urgent=False)
            undo.callback(self._stores.end_threads)
            self._loads = self._lane("tiercache-load", LOADS_IN_FLIGHT, urgent=True)
            undo.pop_all()
        missing = "".join(f"; no {name}: {reason}" for name, reason in self.device.unavailable.items())
        self.report = f"cuda:{ordinal}: {self.device.card}{missing}; {self._locked.report}"
        """Text for a log: the device, the unavailable methods and the page-locked memory."""
        _log.info("%s", self.report)

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
        self._locked.unlock()


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
