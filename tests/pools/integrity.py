"""Checks of slots, blocks and host pools: every count, counted anew, while no other thread uses them."""

from __future__ import annotations

import numpy as np

from tiercache.pools import HostPool
from tiercache.pools.blocks import BlockArena, Quarantine
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
    check_slots(arena.allocator)
    _check_quarantine(arena._quarantine)


def _check_quarantine(quarantine: Quarantine) -> None:
    quarantine.apply_changes()
    with quarantine._lock:
        counts = quarantine._counts.copy()
        assert not quarantine._changes, "the quarantine changed during the check"
    withheld = quarantine._withheld
    assert (counts >= 0).all(), "a quarantine was lifted twice"
    assert quarantine._in_force or not counts.any(), "a slot is under quarantine that nothing can lift"
    assert quarantine._held == int(np.count_nonzero(withheld)), "withheld slots are counted right"
    used = quarantine._allocator.allocated(np.arange(len(counts)))
    assert used[withheld].all(), "a slot that is withheld is on the free stack"
    assert (counts[withheld] > 0).all(), "a slot is withheld without quarantine"
    assert not counts[~used].any(), "a slot under quarantine is on the free stack"


def check_pool(pool: HostPool) -> None:
    """Raise AssertionError unless the blocks of all objects are distinct and allocated."""
    handles = np.flatnonzero(pool._live)
    taken = pool._table[handles]
    assert (taken[:, 0] == handles).all(), "a handle is the number of its object's first block"
    assert len(np.unique(taken)) == taken.size, "two objects share a block"
    assert pool.arena.allocator.allocated(taken.reshape(-1)).all(), "a block of an object is free"
