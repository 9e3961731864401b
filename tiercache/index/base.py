"""Arguments and answers of the index.

The tree itself is in `radix_tree.py`. The index knows pools by name only, and nothing of copies or stores.

Depths are in pages from the start of the sequence. A *span* names pages by their depth on the path to a
pinned node. A span stays valid while other requests split edges, because a split inserts a new node above the
pinned one. A pinned node is neither removed nor merged into another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tiercache.core import Locations, Mask, PoolName

if TYPE_CHECKING:
    from tiercache.index.node import Node


class Match(NamedTuple):
    """Part of a prompt that the index knows.

    A match is valid until the index changes. If its node is pinned, the node stays valid, too.

    A depth is *restorable* if every page pool has all pages before the depth, and every state pool has a
    state exactly at the depth. Pending locations do not count.
    """

    node: Node
    """Deepest node that the prompt enters."""
    path_depth: int
    """Number of leading pages of the prompt that the tree has, with or without objects."""
    depth: int
    """Deepest restorable depth; 0 if there is none. Objects in any tier count."""
    near_depth: int
    """Deepest restorable depth if only objects on the device and the host count."""
    restorable: tuple[int, ...]
    """With state pools: all restorable depths, ascending. Without: `depth` alone, if it is above 0."""
    generation: int
    """Value of the index's counter of changes when the match was made (see `HybridIndex.is_current`)."""
    on_host: bool
    """Whether the host has any object on the path."""


class Span(NamedTuple):
    """Pages [start, end) on the path from the root to `node`.

    The caller keeps `node` pinned for as long as it uses the span.
    """

    node: Node
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


class PageLocations(NamedTuple):
    """Locations of the pages of a span, one entry a page."""

    device: Locations
    """Slots, or ABSENT, or pending."""
    host: Locations
    """Handles, or ABSENT, or pending."""
    stored: Mask
    """Whether each page is known to be in the store."""


class StateLocation(NamedTuple):
    """Locations of one state."""

    device: int
    """Slot, or ABSENT, or pending."""
    host: int
    """Handle, or ABSENT, or pending."""
    stored: bool
    """Whether the state is known to be in the store."""


class PathLocations(NamedTuple):
    """Locations of the objects that restore a depth, by pool."""

    pages: Mapping[PoolName, PageLocations]
    """Pages [0, depth) of each page pool."""
    states: Mapping[PoolName, StateLocation]
    """State at the depth, of each state pool."""


class InsertedPages(NamedTuple):
    """Result for the slots that a request handed in, one entry a page of [start, depth).

    At most one of the three masks is set for a page. If none is set, the index owned the slot before.
    """

    table: Locations
    """Slots that the request must use from now on."""
    adopted: Mask
    """The index now owns the caller's slot."""
    duplicate: Mask
    """The index has the page in another slot. The caller frees its slot when the device no longer uses it."""
    private: Mask
    """A transfer is filling another slot with the page. The caller keeps its slot."""


class PlacedState(NamedTuple):
    """State that a request handed in: its depth in the sequence, its pool, and its device slot."""

    depth: int
    pool: PoolName
    slot: int


class Inserted(NamedTuple):
    """Answer of `insert`.

    A state that is neither adopted nor rejected is in a slot that the index owned before.
    """

    node: Node
    """Node whose edge holds the last page of [0, depth)."""
    start: int
    """First page that was looked at; the slots of the pages before it were the index's already."""
    depth: int
    pages: Mapping[PoolName, InsertedPages]
    adopted_states: tuple[PlacedState, ...]
    """States whose slots the index now owns."""
    rejected_states: tuple[PlacedState, ...]
    """States whose slots still belong to the caller.

    The index has the state in another slot, a transfer is filling another slot with the state, or a page
    before the state is in no tier.
    """


class Origin(NamedTuple):
    """History of a request, which `insert` notes with the states of the request."""

    lineage: int = 0
    """Number of earlier turns in the session of the request (see `Units.lineage`)."""
    known: int = 0
    """Number of the request's leading pages that earlier requests had, evicted pages included."""
    expected: bool = False
    """Whether the request hit a unit whose continuation was expected (see `Units.expected`)."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """Objects that an eviction freed. The caller gives their locations back to its pools."""

    freed: Mapping[PoolName, Locations] = field(default_factory=dict)
    demoted: int = 0
    """Number of freed objects that another tier still has."""
    lost: int = 0
    """Number of freed objects that no tier has any more."""
