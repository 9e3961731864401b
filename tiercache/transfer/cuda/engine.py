"""Transfer engine for one CUDA device, with a stream for stores and a stream for loads, and its self-test."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Final
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from tiercache.core import PoolName
from tiercache.errors import ConfigError, TierCacheError, TransferError
from tiercache.pools.arena import HostArena, HostPool
from tiercache.pools.blocks import BlockArena
from tiercache.pools.device import DevicePool
from tiercache.transfer.base import Fence, LayerTicket, event_of
from tiercache.transfer.copy import LaneEngine, Sides
from tiercache.transfer.cuda.copying import GROUP_BYTES, PIECE_BYTES, CopySet, LockedArena, Pace, best_method
from tiercache.transfer.cuda.device import CudaDevice, Method
from tiercache.transfer.cuda.hardware import CupyDevice
from tiercache.transfer.cuda.lane import LOADS_IN_FLIGHT, STORES_IN_FLIGHT, Choose, CudaLayerTicket, Lane
from tiercache.transfer.descriptors import Descriptors

_log = logging.getLogger(__name__)

_BLOCK_BYTES: Final = 4096
"""Bytes of a block of the arena that is made here."""
_PASSED: Final[WeakSet[CudaDevice]] = WeakSet()
"""Devices that have passed the self-test in this process."""
_TEST_BYTES: Final = 2 << 20
"""Bytes of each buffer of the self-test."""
_TEST_PIECE_BYTES: Final = 1 << 20
"""Bytes of a piece, which the self-test page-locks in one call.

The pieces are so small that one copy of the self-test crosses from one piece into the next.
"""
_TEST_LENGTHS: Final = (1, 15, 16, 17, 255, 4096, 4099, 65536, 65543, 1 << 20)
"""Bytes of each copy. The last copy crosses the end of a page-locked piece."""
_GAP_SENT: Final = 33
_GAP_DEVICE: Final = 21
_GAP_BACK: Final = 43
"""Bytes between two copies, in each of the three buffers.

The kernel copies vectors of 16 bytes. With odd gaps, the addresses have many different offsets from a
multiple of 16. With different gaps in each buffer, source and destination have different offsets.
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


def self_test(device: CudaDevice) -> None:
    """Copy to the device and back by each method, and compare all bytes on the device and on the host.

    A method that fails or copies wrongly is added to `device.unavailable`. A device that has passed once is
    not tested again. Raises ConfigError if no method is left.

    Thread safety: one thread, with the device current.
    """
    if device in _PASSED:
        return
    with ExitStack() as stack:
        test = _SelfTest(device, stack)
        for method in [m for m in Method if m not in device.unavailable]:
            try:
                test.run(method)
            except Exception as error:  # noqa: BLE001  any error means that this method does not work here
                device.unavailable[method] = reason = str(error) or type(error).__name__
                _log.warning("copies by %s are not used on %s: %s", method, device.card, reason)
                device.synchronize_stream(test.stream)  # the next method's test uses the same memory
    if len(device.unavailable) == len(Method):
        raise ConfigError(
            f"no way to copy between {device.card} and the host works: {device.unavailable[Method.MEMCPY]}"
        )
    _PASSED.add(device)


class _SelfTest:
    """Buffers of the self-test: one on the device, and two in an arena that is page-locked in pieces.

    A fourth buffer, in host memory that the driver allocates, receives the device's bytes for the comparison.
    Each run draws new random bytes, because correct bytes left by an earlier run would hide a failure.

    Thread safety: one thread, with the device current.
    """

    def __init__(self, device: CudaDevice, stack: ExitStack) -> None:
        self._device, self._rng = device, np.random.default_rng()
        self.stream = device.create_stream(urgent=False)
        stack.callback(device.destroy_stream, self.stream)
        self._address = device.allocate(_TEST_BYTES)
        stack.callback(device.release, self._address)
        pace = Pace(device, self.stream)
        stack.callback(pace.destroy)
        self._resources = CopySet(device, pace)
        stack.callback(self._resources.destroy)
        self._there = device.allocate_host(_TEST_BYTES)
        self._arena = stack.enter_context(closing(HostArena(2 * _TEST_BYTES, _BLOCK_BYTES, huge_pages=False)))
        self._locked = _page_locked(self._arena, device)
        stack.callback(self._locked.unlock)
        self._sent, self._back = np.frombuffer(self._arena.hold(), np.uint8).reshape(2, _TEST_BYTES)
        stack.callback(device.synchronize_stream, self.stream)

    def run(self, method: Method) -> None:
        """Try one method.

        Raises RuntimeError if any byte is wrong on the device or back on the host. This includes the bytes
        between the copies, which must not change.
        """
        # Path of the bytes:  sent --method--> device --method--> back
        #                                        '--plain copy--> there, to see what is on the device
        # `expected` has the bytes that `there` and `back` must have at the end: their own random bytes,
        # except that the places of the copies must have the copied bytes.
        for memory in (self._sent, self._there, self._back):
            memory[:] = np.frombuffer(self._rng.bytes(_TEST_BYTES), np.uint8)
        expected = [self._there.copy(), self._back.copy()]
        starts = (_GAP_SENT, _GAP_DEVICE, _GAP_BACK)
        for target, source, begin, end in zip(
            expected, (self._sent, expected[0]), starts[:-1], starts[1:], strict=True
        ):
            for there, here, length in zip(
                _places(end).tolist(), _places(begin).tolist(), _TEST_LENGTHS, strict=True
            ):
                target[there : there + length] = source[here : here + length]
        self._device.copy(self._there.ctypes.data, self._address, _TEST_BYTES, self.stream)
        self._copy(method, _places(_GAP_SENT, self._sent.ctypes.data), to_host=False)
        self._copy(method, _places(_GAP_BACK, self._back.ctypes.data), to_host=True)
        self._device.copy(self._address, self._there.ctypes.data, _TEST_BYTES, self.stream)
        self._device.synchronize_stream(self.stream)
        found = (self._there, self._back)
        wrong = sum(np.count_nonzero(one != right) for one, right in zip(found, expected, strict=True))
        if wrong:
            raise RuntimeError(f"{wrong} of {2 * _TEST_BYTES} bytes were wrong in a trial")

    def _copy(self, method: Method, host: npt.NDArray[np.uint64], *, to_host: bool) -> None:
        lengths, layers = np.array(_TEST_LENGTHS), np.zeros(len(_TEST_LENGTHS), np.int64)
        whole = Descriptors(_places(_GAP_DEVICE, self._address), host, lengths, layers, to_host)
        copies = whole.cut(self._locked.address, self._locked.period)
        rows = slice(0, len(copies))
        self._resources.begin_transfer(copies, [method])
        self._resources.put(rows, method)
        self._device.synchronize_stream(self.stream)


def _page_locked(arena: HostArena, device: CudaDevice) -> LockedArena:
    try:
        return LockedArena(arena, device, _TEST_PIECE_BYTES)
    except ConfigError as error:
        raise ConfigError(
            f"{device.card} cannot be used: not even {arena.nbytes >> 20} MiB are page-locked for it"
            f" ({error.__cause__})"
        ) from error


def _places(step: int, base: int = 0) -> npt.NDArray[np.uint64]:
    """Return the address of each copy in a buffer at address `base`, with `step` bytes before each copy."""
    ends = np.cumsum(np.array(_TEST_LENGTHS) + step)
    starts: npt.NDArray[np.int64] = base + ends - np.array(_TEST_LENGTHS)
    return starts.astype(np.uint64)
