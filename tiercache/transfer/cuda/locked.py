"""Page-locking the host arena, so that the device reads and writes it at the speed of the bus."""

from __future__ import annotations

import contextlib
import time
from typing import Final

from tiercache.errors import ConfigError
from tiercache.pools.blocks import BlockArena
from tiercache.transfer.cuda.device import CudaDevice

PIECE_BYTES: Final = 1 << 30
"""What is locked in one call: the driver's lock is free in between for whoever computes already."""


class LockedArena:
    """An arena's memory, page-locked from the start until `unlock`, and mapped as long, in pieces of whole blocks and about `piece_bytes`.

    No copy may go from one piece to the next, for to the driver they have nothing in common: `period` is their length in bytes.
    Raises ConfigError if the driver refuses, with nothing locked. Thread rule: one thread at a time, with the device current.
    """

    def __init__(self, arena: BlockArena, device: CudaDevice, piece_bytes: int = PIECE_BYTES) -> None:
        self.period = max(1, piece_bytes // arena.block_bytes) * arena.block_bytes
        self._device = device
        self._region = arena.hold()
        self._pieces: list[int] = []
        started = time.monotonic()
        try:
            for start in range(0, arena.nbytes, self.period):
                device.lock(arena.address + start, min(self.period, arena.nbytes - start))
                self._pieces.append(arena.address + start)
        except RuntimeError as error:
            self.unlock()
            raise ConfigError(
                f"{arena.nbytes >> 20} MiB of host memory could not be page-locked for the device ({error}); make the host arena smaller"
            ) from error
        self.report = f"{arena.nbytes >> 20} MiB page-locked in {time.monotonic() - started:.2f} s"

    def unlock(self) -> None:
        """Let go of it. Twice is harmless."""
        while self._pieces:
            with contextlib.suppress(RuntimeError):  # a device that is lost has let go already
                self._device.unlock(self._pieces.pop())
        self._region.release()
