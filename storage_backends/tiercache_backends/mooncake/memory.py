"""Registered memory: the backend's own staging memory, and its own mappings of attached memory.

Mooncake moves bytes only from and to registered memory, and a call that was given up may do so for half a
minute more. It therefore gets addresses of mappings that belong to the backend. The owner of attached memory
may unmap its own meanwhile, and is told to withhold the blocks (`SharedMemory.quarantine`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from mmap import MAP_SHARED, mmap
from typing import Final, NamedTuple

from tiercache.storage.attached import AttachedMemory, FreeRanges, SharedExtent, align, locate
from tiercache.storage.base import SharedMemory


class OwnMapping(NamedTuple):
    """Memory that the backend has mapped for itself."""

    memory: mmap
    address: int
    nbytes: int


def mapped(memory: mmap) -> OwnMapping:
    """Return a mapping with its address."""
    return OwnMapping(memory, ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory))


class Region(NamedTuple):
    """Part of the staging memory: `view` has its bytes, which begin at `address`."""

    view: memoryview
    address: int
    offset: int


class StagingMemory:
    """The backend's own memory, lent to calls in regions of whole 4 KiB pages.

    Thread safety: any thread.
    """

    def __init__(self, nbytes: int) -> None:
        self.mapping: Final = mapped(mmap(-1, nbytes))
        self._view: Final = memoryview(self.mapping.memory)
        self.free: Final = FreeRanges(nbytes)
        """Ranges that no call has."""

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self.mapping.nbytes

    def take(self, nbytes: int, patience: float) -> Region | None:
        """Return memory of at least `nbytes` bytes; None if there is none for `patience` seconds."""
        offset = self.free.take(nbytes, patience)
        if offset is None:
            return None
        return Region(self._view[offset : offset + align(nbytes)], self.mapping.address + offset, offset)

    def give(self, region: Region) -> None:
        """Take a region back that no call uses any more."""
        self.free.give(region.offset, len(region.view))


class AttachedMappings:
    """Memories that callers have attached, each with a mapping of the backend's own.

    Thread safety: any thread may read; one thread at a time adds.
    """

    def __init__(self) -> None:
        self.memories: tuple[AttachedMemory, ...] = ()
        """Memories that are registered."""
        self._mappings: dict[int, OwnMapping] = {}
        self._waiting: list[SharedMemory] = []

    def add(self, memory: SharedMemory) -> None:
        """Map a memory, which then waits to be registered."""
        if id(memory) not in self._mappings:
            self._mappings[id(memory)] = mapped(mmap(memory.fd, memory.nbytes, MAP_SHARED))
            self._waiting.append(memory)

    def next_waiting(self) -> tuple[SharedMemory, OwnMapping] | None:
        """Take a memory that waits to be registered, with its mapping; None if there is none."""
        if not self._waiting:
            return None
        memory = self._waiting.pop()
        return memory, self._mappings[id(memory)]

    def registered(self, memory: SharedMemory) -> None:
        """Use a memory from now on."""
        self.memories = (*self.memories, AttachedMemory(memory, memory.address, memory.nbytes))

    @property
    def mappings(self) -> list[OwnMapping]:
        """Mappings that are registered."""
        return [self._mappings[id(one.memory)] for one in self.memories]

    def locate(self, buffers: Sequence[memoryview], length: int) -> list[SharedExtent] | None:
        """Return the places of a payload in attached memory; None if a buffer lies elsewhere."""
        if not self.memories:
            return None
        # The last buffer may be longer than the payload, whose last page need not be whole.
        return locate(_whole(buffers, length), self.memories)

    def pieces(self, extents: Sequence[SharedExtent], length: int) -> tuple[list[int], list[int]]:
        """Return the addresses and sizes of the first `length` bytes of these places."""
        addresses: list[int] = []
        sizes: list[int] = []
        for extent in extents:
            size = min(extent.size, length)
            addresses.append(self._mappings[extent.memory].address + extent.offset)
            sizes.append(size)
            length -= size
        return addresses, sizes


def _whole(buffers: Sequence[memoryview], length: int) -> list[memoryview]:
    """Return the buffers that hold the first `length` bytes, each in full."""
    found: list[memoryview] = []
    for buffer in buffers:
        if length <= 0:
            break
        if buffer.nbytes:
            found.append(buffer)
        length -= buffer.nbytes
    return found
