"""Shared memory of our own, for payloads whose buffers are not in memory that the daemon has."""

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
    """A memfd and its free ranges, first fit. What was taken stays taken until it is given back, by whoever knows that it is safe.

    It is a `SharedMemory`, though nobody's buffers lie in it, so that it is attached like the others.

    Thread safety: any thread.
    """

    def __init__(self, nbytes: int) -> None:
        """Raises OSError where there is not the memory."""
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
        """Bytes of it."""
        return self._region.nbytes

    @property
    def address(self) -> int:
        """Where it is mapped."""
        return self._region.address

    @property
    def available(self) -> int:
        """Free bytes."""
        with self._lock:
            return sum(size for _, size in self._free)

    def embargo(self, ranges: Sequence[tuple[int, int]]) -> Callable[[], None]:
        """Not for staging: a range is kept by not giving it back."""
        raise NotImplementedError

    def view(self, offset: int, size: int) -> memoryview:
        """Bytes of it."""
        return self._region.view[offset : offset + size]

    def take(self, size: int) -> int | None:
        """The offset of `size` bytes, in whole pages; None where there is no such range."""
        size = whole_pages(size)
        with self._lock:
            for at, (offset, room) in enumerate(self._free):
                if room >= size:
                    self._free[at : at + 1] = [(offset + size, room - size)] if room > size else []
                    return offset
        return None

    def give(self, offset: int, size: int) -> None:
        """Give back what was taken, once."""
        start, stop = offset, offset + whole_pages(size)
        with self._lock:
            for neighbour in [span for span in self._free if span[0] == stop or sum(span) == start]:
                self._free.remove(neighbour)
                start, stop = min(start, neighbour[0]), max(stop, sum(neighbour))
            insort(self._free, (start, stop - start))

    def close(self) -> None:
        """Let go of it; it is unmapped when the last view of it goes."""
        self._region.close()
        self._close()


def whole_pages(size: int) -> int:
    """`size`, rounded up to what a place in shared memory must be a multiple of."""
    return -(-size // BLOCK_ALIGN) * BLOCK_ALIGN
