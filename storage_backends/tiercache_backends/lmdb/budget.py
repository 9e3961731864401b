"""How much of the map may be used, and how much may change at once. Arithmetic only.

LMDB never overwrites a page: a transaction copies what it changes, and what it gives up is used again two transactions later, or when the
last reader that began before is done. A full map refuses even deletions, because they change pages too. So a part of the map stays free for
what is given up and cannot be used yet, and a transaction takes a small part of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tiercache.errors import ConfigError

SMALLEST_CAPACITY: Final = 4 << 20
_FIXED_BYTES: Final = 256 << 10
"""For the lock file, the small files and the directories."""
_BOOKKEEPING: Final = 2048
"""One byte in so many is left to the file system's own records of where the large file lies."""
_BATCH_BYTES: Final = 8 << 20
_BATCH_OBJECTS: Final = 256
_RESERVE_SHARE: Final = 18
_BURST_SHARE: Final = 4 / 9
"""Share of the reserve that one transaction may change: two transactions fit, and a ninth is lost between long runs."""
_LEAST_RESERVE: Final = 24
_LOWER_LIMITS: Final = 5


def map_bytes(capacity: int, foreign: int, path: str) -> int:
    """The map's share of a capacity, beside `foreign` bytes of other files; raises ConfigError where too little is left."""
    room = (capacity - _FIXED_BYTES - foreign) * (_BOOKKEEPING - 1) // _BOOKKEEPING >> 16 << 16
    if capacity < SMALLEST_CAPACITY or room < SMALLEST_CAPACITY // 2:
        raise ConfigError(
            f"the store in {path} cannot work in {capacity} bytes, of which other files there take {foreign};"
            f" set capacity to {SMALLEST_CAPACITY + foreign} or more"
        )
    return room


def capacity_for(map_size: int, foreign: int) -> int:
    """A capacity that gives at least this map."""
    return (map_size + (1 << 16)) * _BOOKKEEPING // (_BOOKKEEPING - 1) + 1 + _FIXED_BYTES + foreign


@dataclass(frozen=True, slots=True)
class Budget:
    """What a file of `map_pages` allows: the map, or what a smaller disk gave of it.

    Two transactions in a row may each change nearly half of the reserve: what the first gave up is not needed before the third.

    Thread safety: immutable.
    """

    map_pages: int
    page_bytes: int

    @property
    def reserve(self) -> int:
        """Pages that stay free for what is given up and cannot be used yet: 5.6 %."""
        return max(_LEAST_RESERVE, self.map_pages // _RESERVE_SHARE)

    @property
    def limit(self) -> int:
        """Pages that may be in use."""
        return self.map_pages - self.reserve

    @property
    def lower_limits(self) -> list[int]:
        """Pages that may be in use where the free ones turned out not to do, one limit after the other."""
        return [self.limit - self.reserve * step for step in range(1, _LOWER_LIMITS + 1)]

    @property
    def slack(self) -> int:
        """Pages that an eviction frees beyond what is needed, so that not every set has to evict."""
        return self.map_pages // 256

    @property
    def changes(self) -> int:
        """Objects that one transaction may remove, or touch."""
        return max(8, min(_BATCH_OBJECTS, self.reserve // 6))

    def burst(self, used: int) -> int:
        """Pages that one transaction may change where so many are in use, unless it is for a single object."""
        least = int((self.reserve - self.slack) * _BURST_SHARE)
        return min(_BATCH_BYTES // self.page_bytes, max(least, (self.map_pages - used) // 4))

    def cost(self, pages: int) -> int:
        """Pages that a transaction changes to store an object of so many, and to remove what makes way."""
        return pages + 1
