"""What all cases stand on: memory on the device, page-locked memory beside it, and streams to copy in."""

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
"""Bytes from one filling of the device's memory to the next, within the same noise."""
_SHIFTS: Final = 16


@dataclass(frozen=True, slots=True)
class Work:
    """Copies, and which of them are queued at once. Thread safety: immutable."""

    copies: Copies
    groups: tuple[slice, ...]


class Mover:
    """A stream, and what copies in it need until they are over. Thread safety: one thread at a time, with the device current."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._blocks = bus_blocks(device.card.multiprocessors)
        self._resources = CopySet(device)
        self._stream = device.create_stream(urgent=False)

    def move(self, work: Work, methods: Sequence[Method]) -> None:
        """Queue each group of copies by its method, and wait for the end."""
        groups = list(zip(work.groups, methods, strict=True))
        queue = self._resources.queue(work.copies, groups, self._blocks, self._stream)
        for rows, method in groups:
            queue.put(rows, method)
        self._device.synchronize_stream(self._stream)

    def copy(self, source: int, destination: int, nbytes: int) -> None:
        """One contiguous copy, to its end."""
        self._device.copy(source, destination, nbytes, self._stream)
        self._device.synchronize_stream(self._stream)

    def settle(self) -> None:
        """Wait for what an error or Ctrl-C may have left under way."""
        with suppress(RuntimeError):  # of a device that is lost, where nothing moves any more
            self._device.synchronize_stream(self._stream)

    def close(self) -> None:
        """Give everything back, once nothing is under way."""
        self.settle()
        with suppress(RuntimeError):  # a device that is lost gives nothing back, and its error is on its way already
            self._resources.destroy()
            self._device.destroy_stream(self._stream)


class Ground:
    """`nbytes` of device memory from `address`, as much page-locked memory beside it, and noise to fill it with.

    `stack` gives it all back. Raises ConfigError if there is not enough memory. Thread safety: one thread, with the device current.
    """

    def __init__(self, device: CudaDevice, calibration: Calibration, nbytes: int, stack: ExitStack) -> None:
        self.device = device
        self.calibration = calibration
        try:
            self.address = device.allocate(nbytes)
            stack.callback(_release, device, self.address)
            # By the driver and not in the arena, for this is the fastest memory there is: the limit.
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
        """The limit: so many bytes in one copy."""
        ends = self.address, self.plain.ctypes.data
        self.mover.copy(*(ends if direction is Direction.TO_HOST else ends[::-1]), nbytes)

    def fill(self, nbytes: int) -> np.ndarray:
        """Fill so much of the device's memory with bytes that were not there before; which ones."""
        self._turn += 1
        noise = self._noise[self._turn % _SHIFTS * _SHIFT :][:nbytes]
        self.mover.copy(noise.ctypes.data, self.address, nbytes)
        return noise

    def read(self, nbytes: int) -> np.ndarray:
        """So much of the device's memory, by one contiguous copy."""
        self.plain[:nbytes] = 0
        self.contiguous(Direction.TO_HOST, nbytes)
        return self.plain[:nbytes]


def _release(device: CudaDevice, address: int) -> None:
    with suppress(RuntimeError):  # as above
        device.release(address)


Say = Callable[[str], None]
"""Told what is being done."""
