"""Arithmetic of the map: how much of it may be in use, and how much one transaction may change.

LMDB never overwrites a page: a transaction copies the pages that it changes, and those that it gives up are used again two transactions
later, or when the last reader that began before has ended. A full map refuses even deletions, because they change pages too. Therefore a
part of the map, the reserve, stays free for pages that are given up and cannot be used yet; one transaction changes a small part of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tiercache.errors import ConfigError

SMALLEST_CAPACITY: Final = 4 << 20
"""Bytes of the smallest capacity that a store may have."""
_FIXED_BYTES: Final = 256 << 10
"""Bytes of a capacity for the lock file, the small files and the directories."""
_BOOKKEEPING: Final = 2048
"""One byte in so many is left for the file system's own records of where the large file lies."""
_BATCH_BYTES: Final = 8 << 20
"""Bytes that one transaction changes, at most."""
_BATCH_OBJECTS: Final = 256
"""Objects that one transaction removes or touches, at most."""
_RESERVE_SHARE: Final = 18
"""One page of the map in so many belongs to the reserve."""
_BURST_SHARE: Final = 4 / 9
"""Share of the reserve that one transaction may change: two transactions fit, and a ninth is lost between long runs."""
_LEAST_RESERVE: Final = 24
"""Pages of the smallest reserve."""
_LOWER_LIMITS: Final = 5
"""Steps in which the limit of pages in use falls where the reserve turns out too small."""


def map_bytes(capacity: int, foreign: int, path: str) -> int:
    """Return the map's bytes of a capacity beside `foreign` bytes of other files; raises ConfigError where too little is left.

    The size is a multiple of 64 KiB.
    """
    room = (capacity - _FIXED_BYTES - foreign) * (_BOOKKEEPING - 1) // _BOOKKEEPING >> 16 << 16
    if capacity < SMALLEST_CAPACITY or room < SMALLEST_CAPACITY // 2:
        raise ConfigError(
            f"the store in {path} cannot work in {capacity} bytes, of which other files there take {foreign};"
            f" set capacity to {SMALLEST_CAPACITY + foreign} or more"
        )
    return room


def capacity_for(map_size: int, foreign: int) -> int:
    """Return a capacity that gives at least a map of `map_size` bytes, beside `foreign` bytes of other files."""
    return (map_size + (1 << 16)) * _BOOKKEEPING // (_BOOKKEEPING - 1) + 1 + _FIXED_BYTES + foreign


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a file of `map_pages` LMDB pages: those of the map, or the fewer that a smaller disk has given.

    Two transactions in a row may each change nearly half of the reserve: the pages that the first gave up can be used by the third.
    """

    map_pages: int
    page_bytes: int

    @property
    def reserve(self) -> int:
        """Pages that stay free, because others are given up and cannot be used yet: 5.6 % of the map, and at least 24."""
        return max(_LEAST_RESERVE, self.map_pages // _RESERVE_SHARE)

    @property
    def limit(self) -> int:
        """Pages that may be in use, at most."""
        return self.map_pages - self.reserve

    @property
    def lower_limits(self) -> list[int]:
        """Limits of pages in use to try, one after the other, where the free pages under `limit` turned out to be too few."""
        return [self.limit - self.reserve * step for step in range(1, _LOWER_LIMITS + 1)]

    @property
    def slack(self) -> int:
        """Pages that an eviction frees beyond what is needed, so that not every set has to evict."""
        return self.map_pages // 256

    @property
    def changes(self) -> int:
        """Objects that one transaction may remove or touch, at most."""
        return max(8, min(_BATCH_OBJECTS, self.reserve // 6))

    def burst(self, used: int) -> int:
        """Return the pages that one transaction may change while `used` are in use; one for a single object may change more."""
        least = int((self.reserve - self.slack) * _BURST_SHARE)
        return min(_BATCH_BYTES // self.page_bytes, max(least, (self.map_pages - used) // 4))

    def cost(self, pages: int) -> int:
        """Return the pages that a transaction changes to store an object of `pages`, and to remove what makes way for it."""
        return pages + 1
