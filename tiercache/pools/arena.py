"""Host arena, the rules for its size, and the pools that share it.

The arena is one memory region that is divided into blocks of equal size. The region is *sealed* (no process
can resize it) and *faulted in* (the kernel has allocated every page of it before the first use).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from tiercache.core import BLOCK_ALIGN, Locations, PoolName
from tiercache.errors import ClosedError, ConfigError, PoolFullError, SlotError
from tiercache.geometry import Geometry
from tiercache.memory import MemoryReadings, address_of, create_memfd, kernel_text, populate, read_memory
from tiercache.pools.blocks import BlockArena, check_block_bytes
from tiercache.pools.slots import as_locations
from tiercache.text import readable_size

_TOUCH_BYTES: Final = 64 << 20
"""Bytes that a thread faults in with one system call.

With larger pieces the threads would get uneven shares of the work. Smaller pieces need more calls.
"""


_RESERVE: Final = 2 << 30
"""Bytes that an arena of the size `auto` leaves free at least."""


@dataclass(frozen=True, slots=True)
class SizePlan:
    """Size of an arena in bytes, and the reason for it in words."""

    nbytes: int
    reason: str


def plan_size(nbytes: int | Literal["auto"], readings: MemoryReadings) -> SizePlan:
    """Return the size for a number of bytes, or for `auto`: half of the usable memory, with `_RESERVE` free.

    Raises ConfigError for `auto` if the usable memory is not known or too small, and for a number that
    exceeds it.
    """
    usable = readings.usable
    if nbytes != "auto":
        if usable is not None and nbytes > usable:
            raise ConfigError(
                f"an arena of {readable_size(nbytes)} ({nbytes} bytes) is wanted and only"
                f" {readable_size(usable)} ({usable} bytes) is available; ask for less"
            )
        return SizePlan(nbytes, "as asked for")
    if usable is None:
        raise ConfigError(
            "the available memory cannot be read, so the arena cannot choose its size; give it a number of"
            " bytes"
        )
    half, rest = usable // 2, usable - _RESERVE
    if min(half, rest) <= 0:
        raise ConfigError(
            f"{readable_size(usable)} of memory is usable and {readable_size(_RESERVE)} is to stay free,"
            " which leaves no arena; give it a number of bytes"
        )
    rule = "half of" if half <= rest else f"all but {readable_size(_RESERVE)} of"
    return SizePlan(min(half, rest), f"auto: {rule} {readable_size(usable)} usable ({readings})")


class HostArena(BlockArena):
    """Host memory of `blocks` blocks of `block_bytes` bytes each, in a sealed memfd (a file in memory).

    Objects of all kinds share these blocks; no kind has a budget of its own. Another process can map the same
    bytes through `fd`. The memfd has no name in /dev/shm.

    `nbytes` is rounded down to whole blocks; for "auto" see `plan_size`. The constructor faults the region in
    with a thread per CPU, 16 at most. With `huge_pages` it asks for transparent huge pages.
    `report` describes the result in words. `readings` replaces the memory readings of the system. Raises
    ConfigError for a size that is not possible.

    Thread safety: as `BlockArena`.
    """

    def __init__(
        self,
        nbytes: int | Literal["auto"],
        block_bytes: int,
        *,
        huge_pages: bool = True,
        readings: MemoryReadings | None = None,
    ) -> None:
        check_block_bytes(block_bytes)
        readings = readings or read_memory()
        plan = plan_size(nbytes, readings)
        blocks = plan.nbytes // block_bytes
        if blocks < 1:
            raise ConfigError(
                f"an arena of {readable_size(plan.nbytes)} does not hold one block of"
                f" {readable_size(block_bytes)}; make it larger"
            )
        super().__init__(blocks, block_bytes)
        self.fd, region, pages = _map(blocks * block_bytes, huge_pages)
        self._close_fd = weakref.finalize(self, os.close, self.fd)
        self._map: mmap.mmap | None = region
        self._view = memoryview(region)
        self.address = address_of(region)
        started = time.monotonic()
        try:
            workers, method = _touch(self.address, self._view)
        except BaseException:
            self.close()
            raise
        self.report = (
            f"host arena: {readable_size(self.nbytes)} in {blocks} blocks of {readable_size(block_bytes)},"
            f" {plan.reason}; {pages}; ready in {time.monotonic() - started:.2f} s with {workers}"
            f" threads ({method})"
        )

    def view(self, block: int, count: int = 1) -> memoryview:
        """Return a writable view of adjacent blocks. The region stays mapped while a view lives."""
        self._check_open()
        if not 0 <= block <= block + count - 1 < self.blocks:
            raise SlotError(f"arena block {block} is out of range; there are {self.blocks}")
        return self._view[block * self.block_bytes : (block + count) * self.block_bytes]

    def views(self, blocks: npt.ArrayLike, counts: npt.ArrayLike) -> list[list[memoryview]]:  # noqa: D102
        array, counts = np.asarray(blocks, np.int64), np.asarray(counts)
        owners = np.repeat(np.arange(len(counts)), counts)
        [at] = ((np.diff(array, prepend=-2) != 1) | (np.diff(owners, prepend=-1) != 0)).nonzero()
        runs = zip(array[at].tolist(), np.diff(at, append=len(array)).tolist(), strict=True)
        of_each = np.bincount(owners[at], minlength=len(counts)).tolist()
        return [[self.view(*run) for run in islice(runs, n)] for n in of_each]

    def alloc(self, n_blocks: int) -> Locations:  # noqa: D102
        self._check_open()
        return super().alloc(n_blocks)

    def hold(self) -> memoryview:  # noqa: D102
        self._check_open()
        return self._view[:]

    def close(self) -> None:
        """Release the region. A second call does nothing.

        If views are still in use, the region is unmapped when the last view is gone.
        """
        if self._map is None:
            return
        self._close_fd()
        # While a view is in use, these two calls raise BufferError. The view refers to the map, so the region
        # is unmapped when the last view is gone.
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()
        self._map = None

    def _check_open(self) -> None:
        if self._map is None:
            raise ClosedError("the host arena was closed")


def _map(nbytes: int, huge_pages: bool) -> tuple[int, mmap.mmap, str]:
    """Create a sealed memfd and map it; return both, and which pages it has in words."""
    fd = create_memfd("tiercache-arena", nbytes)
    try:
        region = mmap.mmap(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    with contextlib.suppress(OSError):
        region.madvise(mmap.MADV_DONTDUMP)  # a core dump of a server should not carry its cache
    if not huge_pages:
        return fd, region, "huge pages off"
    setting = kernel_text(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    mode = re.search(r"\[(\w+)\]", setting)
    if mode and mode[1] in ("always", "within_size", "advise", "force"):
        # madvise is only a request: where no huge page is free, the kernel uses ordinary pages.
        with contextlib.suppress(OSError):
            region.madvise(mmap.MADV_HUGEPAGE)
            return fd, region, "huge pages asked for"
    return fd, region, f"ordinary pages (shmem_enabled={mode[1] if mode else 'unknown'})"


def _touch(address: int, view: memoryview) -> tuple[int, str]:
    """Fault in every page of the region, in parallel; return the number of threads and the method's name."""
    pieces = [(start, min(_TOUCH_BYTES, len(view) - start)) for start in range(0, len(view), _TOUCH_BYTES)]
    threads = min(16, len(os.sched_getaffinity(0)), len(pieces))

    def fault_in(piece: tuple[int, int]) -> int:
        try:
            populate(address + piece[0], piece[1])
        except OSError as error:
            return error.errno or errno.EINVAL
        return 0

    with ThreadPoolExecutor(threads, "tiercache-touch") as pool:
        refusals = set(pool.map(fault_in, pieces)) - {0}
        if not refusals:
            return threads, "MADV_POPULATE_WRITE"
        # EINVAL means that the kernel is too old for this call, so touch the pages instead. Any other error
        # means that there is too little memory; touching the pages would then kill the process.
        if refusals != {errno.EINVAL}:
            reason = os.strerror(max(refusals))
            raise ConfigError(
                f"{readable_size(len(view))} for the arena could not be faulted in ({reason}); ask for less"
            )
        # One byte of each 4 KiB page, shape [pages]: writing it makes the kernel allocate the page.
        pages = np.frombuffer(view, np.uint8)[::BLOCK_ALIGN]
        step = _TOUCH_BYTES // BLOCK_ALIGN
        list(pool.map(lambda start: pages[start : start + step].fill(0), range(0, len(pages), step)))
        return threads, "touched page by page"


class HostPool:
    """View of the arena as objects of one geometry. All pools of an arena share its free blocks.

    An object takes `blocks_per_object` blocks, which need not be adjacent. Its handle is the number of its
    first block, so two pools of one arena never have the same handle. If the payload ends inside the last
    block, the rest of that block is unused.

    Thread safety: `alloc` and `free` belong to the arena's owner thread. Any thread may call the rest, for
    handles that stay allocated during the call.
    """

    def __init__(self, geometry: Geometry, arena: BlockArena) -> None:
        self.geometry = geometry
        self.arena = arena
        self.blocks_per_object = -(-geometry.nbytes // arena.block_bytes)
        # Row h lists the blocks of the object with handle h; no other row is ever read:
        #   row 7   7 2 9       the object with handle 7 lies in blocks 7, 2 and 9; rows 2 and 9 are unused
        # The table may be large, but the kernel gives memory only to pages of it that were written.
        self._table = np.empty((arena.blocks, self.blocks_per_object), np.int64)
        self._live = np.zeros(arena.blocks, np.bool_)

    @property
    def name(self) -> PoolName:
        """Cache kind of the pool."""
        return self.geometry.pool

    @property
    def available(self) -> int:
        """Number of objects that fit now, if no other pool takes blocks."""
        return self.arena.available // self.blocks_per_object

    def alloc(self, n: int) -> Locations:
        """Allocate `n` objects and return their handles: int64, shape [n].

        Raises PoolFullError, with nothing taken, if they do not fit.
        """
        if n > self.available:
            raise PoolFullError(
                f"{n} {self.name} objects are wanted on the host and {self.available} fit; evict first"
            )
        blocks = np.sort(self.arena.alloc(n * self.blocks_per_object))  # what is adjacent moves as one piece
        blocks = blocks.reshape(n, self.blocks_per_object)
        handles = blocks[:, 0].copy()
        self._table[handles] = blocks
        self._live[handles] = True
        return handles

    def free(self, handles: npt.ArrayLike) -> None:
        """Give objects back.

        Raises SlotError, with nothing freed, for a handle that is named twice or is not this pool's.
        """
        array = self._checked(handles)
        self.arena.free(self._table[array].reshape(-1))  # SlotError for a handle that is named twice
        self._live[array] = False

    def blocks(self, handles: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the blocks of each object in order: int64, shape [n, blocks_per_object].

        Raises SlotError for a handle that is not this pool's.
        """
        return self._table[self._checked(handles)]

    def buffers_of(self, handles: npt.ArrayLike) -> list[list[memoryview]]:
        """Return writable views of the blocks of each object, in order; adjacent blocks share one.

        The payload is the first `geometry.nbytes` bytes of the blocks. Raises SlotError as `blocks` does.
        """
        blocks = self.blocks(handles)
        return self.arena.views(blocks.reshape(-1), np.full(len(blocks), self.blocks_per_object))

    def _checked(self, handles: npt.ArrayLike) -> Locations:
        array = as_locations(handles, self.arena.blocks, f"{self.name} handle")
        live = self._live[array]
        if np.count_nonzero(live) < len(live):
            raise SlotError(
                f"handle {array[~live][0]} is not an object of pool {self.name}; it was freed, or belongs"
                " to another pool"
            )
        return array
