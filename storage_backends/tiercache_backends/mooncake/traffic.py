"""The way of a batch through Mooncake: which bytes each call moves, through which memory, one call at a time.

    staged   | header | payload |         one piece of the staging memory; the payload is copied
    direct   | header |                   a piece of the staging memory
             | block | block | ...        and pieces of attached memory

    the caller's thread      prepare 1 | prepare 2      | finish 1, prepare 3 | finish 2 ...
    a thread of the link               | call for 1     | call for 2          | call for 3 ...

A piece costs some 35 us of Mooncake's time, more than the copy of 256 KiB. A second call at once would be
slower, because Mooncake spins in every thread that waits for bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Generic, TypeVar

from tiercache.core import Outcome
from tiercache.errors import UnavailableError
from tiercache.storage.attached import SharedExtent, quarantine
from tiercache.storage.base import GetItem, SetItem
from tiercache.storage.guard import PendingCall
from tiercache_backends.mooncake.header import HEADER_BYTES
from tiercache_backends.mooncake.library import MooncakeClient
from tiercache_backends.mooncake.link import Link, Patience
from tiercache_backends.mooncake.memory import AttachedMappings, Region, StagingMemory

Item = TypeVar("Item", GetItem, SetItem)

_PART_BYTES: Final = 16 << 20
"""Payload of a call, unless one object is larger."""
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


@dataclass(frozen=True, slots=True)
class Part(Generic[Item]):
    """The items that one call moves."""

    placed: Sequence[PlacedItem[Item]]
    nbytes: int
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
    items: Iterable[tuple[int, Item, str, Sequence[memoryview], int]], link: Link, outcomes: list[Outcome]
) -> Iterator[Part[Item]]:
    """Yield the parts of a batch, whose items come with position, name, buffers and length in bytes.

    An item that is neither moved directly nor fits into the staging memory gets ERROR in `outcomes`.
    """
    most, most_pieces = min(_PART_BYTES, link.staging.nbytes // 4), link.pieces
    placed: list[PlacedItem[Item]] = []
    at = moved = pieces = 0
    for index, item, name, buffers, length in items:
        extents = link.attached.locate(buffers, length) if length >= _DIRECT_BYTES else None
        if extents is not None and (length < _PIECE_BYTES * len(extents) or len(extents) >= most_pieces):
            extents = None
        size = HEADER_BYTES + (length if extents is None else 0)
        if size > link.staging.nbytes:
            outcomes[index] = Outcome.ERROR
            continue
        size += -size % _ALIGN
        count = 1 + len(extents or ())
        if placed and (at + size > most or moved + length > _PART_BYTES or pieces + count > most_pieces):
            yield Part(placed, at)
            placed, at, moved, pieces = [], 0, 0, 0
        placed.append(PlacedItem(index, item, name, length, extents, at))
        at, moved, pieces = at + size, moved + length, pieces + count
    if placed:
        yield Part(placed, at)


Codes = list[int]


@dataclass(slots=True)
class PartMover(Generic[Item]):
    """Passes the parts of a batch through `prepare`, `work` (on a thread of the link) and `finish`.

    `work` returns a code for each item. Items whose call cannot be made or does not return get UNAVAILABLE in
    `outcomes`, as do all items after them; items for which there is no staging memory get THROTTLED.

    Thread safety: one thread.
    """

    link: Link
    patience: Patience
    what: str
    prepare: Callable[[Part[Item], Region], None]
    work: Callable[[MooncakeClient, Part[Item], Region], Codes]
    finish: Callable[[Part[Item], Region, Codes], None]
    outcomes: list[Outcome]
    _under_way: tuple[Part[Item], Region, PendingCall[Codes]] | None = field(default=None, init=False)

    def move(self, parts: Iterable[Part[Item]]) -> None:
        """Move all parts."""
        try:
            for part in parts:
                region = self._room(part)
                if region is None:
                    continue
                try:
                    self.prepare(part, region)
                    rest = self._wait()
                except BaseException:  # whatever it is, nothing uses the memory
                    self.link.staging.give(region)
                    raise
                try:
                    self._begin(part, region)
                finally:
                    rest()
        finally:
            self._wait()()

    def _room(self, part: Part[Item]) -> Region | None:
        """Return staging memory for a part, if need be when the call under way has given its own back.

        Returns None, and answers the items, if there is none.
        """
        region = self.link.staging.take(part.nbytes, 0) if self.patience.left else None
        if region is None:
            self._wait()()
            is_out = not self.patience.left
            region = None if is_out else self.link.staging.take(part.nbytes, self.patience.left)
            if region is None:
                self._answer(part, Outcome.UNAVAILABLE if is_out else Outcome.THROTTLED)
        return region

    def _begin(self, part: Part[Item], region: Region) -> None:
        """Begin the call for a part."""
        try:
            pending = self.link.begin(
                self.patience,
                self.what,
                lambda client: self.work(client, part, region),
                partial(part.withhold, region, self.link.staging, self.link.attached),
            )
        except BaseException as error:
            self.link.staging.give(region)
            if not isinstance(error, UnavailableError):
                raise
            self._answer(part, Outcome.UNAVAILABLE)
        else:
            self._under_way = part, region, pending

    def _wait(self) -> Callable[[], None]:
        """Wait for the end of the call under way; return what is left to do for its part."""
        if self._under_way is None:
            return lambda: None
        (part, region, pending), self._under_way = self._under_way, None
        try:
            codes = self.link.end(self.patience, pending)
        except BaseException as error:
            # A call that was given up while it ran gives its memory back when it returns.
            if not pending.hangs:
                self.link.staging.give(region)
            if not isinstance(error, UnavailableError):
                raise
            self._answer(part, Outcome.UNAVAILABLE)
            return lambda: None
        self.patience.answered(codes)
        return partial(self._end, part, region, codes)

    def _answer(self, part: Part[Item], outcome: Outcome) -> None:
        for one in part.placed:
            self.outcomes[one.index] = outcome

    def _end(self, part: Part[Item], region: Region, codes: Codes) -> None:
        try:
            self.finish(part, region, codes)
        finally:
            self.link.staging.give(region)
