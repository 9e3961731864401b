"""Queueing of copies in a stream by one of the methods, with the resources that they need until they are over."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from tiercache_kernels.table import ROW_BYTES, fill_table

from tiercache.transfer.cuda.device import MOST_COPIES, CudaDevice, Method
from tiercache.transfer.descriptors import Copies, Descriptors

_LEAST_ROWS: Final = 4096
"""Rows of the first table, enough for some 80 pages of Qwen3-Next; a larger transfer makes it grow."""
GROUP_BYTES: Final = 4 << 20
"""Bytes of a group, 80 us on the bus: queueing less at a time takes a thread as long as that, so no layer would land sooner."""
MOST_QUEUED: Final = 768
"""Most calls that may wait in one stream of a lane, events included: eight loads of 48 groups.

A driver has room for some 1,024. It blocks the caller of one more until there is room, which behind a fence may take as long as the fence.
"""
_STEP: Final = 64
"""Calls between two marks of a `Pace`."""
Table: TypeAlias = npt.NDArray[np.uint64]
_NO_TABLE: Final[Table] = np.empty((0, ROW_BYTES // 8), np.uint64)
_LEAST_BLOCKS: Final = 4
_SHARE: Final = 16
"""Multiprocessors per block that copies: a block keeps 32 KiB on the bus, and a latency of 2 us at 55 GB/s needs 110 KiB."""


def bus_blocks(multiprocessors: int) -> int:
    """Return the blocks for a kernel that copies across the bus: enough to fill it, too few to starve the model's computation."""
    return max(_LEAST_BLOCKS, multiprocessors // _SHARE)


def layer_groups(descriptors: Descriptors, least: int = GROUP_BYTES) -> list[tuple[Sequence[int], slice]]:
    """Return the groups of a load (layers, rows) in the order of layers; small layers share a group until it has `least` bytes."""
    ends = np.cumsum(descriptors.length).tolist()
    groups: list[tuple[Sequence[int], slice]] = []
    layers: list[int] = []
    first = begun = 0
    for layer, rows in descriptors.by_layer():
        layers.append(layer)
        if ends[rows.stop - 1] - begun >= least or rows.stop == len(descriptors):
            groups.append((layers, slice(first, rows.stop)))
            layers, first, begun = [], rows.stop, ends[rows.stop - 1]
    return groups


class Pace:
    """Limit of `MOST_QUEUED` calls that wait in a stream: before one more, the calling thread blocks until the oldest are over.

    It blocks on an event and not in a call for which the stream has no room: there it would hold up every thread that computes.

    Thread safety: one thread at a time, with the device current.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._marks: deque[int] = deque()
        """Events, one behind each `_STEP` calls, the oldest first."""
        self._calls = 0

    def step(self, stream: int) -> None:
        """Wait for room for one more call in `stream`. Call it before every call that queues work there."""
        if self._calls == _STEP:
            self._mark(stream)
            self._calls = 0
        self._calls += 1

    def destroy(self) -> None:
        """Release all events, once nothing is under way. A second call does nothing."""
        while self._marks:
            self._device.destroy_event(self._marks.pop())

    def _mark(self, stream: int) -> None:
        if len(self._marks) < MOST_QUEUED // _STEP - 1:
            self._marks.append(self._device.create_event())
        else:
            self._device.synchronize_event(self._marks[0])
            self._marks.rotate(-1)
        self._device.record(self._marks[-1], stream)


class CopySet:
    """Device resources of one transfer until it is over: an event for each group, two timed events, and the kernel's table of copies.

    All are made by the constructor, and grow when they must: allocating or releasing memory may hold up the device and every thread that
    queues work there. `pace`: that of the set's stream, which several sets may share.

    The caller guarantees that nothing which was queued with the set is under way when the set is used anew.

    Thread safety: one thread at a time.
    """

    def __init__(self, device: CudaDevice, pace: Pace | None = None) -> None:
        self._device = device
        self.pace = pace or Pace(device)
        self._events: list[int] = []
        self._ends: list[int] = []
        self._tables: list[tuple[int, Table]] = []
        """Device address and host memory of each table: the last one is in use, the others were outgrown."""
        try:
            self.event(0)
            self._ends += [device.create_event(timed=True)]
            self._ends += [device.create_event(timed=True)]
            if Method.KERNEL not in device.unavailable:
                self._grow(_LEAST_ROWS)
        except BaseException:
            self.destroy()
            raise

    @classmethod
    def make(cls, device: CudaDevice, count: int) -> list[Self]:
        """Make `count` sets that share one pace, or none if the driver refuses one."""
        made: list[Self] = []
        pace = Pace(device)
        with ExitStack() as undo:
            while len(made) < count:
                made.append(cls(device, pace))
                undo.callback(made[-1].destroy)
            undo.pop_all()
        return made

    def event(self, number: int) -> int:
        """Return the event of group `number`; it is made at the first call."""
        while len(self._events) <= number:
            self._events.append(self._device.create_event())
        return self._events[number]

    def begin(self, stream: int) -> None:
        """Record the start of the transfer. Call it just before the first copy is queued."""
        self.pace.step(stream)
        self._device.record(self._ends[0], stream)

    def end(self, stream: int) -> None:
        """Record the end of the transfer. Call it just after the last copy was queued."""
        self.pace.step(stream)
        self._device.record(self._ends[1], stream)

    def seconds(self) -> float:
        """Return the seconds from `begin` to `end` on the device. Both must be over."""
        return self._device.seconds_between(*self._ends)

    def queue(self, copies: Copies, groups: Sequence[tuple[slice, Method]], blocks: int, stream: int) -> Queue:
        """Return a queue for `groups` of `copies`. If a kernel copies any group, the upload of the table is queued now."""
        if any(method is Method.KERNEL for _, method in groups):
            self._upload(copies, stream)
        address, table = self._tables[-1] if self._tables else (0, _NO_TABLE)
        return Queue(self._device, copies, table, address, blocks, stream, self.pace)

    def destroy(self) -> None:
        """Release everything, the events of the pace too. Nothing of this set, or of others with its pace, may be under way."""
        self.pace.destroy()
        for events in (self._events, self._ends):
            while events:
                self._device.destroy_event(events.pop())
        while self._tables:
            self._device.release(self._tables.pop()[0])

    def _upload(self, copies: Copies, stream: int) -> None:
        rows = len(copies) + 1
        if not self._tables or rows > len(self._tables[-1][1]):
            self._grow(max(_LEAST_ROWS, 2 * rows))
        address, table = self._tables[-1]
        fill_table(table[:rows], copies.source, copies.destination, copies.length)
        self.pace.step(stream)
        self._device.copy(table.ctypes.data, address, rows * ROW_BYTES, stream)

    def _grow(self, rows: int) -> None:
        table = self._device.allocate_host(rows * ROW_BYTES).view(np.uint64).reshape(rows, -1)
        self._tables.append((self._device.allocate(rows * ROW_BYTES), table))


class Queue:
    """Queue that puts groups of one list of copies into one stream. Thread safety: one thread."""

    def __init__(self, device: CudaDevice, copies: Copies, table: Table, address: int, blocks: int, stream: int, pace: Pace) -> None:
        self._device, self._copies, self._stream, self._pace = device, copies, stream, pace
        self._table, self._address, self._blocks = table, address, blocks

    def put(self, rows: slice, method: Method) -> None:
        """Queue the copies in `rows` by `method`."""
        copies = self._copies[rows]
        if not len(copies):
            return
        if method is Method.BATCH:
            for piece in _pieces(copies):
                self._pace.step(self._stream)
                self._device.copy_batch(piece, self._stream)
        elif method is Method.KERNEL:
            chunks = int(self._table[rows.stop, 3]) - int(self._table[rows.start, 3])
            self._pace.step(self._stream)
            self._device.copy_table(self._address + rows.start * ROW_BYTES, len(copies), chunks, self._blocks, self._stream)
        else:
            for source, destination, length in zip(
                copies.source.tolist(), copies.destination.tolist(), copies.length.tolist(), strict=True
            ):
                self._pace.step(self._stream)
                self._device.copy(source, destination, length, self._stream)


def _pieces(copies: Copies) -> Iterator[Copies]:
    """Yield the copies in pieces of at most `MOST_COPIES`, the most that the driver is given in one call."""
    return (copies[first : first + MOST_COPIES] for first in range(0, len(copies), MOST_COPIES))
