"""Memory that callers attach to a store: places of buffers in it, and quarantine of these places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

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
