"""Hybrid prefix index: which pages and states exist for which tokens, where they are, and what is evicted when room is needed.

Reading order: `base` (arguments and answers), `node`, `forest` (structure, pins, counters), `eviction`, `units` and `queue` (what may be
evicted, and in which order), `prefixes` and `ghosts` (what was known once), `ledger` (what is in flight), `tree` (the index itself),
`checkpoints`, `shadow` (the index as its own simulation), `planner` (how an engine cuts a prefill), `integrity`.
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
from tiercache.index.planner import (
    Chunk,
    PrefillRules,
    Speculated,
    StateBlocks,
    after_speculation,
    next_chunk,
    plan_prefill,
    state_blocks,
    state_memory,
)
from tiercache.index.shadow import Shadow
from tiercache.index.tree import HybridIndex

__all__ = [
    "CheckpointRules",
    "Chunk",
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
    "PrefillRules",
    "Shadow",
    "Span",
    "Speculated",
    "StateBlocks",
    "StateLocation",
    "after_speculation",
    "checkpoint_depths",
    "next_chunk",
    "plan_prefill",
    "state_blocks",
    "state_memory",
]
