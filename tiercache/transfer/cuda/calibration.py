"""Self-test and measurement of a device's copy methods: which methods work, and which is fastest.

`self_test` runs before the first byte of a cache is moved. `calibrate` measures the speed of each method, for
both directions and for several lengths and numbers of copies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import log2
from statistics import median
from typing import Final
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from tiercache.errors import ConfigError
from tiercache.pools.arena import HostArena
from tiercache.transfer.cuda.copying import CopySet, LockedArena, bus_blocks
from tiercache.transfer.cuda.device import Card, CudaDevice, Direction, Method
from tiercache.transfer.descriptors import Copies, Descriptors

_log = logging.getLogger(__name__)

LENGTHS: Final = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
"""Bytes per copy in the measurements, from a page of a small model to a recurrent state."""
COUNTS: Final = (1, 16, 128, 1024)
"""Numbers of copies at once in the measurements: from one layer of one object, to a store of many objects."""
MAX_BYTES: Final = 64 << 20
"""Bytes of each of the two buffers, on the device and on the host.

The copies of one measurement and the gaps between them fit in a buffer.
"""
_BLOCK_BYTES: Final = 4096
"""Bytes of a block of the arenas that are made here."""
_ROUNDS: Final = 5
"""Number of timed runs of each measurement. The median of their times counts."""
_EQUAL_SPEED: Final = 0.97
"""A method with at least this share of the highest speed counts as equally fast.

Of equally fast methods, the first in `Method` is chosen. Methods that use the copy engines come first in
`Method`, because copy engines take no multiprocessors from the model's computation.
"""

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
                device.unavailable[method] = str(error) or type(error).__name__
                _log.warning(
                    "copies by %s are not used on %s: %s", method, device.card, device.unavailable[method]
                )
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
        self._resources = CopySet(device)
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
        wrong = sum(
            int((found != right).sum())
            for found, right in zip((self._there, self._back), expected, strict=True)
        )
        if wrong:
            raise RuntimeError(f"{wrong} of {2 * _TEST_BYTES} bytes were wrong in a trial")

    def _copy(self, method: Method, host: npt.NDArray[np.uint64], *, to_host: bool) -> None:
        lengths, layers = np.array(_TEST_LENGTHS), np.zeros(len(_TEST_LENGTHS), np.int64)
        whole = Descriptors(_places(_GAP_DEVICE, self._address), host, lengths, layers)
        copies = self._locked.device_addresses(whole.cut(self._arena.address, self._locked.period)).copies(
            to_host=to_host
        )
        rows = slice(0, len(copies))
        self._resources.queue(
            copies, [(rows, method)], bus_blocks(self._device.card.multiprocessors), self.stream
        ).put(rows, method)
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


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: `count` copies of `length` bytes each, in one direction."""

    direction: Direction
    length: int
    count: int
    speeds: Mapping[Method, float]
    """Speed of each method in GB/s."""

    @property
    def best(self) -> Method:
        """Method to use: the first in `Method` whose speed is nearly the highest."""
        enough = _EQUAL_SPEED * max(self.speeds.values())
        return next(method for method in Method if self.speeds.get(method, 0.0) >= enough)


class Calibration:
    """Measurements of one device, which never change. Thread safety: any thread."""

    def __init__(self, card: Card, cells: Sequence[Cell]) -> None:
        self.card = card
        self.cells = tuple(cells)
        self._known: dict[tuple[Direction, int, int], Method] = {}

    def choose(self, direction: Direction, copies: Copies) -> Method:
        """Return the best method of the measurement that is nearest to these copies.

        The distance is the factor between the lengths times the factor between the numbers of copies. The
        length of `copies` is their mean length. An answer is kept for all copies whose mean length and number
        have the same bit lengths.
        """
        count = max(1, len(copies))
        length = max(1, copies.nbytes // count)
        near = (direction, length.bit_length(), count.bit_length())
        if near not in self._known:
            cells = (cell for cell in self.cells if cell.direction is direction)
            self._known[near] = min(
                cells, key=lambda cell: abs(log2(cell.length / length)) + abs(log2(cell.count / count))
            ).best
        return self._known[near]


def calibrate(
    device: CudaDevice, *, nbytes: int = MAX_BYTES, progress: Callable[[float], object] = lambda _: None
) -> Calibration:
    """Measure every available method. `progress` is called with the fraction that is done, from 0 to 1.

    Each buffer has `nbytes` bytes, or less if the device has no room for so many.

    Thread safety: one thread, with the device current.
    """
    methods = device.methods
    cells = []
    with ExitStack() as stack:
        nbytes, on_device = _largest_buffer(device, nbytes)
        stack.callback(device.release, on_device)
        stream = device.create_stream(urgent=False)
        stack.callback(device.destroy_stream, stream)
        resources = CopySet(device)
        stack.callback(resources.destroy)
        arena = stack.enter_context(closing(HostArena(nbytes, _BLOCK_BYTES, huge_pages=False)))
        locked = LockedArena(arena, device)
        stack.callback(locked.unlock)
        # The callbacks run in reverse order, so the stream ends before the memory that it uses is released.
        stack.callback(device.synchronize_stream, stream)
        plan = [(d, n, c) for d in Direction for n, c in _sizes(nbytes)]
        for number, (direction, length, count) in enumerate(plan):
            spread = _spread(on_device, arena.address, length, count, nbytes)
            copies = locked.device_addresses(spread).copies(to_host=direction is Direction.TO_HOST)
            speeds = {method: _speed(device, copies, method, resources, stream) for method in methods}
            cells.append(Cell(direction, length, count, speeds))
            progress((number + 1) / len(plan))
    return Calibration(device.card, cells)


def _largest_buffer(device: CudaDevice, nbytes: int) -> tuple[int, int]:
    """Allocate a buffer of up to `nbytes` bytes on the device; return its size in bytes and its address.

    The size is halved until the device has room. Raises RuntimeError if two of the longest copies would not
    fit.
    """
    while True:
        try:
            return nbytes, device.allocate(nbytes)
        except RuntimeError:
            nbytes //= 2
            if nbytes < 2 * max(LENGTHS):
                raise


def _sizes(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield (length, count) of each measurement that fits in `nbytes` bytes, half of which are gaps."""
    for length in LENGTHS:
        yield from ((length, count) for count in COUNTS if 2 * length * count <= nbytes or count == 1)


def _spread(device: int, host: int, length: int, count: int, nbytes: int) -> Descriptors:
    """Return copies with gaps and in random order, as copies of slots and blocks have them."""
    places = nbytes // length
    rng = np.random.default_rng(count)
    # The buffer has `places` places of `length` bytes. Only even places are used, so no two copies touch, and
    # none could be merged.
    there, here = (
        (base + rng.choice(places // 2, count, replace=False) * 2 * length).astype(np.uint64)
        for base in (device, host)
    )
    return Descriptors(there, here, np.full(count, length, np.int64), np.zeros(count, np.int64))


def _speed(device: CudaDevice, copies: Copies, method: Method, resources: CopySet, stream: int) -> float:
    """Return the median speed in GB/s. The time begins when the copies are queued, and ends with the copies.

    The first round is not counted, because it may include preparations of the driver.
    """
    times = []
    for _ in range(_ROUNDS + 1):
        started = device.now()
        rows = slice(0, len(copies))
        resources.queue(copies, [(rows, method)], bus_blocks(device.card.multiprocessors), stream).put(
            rows, method
        )
        device.synchronize_stream(stream)
        times.append(device.now() - started)
    return copies.nbytes / median(times[1:]) / 1e9
