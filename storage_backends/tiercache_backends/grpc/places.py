"""Places of buffers in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import addressof, c_char
from typing import NamedTuple

import numpy as np

from tiercache.core import BLOCK_ALIGN
from tiercache.storage.base import SharedMemory
from tiercache.wire.v1 import storage_pb2 as pb


class Known(NamedTuple):
    """Memory that was passed to `attach`, with the address and size in bytes that its mapping had then."""

    memory: SharedMemory
    address: int
    nbytes: int


class Extent(NamedTuple):
    """Adjacent bytes of one memory; `memory` is the `id` of its object."""

    memory: int
    offset: int
    size: int


def locate(buffers: Iterable[memoryview], memories: Sequence[Known]) -> list[Extent] | None:
    """Return the extents of an item's buffers, in order; None where a part of them lies elsewhere or is not whole pages."""
    found: list[Extent] = []
    for buffer in buffers:
        size = buffer.nbytes
        if not size:
            continue
        address = _address(buffer)
        for known in memories:
            offset = address - known.address
            if 0 <= offset <= known.nbytes - size:
                break
        else:
            return None
        if (offset | size) % BLOCK_ALIGN:
            return None
        last = found[-1] if found else None
        if last and last.memory == id(known.memory) and last.offset + last.size == offset:
            found[-1] = last._replace(size=last.size + size)
        else:
            found.append(Extent(id(known.memory), offset, size))
    return found


def _address(buffer: memoryview) -> int:
    if buffer.readonly:
        found: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
        return found
    return addressof(c_char.from_buffer(buffer))


def message(items: Sequence[Sequence[Extent]], regions: Mapping[int, int]) -> pb.Places:
    """Return the places of items, by the daemon's numbers of memories; raise KeyError for a memory that it does not have."""
    extents = [extent for item in items for extent in item]
    return pb.Places(
        counts=[len(item) for item in items],
        regions=[regions[extent.memory] for extent in extents],
        offsets=[extent.offset for extent in extents],
        sizes=[extent.size for extent in extents],
    )


def embargo(extents: Iterable[Extent], memories: Sequence[Known]) -> list[Callable[[], None]]:
    """Put an embargo on extents, each in its memory; return the functions that lift it."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    for extent in extents:
        ranges.setdefault(extent.memory, []).append((extent.offset, extent.size))
    return [known.memory.embargo(ranges[id(known.memory)]) for known in memories if id(known.memory) in ranges]
