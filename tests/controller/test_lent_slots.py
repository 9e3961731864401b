"""An engine that keeps the slots of its requests itself, and lends what they have computed to the cache."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import KV, MAMBA, Fence, P
from tests.controller.lending import LendingEngine, tokens_of
from tests.examples import example_count
from tiercache.core import Tier, as_tokens
from tiercache.errors import InputError, PoolFullError, SlotError

draws = st.integers(0, 2**16)
paths = st.lists(st.integers(0, 1), min_size=1, max_size=4)


class LentSlots(RuleBasedStateMachine):
    hybrid = True

    @initialize(blocks=st.sampled_from([1, 8, 64]), stores=st.booleans())
    def start(self, blocks, stores):
        self.engine = LendingEngine(
            MemoryBackend(1 << 20) if stores else None, hybrid=self.hybrid, blocks=blocks
        )

    @rule(path=paths, more=paths, gives=st.booleans())
    def begin(self, path, more, gives):
        """Begin a request, and compute what follows on the prefix that is there."""
        request = self.engine.begin([*tokens_of(path), 9], gives=gives)
        rest = [*tokens_of(path), *tokens_of(more)][len(request.tokens) :]
        if len(self.engine.running) > 3 or not self.engine.compute(request, rest):
            self.engine.end(request)

    @rule(which=draws, more=paths)
    def compute(self, which, more):
        for request in self._chosen(which):
            self.engine.compute(request, tokens_of(more))

    @rule(which=draws, fenced=st.booleans(), ends=st.booleans())
    def hand_over(self, which, fenced, ends):
        for request in self._chosen(which):
            fence = Fence() if fenced else None
            self.engine.fences += [fence] if fenced else []
            self.engine.hand_over(request, fence)
            if ends:
                self.engine.end(request)

    def _chosen(self, which):
        running = self.engine.running
        return [running[which % len(running)]] if running else []

    @rule(pages=st.integers(0, 12), states=st.integers(0, 6))
    def make_room(self, pages, states):
        need = {KV: pages} | ({MAMBA: states} if self.hybrid else {})
        before = {p: pool.available for p, pool in self.engine.cache.pools.items()}
        there = self.engine.lent.index.evictable(Tier.DEVICE)
        freed = self.engine.lent.make_room(need)
        for pool, count in need.items():
            assert freed.get(pool, 0) >= min(count, there[pool])
            assert self.engine.cache.pools[pool].available == before[pool] + freed.get(pool, 0)

    @rule()
    def land(self):
        """Let the device pass everything, and copies end."""
        self.engine.pass_fences()
        self.engine.controller.tick(0.01)

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.pass_fences()
        while self.engine.running:
            self.engine.end(self.engine.running[0])
        self.engine.cache.settle()
        self.engine.controller.evict(Tier.DEVICE)
        self.engine.check()
        assert all(pool.available == pool.capacity for pool in self.engine.cache.pools.values())
        self.engine.controller.close()


class LentPagesAlone(LentSlots):
    hybrid = False


TestLentSlots = LentSlots.TestCase
TestLentSlots.settings = settings(max_examples=example_count(40), stateful_step_count=30, deadline=None)
TestLentPagesAlone = LentPagesAlone.TestCase
TestLentPagesAlone.settings = TestLentSlots.settings


def test_a_load_into_slots_that_do_not_fit_changes_nothing():
    engine = LendingEngine()
    tokens = list(range(2 * P))
    request = engine.begin([*tokens, 9])
    assert engine.compute(request, tokens)
    engine.hand_over(request)
    engine.end(request)
    assert engine.cache.settle()
    engine.controller.evict(Tier.DEVICE)
    match = engine.lent.index.match(as_tokens([*tokens, 9]))
    assert (match.near_depth, engine.lent.device_depth(match)) == (2, 0)
    source = engine.cache.pools[KV].source
    for count in (1, 3):
        slots = source.alloc(count)
        with pytest.raises(SlotError, match="exactly"):
            engine.lent.load(match, 2, {KV: slots, MAMBA: np.empty(0, np.int64)})
        source.free(slots)
        engine.check()


def test_a_page_that_is_on_its_way_into_another_slot_is_waited_for():
    """A request computes what another one loads: its slots become duplicates, which it frees."""
    engine = LendingEngine(hybrid=False)
    tokens = list(range(3 * P))
    first, second = engine.begin([*tokens, 9]), engine.begin([*tokens, 9])
    assert engine.compute(first, tokens)
    assert engine.compute(second, tokens)
    engine.hand_over(first)
    engine.end(first)
    assert engine.cache.settle()
    engine.controller.evict(Tier.DEVICE)
    match = engine.lent.index.match(as_tokens([*tokens, 9]))
    engine.lent.load(match, 3)
    engine.hand_over(second)
    engine.check()
    engine.end(second)


def test_bad_slots_change_nothing():
    engine = LendingEngine()
    request = engine.begin([*range(2 * P), 9])
    assert engine.compute(request, list(range(2 * P)))
    adopt, row = engine.lent.adopt, request.row
    for error, pages, states in [
        (SlotError, {KV: row + 100}, {}),
        (SlotError, {KV: row}, {2 * P: {MAMBA: 99}}),
        (InputError, {KV: row}, {P + 1: {MAMBA: 0}}),
        (InputError, {KV: row}, {2 * P: {"swa": 0}}),
        (InputError, {MAMBA: row}, {}),
        (InputError, {KV: np.concatenate([row, row])}, {}),
    ]:
        with pytest.raises(error):
            adopt(request.tokens, pages, states)
        engine.check()
    with pytest.raises(InputError, match="no such pool"):
        engine.lent.make_room({"swa": 1})
    assert engine.lent.make_room({KV: 5}) == {}
    with pytest.raises(PoolFullError):
        engine.cache.pools[KV].source.alloc(100)
