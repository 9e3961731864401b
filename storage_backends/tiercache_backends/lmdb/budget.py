"""Limits: LMDB pages in use, LMDB pages that one transaction may change, and room on the disk.

In this file "page" means an LMDB page. LMDB never overwrites a page: a transaction copies each page that it
changes, and gives up the old copy. Two transactions later LMDB can use the old page again. If a reader began
before that page was given up, LMDB has to wait until the reader ends.

When the map is full, even deletions fail, because they change pages too. Therefore a part of the map, the
reserve, is never filled with objects. Transactions take their new pages from the reserve while given-up pages
cannot be used yet. One transaction changes less than half as many pages as the reserve has. It may change
more if much of the map is free, or if a single object needs more.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from threading import Lock
from typing import Final

import numpy as np

from tiercache.errors import ConfigError
from tiercache.storage.env import Env
from tiercache_backends.lmdb.environment import Environment
from tiercache_backends.local.failures import is_full

_log = logging.getLogger(__name__)

SMALLEST_CAPACITY: Final = 4 << 20
"""Bytes of the smallest capacity that a store may have."""
_FIXED_BYTES: Final = 256 << 10
"""Bytes of a capacity that are set aside for the lock file, the small files and the directories."""
_BOOKKEEPING: Final = 2048
"""Divisor of the capacity: one byte in 2048 is left for the file system's own records of LMDB's file."""
_BATCH_BYTES: Final = 8 << 20
"""Maximum bytes that one transaction changes, unless a single object needs more."""
_BATCH_OBJECTS: Final = 256
"""Maximum number of objects that one transaction removes or touches."""
_RESERVE_SHARE: Final = 18
"""Divisor of the map's pages: one page in 18 belongs to the reserve."""
_BURST_SHARE: Final = 4 / 9
"""Share of the reserve that one transaction may change, so that two transactions fit in the reserve.

Two such shares leave a ninth of the reserve unused. This ninth makes up for free pages that cannot be used,
because too few of them are adjacent.
"""
_MIN_RESERVE: Final = 24
"""Minimum number of pages in the reserve."""
_LOWER_LIMITS: Final = 5
"""Number of reduced limits on the pages in use, which a write tries in turn if too few pages are free."""
_FIRST_PAUSE_SECONDS: Final = 1.0
"""Shortest pause, in seconds, after a full disk until the file may try to grow again.

Each attempt that fails doubles the pause.
"""
_MAX_PAUSE_SECONDS: Final = 60.0
"""Longest pause, in seconds, after a full disk until the file may try to grow again."""
_ROOM_BYTES: Final = 1 << 20
"""Growth of the file system's free space, in bytes, that ends a pause early."""
_SPARE_PAGES: Final = 64
"""Minimum number of pages that are allocated on the disk in advance, behind the last used page."""
_SPARE_SHARE: Final = 64
"""Divisor of the map's pages: one page in 64 is allocated on the disk in advance."""


def map_bytes(capacity: int, foreign: int, path: str) -> int:
    """Return the size in bytes of LMDB's map in a store of this capacity.

    `foreign`: bytes of the capacity that other files in the store's directory take.

    Raises ConfigError where too little is left.
    """
    # Round down to a multiple of 64 KiB, which every page size divides.
    room = (capacity - _FIXED_BYTES - foreign) * (_BOOKKEEPING - 1) // _BOOKKEEPING >> 16 << 16
    if capacity < SMALLEST_CAPACITY or room < SMALLEST_CAPACITY // 2:
        raise ConfigError(
            f"the store in {path} cannot work in {capacity} bytes, of which other files there take {foreign};"
            f" set capacity to {SMALLEST_CAPACITY + foreign} or more"
        )
    return room


def capacity_for(map_size: int, foreign: int) -> int:
    """Return a capacity large enough for a map of `map_size` bytes and `foreign` bytes of other files."""
    # This is the inverse of `map_bytes`. The added 64 KiB and 1 byte compensate for its rounding down.
    return (map_size + (1 << 16)) * _BOOKKEEPING // (_BOOKKEEPING - 1) + 1 + _FIXED_BYTES + foreign


@dataclass(frozen=True, slots=True)
class PageBudget:
    """Limits for a file of `map_pages` LMDB pages.

        0                                        limit                map_pages
        |----------- may be in use --------------|----- reserve -------|
                                     |<- slack ->|

    `slack` is the number of pages that an eviction frees in addition to the pages that are needed now.

    Two transactions in a row may each change nearly half of the reserve. The third transaction can use the
    pages that the first gave up.
    """

    map_pages: int
    """Number of pages of the whole map; fewer if the disk had no room for the whole map."""
    page_bytes: int
    """Size of one page in bytes."""

    @property
    def reserve(self) -> int:
        """Pages that stay free, for use while given-up pages are not usable yet: 5.6 %, and at least 24."""
        return max(_MIN_RESERVE, self.map_pages // _RESERVE_SHARE)

    @property
    def limit(self) -> int:
        """Maximum number of pages in use."""
        return self.map_pages - self.reserve

    @property
    def lower_limits(self) -> list[int]:
        """Limits on the pages in use, in falling order, to try if `limit` leaves too few pages free."""
        return [self.limit - self.reserve * step for step in range(1, _LOWER_LIMITS + 1)]

    @property
    def slack(self) -> int:
        """Pages that an eviction frees beyond the need, so that the next sets need not evict."""
        return self.map_pages // 256

    @property
    def changes(self) -> int:
        """Maximum number of objects that one transaction may remove or touch."""
        return max(8, min(_BATCH_OBJECTS, self.reserve // 6))

    def burst(self, used: int) -> int:
        """Return the number of pages that one transaction may change while `used` pages are in use.

        A transaction for a single object may change more pages.
        """
        # A quarter of the free pages, but at least the share of the reserve, and at most 8 MiB.
        least = int((self.reserve - self.slack) * _BURST_SHARE)
        return min(_BATCH_BYTES // self.page_bytes, max(least, (self.map_pages - used) // 4))

    def cost(self, pages: int) -> int:
        """Return the estimated number of pages that change when an object of `pages` pages is stored.

        The estimate includes evictions that make room for the object.
        """
        return pages + 1


def keep_freed_memory() -> None:
    """Let glibc keep up to 16 MiB of this process's freed memory, instead of giving it back to the system.

    LMDB allocates the pages that a transaction changes, and frees them at its end. Whether glibc then returns
    them depends on the heap. If it does, the next transaction meets a page fault for each 4 KiB, and a set of
    objects of 64 KiB and more takes 1.6 times the processor time.
    """
    # When glibc frees a block that it got by `mmap`, it raises its limits to the block's size for `mmap`, and
    # to twice that size for memory that is kept (mallopt(3)). Nothing touches the block, so it costs nothing.
    np.empty(_BATCH_BYTES, np.uint8)


class Disk:
    """Budget of pages for LMDB's file, limited to the room on the disk.

    The budget is the whole map until a write finds the disk full: the disk may be smaller than the capacity,
    or other programs may have filled the disk. From then on the budget is the pages that the file already
    has. After a pause the budget is the whole map again, so that the file may try to grow.

    Thread safety: any thread may call.
    """

    def __init__(self, env: Env, environment: Environment, whole: PageBudget) -> None:
        self._env = env
        self._environment = environment
        self.whole: Final = whole
        self._mutex = Lock()
        self._short: PageBudget | None = None
        """Budget of the pages that the file already has, while the disk counts as full; else None."""
        self._free_then = 0
        """Free bytes of the file system when the disk was last found full."""
        self._pages_then = 0
        """Pages that the file had when the disk was last found full."""
        self._pause = 0.0
        """Length of the present pause in seconds."""
        self._again = 0.0
        """Time at which the present pause ends, in seconds of the monotonic clock."""

    def budget(self) -> PageBudget:
        """Return the present budget, which is the whole map again once a pause is over."""
        with self._mutex:
            if self._short is not None and self._is_due():
                self._short = None
            return self._short or self.whole

    def note_full(self) -> PageBudget:
        """Record that the disk is full, and return the new budget. Raises OSError if that fails."""
        pages = self._environment.pages_on_disk()
        with self._mutex:
            if self._short is None:
                _log.warning(
                    "the disk of %s is full; the store continues with the %d pages that its file has",
                    self._environment.path,
                    pages,
                )
            # No pause if this is the first time or the file has grown since the last time: the disk may have
            # a little room left. Otherwise the pauses are 1, 2, 4, ... 60 seconds.
            self._pause = (
                0.0
                if pages > self._pages_then
                else min(max(_FIRST_PAUSE_SECONDS, 2 * self._pause), _MAX_PAUSE_SECONDS)
            )
            self._pages_then = pages
            self._free_then = self._free()
            self._again = self._env.monotonic() + self._pause
            self._short = PageBudget(min(pages, self.whole.map_pages), self.whole.page_bytes)
            return self._short

    def keep_reserve(self) -> None:
        """Allocate pages on the disk in advance, so that deletions work even after others fill the disk.

        If the disk has no room left, limit the budget to the pages that the file already has.
        """
        if self._short is None:
            try:
                pages = max(_SPARE_PAGES, self.whole.map_pages // _SPARE_SHARE)
                # Allocate when less than a quarter is left, and not for every few pages.
                self._environment.reserve(pages // 4, pages)
            except OSError as error:
                if is_full(error):
                    self.note_full()

    def use_whole_map(self) -> PageBudget:
        """Set the budget to the whole map again, and return it.

        Call this when nothing could be stored in the pages that the file already has.
        """
        with self._mutex:
            self._short = None
            return self.whole

    def is_short(self) -> bool:
        """Return whether the budget is less than the whole map."""
        return self._short is not None

    def _is_due(self) -> bool:
        return self._env.monotonic() >= self._again or self._free() >= self._free_then + _ROOM_BYTES

    def _free(self) -> int:
        try:
            found = self._env.statvfs(self._environment.path)
        except OSError:
            return 0
        return found.f_bavail * found.f_frsize
