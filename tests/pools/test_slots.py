from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.examples import example_count
from tests.pools.integrity import check_slots
from tiercache.errors import ConfigError, PoolFullError, SlotError
from tiercache.pools import SlotAllocator


class Slots(RuleBasedStateMachine):
    """A SlotAllocator against a set."""

    @initialize(capacity=st.integers(0, 12))
    def start(self, capacity: int) -> None:
        self.allocator = SlotAllocator(capacity)
        self.held: set[int] = set()

    @rule(n=st.integers(-1, 14))
    def alloc(self, n: int) -> None:
        if n < 0:
            with pytest.raises(SlotError):
                self.allocator.alloc(n)
        elif n > self.allocator.capacity - len(self.held):
            with pytest.raises(PoolFullError, match="evict"):
                self.allocator.alloc(n)
        else:
            slots = self.allocator.alloc(n)
            assert slots.dtype == np.int64
            assert slots.shape == (n,)
            assert self.held.isdisjoint(slots.tolist())
            self.held |= set(slots.tolist())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        self.allocator.free(slots)
        self.held -= set(slots)

    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        good = (
            data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True, min_size=1))
            if self.held
            else []
        )
        free = [s for s in range(self.allocator.capacity) if s not in self.held]
        bad = data.draw(st.sampled_from([-1, self.allocator.capacity, *free, *good]))
        with pytest.raises(SlotError):
            self.allocator.free(data.draw(st.permutations([*good, bad])))

    @invariant()
    def agree(self) -> None:
        check_slots(self.allocator)
        assert self.allocator.available == self.allocator.capacity - len(self.held)
        assert self.allocator.available == self.allocator.capacity - len(self.held)
        mask = self.allocator.allocated(np.arange(self.allocator.capacity))
        assert set(np.flatnonzero(mask).tolist()) == self.held


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=example_count(60), stateful_step_count=20, deadline=None)


def test_what_is_freed_together_comes_back_in_order() -> None:
    allocator = SlotAllocator(8)
    allocator.alloc(8)
    allocator.free([5, 6, 7])
    assert allocator.alloc(3).tolist() == [5, 6, 7]


def test_errors_say_which_slot() -> None:
    allocator = SlotAllocator(4, noun="kv slot")
    taken = allocator.alloc(2)
    with pytest.raises(SlotError, match="kv slot 3 is free already"):
        allocator.free([0, 3])
    with pytest.raises(SlotError, match="kv slot 9 is out of range; there are 4"):
        allocator.free([0, 9])
    with pytest.raises(SlotError, match="twice"):
        allocator.free([1, 0, 1])
    with pytest.raises(SlotError, match="integers"):
        allocator.free([0.0])
    with pytest.raises(SlotError, match="one-dimensional"):
        allocator.free(taken.reshape(1, 2))
    with pytest.raises(PoolFullError, match="3 kv slots are wanted and 2 of 4 are free"):
        allocator.alloc(3)
    assert allocator.capacity - allocator.available == 2
    allocator.free([])
    with pytest.raises(ConfigError):
        SlotAllocator(-1)


def test_a_broken_allocator_is_found() -> None:
    allocator = SlotAllocator(4)
    allocator.alloc(2)
    allocator._used[3] = True  # private: no call can break it
    with pytest.raises(AssertionError):
        check_slots(allocator)
