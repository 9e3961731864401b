"""Pins, claims and removals: notes on the objects that a call is reading, writing or removing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import NamedTuple, TypeVar

from tiercache.core import BLOCK_ALIGN, Outcome
from tiercache.storage.pages import NONE
from tiercache_backends.file.records import Extent, Places

T = TypeVar("T")


class Pins(NamedTuple):
    """Hold on objects for one reader: their blocks are not freed until `StoreState.unpin`.

    The columns have an entry for each item whose object can be read, in the order of the first blocks.
    """

    items: list[int]
    """Index of the item in the call."""
    rows: list[int]
    """Row of the object in the table of objects."""
    lengths: list[int]
    """Payload bytes."""
    places: Places
    checksums: list[bytes]
    macs: list[bytes]
    """MACs; zeros if the store keeps none."""
    reused: list[bool]
    """Whether the object was read before, since the store was opened."""

    def only(self, positions: Sequence[int]) -> Pins:
        """Return the entries at these positions."""

        def chosen(column: Sequence[T]) -> list[T]:
            return [column[p] for p in positions]

        starts, blocks, further = self.places
        left = {i: further[p] for i, p in enumerate(positions) if p in further}
        return Pins(
            chosen(self.items),
            chosen(self.rows),
            chosen(self.lengths),
            Places(chosen(starts), chosen(blocks), left),
            chosen(self.checksums),
            chosen(self.macs),
            chosen(self.reused),
        )


@dataclass(slots=True)
class Claim:
    """Item of a batch, and the exclusive right to write its object once a call has claimed it."""

    index: int
    """Index of the item in the batch."""
    digest: bytes
    page: bytes
    """Key of the object's page."""
    parent_page: bytes | None
    """Key of the page that the object names as its parent; None if not known.

    For an object that is attached to a page (a state), this is `page` itself.
    """
    blocks: int
    """Number of blocks that the object takes."""
    depth: int
    """Number of pages up to the object's end; 0 if not known."""
    namespace_id: int
    """Number of the object's namespace in the catalog."""
    value: float | None
    """Value that the caller gave; None if it gave none."""
    worker: int
    """Number of the caller that gave the value."""
    taken: int = 0
    """Bytes that the object takes of its owner's share (`records.FOOTPRINT`)."""
    node: int = NONE
    """Node of the object's page in the page table; NONE before the item is claimed."""
    parent: int | None = None
    """Node of `parent_page`; None if that is None, or before the item is claimed."""
    extents: tuple[Extent, ...] = ()
    """Extents for the object's bytes; empty until blocks are allocated."""
    is_charged: bool = False
    """Whether the object's bytes count as `extra` of its owner (`shares.Owners`) until it is published."""

    @property
    def is_page(self) -> bool:
        """Whether the object is the page itself, which other pages can follow."""
        return self.parent_page != self.page


@dataclass(slots=True)
class Claims:
    """Result of sorting a batch. Items are given by their index in the batch."""

    fresh: list[Claim] = field(default_factory=list)
    """Claims to write now; parents come before the pages that follow them."""
    hits: list[int] = field(default_factory=list)
    """Items whose object is stored already."""
    refused: dict[int, Outcome] = field(default_factory=dict)
    """Items that must not be written, with their outcomes."""
    later: list[int] = field(default_factory=list)
    """Items to claim again, for one of three reasons.

    1. The batch already has as many claims as one write of the catalog takes.
    2. Another call is writing or removing the same object, or an earlier item of this batch has the same key.
    3. The page before the item was left for later.
    """
    waits: set[Event] = field(default_factory=set)
    """Events of other calls that work on items in `later`. Each is set when that work ends."""
    held: dict[bytes, int] = field(default_factory=dict)
    """Nodes (rows of the page table) by page key.

    The call holds these nodes until `StoreState.release_nodes`.
    """
    missing: set[bytes] = field(default_factory=set)
    """Keys of pages of the batch that could not be stored."""
    done: Event = field(default_factory=Event)
    """Set when the batch is published."""


class Shortage(NamedTuple):
    """Amounts that must be freed before claims can be written."""

    blocks: int = 0
    objects: int = 0
    """Number of objects whose records must go from the catalog."""
    nbytes: int = 0
    """Bytes of the owner's quota, as `records.FOOTPRINT` counts them."""


@dataclass(slots=True)
class Removed:
    """Object that is being removed."""

    row: int
    """Row of the object in the table of objects."""
    number: int
    """Number of the object's catalog record."""
    digest: bytes
    parent: bytes | None
    """Page key of the parent; None if not known.

    `undo_removal` needs it to make the object resident again.
    """
    keep_blocks: bool = False
    """Whether the blocks stay unused until the store is opened again."""


@dataclass(slots=True)
class Removal:
    """Objects that were taken out of the state together, so that no call finds them any more.

    The caller must end the removal with `finish_removal`, `undo_removal` or `abandon` of `StoreState`.
    """

    objects: list[Removed] = field(default_factory=list)
    done: Event = field(default_factory=Event)
    """Set when the removal has ended."""

    @property
    def digests(self) -> list[bytes]:
        """Digests of the objects."""
        return [removed.digest for removed in self.objects]

    @property
    def numbers(self) -> list[int]:
        """Numbers of the catalog records to remove."""
        return [removed.number for removed in self.objects]


def blocks_for(length: int) -> int:
    """Return the number of blocks that `length` bytes take."""
    return -(-length // BLOCK_ALIGN)
