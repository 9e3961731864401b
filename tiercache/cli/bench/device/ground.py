"""The resources of all cases: memory on the device, page-locked host memory, and streams to copy in."""

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
"""Bytes by which each filling of the device's memory starts later in the noise than the one before."""
_SHIFTS: Final = 16
"""Number of different fillings; then they repeat."""


@dataclass(frozen=True, slots=True)
class Work:
    """Copies, and the groups of them that are queued together."""

    copies: Copies
    groups: tuple[slice, ...]


class Mover:
    """A stream, and the resources that copies in it need until they are over.

    Thread safety: one thread at a time, with the device current.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._blocks = bus_blocks(device.card.multiprocessors)
        self._resources = CopySet(device)
        self._stream = device.create_stream(urgent=False)

    def move(self, work: Work, methods: Sequence[Method]) -> None:
        """Queue each group of copies by its method, and wait until all are over."""
        groups = list(zip(work.groups, methods, strict=True))
        queue = self._resources.queue(work.copies, groups, self._blocks, self._stream)
        for rows, method in groups:
            queue.put(rows, method)
        self._device.synchronize_stream(self._stream)

    def copy(self, source: int, destination: int, nbytes: int) -> None:
        """Make one contiguous copy and wait for its end."""
        self._device.copy(source, destination, nbytes, self._stream)
        self._device.synchronize_stream(self._stream)

    def settle(self) -> None:
        """Wait for copies that an error or Ctrl-C may have left under way."""
        with suppress(RuntimeError):  # a lost device raises, and no copy runs on it any more
            self._device.synchronize_stream(self._stream)

    def close(self) -> None:
        """Wait until no copy is under way, then release the resources and the stream."""
        self.settle()
        with suppress(RuntimeError):  # a lost device releases nothing, and its error has been raised already
            self._resources.destroy()
            self._device.destroy_stream(self._stream)


class Ground:
    """Device memory of `nbytes` from `address`, as much page-locked host memory, and noise to fill the device memory with.

    Closing `stack` releases it. Raises ConfigError if there is not enough memory.

    Thread safety: one thread, with the device current.
    """

    def __init__(self, device: CudaDevice, calibration: Calibration, nbytes: int, stack: ExitStack) -> None:
        self.device = device
        self.calibration = calibration
        try:
            self.address = device.allocate(nbytes)
            stack.callback(_release, device, self.address)
            # Allocated by the driver and not in an arena, because this is the fastest host memory: the limit uses it.
            self.plain = device.allocate_host(nbytes)
            self._noise = device.allocate_host(nbytes + _SHIFT * _SHIFTS)
        except RuntimeError as error:
            raise ConfigError(
                f"there is no room for {nbytes >> 20} MiB on the device and twice that beside it ({error}); lower --most"
            ) from error
        whole = len(self._noise) // 8 * 8
        self._noise[:whole].view(np.uint64)[:] = np.random.default_rng(0).integers(0, 1 << 64, whole // 8, np.uint64)
        self.mover = Mover(device)
        stack.callback(self.mover.close)
        self._turn = 0

    def contiguous(self, direction: Direction, nbytes: int) -> None:
        """Copy `nbytes` in one contiguous copy: the limit that other copies are compared with."""
        ends = self.address, self.plain.ctypes.data
        self.mover.copy(*(ends if direction is Direction.TO_HOST else ends[::-1]), nbytes)

    def fill(self, nbytes: int) -> np.ndarray:
        """Fill the first `nbytes` of the device memory with other bytes than the last filling, and return these (uint8)."""
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
    with suppress(RuntimeError):  # a lost device raises
        device.release(address)


Say = Callable[[str], None]
"""A function that is called with a description of each step, to show progress."""
