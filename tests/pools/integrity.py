"""Checks of slots, blocks and host pools: every count, counted anew, while no other thread uses them."""

from __future__ import annotations

import numpy as np

from tiercache.pools import HostPool
from tiercache.pools.blocks import BlockArena
from tiercache.pools.slots import SlotAllocator


def check_slots(allocator: SlotAllocator) -> None:
    """Raise AssertionError unless every slot is either free or used."""
    free = allocator._free[: allocator._available]
    assert 0 <= allocator._available <= allocator.capacity
    assert len(np.unique(free)) == len(free), "a slot is on the free stack twice"
    assert not allocator._used[free].any(), "a slot is free and used"
    assert int(np.count_nonzero(allocator._used)) + len(free) == allocator.capacity, "neither free nor used"


def check_arena(arena: BlockArena) -> None:
    """Raise AssertionError unless every block is either free, used or withheld."""
    arena._apply_changes()
    check_slots(arena.allocator)
    with arena._quarantine_lock:
        counts = arena._counts.copy()
        assert not arena._changes, "the quarantine changed during the check"
    withheld = arena._withheld
    assert (counts >= 0).all(), "a quarantine was lifted twice"
    assert arena._in_force or not counts.any(), "a block is under quarantine that nothing can lift"
    assert arena._held == int(np.count_nonzero(withheld)), "withheld blocks are counted right"
    used = arena.allocator.allocated(np.arange(len(counts)))
    assert used[withheld].all(), "a block that is withheld is on the free stack"
    assert (counts[withheld] > 0).all(), "a block is withheld without quarantine"
    assert not counts[~used].any(), "a block under quarantine is on the free stack"


def check_pool(pool: HostPool) -> None:
    """Raise AssertionError unless the blocks of all objects are distinct and allocated."""
    handles = np.flatnonzero(pool._live)
    taken = pool._table[handles]
    assert (taken[:, 0] == handles).all(), "a handle is the number of its object's first block"
    assert len(np.unique(taken)) == taken.size, "two objects share a block"
    assert pool.arena.allocator.allocated(taken.reshape(-1)).all(), "a block of an object is free"
