"""Client's own shared memory, for payloads whose buffers are not in memory that the daemon maps."""

from __future__ import annotations

import os
import weakref
from bisect import insort
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final

from tiercache.core import BLOCK_ALIGN
from tiercache.wire import memory

_NAME: Final = "tiercache-staging"


class Staging:
    """Memfd and its free ranges, allocated first fit. A taken range stays taken until the caller, knowing that it is safe, gives it back.

    It is a `SharedMemory`, so that it is attached like other memories, although no buffers of items lie in it.

    Thread safety: any thread may call.
    """

    def __init__(self, nbytes: int) -> None:
        """Create the memfd and fault in all of its pages; raise OSError where there is not enough memory."""
        self.fd: Final = memory.create(nbytes, _NAME)
        try:
            self._region = memory.Region(self.fd, nbytes)
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
        """Address of its first byte in this process."""
        return self._region.address

    @property
    def available(self) -> int:
        """Number of free bytes."""
        with self._lock:
            return sum(size for _, size in self._free)

    def embargo(self, ranges: Sequence[tuple[int, int]]) -> Callable[[], None]:
        """Raise NotImplementedError: a staging range is kept from reuse by not giving it back."""
        raise NotImplementedError

    def view(self, offset: int, size: int) -> memoryview:
        """Return a view of `size` bytes at `offset`."""
        return self._region.view[offset : offset + size]

    def take(self, size: int) -> int | None:
        """Take `size` bytes, rounded up to whole pages, and return their offset; None where no free range is long enough."""
        size = whole_pages(size)
        with self._lock:
            for at, (offset, room) in enumerate(self._free):
                if room >= size:
                    self._free[at : at + 1] = [(offset + size, room - size)] if room > size else []
                    return offset
        return None

    def give(self, offset: int, size: int) -> None:
        """Give back a range that was taken; the caller does so only once."""
        start, stop = offset, offset + whole_pages(size)
        with self._lock:
            for neighbour in [span for span in self._free if span[0] == stop or sum(span) == start]:
                self._free.remove(neighbour)
                start, stop = min(start, neighbour[0]), max(stop, sum(neighbour))
            insort(self._free, (start, stop - start))

    def close(self) -> None:
        """Release the memory; it is unmapped when the last view of it is gone."""
        self._region.close()
        self._close()


def whole_pages(size: int) -> int:
    """Return `size` rounded up to a multiple of BLOCK_ALIGN, as required of places in shared memory."""
    return -(-size // BLOCK_ALIGN) * BLOCK_ALIGN
