"""Resources of all cases: memory on the device, page-locked host memory, and a stream for copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final

import numpy as np

from tiercache.errors import ConfigError
from tiercache.transfer.cuda import Calibration, CudaDevice, Direction, Method
from tiercache.transfer.cuda.copying import CopySet, bus_blocks
from tiercache.transfer.descriptors import Copies

_SHIFT: Final = 4099
"""Distance in bytes between the starts of two consecutive fillings in the random bytes.

Each filling of the device memory is a window of the same random bytes:

    random bytes   |0 ..... 4099 ..... 8198 ...
    filling 0      [----------------------)
    filling 1            [----------------------)
"""
_SHIFTS: Final = 16
"""Number of different fillings; the next filling is the first one again."""


@dataclass(frozen=True, slots=True)
class Work:
    """Copies, and the groups in which they are queued."""

    copies: Copies
    groups: tuple[slice, ...]


class Mover:
    """Stream of copies, and the resources that the copies need until they are done.

    Thread safety: one thread at a time, with the device current.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._blocks = bus_blocks(device.card.multiprocessors)
        self._resources = CopySet(device)
        self._stream = device.create_stream(urgent=False)

    def move(self, work: Work, methods: Sequence[Method]) -> None:
        """Queue each group of copies by its method, and wait until all copies are done."""
        groups = list(zip(work.groups, methods, strict=True))
        queue = self._resources.queue(work.copies, groups, self._blocks, self._stream)
        for rows, method in groups:
            queue.put(rows, method)
        self._device.synchronize_stream(self._stream)

    def copy(self, source: int, destination: int, nbytes: int) -> None:
        """Make one contiguous copy and wait until it is done."""
        self._device.copy(source, destination, nbytes, self._stream)
        self._device.synchronize_stream(self._stream)

    def settle(self) -> None:
        """Wait for copies that an error or Ctrl-C may have left under way."""
        with suppress(RuntimeError):  # raised by a lost device, on which no copy runs any more
            self._device.synchronize_stream(self._stream)

    def close(self) -> None:
        """Wait until all copies are done, then release the resources and the stream."""
        self.settle()
        with suppress(RuntimeError):  # raised by a lost device, whose error was raised before
            self._resources.destroy()
            self._device.destroy_stream(self._stream)


class Ground:
    """Memory for a benchmark, on the device and on the host.

    There are `nbytes` bytes on the device, and two page-locked areas of about this size on the host. One is
    for contiguous copies. The other has random bytes, with which the device memory is filled. Closing `stack`
    releases all memory. Raises ConfigError if there is not enough memory.

    Thread safety: one thread, with the device current.
    """

    def __init__(self, device: CudaDevice, calibration: Calibration, nbytes: int, stack: ExitStack) -> None:
        self.device = device
        self.calibration = calibration
        try:
            self.address = device.allocate(nbytes)
            stack.callback(_release, device, self.address)
            # Host memory for the contiguous copy, which is the limit for all other copies. It is allocated by
            # the driver, because no other host memory is faster.
            self.plain = device.allocate_host(nbytes)
            self._noise = device.allocate_host(nbytes + _SHIFT * _SHIFTS)
        except RuntimeError as error:
            raise ConfigError(
                f"{nbytes >> 20} MiB of device memory and twice as much host memory are not available"
                f" ({error}); lower --most"
            ) from error
        whole = len(self._noise) // 8 * 8
        self._noise[:whole].view(np.uint64)[:] = np.random.default_rng(0).integers(
            0, 1 << 64, whole // 8, np.uint64
        )
        self.mover = Mover(device)
        stack.callback(self.mover.close)
        self._turn = 0

    def contiguous(self, direction: Direction, nbytes: int) -> None:
        """Make one contiguous copy of `nbytes` bytes, the limit for other copies."""
        ends = self.address, self.plain.ctypes.data
        self.mover.copy(*(ends if direction is Direction.TO_HOST else ends[::-1]), nbytes)

    def fill(self, nbytes: int) -> np.ndarray:
        """Fill the first `nbytes` of the device memory with the next random bytes; return them as uint8."""
        self._turn += 1
        noise = self._noise[self._turn % _SHIFTS * _SHIFT :][:nbytes]
        self.mover.copy(noise.ctypes.data, self.address, nbytes)
        return noise

    def read(self, nbytes: int) -> np.ndarray:
        """Return the first `nbytes` of the device memory, read by one contiguous copy."""
        self.plain[:nbytes] = 0
        self.contiguous(Direction.TO_HOST, nbytes)
        return self.plain[:nbytes]


def _release(device: CudaDevice, address: int) -> None:
    with suppress(RuntimeError):  # raised by a lost device
        device.release(address)


Say = Callable[[str], None]
"""Function that shows progress. It is called with a description of each step."""
