"""The client's own staging memory, and extents of shared memory as the wire names them.

Attached memory belongs to the caller, and the daemon has mapped it into its own process. Payloads whose
buffers lie elsewhere go through staging memory.
"""

from __future__ import annotations

import os
import weakref
from bisect import insort
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Final

from tiercache.core import BLOCK_ALIGN
from tiercache.memory import Region, create_memfd
from tiercache.storage.attached import SharedExtent
from tiercache.wire.v1 import storage_pb2 as pb

_NAME: Final = "tiercache-staging"


def encode_places(items: Sequence[Sequence[SharedExtent]], regions: Mapping[int, int]) -> pb.Places:
    """Return the message with the places of items, given the extents of each item.

    `regions`: the number that the daemon gave to each memory, by the `id` of the memory's object. Raises
    KeyError for a memory that the daemon does not have.
    """
    extents = [extent for item in items for extent in item]
    return pb.Places(
        counts=[len(item) for item in items],
        regions=[regions[extent.memory] for extent in extents],
        offsets=[extent.offset for extent in extents],
        sizes=[extent.size for extent in extents],
    )


class Staging:
    """Memory (a memfd) that client and daemon can both map, with a first-fit allocator of its ranges.

    The caller gives a range back when it is certain that the daemon does not use the range any more.

    Thread safety: any thread may call.
    """

    def __init__(self, nbytes: int) -> None:
        """Create the memfd and touch all of its pages; raise OSError where there is not enough memory."""
        self.fd: Final = create_memfd(_NAME, nbytes)
        try:
            self._region = Region(self.fd, nbytes)
            self._region.populate()
        except BaseException:
            os.close(self.fd)
            raise
        self._close = weakref.finalize(self, os.close, self.fd)
        self._lock = Lock()
        self._free = [(0, nbytes)]  # (offset, size), by offset, none adjacent

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._region.nbytes

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""
        return self._region.address

    @property
    def available(self) -> int:
        """Number of free bytes."""
        with self._lock:
            return sum(size for _, size in self._free)

    def view(self, offset: int, size: int) -> memoryview:
        """Return a view of `size` bytes at `offset`."""
        return self._region.view[offset : offset + size]

    def take(self, size: int) -> int | None:
        """Take `size` bytes, rounded up to whole 4 KiB pages, and return their offset.

        Returns None where no free range is long enough.
        """
        size = align(size)
        with self._lock:
            for at, (offset, room) in enumerate(self._free):
                if room >= size:
                    self._free[at : at + 1] = [(offset + size, room - size)] if room > size else []
                    return offset
        return None

    def give(self, offset: int, size: int) -> None:
        """Give back a range that was taken; the caller must do so only once for each range."""
        start, stop = offset, offset + align(size)
        with self._lock:
            # Join the range with free neighbours:  [a, start) + [start, stop) + [stop, b) = [a, b)
            for neighbour in [span for span in self._free if span[0] == stop or sum(span) == start]:
                self._free.remove(neighbour)
                start, stop = min(start, neighbour[0]), max(stop, sum(neighbour))
            insort(self._free, (start, stop - start))

    def close(self) -> None:
        """Release the memory; it is unmapped when the last view of it is gone."""
        self._region.close()
        self._close()


def align(size: int) -> int:
    """Round `size` up to whole 4 KiB pages (BLOCK_ALIGN), as places in shared memory require."""
    return -(-size // BLOCK_ALIGN) * BLOCK_ALIGN
