"""Batches in parts: which bytes of a batch one call of Mooncake moves, and through which memory.

    staged   | header | payload |         one piece of the staging memory; the payload is copied
    direct   | header |                   a piece of the staging memory
             | block | block | ...        and pieces of attached memory

A piece costs some 35 us of Mooncake's time, more than the copy of 256 KiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from tiercache.storage.attached import SharedExtent, quarantine
from tiercache.storage.base import GetItem, SetItem
from tiercache_backends.mooncake.header import HEADER_BYTES
from tiercache_backends.mooncake.memory import AttachedMappings, Region, StagingMemory

Item = TypeVar("Item", GetItem, SetItem)

PART_BYTES: Final = 16 << 20
"""Payload of a call, unless one object is larger."""
MAX_PIECES: Final = 1024
"""Pieces of all calls under way. From some 1,400 for one host on, Mooncake fails calls (code -800)."""
_DIRECT_BYTES: Final = 256 << 10
_PIECE_BYTES: Final = 32 << 10
"""Smallest payload, and smallest average piece of it, that is moved directly."""
_ALIGN: Final = 64


@dataclass(frozen=True, slots=True)
class PlacedItem(Generic[Item]):
    """One item of a part."""

    index: int
    """Position in the batch."""
    item: Item
    name: str
    length: int
    extents: Sequence[SharedExtent] | None
    """Places of the payload in attached memory; None if it is staged."""
    at: int
    """Offset of the header in the region of the part."""


class Part(Generic[Item]):
    """The items that one call moves.

    Thread safety: one thread at a time.
    """

    def __init__(self, placed: Sequence[PlacedItem[Item]], nbytes: int) -> None:
        self.placed: Final[Sequence[PlacedItem[Item]]] = placed
        self.nbytes: Final = nbytes
        """Bytes of staging memory that the part needs."""

    @property
    def names(self) -> list[str]:
        """Names of the objects."""
        return [one.name for one in self.placed]

    def header(self, one: PlacedItem[Item], region: Region) -> memoryview:
        """Return the place of an object's header."""
        return region.view[one.at : one.at + HEADER_BYTES]

    def staged(self, one: PlacedItem[Item], region: Region) -> memoryview:
        """Return the place of a staged payload."""
        return region.view[one.at + HEADER_BYTES : one.at + HEADER_BYTES + one.length]

    def pieces(self, region: Region, attached: AttachedMappings) -> tuple[list[list[int]], list[list[int]]]:
        """Return the addresses and the sizes of each object's pieces."""
        addresses: list[list[int]] = []
        sizes: list[list[int]] = []
        for one in self.placed:
            if one.extents is None:
                addresses.append([region.address + one.at])
                sizes.append([HEADER_BYTES + one.length])
            else:
                found: tuple[list[int], list[int]] = attached.pieces(one.extents, one.length)
                addresses.append([region.address + one.at, *found[0]])
                sizes.append([HEADER_BYTES, *found[1]])
        return addresses, sizes

    def withhold(
        self, region: Region, staging: StagingMemory, attached: AttachedMappings
    ) -> Callable[[], None]:
        """Withhold all memory of the part; return the function that ends this."""
        extents = [extent for one in self.placed for extent in one.extents or ()]
        ends = quarantine(extents, attached.memories)

        def end() -> None:
            staging.give(region)
            for each in ends:
                each()

        return end


def parts(
    items: Sequence[tuple[int, Item, str, Sequence[memoryview], int]],
    attached: AttachedMappings,
    staging: StagingMemory,
    most_pieces: int,
) -> Iterator[Part[Item]]:
    """Yield the parts of a batch, whose items come with position, name, buffers and length in bytes.

    `most_pieces`: pieces of one call.
    """
    most = min(PART_BYTES, staging.nbytes // 4)
    placed: list[PlacedItem[Item]] = []
    at = moved = pieces = 0
    for index, item, name, buffers, length in items:
        extents = attached.locate(buffers, length) if length >= _DIRECT_BYTES else None
        if extents is not None and (length < _PIECE_BYTES * len(extents) or len(extents) >= most_pieces):
            extents = None
        size = HEADER_BYTES + (length if extents is None else 0)
        size += -size % _ALIGN
        count = 1 + len(extents or ())
        if placed and (at + size > most or moved + length > PART_BYTES or pieces + count > most_pieces):
            yield Part(placed, at)
            placed, at, moved, pieces = [], 0, 0, 0
        placed.append(PlacedItem(index, item, name, length, extents, at))
        at, moved, pieces = at + size, moved + length, pieces + count
    if placed:
        yield Part(placed, at)
