"""Page-locked host memory, and queues of copies in a CUDA stream, by driver calls or by a kernel."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from tiercache_kernels.kernel import ROW_BYTES, fill_table

from tiercache.errors import ConfigError
from tiercache.pools.blocks import BlockArena
from tiercache.transfer.cuda.device import MAX_COPIES, CudaDevice, Method
from tiercache.transfer.descriptors import Descriptors

_MIN_ROWS: Final = 4096
"""Rows of the first table (the list of copies that the kernel reads), one per copy.

This is enough for about 80 pages of Qwen3-Next. A larger transfer makes a larger table.
"""
GROUP_BYTES: Final = 4 << 20
"""Minimum bytes of a group (layers of a load that are queued together). The last group may be smaller.

The bus moves this many bytes in about 80 us. A thread takes about as long to queue one group, even a small
group. With smaller groups, no layer would therefore land sooner.
"""
MAX_QUEUED: Final = 768
"""Maximum number of calls that wait in one stream of a lane.

This is enough for eight loads of 48 groups, with a copy and an event for each group.

A driver has room for about 1,024 calls of a stream. A further call blocks until the stream has finished some
calls. While a stream waits for a fence, it does not finish any call.
"""
_STEP: Final = 64
"""Calls between two marks (events) of a `Pace`."""
Table: TypeAlias = npt.NDArray[np.uint64]
_MIN_BLOCKS: Final = 4
_SHARE: Final = 16
"""A device with N multiprocessors runs N / 16 thread blocks of the kernel, but at least `_MIN_BLOCKS`.

Each thread block has 32 KiB in flight. PCIe 5 x16 (55 GB/s, a latency of 2 us) needs 110 KiB in flight to be
fully used, that is, four thread blocks.
"""


def bus_blocks(multiprocessors: int) -> int:
    """Return the number of thread blocks of a kernel that copies across the bus.

    The number is large enough to use the whole bus, and small enough to leave room for the model's
    computation.
    """
    return max(_MIN_BLOCKS, multiprocessors // _SHARE)


SMALL_COPY: Final = 32 << 10
"""Mean bytes of copies below which the kernel makes them.

A copy engine takes about a microsecond to begin a copy, in which the bus moves some 50 KiB. This was not
measured yet; `tiercache bench device` has the speed of each method.
"""


def best_method(device: CudaDevice, copies: Descriptors) -> Method:
    """Return the method for these copies: a batch, or the kernel for small copies, if they work.

    Without batches the kernel makes all copies, and without it each is a call of the driver.
    """
    works = [method for method in Method if method not in device.unavailable]
    wanted = Method.KERNEL if copies.nbytes < SMALL_COPY * len(copies) else Method.BATCH
    others = (method for method in (Method.BATCH, Method.KERNEL) if method in works)
    return wanted if wanted in works else next(others, Method.MEMCPY)


def layer_groups(copies: Descriptors, least: int = GROUP_BYTES) -> list[tuple[Sequence[int], slice]]:
    """Return the groups of a load in the order of layers, each with its layers and its rows.

    Small layers share a group until it has `least` bytes:

        layer     0    1    2    3    4
        MiB       3    3    6    1    1       least: 4 MiB
        group    |   0    |  1 |   2   |      layers 0 and 1 land together, with one event
    """
    # Rows 0 to i have `ends[i]` bytes together. The present group begins at row `first`; the rows before it
    # have `begun` bytes.
    ends = np.cumsum(copies.length).tolist()
    groups: list[tuple[Sequence[int], slice]] = []
    layers: list[int] = []
    first = begun = 0
    for layer, rows in copies.by_layer():
        layers.append(layer)
        if ends[rows.stop - 1] - begun >= least or rows.stop == len(copies):
            groups.append((layers, slice(first, rows.stop)))
            layers, first, begun = [], rows.stop, ends[rows.stop - 1]
    return groups


class Pace:
    """Limit of `MAX_QUEUED` on the calls that wait in `stream`.

    At the limit, a caller waits here until the stream has finished some calls. Without the limit, the caller
    would wait in the driver, and so would every other thread that calls the driver.

    Thread safety: one thread at a time, with the device current.
    """

    def __init__(self, device: CudaDevice, stream: int) -> None:
        self.stream = stream
        self._device = device
        self._marks: deque[int] = deque()
        """Events, the oldest first. There are `_STEP` calls between an event and the next."""
        self._calls = 0
        """Number of calls since the last event."""

    def step(self) -> int:
        """Wait for room for one more call, and return the stream. Call this before each call that queues."""
        if self._calls == _STEP:
            self._mark()
            self._calls = 0
        self._calls += 1
        return self.stream

    def destroy(self) -> None:
        """Release all events, once no work is in the stream. A second call does nothing."""
        while self._marks:
            self._device.destroy_event(self._marks.pop())

    def _mark(self) -> None:
        # The marks are a ring of MAX_QUEUED / _STEP - 1 = 11 events. When all are in use, wait until the
        # stream has passed the oldest mark, and record that mark again. After this wait, at most MAX_QUEUED -
        # _STEP = 704 calls are still waiting in the stream:
        #   calls    0 ... 63 m0 64 ... 127 m1 ... m10 704 ... 767      then wait for m0, and record it again
        if len(self._marks) < MAX_QUEUED // _STEP - 1:
            self._marks.append(self._device.create_event())
        else:
            self._device.synchronize_event(self._marks[0])
            self._marks.rotate(-1)
        self._device.record(self._marks[-1], self.stream)


class CopySet:
    """Queue of the copies of one transfer, with its device resources: an event for each group, and the table.

    The constructor makes what most transfers need. The set grows only for a transfer that needs more, because
    allocating or releasing memory may delay the device and every thread that queues work there.

    `pace` limits the calls in its stream. All sets that use the same stream share one pace.

    All work that was queued with the set must be over before another transfer uses the set.

    Thread safety: one thread at a time.
    """

    def __init__(self, device: CudaDevice, pace: Pace) -> None:
        self._device, self._pace = device, pace
        self._blocks = bus_blocks(device.card.multiprocessors)
        self._copies: Descriptors | None = None
        self._events: list[int] = []
        self._tables: list[tuple[int, Table]] = []
        """Device address and host memory of each table. The last is in use; earlier tables were too small."""
        try:
            self._event(0)
            if Method.KERNEL not in device.unavailable:
                self._grow(_MIN_ROWS)
        except BaseException:
            self.destroy()
            raise

    def begin_transfer(self, copies: Descriptors, methods: Collection[Method]) -> None:
        """Begin a transfer, whose groups use these methods.

        If the kernel copies any group, the upload of the table to the device is queued now.
        """
        self._copies = copies
        # The table has the rows of all groups, so one upload serves all of them. The stream finishes the
        # upload before it starts the kernels that read the table.
        if Method.KERNEL in methods:
            self._upload(copies)

    def put(self, rows: slice, method: Method) -> None:
        """Queue the copies in `rows` by `method`."""
        assert self._copies is not None, "a transfer has begun"
        copies = self._copies[rows]
        if not len(copies):
            return
        if method is Method.BATCH:
            for piece in _pieces(copies):
                self._device.copy_batch(piece, self._pace.step())
        elif method is Method.KERNEL:
            # Column 3 has the number of the row's first chunk (a piece that the kernel copies at a time), so
            # the difference is the number of chunks in these rows.
            address, table = self._tables[-1]
            chunks = int(table[rows.stop, 3]) - int(table[rows.start, 3])
            self._device.copy_table(
                address + rows.start * ROW_BYTES, len(copies), chunks, self._blocks, self._pace.step()
            )
        else:
            for source, destination, length in zip(
                copies.source.tolist(), copies.destination.tolist(), copies.length.tolist(), strict=True
            ):
                self._device.copy(source, destination, length, self._pace.step())

    def mark(self, number: int) -> int:
        """Record the event of group `number` behind what is queued, and return it."""
        event = self._event(number)
        self._device.record(event, self._pace.step())
        return event

    def destroy(self) -> None:
        """Release all resources. All work that was queued with this set must be over."""
        while self._events:
            self._device.destroy_event(self._events.pop())
        while self._tables:
            self._device.release(self._tables.pop()[0])

    def _event(self, number: int) -> int:
        while len(self._events) <= number:
            self._events.append(self._device.create_event())
        return self._events[number]

    def _upload(self, copies: Descriptors) -> None:
        rows = len(copies) + 1
        if not self._tables or rows > len(self._tables[-1][1]):
            # A table that is too small is kept until `destroy`: releasing memory may delay the device.
            self._grow(max(_MIN_ROWS, 2 * rows))
        address, table = self._tables[-1]
        fill_table(table[:rows], copies.source, copies.destination, copies.length)
        self._device.copy(table.ctypes.data, address, rows * ROW_BYTES, self._pace.step())

    def _grow(self, rows: int) -> None:
        table = self._device.allocate_host(rows * ROW_BYTES).view(np.uint64).reshape(rows, -1)
        self._tables.append((self._device.allocate(rows * ROW_BYTES), table))


def _pieces(copies: Descriptors) -> Iterator[Descriptors]:
    """Yield the copies in pieces of at most `MAX_COPIES`, which is the maximum of one call of the driver."""
    return (copies[first : first + MAX_COPIES] for first in range(0, len(copies), MAX_COPIES))


PIECE_BYTES: Final = 1 << 30
"""Bytes that are page-locked in one call of the driver.

The driver holds a lock during such a call. Between two calls, threads that compute can take this lock.
"""


class LockedArena:
    """The memory of an arena, kept page-locked and mapped until `unlock`.

    The memory, which begins at `address`, is locked in pieces of `period` bytes: as many whole blocks as fit
    in `piece_bytes`, at least one. The driver treats two pieces as unrelated memory, so no copy may cross
    from one piece into the next.

    Raises ConfigError, with nothing locked, if the driver refuses.

    Thread safety: one thread at a time, with the device current.
    """

    def __init__(self, arena: BlockArena, device: CudaDevice, piece_bytes: int = PIECE_BYTES) -> None:
        self.address = arena.address
        self.period = max(1, piece_bytes // arena.block_bytes) * arena.block_bytes
        self._device = device
        self._region = arena.hold()
        self._pieces: list[int] = []
        started = time.monotonic()
        try:
            # The last piece may be shorter: arena [0, 10) with period 4 has pieces [0, 4), [4, 8), [8, 10).
            for start in range(0, arena.nbytes, self.period):
                device.lock(arena.address + start, min(self.period, arena.nbytes - start))
                self._pieces.append(arena.address + start)
        except RuntimeError as error:
            self.unlock()
            raise ConfigError(
                f"{arena.nbytes >> 20} MiB of host memory could not be page-locked for the device ({error});"
                " make the host arena smaller"
            ) from error
        self.report = f"{arena.nbytes >> 20} MiB page-locked in {time.monotonic() - started:.2f} s"

    def unlock(self) -> None:
        """Unlock the memory and release the arena's mapping. A second call does nothing."""
        while self._pieces:
            with contextlib.suppress(RuntimeError):  # a lost device has unlocked its memory already
                self._device.unlock(self._pieces.pop())
        self._region.release()
