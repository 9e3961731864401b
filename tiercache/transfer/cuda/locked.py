"""Page-locking the host arena, so that the device reads and writes it at the speed of the bus."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Final

import numpy as np

from tiercache.errors import ConfigError
from tiercache.pools.blocks import BlockArena
from tiercache.transfer.cuda.device import CudaDevice
from tiercache.transfer.descriptors import Descriptors

PIECE_BYTES: Final = 1 << 30
"""What is locked in one call: the driver's lock is free in between for whoever computes already."""


class LockedArena:
    """An arena's memory, page-locked from the start until `unlock`, and mapped as long, in pieces of whole blocks and about `piece_bytes`.

    No copy may go from one piece to the next, for to the driver they have nothing in common: `period` is their length in bytes. Most
    devices know them by the host's addresses; `seen` puts in what this one knows them by.
    Raises ConfigError if the driver refuses, with nothing locked. Thread safety: one thread at a time, with the device current.
    """

    def __init__(self, arena: BlockArena, device: CudaDevice, piece_bytes: int = PIECE_BYTES) -> None:
        self.period = max(1, piece_bytes // arena.block_bytes) * arena.block_bytes
        self._device = device
        self._region = arena.hold()
        self._pieces: list[int] = []
        self._origin = arena.address
        shifts: list[int] = []
        started = time.monotonic()
        try:
            for start in range(0, arena.nbytes, self.period):
                known = device.lock(arena.address + start, min(self.period, arena.nbytes - start))
                self._pieces.append(arena.address + start)
                shifts.append(known - self._pieces[-1])
        except RuntimeError as error:
            self.unlock()
            raise ConfigError(
                f"{arena.nbytes >> 20} MiB of host memory could not be page-locked for the device ({error}); make the host arena smaller"
            ) from error
        self._shifts = np.array(shifts, np.int64)
        """Of each piece: from the host's address to that by which the device knows it."""
        self.report = f"{arena.nbytes >> 20} MiB page-locked in {time.monotonic() - started:.2f} s"

    def seen(self, descriptors: Descriptors) -> Descriptors:
        """The same copies as the device is to be told of them; none of them across two pieces."""
        if not self._shifts.any():
            return descriptors
        host = descriptors.host.astype(np.int64)
        return replace(descriptors, host=(host + self._shifts[(host - self._origin) // self.period]).astype(np.uint64))

    def unlock(self) -> None:
        """Let go of it. Twice is harmless."""
        while self._pieces:
            with contextlib.suppress(RuntimeError):  # a device that is lost has let go already
                self._device.unlock(self._pieces.pop())
        self._region.release()
