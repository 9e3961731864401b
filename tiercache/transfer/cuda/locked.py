"""Page-locking of the host arena, so that the device reads and writes it at the speed of the bus."""

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
"""Bytes that are locked in one call. Between calls the driver's lock is free for threads that compute already."""


class LockedArena:
    """An arena's memory, kept page-locked and mapped until `unlock`, in pieces of whole blocks and about `piece_bytes` bytes.

    No copy may go from one piece into the next, for to the driver they are unrelated memory; `period` is the length of a piece in bytes.
    Most devices use the host's addresses for the pieces; `seen` puts in the addresses that this device uses.

    Raises ConfigError if the driver refuses; nothing is locked then.

    Thread safety: one thread at a time, with the device current.
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
        """For each piece: the device's address of it minus the host's, in bytes; shape [pieces]."""
        self.report = f"{arena.nbytes >> 20} MiB page-locked in {time.monotonic() - started:.2f} s"

    def seen(self, descriptors: Descriptors) -> Descriptors:
        """Return the same copies with the device's addresses of host memory. The caller guarantees that none crosses the end of a piece."""
        if not self._shifts.any():
            return descriptors
        host = descriptors.host.astype(np.int64)
        return replace(descriptors, host=(host + self._shifts[(host - self._origin) // self.period]).astype(np.uint64))

    def unlock(self) -> None:
        """Unlock the memory and release the arena's mapping. A second call does nothing."""
        while self._pieces:
            with contextlib.suppress(RuntimeError):  # a device that is lost has unlocked it already
                self._device.unlock(self._pieces.pop())
        self._region.release()
