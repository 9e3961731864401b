"""Memory that calls of a store use: places in attached memory, quarantine of these, and free ranges."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from threading import Condition
from typing import Final, NamedTuple

from tiercache.core import BLOCK_ALIGN
from tiercache.storage.base import GetItem, SharedMemory
from tiercache.storage.vectors import address_of


class AttachedMemory(NamedTuple):
    """Memory that was passed to `attach`, as this process had mapped it at that time."""

    memory: SharedMemory
    address: int
    nbytes: int


class SharedExtent(NamedTuple):
    """Adjacent bytes of one memory."""

    memory: int
    """Python's `id` of the memory's object."""
    offset: int
    size: int


def locate(buffers: Iterable[memoryview], memories: Sequence[AttachedMemory]) -> list[SharedExtent] | None:
    """Return the extents of an item's buffers in attached memory, in order, or None.

    None means that a buffer is not completely in attached memory, or does not consist of whole 4 KiB pages.
    Adjacent buffers share an extent. Example, for a memory that is mapped at 0x10000:

        buffers    [0x11000, 0x12000) [0x12000, 0x14000)   [0x18000, 0x19000)
        extents    (offset 0x1000, size 0x3000)            (offset 0x8000, size 0x1000)
    """
    found: list[SharedExtent] = []
    for buffer in buffers:
        size = buffer.nbytes
        if not size:
            continue
        address = address_of(buffer)
        for attached in memories:
            offset = address - attached.address
            if 0 <= offset <= attached.nbytes - size:
                break
        else:  # no memory holds the whole buffer
            return None
        if (offset | size) % BLOCK_ALIGN:  # the offset or the size is not a multiple of 4 KiB
            return None
        last = found[-1] if found else None
        if last and last.memory == id(attached.memory) and last.offset + last.size == offset:
            found[-1] = last._replace(size=last.size + size)
        else:
            found.append(SharedExtent(id(attached.memory), offset, size))
    return found


def quarantine(
    extents: Iterable[SharedExtent], memories: Sequence[AttachedMemory]
) -> list[Callable[[], None]]:
    """Put extents under quarantine in their memories; return the functions that end the quarantine."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    for extent in extents:
        ranges.setdefault(extent.memory, []).append((extent.offset, extent.size))
    return [
        attached.memory.quarantine(ranges[id(attached.memory)])
        for attached in memories
        if id(attached.memory) in ranges
    ]


def withheld(items: Sequence[GetItem], memories: Sequence[AttachedMemory]) -> list[bool]:
    """Return for each item whether a call that was given up may still write to its buffers."""
    some = [one for one in memories if one.memory.is_quarantined([(0, one.nbytes)])]
    if not some:
        return [False] * len(items)
    return [any(_is_withheld(view, one) for one in some for view in item.buffers) for item in items]


def _is_withheld(view: memoryview, attached: AttachedMemory) -> bool:
    """Return whether a byte of the view lies in this memory and is under quarantine."""
    at = address_of(view) - attached.address
    start, end = max(at, 0), min(at + view.nbytes, attached.nbytes)
    return start < end and attached.memory.is_quarantined([(start, end - start)])


def align(size: int) -> int:
    """Round `size` up to whole 4 KiB pages (BLOCK_ALIGN), as places in shared memory require."""
    return -(-size // BLOCK_ALIGN) * BLOCK_ALIGN


class FreeRanges:
    """First-fit allocator of the whole pages of one memory that a store lends to its calls.

    Thread safety: any thread.
    """

    def __init__(self, nbytes: int) -> None:
        self._free: Final = [(0, nbytes)]  # offset and size of each free range, by offset, none adjacent
        self._changed: Final = Condition()

    @property
    def nbytes(self) -> int:
        """Number of free bytes."""
        with self._changed:
            return sum(size for _, size in self._free)

    def take(self, size: int, patience: float = 0.0) -> int | None:
        """Take `size` bytes, rounded up to whole pages; return their offset.

        Returns None if no free range is long enough for `patience` seconds.
        """
        size = align(size)
        with self._changed:
            if not self._changed.wait_for(lambda: any(room >= size for _, room in self._free), patience):
                return None
            at = next(n for n, (_, room) in enumerate(self._free) if room >= size)
            offset, room = self._free[at]
            self._free[at : at + 1] = [(offset + size, room - size)] if room > size else []
            return offset

    def give(self, offset: int, size: int) -> None:
        """Give back a range that was taken, once."""
        start, stop = offset, offset + align(size)
        with self._changed:
            # Join the range with free neighbours:  [a, start) + [start, stop) + [stop, b) = [a, b)
            for neighbour in [span for span in self._free if span[0] == stop or sum(span) == start]:
                self._free.remove(neighbour)
                start, stop = min(start, neighbour[0]), max(stop, sum(neighbour))
            insort(self._free, (start, stop - start))
            self._changed.notify_all()
