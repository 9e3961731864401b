"""Hybrid prefix index, which knows the pages and states of token sequences and decides what is evicted.

Principles:

1. Tokens are compared, not their hashes.
2. A depth can be restored where all of its pages are, and one state of each state pool.
3. The index knows places, never bytes; its owner frees the places that an eviction returns.
4. No method waits or does I/O; one thread calls them.

Reading order:

- `base` (arguments and answers), `node` (an edge of the tree), `counters` (totals over all nodes), `ghosts`
  (memory of evicted pages), `eviction_order` (columns for policies, and the queue)
- `radix_tree` (structure and pins), and the changes of its contents: `residency` (by inserts and transfers)
  and `eviction`
- `hybrid_index`, which puts these together
- `checkpoints` (where a prefill leaves states, and is cut)

An index belongs to one thread, and so does everything in it, unless a class says otherwise.
"""

from tiercache.index.appraisal import Appraisal
from tiercache.index.base import (
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
from tiercache.index.checkpoints import (
    CHECKPOINTS,
    CheckpointPlan,
    CheckpointRules,
    Chunk,
    checkpoint_depths,
    checkpoints_named,
    plan_prefill,
)
from tiercache.index.hybrid_index import HybridIndex
from tiercache.index.node import Node
from tiercache.index.radix_tree import Pin

__all__ = [
    "CHECKPOINTS",
    "Appraisal",
    "CheckpointPlan",
    "CheckpointRules",
    "Chunk",
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
    "checkpoints_named",
    "plan_prefill",
]
