"""The hybrid prefix index: which pages and states exist for which tokens, where they are, and what goes when room is needed.

Reading order: `base` (questions and answers), `node`, `forest` (structure, pins, counters), `eviction`, `ledger` (what is in flight),
`tree` (the index itself), `checkpoints`, `integrity`.
"""

from tiercache.index.base import (
    Content,
    Eviction,
    Inserted,
    InsertedPages,
    Match,
    Origin,
    PageLocations,
    PathLocations,
    PlacedState,
    Span,
    StateLocation,
)
from tiercache.index.checkpoints import CheckpointRules, checkpoint_depths
from tiercache.index.forest import Pin
from tiercache.index.node import Node
from tiercache.index.tree import HybridIndex

__all__ = [
    "CheckpointRules",
    "Content",
    "Eviction",
    "HybridIndex",
    "Inserted",
    "InsertedPages",
    "Match",
    "Node",
    "Origin",
    "PageLocations",
    "PathLocations",
    "Pin",
    "PlacedState",
    "Span",
    "StateLocation",
    "checkpoint_depths",
]
