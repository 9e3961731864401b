"""Arguments and answers of the index. The tree itself is in `tree.py`; the index knows nothing of pools, copies or stores.

Depths are in pages from the start of the sequence. A *span* names pages by their depth on the path to a pinned node: it stays right while
other requests split edges, because a split puts the new node above and a pinned node is neither evicted nor merged away.
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
    """Part of a prompt that the index knows. Valid until the next change of the index, unless its node is pinned.

    `node` is the deepest node that the prompt enters. `path_depth`: pages of the prompt that are in the tree at all. `depth`: the deepest
    restorable depth over all tiers (every page pool present from 0 to there, every state pool present exactly there). `near_depth`: the
    same from device and host alone. `restorable`: every restorable depth, ascending (without state pools only `depth` itself, where every
    smaller depth is restorable too). An object that is pending and nowhere present does not count. `generation`: see
    `HybridIndex.is_current`.
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
    """Locations of the pages of a span, one entry a page.

    `device` are slots and `host` handles, or ABSENT, or pending; `stored` says whether the page is known to be in the store.
    """

    device: Locations
    host: Locations
    stored: Mask


@dataclass(frozen=True, slots=True)
class StateLocation:
    """Location of one state: device slot and host handle (or ABSENT, or pending), and whether it is known to be in the store."""

    device: int
    host: int
    stored: bool


class PathLocations(NamedTuple):
    """Locations of everything that restores one depth: pages [0, depth) by page pool, and the states exactly at depth by state pool."""

    pages: Mapping[PoolName, PageLocations]
    states: Mapping[PoolName, StateLocation]


@dataclass(frozen=True, slots=True)
class InsertedPages:
    """Result for the slots that a request handed in, one entry a page of [0, depth).

    `table` is what the request must use from now on. `adopted`: the index now owns the caller's slot. `duplicate`: the index held the page
    already, so the caller's slot is free once its fence has passed. `private`: another transfer is filling this page at the moment, and the
    slot stays the caller's. None of the three: the slot was the index's own before.
    """

    table: Locations
    adopted: Mask
    duplicate: Mask
    private: Mask


class PlacedState(NamedTuple):
    """State that a request handed in: its depth in the sequence, its pool, and its device slot."""

    depth: int
    pool: PoolName
    slot: int


@dataclass(frozen=True, slots=True)
class Inserted:
    """Answer of `insert`; `node` covers the last page of [0, depth).

    `rejected_states` are the caller's again: the index holds another copy, or is being brought one, or their KV is not whole. A state in
    neither list was the index's own slot already.
    """

    node: Node
    depth: int
    pages: Mapping[PoolName, InsertedPages]
    adopted_states: tuple[PlacedState, ...]
    rejected_states: tuple[PlacedState, ...]


class Origin(NamedTuple):
    """Point from which a request starts.

    `lineage`: how many requests in a row led to it (see `Units.lineage`). `known`: the pages of it that were known, now or once.
    """

    lineage: int = 0
    known: int = 0


class Content(NamedTuple):
    """One edge of the tree, as `HybridIndex.contents` yields it.

    `checkpoint`: why the state at its end was taken, NONE without a complete one. `pages`: how many of its leading pages every page pool
    has in some tier. `state`: whether every state pool has a state at its end.
    """

    checkpoint: CheckpointKind
    pages: int
    state: bool


@dataclass(frozen=True, slots=True)
class Eviction:
    """Objects that an eviction freed, for the caller to give back to its pools.

    Of these objects, `demoted` are still in another tier and `lost` are in none.
    """

    freed: Mapping[PoolName, Locations] = field(default_factory=dict)
    demoted: int = 0
    lost: int = 0
