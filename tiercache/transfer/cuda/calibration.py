"""Measurement of the fastest copy method on this machine, per direction, size and number of copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import log2
from statistics import median
from typing import Final

import numpy as np

from tiercache.pools.arena import HostArena
from tiercache.transfer.cuda.copying import CopySet, bus_blocks
from tiercache.transfer.cuda.device import Card, CudaDevice, Direction, Method
from tiercache.transfer.cuda.locked import LockedArena
from tiercache.transfer.descriptors import Copies, Descriptors

LENGTHS: Final = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
"""Bytes per copy: pages of small models, of 16 and of 64 tokens; convolution and recurrent states."""
COUNTS: Final = (1, 16, 128, 1024)
"""Numbers of copies at once: a layer of one object, of some, of a long prompt; a whole store."""
MOST_BYTES: Final = 64 << 20
"""Most bytes of one measurement, and of the buffer on either side."""
_BLOCK_BYTES: Final = 4096
_ROUNDS: Final = 5
_AS_GOOD: Final = 0.97
"""Share of the fastest speed that counts as equally fast.

Of such methods the first in `Method` is chosen: the copy engines take no multiprocessors from the computation."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: `count` copies of `length` bytes each. `speeds`: GB/s by method."""

    direction: Direction
    length: int
    count: int
    speeds: Mapping[Method, float]

    @property
    def best(self) -> Method:
        """Method to use: the first in `Method` that is nearly as fast as the fastest."""
        enough = _AS_GOOD * max(self.speeds.values())
        return next(method for method in Method if self.speeds.get(method, 0.0) >= enough)


class Calibration:
    """Measurements of one device. Thread safety: any thread; the measurements never change."""

    def __init__(self, card: Card, cells: Sequence[Cell]) -> None:
        self.card = card
        self.cells = tuple(cells)
        self._known: dict[tuple[Direction, int, int], Cell] = {}

    def choose(self, direction: Direction, copies: Copies) -> Method:
        """Return the best method of the measurement that is nearest to these copies; see `nearest`."""
        return self.nearest(direction, copies).best

    def nearest(self, direction: Direction, copies: Copies) -> Cell:
        """Return the measurement that is nearest to these copies, by the factors between mean lengths and between numbers.

        Copies whose mean lengths, and whose numbers, lie between the same powers of two get the same answer.
        """
        count = max(1, len(copies))
        length = max(1, copies.nbytes // count)
        near = (direction, length.bit_length(), count.bit_length())
        if near not in self._known:
            cells = (cell for cell in self.cells if cell.direction is direction)
            self._known[near] = min(cells, key=lambda cell: abs(log2(cell.length / length)) + abs(log2(cell.count / count)))
        return self._known[near]


def calibrate(device: CudaDevice, *, nbytes: int = MOST_BYTES, progress: Callable[[float], object] = lambda _: None) -> Calibration:
    """Measure every method that `device` has, in turn. `progress` is told the share that is done, up to 1.

    Each buffer has `nbytes` bytes, or a half, a quarter and so on if the device has no room for it.

    Thread safety: one thread, with the device current.
    """
    methods = device.methods
    cells = []
    with ExitStack() as stack:
        nbytes, on_device = _most(device, nbytes)
        stack.callback(device.release, on_device)
        stream = device.create_stream(urgent=False)
        stack.callback(device.destroy_stream, stream)
        resources = CopySet(device)
        stack.callback(resources.destroy)
        arena = stack.enter_context(closing(HostArena(nbytes, _BLOCK_BYTES, huge_pages=False)))
        locked = LockedArena(arena, device)
        stack.callback(locked.unlock)
        stack.callback(device.synchronize_stream, stream)
        plan = [(d, n, c) for d in Direction for n, c in _sizes(nbytes)]
        for number, (direction, length, count) in enumerate(plan):
            spread = _spread(on_device, arena.address, length, count, nbytes)
            copies = locked.seen(spread).copies(to_host=direction is Direction.TO_HOST)
            speeds = {method: _speed(device, copies, method, resources, stream) for method in methods}
            cells.append(Cell(direction, length, count, speeds))
            progress((number + 1) / len(plan))
    return Calibration(device.card, cells)


def _most(device: CudaDevice, nbytes: int) -> tuple[int, int]:
    """Allocate a buffer of up to `nbytes` on the device; return its size in bytes and its address."""
    while True:
        try:
            return nbytes, device.allocate(nbytes)
        except RuntimeError:
            nbytes //= 2
            if nbytes < 2 * max(LENGTHS):
                raise


def _sizes(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield (length, count) of every measurement that fits in `nbytes` with gaps as large as the copies."""
    for length in LENGTHS:
        yield from ((length, count) for count in COUNTS if 2 * length * count <= nbytes or count == 1)


def _spread(device: int, host: int, length: int, count: int, nbytes: int) -> Descriptors:
    """Return copies that lie apart and in random order, as slots and blocks do."""
    places = nbytes // length
    rng = np.random.default_rng(count)
    there, here = ((base + rng.choice(places // 2, count, replace=False) * 2 * length).astype(np.uint64) for base in (device, host))
    return Descriptors(there, here, np.full(count, length, np.int64), np.zeros(count, np.int64))


def _speed(device: CudaDevice, copies: Copies, method: Method, resources: CopySet, stream: int) -> float:
    """Return the median GB/s from the call to the end of the copies, as in a transfer. The first round is not counted."""
    times = []
    for _ in range(_ROUNDS + 1):
        started = time.perf_counter()
        rows = slice(0, len(copies))
        resources.queue(copies, [(rows, method)], bus_blocks(device.card.multiprocessors), stream).put(rows, method)
        device.synchronize_stream(stream)
        times.append(time.perf_counter() - started)
    return copies.nbytes / median(times[1:]) / 1e9
