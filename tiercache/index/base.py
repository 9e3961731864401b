"""What the index is asked and what it answers. The tree itself is in `tree.py`; the index knows nothing of pools, copies or stores.

Depths are in pages from the start of the sequence. A *span* names pages by their depth on the path to a pinned node: it stays right
while other requests split edges, because a split puts the new node above and a pinned node is neither evicted nor merged away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tiercache.core import Locations, Mask, PoolName
from tiercache.policy import CheckpointKind

if TYPE_CHECKING:
    from tiercache.index.node import Node


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt the index knows. Valid until the next change of the index, unless its node is pinned.

    `node` is the deepest node that the prompt enters. `path_depth`: pages of the prompt that are in the tree at all; `depth`: the deepest
    restorable depth over all tiers (every page pool present from 0 to there, every state pool present exactly there); `near_depth`: the
    same from device and host alone; `restorable`: every restorable depth, ascending (without state pools only `depth` itself, where every
    smaller depth is restorable too). What is pending and nowhere else is not present.
    """

    node: Node
    path_depth: int
    depth: int
    near_depth: int
    restorable: tuple[int, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class Span:
    """Pages [start, end) on the path from the root to `node`. The caller keeps `node` pinned for as long as it uses the span."""

    node: Node
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class PageLocations:
    """Where the pages of a span are, one entry a page: device slot, host handle (or ABSENT, or pending), and known to be stored."""

    device: Locations
    host: Locations
    stored: Mask


@dataclass(frozen=True, slots=True)
class StateLocation:
    """Where one state is: device slot and host handle (or ABSENT, or pending), and known to be stored."""

    device: int
    host: int
    stored: bool


class PathLocations(NamedTuple):
    """Where everything is that restores one depth: pages [0, depth) by page pool, and the states exactly at depth by state pool."""

    pages: Mapping[PoolName, PageLocations]
    states: Mapping[PoolName, StateLocation]


@dataclass(frozen=True, slots=True)
class InsertedPages:
    """What became of the slots that a request handed in, one entry a page of [0, depth).

    `table` is what the request must use from now on. `adopted`: the index now owns the caller's slot; `duplicate`: the index held the page
    already, so the caller's slot is free once its fence has passed; neither: the slot was the index's own before, or another transfer is
    filling this page at the moment and the slot stays the caller's (`private`).
    """

    table: Locations
    adopted: Mask
    duplicate: Mask
    private: Mask


class PlacedState(NamedTuple):
    """A state that a request handed in: where in the sequence, of which pool, in which device slot."""

    depth: int
    pool: PoolName
    slot: int


@dataclass(frozen=True, slots=True)
class Inserted:
    """The answer of `insert`; `node` covers the last page of [0, depth).

    `rejected_states` are the caller's again: the index holds (or is being brought) another copy, or their KV is not whole. A state in
    neither list was the index's own slot already.
    """

    node: Node
    depth: int
    pages: Mapping[PoolName, InsertedPages]
    adopted_states: tuple[PlacedState, ...]
    rejected_states: tuple[PlacedState, ...]


class Origin(NamedTuple):
    """Where a request starts from: how many requests in a row led to it (see `Units.lineage`), and the pages of it that were known, now or
    once.
    """

    lineage: int = 0
    known: int = 0


class Content(NamedTuple):
    """One edge of the tree: why the state at its end was taken, how many of its pages are in some tier, and whether the state is."""

    checkpoint: CheckpointKind
    pages: int
    state: bool


@dataclass(frozen=True, slots=True)
class Eviction:
    """What an eviction freed, for the caller to give back to its pools; `demoted` objects are still in another tier, `lost` are in none."""

    freed: Mapping[PoolName, Locations] = field(default_factory=dict)
    demoted: int = 0
    lost: int = 0
