"""Division of a `file` store's capacity between slabs and catalog."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tiercache.core import BLOCK_ALIGN
from tiercache.errors import ConfigError
from tiercache_backends.local.directory import StoreDirectory

SMALLEST_CAPACITY: Final = 4 << 20
_SMALLEST_SLAB: Final = 1 << 20
_SMALLEST_MAP: Final = 1 << 20
_SLABS: Final = 64
CATALOG_SHARE: Final = 16
"""One byte in 16 of the capacity goes to the catalog: an object of one block takes 195 bytes of records for 4,096 of payload, and a
transaction copies what it changes."""
_FIXED_BYTES: Final = 256 << 10
"""Bytes kept free of slabs for the small files, the directories, and the file system's own bookkeeping of the large files."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Division of a capacity, in bytes: `budget_blocks` blocks for slabs and `map_bytes` bytes for the catalog's map.

    Slabs and catalog together never exceed the capacity, whatever the catalog's file really needs.
    """

    capacity: int
    budget_blocks: int
    map_bytes: int


def slab_blocks_for(capacity: int) -> int:
    """Return the blocks per slab of a store that is made with this capacity in bytes."""
    return max(_SMALLEST_SLAB, 1 << (capacity // _SLABS).bit_length()) // BLOCK_ALIGN


def divide(capacity: int, directory: StoreDirectory) -> Shares:
    """Return the shares of slabs and catalog, less whatever else lies in the directory; raise ConfigError where too little is left."""
    map_bytes = _map_bytes(capacity, directory)
    budget = (capacity - map_bytes - _FIXED_BYTES - directory.foreign_bytes(["slabs"])) // BLOCK_ALIGN
    if capacity < SMALLEST_CAPACITY or budget < _SMALLEST_SLAB // BLOCK_ALIGN:
        raise ConfigError(
            f"the store in {directory.path} cannot work in {capacity} bytes: {capacity - budget * BLOCK_ALIGN} of them go to its catalog"
            f" and to other files there; set capacity to {max(SMALLEST_CAPACITY, capacity + _SMALLEST_SLAB - budget * BLOCK_ALIGN)} or more"
        )
    return Shares(capacity, budget, map_bytes)


def as_found(there: int, directory: StoreDirectory) -> Shares:
    """Return the shares that leave a store as it is: its `there` blocks of slabs stay, whatever the capacity and other files are."""
    taken = directory.database_bytes() + _FIXED_BYTES + directory.foreign_bytes(["slabs"])
    capacity = directory.capacity or taken + there * BLOCK_ALIGN
    map_bytes = _map_bytes(capacity, directory)
    return Shares(capacity, max(there, (capacity - map_bytes - taken + directory.database_bytes()) // BLOCK_ALIGN), map_bytes)


def _map_bytes(capacity: int, directory: StoreDirectory) -> int:
    return max(_SMALLEST_MAP, capacity // CATALOG_SHARE // BLOCK_ALIGN * BLOCK_ALIGN, directory.database_bytes())
